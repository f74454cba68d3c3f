"""A server's shell: threads and sockets around `ServerMachine` and `SliceStore`.

One thread accepts, one per worker receives, one sends. A receiving thread reads a push straight
into a pooled buffer; the state machine decides, under one lock, what happens next. The thread
whose push completes a slice also updates it, while its bytes are in the cache; as long as it does,
completed slices queue in the machine, and the most urgent is next.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from foreprop.config import Config
from foreprop.core.barrier import StepBarrier, TellNormPart
from foreprop.core.manifest import (
    Hyperparameters,
    Manifest,
    decode_manifest,
    describe_mismatch,
)
from foreprop.core.rows import AnswerRows, FailRows
from foreprop.core.server import (
    AnswerReady,
    FailSession,
    FinishSession,
    InstallValue,
    NormArrived,
    PullArrived,
    PushArrived,
    ServerMachine,
    SliceSummed,
    SumSlice,
    UpdateFinished,
    UpdateSlice,
    ValueArrived,
    WorkerLeft,
)
from foreprop.core.wire import (
    MAX_CONTROL_BYTES,
    Flag,
    Frame,
    FrameReader,
    Header,
    Kind,
    encode_header,
)
from foreprop.core.worker import CONTROL_PRIORITY, NO_TOKEN, FrameSent, SendFrame
from foreprop.engine.blobs import BlobShelf
from foreprop.engine.failure import Failure, decode_failure, failure_of
from foreprop.engine.hyperparameters import (
    HyperparameterHistory,
    decode_groups,
    scale_of,
    with_scale,
)
from foreprop.engine.keptrows import PULL_BYTES
from foreprop.engine.norms import NORM_BYTES, decode_norm
from foreprop.engine.outbox import Outbox
from foreprop.engine.rowserver import ROW_KINDS, RowServer
from foreprop.engine.rowstore import SPARSE_OPTIMIZERS, RowStore
from foreprop.engine.slicestore import ELEMENTWISE_OPTIMIZERS, GradientBuffer, SliceStore
from foreprop.engine.stall import StallReporter
from foreprop.errors import (
    ForepropError,
    RemoteProtocolError,
    TransportError,
)
from foreprop.net.stream import SocketStream, Stream
from foreprop.net.tcp import tune
from foreprop.observe.stages import Stage
from foreprop.observe.trace import TraceRecorder, trace_path
from foreprop.version import __version__

_EMPTY = memoryview(b"")
_UPDATE_FINISHED = UpdateFinished()
_HYPERPARAMETERS_LIMIT_BYTES = 1 << 20
_FAREWELL_S = 2.0
_LISTEN_POLL_S = 0.2
_JOIN_SHARE = 0.9
"""A server gives up before the workers do: it knows who is missing."""
_MAX_STRANGERS = 1000
"""Connections at one time that have not said hello; a larger world joins in portions."""

StreamWrapper = Callable[[Stream, int], Stream]
"""Puts an emulated link around the stream to a rank, if there is one."""


class _Peer:
    """One worker's connection and what is arriving on it."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.sending = threading.Lock()  # frames never interleave, not even the last one
        self.rank = -1
        self.manifest: Manifest | None = None
        self.incoming: GradientBuffer | None = None
        self.last_push: tuple[int, int] | None = None  # (slice, step)
        self.left = False
        self.connected_at_s = time.monotonic()
        self.receive_started_ns = 0

    @property
    def last_step(self) -> int:
        return 0 if self.last_push is None else self.last_push[1]


class _Session:
    """What exists once the first manifest is known."""

    def __init__(
        self, manifest: Manifest, index: int, store_class: type[SliceStore], server: Server
    ) -> None:
        slices = manifest.slices()
        names = [info.name for info in manifest.parameters]
        self.manifest = manifest
        self.slices = slices
        self.names = [names[piece.parameter] for piece in slices]
        shards = manifest.shards(len(slices))
        self.names += [names[shard.parameter] for shard in shards]
        self.barrier: StepBarrier | None = None
        if manifest.knobs.aggregation.needs_norm:
            owners = [piece.server for piece in slices] + [shard.server for shard in shards]
            self.barrier = StepBarrier(owners.count(index))
        self.machine = ServerMachine(
            slices,
            index=index,
            workers=manifest.world_size,
            order=manifest.knobs.order,
            reply=manifest.knobs.reply,
            names=names,
            barrier=self.barrier,
        )
        scale = 1.0 if manifest.knobs.aggregation.skip_nonfinite else None
        self.groups = with_scale(manifest.optimizer.groups, scale)
        """What the optimizer's numbers look like."""
        self.coefficient = 1.0
        """For the gradients of the step whose updates are under way."""
        self.store = store_class(manifest, slices, index)
        self.rows = RowServer(manifest, shards, index, server, server._lock, self.barrier)
        self.hyperparameters = HyperparameterHistory(manifest.world_size)
        self.blobs = BlobShelf(readers=manifest.world_size - 1)


class Server:
    """One server of one session, over a listening socket or ready-made streams."""

    def __init__(
        self,
        *,
        index: int,
        session_id: str,
        config: Config,
        wrap: StreamWrapper | None = None,
        store_class: type[SliceStore] = SliceStore,
    ) -> None:
        self._index = index
        self._store_class = store_class
        self._session_id = session_id
        self._config = config
        self._wrap = wrap
        self._lock = threading.RLock()
        self._peers: dict[int, _Peer] = {}
        self._session: _Session | None = None
        self._strangers: list[_Peer] = []  # who has not said hello
        self._started_at_s = time.monotonic()
        self._done = threading.Event()
        self._wake = socket.socketpair()  # ends the wait for connections
        self._failure: Failure | None = None
        self._messages: dict[int, bytes] = {}
        self._next_token = 0
        self._threads: list[threading.Thread] = []
        self._streams: list[Stream] = []
        self._outbox = Outbox(
            f"foreprop-server{index}-send", self._transmit, self._next_after_sent, self._broke
        )
        self._trace: TraceRecorder | None = None
        self._updated_ns: dict[int, int] = {}  # by slice, for the trace
        if config.trace:
            path = trace_path(Path(config.trace), f"server-{index}", session_id)
            self._trace = TraceRecorder(path, f"server {index}", 1000 + index)

    # Life.
    def run(self, listener: socket.socket) -> Failure | None:
        """Serve until every worker has left or the session has failed; returns the failure."""
        listener.setblocking(False)
        reporter = StallReporter(self)
        selector = selectors.DefaultSelector()
        selector.register(listener, selectors.EVENT_READ)
        selector.register(self._wake[0], selectors.EVENT_READ)
        while not self._done.is_set():
            reporter.look()
            self._look_at_joining()
            ready = selector.select(_LISTEN_POLL_S)
            if all(key.fileobj is not listener for key, _ in ready):
                continue
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                continue
            except OSError as error:  # too many descriptors, or gone before we looked
                print(f"foreprop: server {self._index}: accept: {error}", file=sys.stderr)
                time.sleep(_LISTEN_POLL_S)
                continue
            self._welcome_socket(sock, address[0])
        selector.close()
        self._accept_the_rest(listener)
        listener.close()
        return self.wait()

    def _accept_the_rest(self, listener: socket.socket) -> None:
        """Who has connected is to hear why the session has failed."""
        while self._failure is not None:
            try:
                sock, address = listener.accept()
            except OSError:
                return
            self._welcome_socket(sock, address[0])

    def _welcome_socket(self, sock: socket.socket, address: str) -> None:
        with self._lock:
            strangers = len(self._strangers)
        if strangers >= _MAX_STRANGERS:
            sock.close()
            return
        try:
            sock.settimeout(None)
            tune(
                sock,
                unsent_bytes=self._config.unsent_bytes,
                timeout_s=self._config.step_timeout_s,
                emulated=self._wrap is not None,
            )
        except OSError:
            sock.close()
            return
        self.serve(SocketStream(sock, f"worker at {address}"))

    def _look_at_joining(self) -> None:
        """Give up on workers that do not come, and on strangers that say nothing."""
        limit_s, now = _JOIN_SHARE * self._config.join_timeout_s, time.monotonic()
        with self._lock:
            silent = [peer for peer in self._strangers if now > peer.connected_at_s + limit_s]
            joined = sorted(self._peers)
            zero = self._peers.get(0)
        for peer in silent:
            peer.stream.close()
        if self._session is None and now > self._started_at_s + limit_s:
            size = zero.manifest.world_size if zero is not None and zero.manifest else 0
            missing = [f"rank {rank}" for rank in range(size) if rank not in joined]
            what = ", ".join(missing) or "rank 0"
            self._fail(
                Failure(
                    kind="StepTimeout",
                    message=f"server {self._index} waited {limit_s:.1f} s (of join_timeout_s) for"
                    f" {what} to join; it has met ranks {joined}",
                )
            )

    def serve(self, stream: Stream) -> None:
        """Take one worker's connection; returns at once."""
        peer = _Peer(stream)
        with self._lock:
            self._streams.append(stream)
            self._strangers.append(peer)
        self._spawn("receive", lambda: self._receive(peer))

    def wait(self) -> Failure | None:
        """Block until the session has ended, then release everything."""
        self._done.wait()
        self._say_farewell()
        for stream in list(self._streams):
            stream.close()
        self._outbox.stop()
        for thread in self._threads:
            thread.join()
        for end in self._wake:
            end.close()
        if self._trace is not None:
            self._trace.write()
        return self._failure

    def cancel(self) -> None:
        """End now, without telling anybody."""
        self._end()

    def _end(self) -> None:
        self._done.set()
        with contextlib.suppress(OSError):  # closed already: it has ended before
            self._wake[1].send(b"x", socket.MSG_DONTWAIT)

    def _spawn(self, what: str, run: Callable[[], None]) -> None:
        name = f"foreprop-server{self._index}-{what}"
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads = [known for known in self._threads if known.is_alive()]
        self._threads.append(thread)
        thread.start()

    # Receiving.
    def _receive(self, peer: _Peer) -> None:
        torch.set_grad_enabled(False)  # holds for this thread, which may have to update slices
        reader = FrameReader(lambda header: self._destination(peer, header))
        try:
            while True:
                received = peer.stream.receive_into(reader.buffer)
                if not received:
                    break
                frame = reader.advance(received)
                if frame is not None:
                    self._on_frame(peer, frame)
        except RemoteProtocolError as error:
            self._reject(peer, error)
        except TransportError:
            pass
        except ForepropError as error:
            self._fail(failure_of(error))
        except BaseException as error:
            self._broke(error)
        if peer.rank < 0 or not self._done.is_set():
            peer.stream.close()  # otherwise it is still told why the session has ended
        self._on_closed(peer)

    def _reject(self, peer: _Peer, error: RemoteProtocolError) -> None:
        """A peer that breaks the rules loses its connection; a stranger costs nobody anything."""
        who = f"rank {peer.rank}" if peer.rank >= 0 else "a stranger"
        message = f"foreprop: server {self._index}: {who} broke the protocol: {error}"
        print(message, file=sys.stderr, flush=True)
        if peer.rank >= 0:
            failure = Failure(
                kind="RemoteProtocolError",
                message=f"{who} broke the protocol: {error}",
                peer=who,
                step=peer.last_step,
            )
            self._fail(failure)

    def _on_closed(self, peer: _Peer) -> None:
        if peer.rank < 0:
            with self._lock:
                self._strangers.remove(peer)
                self._streams.remove(peer.stream)
            return
        if peer.left or self._done.is_set():
            return
        message = (
            f"rank {peer.rank} is gone: its connection to server {self._index} closed without a"
            f" goodbye; {self._describe_last(peer)}"
        )
        self._fail(
            Failure(kind="PeerLost", message=message, peer=f"rank {peer.rank}", step=peer.last_step)
        )

    def _describe_last(self, peer: _Peer) -> str:
        """Where a lost worker was: stage, step and parameter."""
        session = self._session
        if session is None:
            return "the session had not started"
        if peer.last_push is None:
            last = "it had pushed nothing"
        else:
            last = f"its last push was {session.names[peer.last_push[0]]} of step {peer.last_step}"
        with self._lock:
            for _, step, text in self._incomplete(session):
                return f"{last}; stage {Stage.PUSH_RECEIVED.value}, step {step}: {text}"
        return f"{last} (stage {Stage.PUSH_RECEIVED.value}); nothing was waiting for it"

    def _destination(self, peer: _Peer, header: Header) -> memoryview:
        """Where the payload goes; every size is checked against what is known here."""
        kind, size = header.kind, header.payload_bytes
        if self._trace is not None:
            peer.receive_started_ns = self._trace.now_ns()
        if peer.rank < 0:
            if kind != Kind.HELLO:
                raise RemoteProtocolError(f"the first frame is {Kind(kind).name}, not HELLO")
            return _bounded(header, MAX_CONTROL_BYTES)
        if header.rank != peer.rank:
            raise RemoteProtocolError(f"rank {peer.rank} sent a frame of rank {header.rank}")
        if kind == Kind.FAILURE:
            return _bounded(header, MAX_CONTROL_BYTES)
        session = self._session
        if session is None:
            raise RemoteProtocolError(f"{Kind(kind).name} before the session has started")
        if kind in (Kind.PUSH, Kind.VALUE):
            session.machine.owned(header.slice)
            if kind == Kind.PUSH and header.flags & Flag.NO_GRADIENT:
                return _exactly(header, 0)
            value = kind == Kind.VALUE
            _check_size(header, session.store.size_bytes(header.slice, value=value))
            with self._lock:
                peer.incoming = session.store.take_buffer(header.slice, value=value)
            return peer.incoming.view
        if kind == Kind.BLOB:
            return _exactly(header, session.manifest.blob_bytes[_which_blob(header, session)])
        if kind in ROW_KINDS:
            return _bounded(header, session.rows.limit_bytes(header))
        if kind == Kind.STATE:
            return _bounded(header, _state_store(session, header).state_limit_bytes(header.slice))
        if kind == Kind.TABLE:
            return _bounded(header, session.rows.store.kept_limit_bytes(header.slice))
        if kind == Kind.TABLE_PULL:
            return _exactly(header, PULL_BYTES)
        if kind == Kind.HYPERPARAMETERS:
            return _bounded(header, _HYPERPARAMETERS_LIMIT_BYTES)
        if kind == Kind.NORM:
            return _exactly(header, NORM_BYTES)
        if size:
            raise RemoteProtocolError(f"{Kind(kind).name} carries {size} bytes")
        return _EMPTY

    def _on_frame(self, peer: _Peer, frame: Frame) -> None:
        header, payload = frame
        kind = header.kind
        if kind == Kind.PUSH:
            self._on_push(peer, header)
        elif kind in ROW_KINDS:
            self._started().rows.on_frame(peer.rank, header, payload)
            if kind == Kind.ROWS_PUSH:
                peer.last_push = (header.slice, header.step)
        elif kind == Kind.HELLO:
            self._on_hello(peer, header, decode_manifest(payload))
        elif kind == Kind.FAILURE:
            failure = decode_failure(payload)
            peer.left = True
            self._fail(failure)
        else:
            self._on_control(peer, header, payload)

    def _on_push(self, peer: _Peer, header: Header) -> None:
        session = self._started()
        buffer, peer.incoming = peer.incoming, None
        event = PushArrived(peer.rank, header.slice, header.step, header.priority, header.flags)
        with self._lock:
            self._store_gradient(session, event, buffer)
            instructions = session.machine.handle(event)
        peer.last_push = (header.slice, header.step)
        if self._trace is not None:
            self._span(Stage.PUSH_RECEIVED, header, peer.receive_started_ns)
        self._execute(instructions)

    @staticmethod
    def _store_gradient(
        session: _Session, event: PushArrived, buffer: GradientBuffer | None
    ) -> None:
        """A refused push ends the session, so what it left behind is never summed."""
        if buffer is not None:
            session.store.put_gradient(event.slice, event.rank, buffer)

    def _on_control(self, peer: _Peer, header: Header, payload: memoryview) -> None:
        session = self._started()
        kind, rank, step = header.kind, peer.rank, header.step
        if kind == Kind.VALUE:
            buffer, peer.incoming = peer.incoming, None
            with self._lock:
                event = ValueArrived(rank, header.slice, step, header.priority)
                instructions = session.machine.handle(event)
                if buffer is not None:
                    session.store.put_value(header.slice, buffer)
                # under the lock: the sender may already be about to send this slice
                for instruction in instructions:
                    if isinstance(instruction, InstallValue):
                        session.store.install_value(instruction.slice)
            self._execute(instructions)
        elif kind == Kind.PULL:
            self._dispatch(PullArrived(rank, header.slice, step, header.priority))
        elif kind == Kind.HYPERPARAMETERS:
            groups = decode_groups(payload, session.groups)
            with self._lock:
                session.hyperparameters.announce(rank, step, groups)
        elif kind == Kind.NORM:
            self._on_norm(session, header, payload)
        elif kind == Kind.BLOB:
            self._on_blob(session, header, payload)
        elif kind == Kind.BLOB_PULL:
            self._on_blob_pull(session, peer, header)
        elif kind == Kind.STATE:
            with self._lock:
                store = _state_store(session, header)
                averages = header.flags & Flag.AVERAGES
                (store.import_average if averages else store.import_state)(header.slice, payload)
        elif kind == Kind.STATE_PULL:
            with self._lock:
                store = _state_store(session, header)
                if header.flags & Flag.AVERAGES:
                    data = store.export_average(header.slice)
                elif header.flags & Flag.MASTER:
                    data = store.export_master(header.slice)
                else:
                    data = store.export_state(header.slice)
            self._answer(rank, Kind.STATE_REPLY, header, data)
        elif kind == Kind.TABLE:
            if rank != 0:
                raise RemoteProtocolError(f"rank {rank} sent a table's rows; only rank 0 may")
            with self._lock:
                anew = bool(header.flags & Flag.ANEW)
                session.rows.store.import_kept(header.slice, payload, anew=anew)
        elif kind == Kind.TABLE_PULL:
            with self._lock:
                data = session.rows.store.export_kept(header.slice, payload)
            self._answer(rank, Kind.TABLE_REPLY, header, data)
        elif kind == Kind.STATUS_PULL:
            self._tell_status(session, peer, header)
        elif kind == Kind.BYE:
            peer.left = True
            session.rows.rank_left(rank)
            self._dispatch(WorkerLeft(rank))
        else:
            raise RemoteProtocolError(f"rank {rank} sent {Kind(kind).name}")

    def _tell_status(self, session: _Session, peer: _Peer, header: Header) -> None:
        """Past the queue, whose head may be just what everybody waits for."""
        with self._lock:
            text = self._describe_wait(session, header.slice, header.step)
        sending_to = self._outbox.sending_to()
        if sending_to:
            text += f"; it is sending to rank{'s' * (len(sending_to) > 1)} "
            text += ", ".join(map(str, sending_to))
        data = text.encode()
        about = (header.step, header.slice, CONTROL_PRIORITY, len(data))
        frame = encode_header(Kind.STATUS_REPLY, 0, self._index, *about)
        _tell(peer, frame, memoryview(data))

    def _describe_wait(self, session: _Session, number: int, step: int) -> str:
        """Of a slice or shard. What is at the barrier waits for all others, too."""
        of_rows = number in session.rows.store
        text = (session.rows if of_rows else session.machine).describe_wait(number, step)
        if session.barrier is not None and session.barrier.holds(number):
            for other, at_step in (session.machine if of_rows else session.rows).incomplete():
                return f"{text}; {self._describe_wait(session, other, at_step)}"
        return text

    def _started(self) -> _Session:
        if self._session is None:
            raise RemoteProtocolError("the session has not started")
        return self._session

    # The start.
    def _on_hello(self, peer: _Peer, header: Header, manifest: Manifest) -> None:
        if peer.rank >= 0:
            raise RemoteProtocolError("a second HELLO on one connection")
        if manifest.session != self._session_id:
            raise RemoteProtocolError(f"HELLO for another session: {manifest.session!r}")
        if header.rank >= manifest.world_size or not manifest.parameters:
            raise RemoteProtocolError(f"rank {header.rank} of {manifest.world_size}")
        with self._lock:
            if header.rank in self._peers:
                raise RemoteProtocolError(f"two workers say that they are rank {header.rank}")
            peer.rank, peer.manifest = header.rank, manifest
            self._strangers.remove(peer)
            if self._wrap is not None:
                peer.stream = self._wrap(peer.stream, peer.rank)
            self._peers[header.rank] = peer
            zero = self._peers.get(0)
            if zero is None or zero.manifest is None:
                return
            refused = self._compare_all(zero.manifest)
            complete = len(self._peers) == zero.manifest.world_size
            if not refused and complete:
                self._session = _Session(zero.manifest, self._index, self._store_class, self)
        if refused:
            self._fail(Failure(kind="HandshakeError", message=refused))
        elif complete:
            for rank in range(manifest.world_size):
                self._answer(rank, Kind.WELCOME, header, b"")

    def _compare_all(self, zero: Manifest) -> str | None:
        known = (
            SPARSE_OPTIMIZERS if info.rows else ELEMENTWISE_OPTIMIZERS for info in zero.parameters
        )
        if any(zero.optimizer.name not in allowed for allowed in known):
            return f"optimizer {zero.optimizer.name!r} is not one that servers apply"
        ours = (__version__, torch.__version__.partition("+")[0], sys.byteorder)
        theirs = (zero.foreprop, zero.torch, zero.byteorder)
        for name, mine, other in zip(("foreprop", "torch", "byteorder"), ours, theirs, strict=True):
            if mine != other:
                us = f"server {self._index}"
                return f"rank 0 and {us} do not agree: {name}: rank 0 has {other!r}, {us} {mine!r}"
        for rank, peer in self._peers.items():
            if peer.manifest is not None:
                them = f"rank {rank}"
                text = describe_mismatch(zero, peer.manifest, us="rank 0", them=them)
                if text is not None:
                    return f"rank 0 and rank {rank} do not agree: {text}"
        return None

    # Blobs: buffers and frozen parameters, from rank 0 to whoever asks.
    def _on_blob(self, session: _Session, header: Header, payload: memoryview) -> None:
        if header.rank != 0:
            raise RemoteProtocolError(f"rank {header.rank} sent buffers; only rank 0 may")
        data = bytes(payload)
        with self._lock:
            ranks = session.blobs.put(_which_blob(header, session), header.step, data)
        for rank in ranks:
            self._answer(rank, Kind.BLOB_REPLY, header, data)

    def _on_blob_pull(self, session: _Session, peer: _Peer, header: Header) -> None:
        with self._lock:
            which = _which_blob(header, session)
            data = session.blobs.pull(which, header.step, peer.rank)
        if data is not None:
            self._answer(peer.rank, Kind.BLOB_REPLY, header, data)

    # The global norm of a step's gradients, from rank 0.
    def _on_norm(self, session: _Session, header: Header, payload: memoryview) -> None:
        norm, aggregation = decode_norm(header, payload), session.manifest.knobs.aggregation
        with self._lock:
            skip, coefficient = aggregation.skips(norm), aggregation.coefficient(norm)
            instructions = session.machine.handle(NormArrived(header.rank, header.step, skip))
            session.coefficient = coefficient
        if self._index == 0:
            for rank in range(1, session.manifest.world_size):
                self._answer(rank, Kind.NORM, header, bytes(payload))
        session.rows.use_norm(header.step, coefficient, skip=skip)  # look-ups often come first
        self._execute(instructions)

    def _sum(self, summed: SumSlice) -> Sequence[object]:
        """Do the one sum that is under way; returns what follows from it."""
        session = self._started()
        with self._lock:
            scale = scale_of(session.hyperparameters.at(summed.step))
        part = session.store.aggregate(summed.slice, summed.ranks, scale)
        with self._lock:
            return session.machine.handle(SliceSummed(part))

    # Deciding and doing.
    def _dispatch(self, event: object) -> None:
        session = self._started()
        with self._lock:
            instructions = session.machine.handle(event)
        self._execute(instructions)

    def _execute(self, instructions: Sequence[object]) -> None:
        while instructions:
            following: Sequence[object] = ()
            for instruction in instructions:
                kind = type(instruction)
                if kind is SendFrame:
                    self._outbox.submit(instruction)  # type: ignore[arg-type]
                elif kind is UpdateSlice:
                    following = self._update(instruction)  # type: ignore[arg-type]
                elif isinstance(instruction, SumSlice):
                    following = self._sum(instruction)
                elif isinstance(instruction, TellNormPart):
                    self.tell_norm_part(instruction)
                elif isinstance(instruction, FailSession):
                    self._fail_as_told(instruction)
                elif isinstance(instruction, FinishSession):
                    self._end()
            instructions = following

    def _fail_as_told(self, told: FailSession) -> None:
        if told.rank >= 0:
            peer = f"rank {told.rank}"
            self._fail(Failure(kind="PeerLost", message=told.reason, peer=peer, step=told.step))
        else:
            self._fail(Failure(kind="TrainingLoopError", message=told.reason, step=told.step))

    def _update(self, update: UpdateSlice) -> Sequence[object]:
        """Do the one update that is under way; returns what follows from it."""
        session = self._started()
        started_ns = self._trace.now_ns() if self._trace is not None else 0
        with self._lock:
            groups = session.hyperparameters.at(update.step) if update.ranks else ()
        session.store.update(update.slice, update.ranks, groups, session.coefficient)
        if self._trace is not None:
            self._trace.span(
                Stage.UPDATED.value,
                session.names[update.slice],
                started_ns,
                step=update.step,
                slice_=update.slice,
            )
            self._updated_ns[update.slice] = self._trace.now_ns()
        with self._lock:
            return session.machine.handle(_UPDATE_FINISHED)

    def _next_after_sent(self, rank: int) -> SendFrame | None:
        session = self._session
        if session is None:
            return None
        with self._lock:
            instructions = session.machine.handle(FrameSent(rank))
        return instructions[0] if instructions else None  # type: ignore[return-value]

    def _answer(self, rank: int, kind: Kind, about: Header, data: bytes) -> None:
        self._queue_answer(rank, kind, about.step, CONTROL_PRIORITY, about.slice, data)

    def _queue_answer(
        self, rank: int, kind: Kind, step: int, priority: int, slice_: int, data: bytes
    ) -> None:
        with self._lock:
            token = self._next_token
            self._next_token += 1
            self._messages[token] = data
            event = AnswerReady(rank, kind, step, priority, slice_, token)
            instructions = self._started().machine.handle(event)
        self._execute(instructions)

    # For the rows, see `RowHost`.
    def answer_rows(self, answer: AnswerRows, data: bytes) -> None:
        rank, _, step, request, priority = answer
        self._queue_answer(rank, Kind.ROWS_REPLY, step, priority, request, data)

    def tell_norm_part(self, told: TellNormPart) -> None:
        about = Header(Kind.NORM_PART, 0, 0, told.step, 0, CONTROL_PRIORITY, 0)
        self._answer(0, Kind.NORM_PART, about, told.part.encode())

    def fail_rows(self, failure: FailRows) -> None:
        self._fail_as_told(FailSession(*failure))

    def settings_at(self, step: int) -> tuple[Hyperparameters, ...]:
        return self._started().hyperparameters.at(step)

    # Sending.
    def _transmit(self, frame: SendFrame) -> None:
        session = self._started()
        rank, kind, step, slice_, priority, flags, token = frame
        if token != NO_TOKEN:
            payload = memoryview(self._messages.pop(token))
        elif kind == Kind.REPLY and not flags & Flag.UNCHANGED:
            payload = session.store.values(slice_)
        else:
            payload = _EMPTY
        header = encode_header(kind, flags, self._index, step, slice_, priority, len(payload))
        started_ns = self._trace.now_ns() if self._trace is not None else 0
        peer = self._peers[rank]
        try:
            with peer.sending:
                if self._done.is_set():
                    return
                peer.stream.send(header, payload)
        except TransportError:
            return  # its receiving thread reports the loss, with the rank's name
        if self._trace is not None and kind == Kind.REPLY:
            sent = Header(kind, flags, rank, step, slice_, priority, len(payload))
            updated_ns = self._updated_ns.get(slice_, started_ns)
            self._span(Stage.REPLY_QUEUED, sent, updated_ns, stop_ns=started_ns)
            self._span(Stage.REPLY_SENT, sent, started_ns)

    def _span(
        self, stage: Stage, header: Header, started_ns: int, *, stop_ns: int | None = None
    ) -> None:
        if self._trace is not None:
            self._trace.span(
                stage.value,
                self._started().names[header.slice],
                started_ns,
                stop_ns=stop_ns,
                step=header.step,
                size_bytes=header.payload_bytes,
                slice_=header.slice,
                priority=header.priority,
            )

    # The end.
    def _fail(self, failure: Failure) -> None:
        with self._lock:
            if self._failure is None and not self._done.is_set():
                self._failure = failure
        self._end()

    def _broke(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        print(f"foreprop: server {self._index} broke:\n{text}", file=sys.stderr, flush=True)
        self._fail(failure_of(error))

    def _say_farewell(self) -> None:
        """Tell every worker why the session ended; whoever does not listen is left behind."""
        failure = self._failure
        if failure is None:
            return
        data = memoryview(failure.encode())
        header = encode_header(Kind.FAILURE, 0, self._index, 0, 0, CONTROL_PRIORITY, len(data))
        tellers = [
            threading.Thread(target=_tell, args=(peer, header, data), daemon=True)
            for peer in (*self._peers.values(), *self._strangers)
            if not peer.left
        ]
        for teller in tellers:
            teller.start()
        deadline = time.monotonic() + _FAREWELL_S
        for teller in tellers:
            teller.join(max(0.0, deadline - time.monotonic()))

    # For the stall report.
    def stalled(self) -> tuple[int, int, str] | None:
        """(slice, step, description) of a slice that some ranks have pushed and others not."""
        session = self._session
        if session is None:
            return None
        with self._lock:
            return next(self._incomplete(session), None)

    @staticmethod
    def _incomplete(session: _Session) -> Iterator[tuple[int, int, str]]:
        for part in (session.machine, session.rows):
            for number, step in part.incomplete():
                yield number, step, part.describe_wait(number, step)

    @property
    def index(self) -> int:
        return self._index

    @property
    def stall_report_s(self) -> float:
        return self._config.stall_report_s


def _tell(peer: _Peer, header: bytes, payload: memoryview) -> None:
    if not peer.sending.acquire(timeout=_FAREWELL_S):
        return  # stuck in the middle of a frame: it will see the connection close
    try:
        with contextlib.suppress(TransportError):
            peer.stream.send(header, payload)
    finally:
        peer.sending.release()


def _check_size(header: Header, size_bytes: int) -> None:
    if header.payload_bytes != size_bytes:
        raise RemoteProtocolError(
            f"{Kind(header.kind).name} of slice {header.slice} carries {header.payload_bytes}"
            f" bytes, not {size_bytes}"
        )


def _exactly(header: Header, size_bytes: int) -> memoryview:
    _check_size(header, size_bytes)
    return memoryview(bytearray(size_bytes))


def _bounded(header: Header, limit_bytes: int) -> memoryview:
    if header.payload_bytes > limit_bytes:
        raise RemoteProtocolError(
            f"{Kind(header.kind).name} of {header.payload_bytes} bytes; at most {limit_bytes}"
        )
    # untouched memory: who only says that much will come takes none
    return np.empty(header.payload_bytes, np.uint8).data


def _state_store(session: _Session, header: Header) -> SliceStore | RowStore:
    """Which of a server's stores has the optimizer state that a frame is about."""
    if header.slice in session.rows.store:
        return session.rows.store
    session.machine.owned(header.slice)
    return session.store


def _which_blob(header: Header, session: _Session) -> int:
    if header.slice >= len(session.manifest.blob_bytes):
        raise RemoteProtocolError(f"there is no blob {header.slice}")
    return header.slice

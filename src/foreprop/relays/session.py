"""What a relay does with the frames of its session: `RelayMachine`, `RelayStore` and rows.

A receiving thread whose push is a slice's last of this node adds the gradients up; the link's own
threads send the sum on and read the answers. What cannot be summed, such as optimizer state for
checkpoints, passes through.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from foreprop.core.manifest import Hyperparameters, Manifest
from foreprop.core.norm import ENCODED_BYTES
from foreprop.core.peers import SERVER, Peers
from foreprop.core.relay_machine import AnswerArrived, NoticeArrived, RelayMachine
from foreprop.core.rows_machine import FailRows
from foreprop.core.server_machine import (
    AnswerReady,
    FailSession,
    InstallValue,
    PullArrived,
    PushArrived,
    UpdateFinished,
    UpdateSlice,
    ValueArrived,
    WorkerLeft,
)
from foreprop.core.wire import MAX_CONTROL_BYTES, Flag, Header, Kind
from foreprop.core.worker_machine import (
    CONTROL_PRIORITY,
    NO_TOKEN,
    Finish,
    FrameSent,
    MessageReady,
    SendFrame,
)
from foreprop.errors import RemoteProtocolError
from foreprop.link.failure import Failure
from foreprop.link.outbox import Outbox, frames_of
from foreprop.numerics.finite import check_finite
from foreprop.numerics.norms import NORM_BYTES
from foreprop.observe.stages import RelayStage, Stage
from foreprop.path.blobs import BlobShelf
from foreprop.path.hyperparameters import HyperparameterHistory, decode_groups, with_scale
from foreprop.path.peer import (
    HYPERPARAMETERS_LIMIT_BYTES,
    Peer,
    SessionHost,
    bounded,
    check_size,
    exactly,
    which_blob,
)
from foreprop.path.slices import failure_told
from foreprop.path.tensors import state_limit_bytes
from foreprop.relays.relaystore import RelayStore
from foreprop.relays.rows import RelayRows
from foreprop.relays.serverlink import ServerLink
from foreprop.tables.kept import PULL_BYTES
from foreprop.tables.service import ROW_KINDS

_EMPTY = memoryview(b"")
_ANSWERED_ABOVE: dict[int, Kind] = {
    Kind.STATE_PULL: Kind.STATE_REPLY,
    Kind.TABLE_PULL: Kind.TABLE_REPLY,
}
_STATUS_LIMIT_BYTES = 65_536


class RelaySession:
    """One relay's part in a session: it sums, passes on, and hands out the answers."""

    def __init__(
        self, manifest: Manifest, host: SessionHost, peers: Peers, link: ServerLink
    ) -> None:
        slices = manifest.slices()
        shards = manifest.shards(len(slices))
        names = [info.name for info in manifest.parameters]
        self.names = [names[piece.parameter] for piece in slices]
        self.names += [names[shard.parameter] for shard in shards]
        self._elems = [piece.elems for piece in slices]
        self._elems += [shard.rows * shard.row_elems for shard in shards]
        self._manifest = manifest
        self._host = host
        self._lock = host.lock
        self._trace = host.trace
        self._receive_started_ns = 0  # what comes from the server
        self._peers = peers
        self._link = link
        self._machine = RelayMachine(
            slices,
            server=host.index,
            peers=peers,
            order=manifest.knobs.order,
            reply=manifest.knobs.reply,
            names=names,
        )
        self._store = RelayStore(manifest, slices, host.index)
        self._rows = RelayRows(manifest, shards, self, self._lock, peers, host.index)
        scale = 1.0 if manifest.knobs.aggregation.skip_nonfinite else None
        self._groups = with_scale(manifest.optimizer.groups, scale)
        """What the optimizer's numbers look like."""
        self._hyperparameters = HyperparameterHistory([ranks.start for ranks in peers.ranks])
        readers = peers.count - (peers.first_rank(0) == 0)
        self._blobs = BlobShelf(readers=readers)
        self._asked_blobs: set[tuple[int, int]] = set()  # which, step
        self._askers: dict[tuple[int, int, int], deque[Peer]] = {}
        """By kind of the answer, slice and step: who has asked the server."""
        self._outbox = Outbox(
            f"foreprop-relay{host.index}-push", self._transmit, self._next_to_server, self._broke
        )
        self.has_left = False

    def start(self) -> None:
        """Tell the server; when it welcomes all relays, this one welcomes its workers."""
        self.send_on(Kind.MANIFEST, 0, CONTROL_PRIORITY, 0, self._manifest.encode())

    # From the workers.
    def destination(self, peer: Peer, header: Header) -> memoryview:
        """Every size is checked against what is known here."""
        kind, size = header.kind, header.payload_bytes
        if kind in (Kind.PUSH, Kind.VALUE):
            self._machine.owned(header.slice)
            if kind == Kind.PUSH and header.flags & Flag.NO_GRADIENT:
                return exactly(header, 0)
            value = kind == Kind.VALUE
            check_size(header, self._store.size_bytes(header.slice, value=value))
            with self._lock:
                peer.incoming = self._store.take_buffer(header.slice, value=value)
            return peer.incoming.view
        if kind == Kind.BLOB:
            return exactly(header, self._manifest.blob_bytes[which_blob(header, self._manifest)])
        if kind in ROW_KINDS:
            return bounded(header, self._rows.limit_bytes(header))
        if kind == Kind.STATE:
            return bounded(header, self._state_limit_bytes(header))
        if kind == Kind.TABLE:
            return bounded(header, self._rows.kept_limit_bytes(header.slice))
        if kind == Kind.TABLE_PULL:
            return exactly(header, PULL_BYTES)
        if kind == Kind.HYPERPARAMETERS:
            return bounded(header, HYPERPARAMETERS_LIMIT_BYTES)
        if kind == Kind.NORM:
            return exactly(header, NORM_BYTES)
        if size:
            raise RemoteProtocolError(f"{Kind(kind).name} carries {size} bytes")
        return _EMPTY

    def on_frame(self, peer: Peer, header: Header, payload: memoryview) -> None:
        kind, number = header.kind, peer.number
        if kind == Kind.PUSH:
            self._on_push(peer, header)
        elif kind in ROW_KINDS:
            self._rows.on_frame(number, header, payload)
            if kind == Kind.ROWS_PUSH:
                peer.last_push = (header.slice, header.step)
        elif kind == Kind.VALUE:
            self._on_value(peer, header)
        elif kind == Kind.PULL:
            self._dispatch(PullArrived(number, header.slice, header.step, header.priority))
        elif kind == Kind.HYPERPARAMETERS:
            self._on_hyperparameters(number, header, payload)
        elif kind in (Kind.NORM, Kind.BLOB, Kind.STATE, Kind.TABLE):
            self._on_word_of_rank_zero(peer, header, payload)
        elif kind == Kind.BLOB_PULL:
            self._on_blob_pull(peer, header)
        elif kind in _ANSWERED_ABOVE:
            self._ask(_ANSWERED_ABOVE[kind], peer, header)
            self._pass_on(header, payload)
        elif kind == Kind.STATUS_PULL:
            self._on_status_pull(peer, header)
        elif kind == Kind.BYE:
            peer.left = True
            self._rows.rank_left(number)
            self._dispatch(WorkerLeft(number))
        else:
            raise RemoteProtocolError(f"{self._peers.name(number)} sent {Kind(kind).name}")

    def _on_push(self, peer: Peer, header: Header) -> None:
        buffer, peer.incoming = peer.incoming, None
        if buffer is not None:
            self._check_finite(peer.number, header, buffer.tensor)
        event = PushArrived(peer.number, header.slice, header.step, header.priority, header.flags)
        with self._lock:
            if buffer is not None:  # a refused push ends the session, so it is never summed
                self._store.put_gradient(event.slice, event.rank, buffer)
            instructions = self._machine.handle(event)
        peer.last_push = (header.slice, header.step)
        self._span(Stage.PUSH_RECEIVED, header, peer.receive_started_ns)
        self._execute(instructions)

    def _check_finite(self, worker: int, header: Header, gradient: torch.Tensor) -> None:
        check_finite(
            gradient,
            self._manifest.knobs.aggregation,
            whose=self._peers.name(worker),
            name=self.names[header.slice],
            step=header.step,
        )

    def _on_value(self, peer: Peer, header: Header) -> None:
        buffer, peer.incoming = peer.incoming, None
        with self._lock:
            event = ValueArrived(peer.number, header.slice, header.step, header.priority)
            instructions = self._machine.handle(event)
            if buffer is not None:
                self._store.put_value(header.slice, header.step, buffer)
            # under the lock: the sender may already be about to send this slice
            for instruction in instructions:
                if isinstance(instruction, InstallValue):
                    self._store.install_value(instruction.slice)
        self._execute(instructions)

    def _on_hyperparameters(self, worker: int, header: Header, payload: memoryview) -> None:
        """The first worker's go on to the server; that all agree is seen at the next sum."""
        groups = decode_groups(payload, self._groups)
        with self._lock:
            self._hyperparameters.announce(worker, header.step, groups)
        if worker == 0:
            self._pass_on(header, payload)

    def _on_word_of_rank_zero(self, peer: Peer, header: Header, payload: memoryview) -> None:
        """For the server, and some of it for the other workers of this node."""
        kind = header.kind
        if peer.rank != 0:
            raise RemoteProtocolError(f"rank {peer.rank} sent {Kind(kind).name}; only rank 0 may")
        self._pass_on(header, payload)
        if kind == Kind.NORM and self._host.index == 0:
            for other in range(1, self._peers.count):
                self._answer(other, Kind.NORM, header, payload)
        elif kind == Kind.BLOB:
            self._hand_out_blob(header, payload)

    def _hand_out_blob(self, header: Header, payload: memoryview) -> None:
        data, which = bytes(payload), which_blob(header, self._manifest)
        with self._lock:
            self._asked_blobs.discard((which, header.step))
            peers = self._blobs.put(which, header.step, data)
        for peer in peers:
            self._answer(peer, Kind.BLOB_REPLY, header, data)

    def _on_blob_pull(self, peer: Peer, header: Header) -> None:
        """The node's first to ask asks the server, unless rank 0 is here and will tell."""
        key = (which_blob(header, self._manifest), header.step)
        with self._lock:
            data = self._blobs.pull(*key, peer.number)
            asks = data is None and self._peers.first_rank(0) != 0 and key not in self._asked_blobs
            if asks:
                self._asked_blobs.add(key)
        if data is not None:
            self._answer(peer.number, Kind.BLOB_REPLY, header, data)
        elif asks:
            self._pass_on(header, _EMPTY)

    def _on_status_pull(self, peer: Peer, header: Header) -> None:
        """What has been passed on waits for the server, which knows why."""
        with self._lock:
            passed_on = self._machine.has_pushed(header.slice, header.step)
            passed_on = passed_on or self._rows.has_pushed(header.slice, header.step)
            text = "" if passed_on else self._describe_wait(header.slice, header.step)
        if passed_on:
            self._ask(Kind.STATUS_REPLY, peer, header)
            self._link.tell(Kind.STATUS_PULL, step=header.step, slice_=header.slice)
        else:
            self._host.tell(peer, Kind.STATUS_REPLY, header, text.encode())

    def _ask(self, answer: Kind, peer: Peer, header: Header) -> None:
        with self._lock:
            self._askers.setdefault((answer, header.slice, header.step), deque()).append(peer)

    def _asker(self, header: Header) -> Peer:
        """Who has asked for this answer: the first of those that have not got theirs."""
        with self._lock:
            askers = self._askers.get((header.kind, header.slice, header.step))
            if not askers:
                raise RemoteProtocolError(
                    f"server {self._host.index} sent {Kind(header.kind).name} of slice"
                    f" {header.slice}, which nobody has asked for"
                )
            return askers.popleft()

    # From the server. In its link's thread.
    def destination_above(self, header: Header) -> memoryview:
        kind, slice_ = header.kind, header.slice
        self._receive_started_ns = time.perf_counter_ns()
        if kind == Kind.ROWS_REPLY:
            return self._rows.room(header)
        if kind == Kind.REPLY:
            if not self._machine.awaits(slice_, header.step):
                raise RemoteProtocolError(
                    f"server {self._host.index} sent a reply for slice {slice_}, step"
                    f" {header.step}, which is not awaited"
                )
            if header.flags & Flag.UNCHANGED:
                return exactly(header, 0)
            return self._store.room(slice_, header.payload_bytes)
        return bounded(header, self._control_limit_bytes(header))

    def _control_limit_bytes(self, header: Header) -> int:
        kind = header.kind
        if kind == Kind.STATE_REPLY:
            return self._state_limit_bytes(header)
        if kind == Kind.TABLE_REPLY:
            return self._rows.kept_limit_bytes(header.slice)
        if kind == Kind.BLOB_REPLY:
            return self._manifest.blob_bytes[which_blob(header, self._manifest)]
        limits = {
            Kind.STATUS_REPLY: _STATUS_LIMIT_BYTES,
            Kind.NORM_PART: max(1, len(self._elems)) * ENCODED_BYTES,
            Kind.NORM: NORM_BYTES,
            Kind.FAILURE: MAX_CONTROL_BYTES,
        }
        return limits.get(Kind(kind), 0)

    def _state_limit_bytes(self, header: Header) -> int:
        if header.slice >= len(self._elems):
            raise RemoteProtocolError(f"there is no slice {header.slice}")
        return state_limit_bytes(self._elems[header.slice])

    def on_frame_above(self, header: Header, payload: memoryview) -> None:
        kind, slice_, step = header.kind, header.slice, header.step
        if kind == Kind.REPLY:
            with self._lock:
                self._store.land(slice_, payload)
            self._span(Stage.REPLY_RECEIVED, header, self._receive_started_ns)
            self._dispatch(AnswerArrived(slice_, step, header.priority, header.flags))
        elif kind == Kind.NOTIFY:
            self._dispatch(NoticeArrived(slice_, step, header.flags))
        elif kind == Kind.ROWS_REPLY:
            self._rows.arrived(header)
        elif kind == Kind.WELCOME:
            self._tell_workers(Kind.WELCOME, header, b"")
        elif kind == Kind.NORM_PART and self._machine.measures:
            self._tell_workers(Kind.NORM_PART, header, payload)
        elif kind == Kind.NORM_PART and self._peers.first_rank(0) == 0:
            self._answer(0, Kind.NORM_PART, header, payload)
        elif kind == Kind.NORM and self._peers.first_rank(0) != 0:
            self._tell_workers(Kind.NORM, header, payload)
        elif kind == Kind.BLOB_REPLY:
            self._hand_out_blob(header, payload)
        elif kind in (Kind.STATE_REPLY, Kind.TABLE_REPLY):
            self._answer(self._asker(header).number, Kind(kind), header, payload)
        elif kind == Kind.STATUS_REPLY:
            self._hand_out_status(header, payload)
        else:
            raise RemoteProtocolError(f"server {self._host.index} sent {Kind(kind).name}")

    def _hand_out_status(self, header: Header, payload: memoryview) -> None:
        """What waits for the norm waits for all others, of which the server knows only sums."""
        data = bytes(payload)
        if self._manifest.knobs.aggregation.needs_norm:
            with self._lock:
                for _, _, text in self.incomplete():
                    data += f"; on this node {text}".encode()
                    break
        self._host.tell(self._asker(header), Kind.STATUS_REPLY, header, data)

    def _tell_workers(self, kind: Kind, about: Header, data: bytes | memoryview) -> None:
        for peer in range(self._peers.count):
            self._answer(peer, kind, about, data)

    # Deciding and doing.
    def _dispatch(self, event: object) -> None:
        with self._lock:
            instructions = self._machine.handle(event)
        self._execute(instructions)

    def _execute(self, instructions: Sequence[Any]) -> None:
        while instructions:
            following: Sequence[Any] = ()
            for instruction in instructions:
                if isinstance(instruction, SendFrame):
                    outbox = self._outbox if instruction.peer == SERVER else self._host
                    outbox.submit(instruction)
                elif isinstance(instruction, UpdateSlice):
                    following = self._sum(instruction)
                elif isinstance(instruction, FailSession):
                    self._host.fail(failure_told(instruction, self._peers))
                elif isinstance(instruction, Finish):
                    self._leave()
            instructions = following

    def _sum(self, asked: UpdateSlice) -> Sequence[Any]:
        """Make the one sum that is under way; returns what follows from it."""
        started_ns = time.perf_counter_ns()
        if asked.ranks and not asked.gradient:
            with self._lock:
                self._hyperparameters.at(asked.step)
        self._store.add_up(asked.slice, asked.ranks)
        about = Header(Kind.PUSH, 0, 0, asked.step, asked.slice, 0, 0)
        self._span(RelayStage.NODE_SUMMED, about, started_ns)
        with self._lock:
            self._store.keep_sum_only(asked.slice)
            return self._machine.handle(UpdateFinished())

    def _leave(self) -> None:
        """Every worker of the node has said goodbye, and all that they said has been passed on."""
        self.has_left = True
        self._link.send(Kind.BYE, 0, 0, 0, CONTROL_PRIORITY, _EMPTY)

    # Sending to the workers.
    def next_after_sent(self, peer: int) -> list[SendFrame]:
        return frames_of(self._machine.handle(FrameSent(peer)))

    def payload_of(self, frame: SendFrame) -> memoryview:
        if frame.kind == Kind.REPLY and not frame.flags & Flag.UNCHANGED:
            return self._store.values(frame.slice)
        return _EMPTY

    def on_sent(self, frame: SendFrame, size_bytes: int, started_ns: int) -> None:
        if frame.kind == Kind.REPLY:
            peer, kind, step, slice_, priority, flags, _ = frame
            sent = Header(kind, flags, peer, step, slice_, priority, size_bytes)
            self._span(Stage.REPLY_SENT, sent, started_ns)

    def _answer(self, peer: int, kind: Kind, about: Header, data: bytes | memoryview) -> None:
        self.answer(peer, kind, about.step, CONTROL_PRIORITY, about.slice, data)

    def answer(
        self,
        peer: int,
        kind: Kind,
        step: int,
        priority: int,
        slice_: int,
        data: bytes | memoryview,
    ) -> None:
        """Queue a frame for a worker."""
        with self._lock:
            token = self._host.keep(data)
            event = AnswerReady(peer, kind, step, priority, slice_, token)
            instructions = self._machine.handle(event)
        self._execute(instructions)

    # Sending to the server.
    def send_on(
        self,
        kind: int,
        step: int,
        priority: int,
        slice_: int,
        data: bytes | memoryview,
        flags: int = 0,
    ) -> None:
        """Queue a frame for the server."""
        with self._lock:
            token = self._host.keep(data)
            event = MessageReady(SERVER, kind, step, priority, slice_, token, flags)
            instructions = self._machine.handle(event)
        self._execute(instructions)

    def _pass_on(self, header: Header, payload: memoryview) -> None:
        place = (header.step, header.priority, header.slice)
        self.send_on(header.kind, *place, payload, header.flags)

    def _next_to_server(self, _: int) -> list[SendFrame]:
        with self._lock:
            instructions = self._machine.handle(FrameSent(SERVER))
        if any(isinstance(instruction, Finish) for instruction in instructions):
            self._leave()
        return frames_of(instructions)

    def _transmit(self, frame: SendFrame) -> None:
        _, kind, step, slice_, priority, flags, token = frame
        payload, total = _EMPTY, None
        with self._lock:
            if token != NO_TOKEN:
                payload = memoryview(self._host.take(token))
            elif kind == Kind.VALUE:
                payload = self._store.take_value(slice_, step)
            elif kind == Kind.PUSH and (total := self._store.take_sum(slice_)) is not None:
                payload = total.view
        started_ns = time.perf_counter_ns()
        self._link.send(kind, flags, step, slice_, priority, payload)
        if kind == Kind.PUSH:
            about = Header(kind, flags, 0, step, slice_, priority, len(payload))
            self._span(Stage.PUSH_SENT, about, started_ns)
        if total is not None:
            with self._lock:
                self._store.give_back(total)

    # For the rows, see `RowRelayHost`.
    def settings_at(self, step: int) -> tuple[Hyperparameters, ...]:
        return self._hyperparameters.at(step)

    def fail_rows(self, failure: FailRows) -> None:
        self._host.fail(failure_told(FailSession(*failure), self._peers))

    # Reports and the end.
    def _describe_wait(self, number: int, step: int) -> str:
        part = self._rows if number in self._rows else self._machine
        return part.describe_wait(number, step)

    def incomplete(self) -> Iterator[tuple[int, int, str]]:
        for part in (self._machine, self._rows):
            for number, step in part.incomplete():
                yield number, step, part.describe_wait(number, step)

    def describe_awaited(self) -> str:
        """What has been passed on and not answered, or else what the workers have not pushed."""
        with self._lock:
            for slice_, step in self._machine.awaited():
                return f"stage {Stage.REPLY_RECEIVED.value}, step {step}: {self.names[slice_]}"
            for _, step, text in self.incomplete():
                return f"stage {Stage.PUSH_RECEIVED.value}, step {step}: {text}"
        return "nothing"

    def _broke(self, error: BaseException) -> None:
        if not isinstance(error, OSError):  # a lost connection is told by who reads from it
            self._host.broke(error)

    def _span(self, stage: Stage | RelayStage, about: Header, started_ns: int) -> None:
        if self._trace is not None:
            self._trace.span(
                stage.value,
                self.names[about.slice],
                started_ns,
                step=about.step,
                size_bytes=about.payload_bytes,
                slice_=about.slice,
                priority=about.priority,
            )

    def close(self, failure: Failure | None) -> None:
        self._link.close(failure)
        self._outbox.stop()

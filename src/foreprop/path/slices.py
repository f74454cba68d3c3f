"""What a server does with the frames of its session: `ServerMachine`, `SliceStore` and rows.

A receiving thread reads a push straight into a pooled buffer; the state machine decides, under the
server's lock, what happens next. The thread whose push completes a slice also updates it, while its
bytes are in the cache; as long as it does, completed slices queue in the machine, and the most
urgent is next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from foreprop.core.barrier import StepBarrier, TellNormPart
from foreprop.core.manifest import Hyperparameters, Manifest
from foreprop.core.norm import encode_square_sums
from foreprop.core.peers import Peers
from foreprop.core.rows_machine import AnswerRows, FailRows
from foreprop.core.sendqueue import Turns
from foreprop.core.server_machine import (
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
    TellSquares,
    UpdateFinished,
    UpdateSlice,
    ValueArrived,
    WorkerLeft,
)
from foreprop.core.wire import Flag, Header, Kind
from foreprop.core.worker_machine import CONTROL_PRIORITY, FrameSent, SendFrame
from foreprop.errors import RemoteProtocolError
from foreprop.link.failure import Failure
from foreprop.link.outbox import frames_of
from foreprop.numerics.finite import check_finite
from foreprop.numerics.norms import NORM_BYTES, decode_norm
from foreprop.observe.stages import Stage
from foreprop.path.blobs import BlobShelf
from foreprop.path.hyperparameters import (
    HyperparameterHistory,
    decode_groups,
    scale_of,
    with_scale,
)
from foreprop.path.peer import (
    HYPERPARAMETERS_LIMIT_BYTES,
    Peer,
    SessionHost,
    bounded,
    check_size,
    exactly,
    which_blob,
)
from foreprop.path.slicestore import (
    GradientBuffer,
    SliceStore,
)
from foreprop.tables.kept import PULL_BYTES
from foreprop.tables.service import ROW_KINDS, RowServer
from foreprop.tables.store import RowStore

_EMPTY = memoryview(b"")
_UPDATE_FINISHED = UpdateFinished()


class ServerSession:
    """One server's part in a session: it sums, updates and answers."""

    def __init__(
        self, manifest: Manifest, host: SessionHost, store_class: type[SliceStore] = SliceStore
    ) -> None:
        index, peers = host.index, manifest.peers()
        slices = manifest.slices()
        names = [info.name for info in manifest.parameters]
        shards = manifest.shards(len(slices))
        self.names = [names[piece.parameter] for piece in slices]
        self.names += [names[shard.parameter] for shard in shards]
        self._manifest = manifest
        self._host = host
        self._lock = host.lock
        self._trace = host.trace
        self._peers = peers
        self._barrier: StepBarrier | None = None
        if manifest.knobs.aggregation.needs_norm:
            owners = [piece.server for piece in slices if manifest.is_served(piece)]
            owners += [shard.server for shard in shards]
            self._barrier = StepBarrier(owners.count(index))
        self._machine = ServerMachine(
            slices,
            index=index,
            workers=peers.count,
            order=manifest.knobs.order,
            reply=manifest.knobs.reply,
            names=names,
            barrier=self._barrier,
            peers=peers,
            turns=Turns.after(index, peers.count),
        )
        scale = 1.0 if manifest.knobs.aggregation.skip_nonfinite else None
        self._groups = with_scale(manifest.optimizer.groups, scale)
        """What the optimizer's numbers look like."""
        self._coefficient = 1.0
        """For the gradients of the step whose updates are under way."""
        self._store = store_class(manifest, slices, index)
        self._rows = RowServer(manifest, shards, index, self, self._lock, self._barrier)
        self._hyperparameters = HyperparameterHistory([ranks.start for ranks in peers.ranks])
        self._blobs = BlobShelf(readers=peers.count - 1)
        self._updated_ns: dict[int, int] = {}  # by slice, for the trace

    def start(self) -> None:
        """Welcome everybody."""
        about = Header(Kind.MANIFEST, 0, 0, 0, 0, 0, 0)
        for peer in range(self._peers.count):
            self._answer(peer, Kind.WELCOME, about, b"")

    # Receiving.
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
            return bounded(header, self._state_store(header).state_limit_bytes(header.slice))
        if kind == Kind.TABLE:
            return bounded(header, self._rows.store.kept_limit_bytes(header.slice))
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
        kind = header.kind
        if kind == Kind.PUSH:
            self._on_push(peer, header)
        elif kind in ROW_KINDS:
            self._rows.on_frame(peer.number, header, payload)
            if kind == Kind.ROWS_PUSH:
                peer.last_push = (header.slice, header.step)
        else:
            self._on_control(peer, header, payload)

    def _on_push(self, peer: Peer, header: Header) -> None:
        buffer, peer.incoming = peer.incoming, None
        if buffer is not None:
            self._check_finite(peer, header, buffer)
        event = PushArrived(peer.number, header.slice, header.step, header.priority, header.flags)
        with self._lock:
            self._store_gradient(event, buffer)
            instructions = self._machine.handle(event)
        peer.last_push = (header.slice, header.step)
        if self._trace is not None:
            self._span(Stage.PUSH_RECEIVED, header, peer.receive_started_ns)
        self._execute(instructions)

    def _check_finite(self, peer: Peer, header: Header, buffer: GradientBuffer) -> None:
        check_finite(
            buffer.tensor,
            self._manifest.knobs.aggregation,
            whose=self._peers.name(peer.number),
            name=self.names[header.slice],
            step=header.step,
        )

    def _store_gradient(self, event: PushArrived, buffer: GradientBuffer | None) -> None:
        """A refused push ends the session, so what it left behind is never summed."""
        if buffer is not None:
            self._store.put_gradient(event.slice, event.rank, buffer)

    def _on_control(self, peer: Peer, header: Header, payload: memoryview) -> None:
        kind, number, step = header.kind, peer.number, header.step
        if kind == Kind.VALUE:
            self._on_value(peer, header)
        elif kind == Kind.PULL:
            self._dispatch(PullArrived(number, header.slice, step, header.priority))
        elif kind == Kind.HYPERPARAMETERS:
            groups = decode_groups(payload, self._groups)
            with self._lock:
                self._hyperparameters.announce(number, step, groups)
        elif kind == Kind.NORM:
            self._on_norm(peer, header, payload)
        elif kind == Kind.BLOB:
            self._on_blob(header, payload)
        elif kind == Kind.BLOB_PULL:
            self._on_blob_pull(peer, header)
        elif kind == Kind.STATE:
            with self._lock:
                store = self._state_store(header)
                averages = header.flags & Flag.AVERAGES
                (store.import_average if averages else store.import_state)(header.slice, payload)
        elif kind == Kind.STATE_PULL:
            self._on_state_pull(peer, header)
        elif kind == Kind.TABLE:
            self._on_table(peer, header, payload)
        elif kind == Kind.TABLE_PULL:
            with self._lock:
                data = self._rows.store.export_kept(header.slice, payload)
            self._answer(number, Kind.TABLE_REPLY, header, data)
        elif kind == Kind.STATUS_PULL:
            self._tell_status(peer, header)
        elif kind == Kind.BYE:
            peer.left = True
            self._rows.rank_left(number)
            self._dispatch(WorkerLeft(number))
        else:
            raise RemoteProtocolError(f"{self._peers.name(number)} sent {Kind(kind).name}")

    def _on_value(self, peer: Peer, header: Header) -> None:
        buffer, peer.incoming = peer.incoming, None
        with self._lock:
            event = ValueArrived(peer.number, header.slice, header.step, header.priority)
            instructions = self._machine.handle(event)
            if buffer is not None:
                self._store.put_value(header.slice, buffer)
            # under the lock: the sender may already be about to send this slice
            for instruction in instructions:
                if isinstance(instruction, InstallValue):
                    self._store.install_value(instruction.slice)
        self._execute(instructions)

    def _on_state_pull(self, peer: Peer, header: Header) -> None:
        with self._lock:
            store = self._state_store(header)
            if header.flags & Flag.AVERAGES:
                data = store.export_average(header.slice)
            elif header.flags & Flag.GRADIENT:
                self._machine.owned(header.slice)
                data = self._store.export_gradient(header.slice)
            elif header.flags & Flag.MASTER:
                data = store.export_master(header.slice)
            else:
                data = store.export_state(header.slice)
        self._answer(peer.number, Kind.STATE_REPLY, header, data)

    def _on_table(self, peer: Peer, header: Header, payload: memoryview) -> None:
        if peer.rank != 0:
            raise RemoteProtocolError(f"rank {peer.rank} sent a table's rows; only rank 0 may")
        with self._lock:
            anew = bool(header.flags & Flag.ANEW)
            self._rows.store.import_kept(header.slice, payload, anew=anew)

    def _state_store(self, header: Header) -> SliceStore | RowStore:
        """Which of the stores has the optimizer state that a frame is about."""
        if header.slice in self._rows.store:
            return self._rows.store
        self._machine.owned(header.slice)
        return self._store

    # Blobs: buffers and frozen parameters, from rank 0 to whoever asks.
    def _on_blob(self, header: Header, payload: memoryview) -> None:
        if header.rank != 0:
            raise RemoteProtocolError(f"rank {header.rank} sent buffers; only rank 0 may")
        data = bytes(payload)
        with self._lock:
            peers = self._blobs.put(which_blob(header, self._manifest), header.step, data)
        for peer in peers:
            self._answer(peer, Kind.BLOB_REPLY, header, data)

    def _on_blob_pull(self, peer: Peer, header: Header) -> None:
        with self._lock:
            which = which_blob(header, self._manifest)
            data = self._blobs.pull(which, header.step, peer.number)
        if data is not None:
            self._answer(peer.number, Kind.BLOB_REPLY, header, data)

    # The global norm of a step's gradients, from rank 0.
    def _on_norm(self, peer: Peer, header: Header, payload: memoryview) -> None:
        norm, aggregation = decode_norm(header, payload), self._manifest.knobs.aggregation
        with self._lock:
            skip, coefficient = aggregation.skips(norm), aggregation.coefficient(norm)
            instructions = self._machine.handle(NormArrived(peer.number, header.step, skip))
            self._coefficient = coefficient
        if self._host.index == 0:
            for other in range(1, self._peers.count):
                self._answer(other, Kind.NORM, header, bytes(payload))
        self._rows.use_norm(header.step, coefficient, skip=skip)  # look-ups often come first
        self._execute(instructions)

    # Deciding and doing.
    def _dispatch(self, event: object) -> None:
        with self._lock:
            instructions = self._machine.handle(event)
        self._execute(instructions)

    def _execute(self, instructions: Sequence[object]) -> None:
        while instructions:
            following: Sequence[object] = ()
            for instruction in instructions:
                kind = type(instruction)
                if kind is SendFrame:
                    self._host.submit(instruction)  # type: ignore[arg-type]
                elif kind is UpdateSlice:
                    following = self._update(instruction)  # type: ignore[arg-type]
                elif isinstance(instruction, SumSlice):
                    following = self._sum(instruction)
                elif isinstance(instruction, TellNormPart):
                    self.tell_norm_part(instruction)
                elif isinstance(instruction, TellSquares):
                    self._tell_squares(instruction)
                elif isinstance(instruction, FailSession):
                    self._host.fail(failure_told(instruction, self._peers))
                elif isinstance(instruction, FinishSession):
                    self._host.end()
            instructions = following

    def _sum(self, summed: SumSlice) -> Sequence[object]:
        """Do the one sum that is under way; returns what follows from it."""
        with self._lock:
            scale = scale_of(self._hyperparameters.at(summed.step))
        part = self._store.aggregate(summed.slice, summed.ranks, scale)
        with self._lock:
            return self._machine.handle(SliceSummed(part))

    def _update(self, update: UpdateSlice) -> Sequence[object]:
        """Do the one update that is under way; returns what follows from it."""
        started_ns = self._trace.now_ns() if self._trace is not None else 0
        finished = _UPDATE_FINISHED
        if update.gradient:
            about = (update.slice, update.ranks)
            squares = self._store.aggregate_only(*about, measure=update.measure)
            finished = UpdateFinished(squares)
        else:
            with self._lock:
                groups = self._hyperparameters.at(update.step) if update.ranks else ()
            self._store.update(update.slice, update.ranks, groups, self._coefficient)
        if self._trace is not None:
            self._trace.span(
                Stage.UPDATED.value,
                self.names[update.slice],
                started_ns,
                step=update.step,
                slice_=update.slice,
            )
            self._updated_ns[update.slice] = self._trace.now_ns()
        with self._lock:
            return self._machine.handle(finished)

    # Sending.
    def next_after_sent(self, peer: int) -> list[SendFrame]:
        return frames_of(self._machine.handle(FrameSent(peer)))

    def payload_of(self, frame: SendFrame) -> memoryview:
        if frame.kind == Kind.REPLY and not frame.flags & Flag.UNCHANGED:
            return self._store.values(frame.slice)
        return _EMPTY

    def on_sent(self, frame: SendFrame, size_bytes: int, started_ns: int) -> None:
        if self._trace is not None and frame.kind == Kind.REPLY:
            peer, kind, step, slice_, priority, flags, _ = frame
            sent = Header(kind, flags, peer, step, slice_, priority, size_bytes)
            updated_ns = self._updated_ns.get(slice_, started_ns)
            self._span(Stage.REPLY_QUEUED, sent, updated_ns, stop_ns=started_ns)
            self._span(Stage.REPLY_SENT, sent, started_ns)

    def _answer(self, peer: int, kind: Kind, about: Header, data: bytes) -> None:
        self._queue_answer(peer, kind, about.step, CONTROL_PRIORITY, about.slice, data)

    def _queue_answer(
        self, peer: int, kind: Kind, step: int, priority: int, slice_: int, data: bytes
    ) -> None:
        with self._lock:
            token = self._host.keep(data)
            event = AnswerReady(peer, kind, step, priority, slice_, token)
            instructions = self._machine.handle(event)
        self._execute(instructions)

    # For the rows, see `RowHost`.
    def answer_rows(self, answer: AnswerRows, data: bytes) -> None:
        peer, _, step, request, priority = answer
        self._queue_answer(peer, Kind.ROWS_REPLY, step, priority, request, data)

    def tell_norm_part(self, told: TellNormPart) -> None:
        about = Header(Kind.NORM_PART, 0, 0, told.step, 0, CONTROL_PRIORITY, 0)
        self._answer(0, Kind.NORM_PART, about, told.part.encode())

    def _tell_squares(self, told: TellSquares) -> None:
        about = Header(Kind.NORM_PART, 0, 0, told.step, 0, CONTROL_PRIORITY, 0)
        data = encode_square_sums(told.squares)
        for peer in range(self._peers.count):
            self._answer(peer, Kind.NORM_PART, about, data)

    def fail_rows(self, failure: FailRows) -> None:
        self._host.fail(failure_told(FailSession(*failure), self._peers))

    def settings_at(self, step: int) -> tuple[Hyperparameters, ...]:
        return self._hyperparameters.at(step)

    # Reports.
    def _tell_status(self, peer: Peer, header: Header) -> None:
        with self._lock:
            text = self._describe_wait(header.slice, header.step)
        sending_to = self._host.sending_to()
        if sending_to:
            text += f"; it is sending to {self._peers.names(sending_to)}"
        self._host.tell(peer, Kind.STATUS_REPLY, header, text.encode())

    def _describe_wait(self, number: int, step: int) -> str:
        """Of a slice or shard. What is at the barrier waits for all others, too."""
        of_rows = number in self._rows.store
        text = (self._rows if of_rows else self._machine).describe_wait(number, step)
        if self._barrier is not None and self._barrier.holds(number):
            for other, at_step in (self._machine if of_rows else self._rows).incomplete():
                return f"{text}; {self._describe_wait(other, at_step)}"
        return text

    def incomplete(self) -> Iterator[tuple[int, int, str]]:
        for part in (self._machine, self._rows):
            for number, step in part.incomplete():
                yield number, step, part.describe_wait(number, step)

    def close(self, failure: Failure | None) -> None:
        """Nothing is held that is not the server's."""

    def _span(
        self, stage: Stage, header: Header, started_ns: int, *, stop_ns: int | None = None
    ) -> None:
        if self._trace is not None:
            self._trace.span(
                stage.value,
                self.names[header.slice],
                started_ns,
                stop_ns=stop_ns,
                step=header.step,
                size_bytes=header.payload_bytes,
                slice_=header.slice,
                priority=header.priority,
            )


def failure_told(told: FailSession, peers: Peers) -> Failure:
    """What a machine's decision to end the session is to all others."""
    if told.rank < 0:
        return Failure(kind="TrainingLoopError", message=told.reason, step=told.step)
    peer = peers.name(told.rank)
    return Failure(kind="PeerLost", message=told.reason, peer=peer, step=told.step)

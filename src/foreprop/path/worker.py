"""A worker's shell: threads and sockets around `WorkerMachine`.

One thread sends, one per server receives, straight into the parameters' memory. The training
thread dispatches gradients and waits for parameters.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from foreprop.config import Config
from foreprop.core.barrier import OUTSIDE, NormCombiner
from foreprop.core.manifest import ITEMSIZE_BYTES, Manifest
from foreprop.core.norm import ENCODED_BYTES, SquareSum, decode_square_sum
from foreprop.core.rows_machine import Shard
from foreprop.core.sendqueue import Turns
from foreprop.core.window import PushWindow, may_hold_back
from foreprop.core.wire import (
    MAX_CONTROL_BYTES,
    Flag,
    Frame,
    FrameReader,
    Header,
    Kind,
    encode_header,
)
from foreprop.core.worker_machine import (
    CONTROL_PRIORITY,
    LAST_PRIORITY,
    NO_TOKEN,
    Closing,
    CompleteParameter,
    Finish,
    FrameSent,
    GradientReady,
    MessageReady,
    NotifyArrived,
    PrioritiesLearned,
    PullsDue,
    ReplyArrived,
    SendFrame,
    ValuesAwaited,
    ValuesOffered,
    WorkerMachine,
)
from foreprop.errors import (
    ForepropError,
    InternalError,
    PeerLost,
    RemoteProtocolError,
    StepTimeout,
    TransportError,
)
from foreprop.link.failure import decode_failure, failure_of, own_error
from foreprop.link.outbox import Outbox, frames_of
from foreprop.link.stream import Stream
from foreprop.numerics.norms import (
    NORM_BYTES,
    GradientNorms,
    MeasuredGradients,
    decode_norm,
    encode_norm,
)
from foreprop.numerics.wirecasts import WireCasts
from foreprop.observe.stages import Stage
from foreprop.observe.trace import TraceRecorder
from foreprop.path.progress import NOTHING, Progress
from foreprop.path.tensors import state_limit_bytes
from foreprop.tables.exchange import Pull, RowExchange
from foreprop.tables.kept import (
    END,
    KeptRows,
    cut_kept,
    decode_kept,
    encode_kept,
    in_table,
)
from foreprop.tables.kept import encode_pull as encode_kept_pull
from foreprop.tables.kept import limit_bytes as kept_limit_bytes
from foreprop.tables.parts import RowPart

_EMPTY = memoryview(b"")
_STATUS_LIMIT_BYTES = 65_536
_NAMED_S = 2.0
"""After `step_timeout_s` a server says by itself who has not closed the session."""
_CAUSE_S = 1.0
"""How long after a connection's end another server may still tell the reason."""
_GOODBYE_S = 1.0


class ParameterMemory(Protocol):
    """Where the bytes of one parameter are; the training side owns it."""

    @property
    def values(self) -> memoryview:
        """The parameter itself, or the staging memory that stands for it."""

    def take_gradient(self, start_bytes: int, stop_bytes: int) -> memoryview:
        """Part of the gradient, to be sent now. Each part is taken once; the last one ends the
        parameter's hold on the gradient. Sending thread.
        """

    def land_average(self, gradient: torch.Tensor) -> None:
        """Collectives have aggregated it, and the workers update: flat. Any thread."""


class NormOutside(Protocol):
    """Parameters that no server has, but which have a part in the global norm."""

    def use_norm(self, step: int, norm: float) -> None:
        """The step's global norm is known. Any thread; must not block."""

    def describe(self) -> str:
        """What they wait for, in words."""

    def look_around(self) -> None:
        """Nothing goes on: tell others so, and raise what they have told. Training thread."""


class WorkerEngine:
    """One worker's part in one session.

    ``streams`` are the connections to the servers, by index. Errors from any thread are kept and
    raised in the training thread at its next call.
    """

    def __init__(
        self,
        manifest: Manifest,
        memory: Sequence[ParameterMemory],
        streams: Sequence[Stream],
        *,
        rank: int,
        config: Config,
        trace: TraceRecorder | None = None,
        servers: Sequence[str] | None = None,
    ) -> None:
        self.manifest = manifest
        self._servers = servers or [f"server {i}" for i in range(len(streams))]  # for messages
        self.slices = manifest.slices()
        self.parameters = manifest.parameters
        self._aggregation = manifest.knobs.aggregation
        self.every_parameter = self._aggregation.needs_every_parameter
        names = [info.name for info in manifest.parameters]
        self.progress = Progress(names, rank=rank, config=config, trace=trace)
        self.counters = self.progress.counters
        self._norms = GradientNorms(self.progress, config)
        self._memory = memory
        self._streams = streams
        self._rank = rank
        self._config = config
        self._trace = trace
        self._queued_ns = [0] * len(manifest.parameters)  # for the trace
        self._itemsize = [ITEMSIZE_BYTES[info.dtype] for info in manifest.parameters]
        self._casts = WireCasts(manifest, self.slices)
        self._machine = WorkerMachine(
            self.slices,
            parameters=len(manifest.parameters),
            order=manifest.knobs.order,
            reply=manifest.knobs.reply,
            window=self._push_window(),
            turns=Turns.after(rank, manifest.knobs.servers),
        )
        self.rows = RowExchange(
            manifest,
            manifest.shards(len(self.slices)),
            send=self._send_message,
            priority_of=self._machine.priority_of,
            changed=self.progress.notify,
        )
        self._owners = {piece.server for piece in self.slices if manifest.is_served(piece)}
        self._owners |= {shard.server for shard in self.rows.shards}
        self._norm_combiner = NormCombiner(self._owners)
        self._measures = False  # gradients are sent to be measured
        self._squares = MeasuredGradients(self.slices, parameters=len(manifest.parameters))
        self._norm_outside: NormOutside | None = None
        self._rows_step: dict[int, int] = {}
        """By row-wise parameter: the step of its last push."""
        self._lock = threading.Lock()
        self._closing = False
        self._unparted: StepTimeout | None = None
        """What kept the others from leaving, too."""
        self._offering = False
        self._finished = threading.Event()
        self._failed = threading.Event()
        self._sending = [threading.Lock() for _ in streams]  # frames never interleave
        self._welcomes = 0
        self._answers: dict[tuple[int, int], bytes] = {}
        self._blobs: dict[int, memoryview] = {}
        self._messages: dict[int, memoryview] = {}
        self._next_token = 0
        self._tellers: list[threading.Thread] = []
        self._outbox = Outbox("foreprop-send", self._transmit, self._next_after_sent, self._broke)
        self._threads = [
            threading.Thread(
                target=self._receive, args=(i, stream), name=f"foreprop-receive-{i}", daemon=True
            )
            for i, stream in enumerate(streams)
        ]

    def _push_window(self) -> PushWindow | None:
        knobs, needs_norm = self.manifest.knobs, self._aggregation.needs_norm
        if not may_hold_back(knobs.order, knobs.reply, needs_norm=needs_norm):
            return None
        itemsizes = [ITEMSIZE_BYTES[dtype] for dtype in self.manifest.wire_dtypes()]
        sizes_bytes = [piece.elems * itemsizes[piece.parameter] for piece in self.slices]
        window_bytes = self._config.push_window_bytes
        return PushWindow(sizes_bytes, window_bytes, servers=len(self._streams))

    # The start.
    def join(self, look: Callable[[], None] = lambda: None) -> None:
        """Shake hands with every server; raises `HandshakeError` with both sides' values.

        ``look`` is called now and then, and may raise what came to be known on another way.
        """
        for thread in self._threads:
            thread.start()
        manifest = self.manifest.encode()
        for server in range(len(self._streams)):
            self._send_message(server, Kind.MANIFEST, 0, CONTROL_PRIORITY, manifest)

        def welcomed() -> bool:
            look()
            return self._welcomes == len(self._streams)

        self.progress.wait_until(
            welcomed,
            self._config.join_timeout_s,
            lambda: (
                f"the handshake: {self._welcomes} of {len(self._streams)} servers have"
                " welcomed all workers; does every rank call parallelize()?"
            ),
            setting="join_timeout_s",
        )

    def offer_values(self) -> None:
        """Rank 0: send every parameter to its server, which sends it to the other ranks.

        Blocks until all have left: they are read as they leave, and may change when this returns.
        """
        self._offering = True
        self._dispatch(ValuesOffered())
        self.progress.wait_until(
            lambda: self._machine.is_idle,
            self._config.join_timeout_s,
            lambda: f"the servers to take rank 0's values; {self.queue_depth} slices are queued",
            setting="join_timeout_s",
        )
        self._offering = False

    def await_values(self) -> None:
        """Other ranks: every parameter is pending until rank 0's values have come."""
        self._dispatch(ValuesAwaited())

    # Training.
    def push(self, parameter: int, step: int, *, flags: int = 0, with_value: bool = False) -> None:
        """Queue a parameter's gradient; the memory's ``gradient`` must be set. Any thread."""
        self.progress.gradient_ready(parameter, step)
        self._measures |= bool(flags & Flag.MEASURE)
        if self._trace is not None:
            self._queued_ns[parameter] = self._trace.now_ns()
        self._dispatch(GradientReady(parameter, step, flags, with_value))

    # Rows.
    def push_rows(self, parameter: int, step: int, gradient: RowPart | None, *, flags: int) -> None:
        """Send the gradient's rows, or word that there are none. Any thread."""
        self.progress.gradient_ready(parameter, step)
        self._rows_step[parameter] = step
        sent_bytes = self.rows.push(parameter, step, gradient, flags=flags)
        with self._lock:
            self.counters.pushes += 1
            self.counters.pushed_bytes += sent_bytes

    def send_row_values(self, parameter: int, step: int, table: torch.Tensor) -> None:
        """Rank 0: the whole table's values, which count from ``step`` on."""
        self.rows.send_values(parameter, step, table.cpu())

    def pull_rows(self, parameter: int, step: int, numbers: torch.Tensor) -> Pull:
        """Ask for rows as they are after ``step``; ``numbers`` ascend, int64."""
        return self.rows.pull(parameter, step, numbers)

    def wait_for_rows(self, pull: Pull) -> torch.Tensor:
        """Block until the rows are here; raises what went wrong meanwhile."""
        self.progress.raise_if_failed()
        if pull.missing:
            self.progress.wait_for_parameter(
                pull.parameter,
                pull.step,
                lambda: not pull.missing,
                lambda: self._describe_pull(pull),
                lambda: self._ask_about_rows(pull),
            )
        return pull.rows

    def settle_rows(self) -> None:
        """Block until the servers have updated all tables as of their last pushes."""
        pulls = []
        for parameter in {shard.parameter for shard in self.rows.shards}:
            of_each_server = torch.arange(
                min(len(self._streams), self.parameters[parameter].shape[0])
            )
            step = self._rows_step.get(parameter, 0)
            # anew: a relay's rows may be older than a change by hand
            pulls.append(self.rows.pull(parameter, step, of_each_server, flags=Flag.ANEW))
        for pull in pulls:
            self.wait_for_rows(pull)

    def kept_rows(self, parameter: int) -> Iterator[KeptRows]:
        """All that servers keep of a remote table, in parts, with the table's row numbers."""
        for shard in self.rows.shards_of(parameter):
            following = 0
            while following != END:
                part = self._fetch_kept(shard, following)
                following = part.following
                yield in_table(part, shard, len(self._streams))

    def _fetch_kept(self, shard: Shard, first: int) -> KeptRows:
        key, about = (int(Kind.TABLE_REPLY), shard.number), (Kind.TABLE_PULL, 0, CONTROL_PRIORITY)
        self._send_message(shard.server, *about, encode_kept_pull(first), slice_=shard.number)
        self.progress.wait_until(
            lambda: key in self._answers,
            self._config.step_timeout_s,
            lambda: f"rows of {self.parameters[shard.parameter].name} from {shard.server}",
        )
        return decode_kept(memoryview(bytearray(self._answers.pop(key))), shard)

    def send_kept_rows(self, parameter: int, part: KeptRows, *, anew: bool = False) -> None:
        """Rank 0: replace rows, or all that there is, while no update can be under way.

        Row numbers are the table's. Blocks until the servers have taken them.
        """
        shards, flags = self.rows.shards_of(parameter), Flag.ANEW if anew else 0
        for shard, own in cut_kept(part, shards, len(self._streams)):
            about = (Kind.TABLE, 0, CONTROL_PRIORITY, encode_kept(own))
            self._send_message(shard.server, *about, slice_=shard.number, flags=flags)
        self.settle_rows()

    def announce_hyperparameters(self, step: int, data: bytes) -> None:
        """Tell every server the optimizer's numbers for this step and the following ones."""
        for server in range(len(self._streams)):
            self._send_message(server, Kind.HYPERPARAMETERS, step, CONTROL_PRIORITY, data)

    def learn_priorities(self, order: Sequence[int]) -> None:
        self._dispatch(PrioritiesLearned(tuple(order)))

    def start_step(self) -> None:
        """The next forward pass begins; matters to ``reply="pull"`` only."""
        if self.manifest.knobs.reply == "pull":
            self._dispatch(PullsDue())

    def end_step(self, step: int) -> None:
        """Nothing: every rank decides by itself what it sends next."""

    def is_complete(self, parameter: int) -> bool:
        return self._machine.is_complete(parameter)

    def wait(self, parameter: int, step: int) -> None:
        """Block until the parameter's last reply is in; raises what went wrong meanwhile."""
        self.progress.raise_if_failed()
        if self._machine.is_complete(parameter):
            return
        self.start_step()
        self.progress.wait_for_parameter(
            parameter,
            step,
            lambda: self._machine.is_complete(parameter),
            lambda: self._describe_wait(parameter, step),
            lambda: self._ask_status(parameter),
        )

    def grad_norm(self, step: int) -> float | None:
        """The global norm of the step's gradients, once it is known; None if none is needed."""
        if not self._aggregation.needs_norm:
            return None
        self.progress.raise_if_failed()
        return self._norms.of(step) if self.slices or self.rows.shards else 0.0

    def square_sums(self, round_: int) -> Sequence[SquareSum]:
        """By parameter, of the averaged gradients of the session's so-manieth round.

        Blocks until all of them are averaged. Every round must have been measured.
        """
        self.progress.wait_until(
            lambda: self._squares.has(round_),
            self._config.step_timeout_s,
            lambda: f"the norm of the gradients: {self._describe_round()}",
            self._ask_about_round,
        )
        return self._squares.of(round_)

    def _describe_round(self) -> str:
        waiting = self._incomplete()
        return self._describe_wait(waiting[0], self._machine.step_of(waiting[0])) if waiting else ""

    def _ask_about_round(self) -> None:
        for parameter in self._incomplete()[:1]:
            self._ask_status(parameter)

    def _incomplete(self) -> list[int]:
        return [p for p in range(len(self.parameters)) if not self.is_complete(p)]

    def raise_if_failed(self) -> None:
        self.progress.raise_if_failed()

    @property
    def is_rank_zero(self) -> bool:
        return self._rank == 0

    @property
    def failed(self) -> bool:
        return self.progress.error is not None

    @property
    def queue_depth(self) -> int:
        return self._machine.queue_depth

    # The global norm, if it is also of parameters that no server has.
    def share_norm(self, outside: NormOutside) -> None:
        """Before the first step: wait for their part, too; see `add_norm_part`."""
        self._norm_outside = outside
        self._norm_combiner = NormCombiner({OUTSIDE, *self._owners})

    def add_norm_part(self, step: int, part: SquareSum) -> None:
        """The outside part of this step is known; it is the same on all ranks. Any thread."""
        if self._rank == 0:
            self._combine_norm(OUTSIDE, step, part)

    # Buffers, frozen parameters and optimizer state.
    def publish_blob(self, which: int, step: int, data: bytes) -> None:
        """Rank 0: leave a blob (see `Manifest.blob_bytes`) with server 0 for whoever asks."""
        self._send_message(0, Kind.BLOB, step, LAST_PRIORITY, data, slice_=which)

    def fetch_blob(self, which: int, step: int) -> memoryview:
        """Rank 0's blob of this step; blocks until it is there."""
        self._blobs.pop(which, None)
        self._send_message(0, Kind.BLOB_PULL, step, CONTROL_PRIORITY, b"", slice_=which)
        what = "frozen parameters" if which else "buffers"
        self.progress.wait_until(
            lambda: which in self._blobs,
            self._config.step_timeout_s,
            lambda: f"rank 0's {what} of step {step}",
        )
        return self._blobs.pop(which)

    def send_state(self, slice_: int, step: int, data: bytes, *, flags: int = 0) -> None:
        """Rank 0: replace the optimizer state of a slice or shard, from this step on.

        With ``Flag.AVERAGES`` its moving average.
        """
        server = self._server_of(slice_)
        about = (Kind.STATE, step, CONTROL_PRIORITY, data)
        self._send_message(server, *about, slice_=slice_, flags=flags)

    def fetch_states(self, slices: Sequence[int], step: int, *, flags: int = 0) -> dict[int, bytes]:
        """The optimizer state of these slices and shards, or what the flags say instead."""
        keys = [(int(Kind.STATE_REPLY), slice_) for slice_ in slices]
        about = (Kind.STATE_PULL, step, CONTROL_PRIORITY, b"")
        for slice_ in slices:
            server = self._server_of(slice_)
            self._send_message(server, *about, slice_=slice_, flags=flags)
        self.progress.wait_until(
            lambda: all(key in self._answers for key in keys),
            self._config.step_timeout_s,
            lambda: f"the optimizer state after step {step}",
        )
        return {key[1]: self._answers.pop(key) for key in keys}

    def _server_of(self, number: int) -> int:
        """Of a slice or shard."""
        if number < len(self.slices):
            return self.slices[number].server
        return self.rows.shards[number - len(self.slices)].server

    # The end.
    def give_up(self, error: BaseException) -> None:
        """Tell the servers, and by them all ranks, that this one goes on no more, and why.

        What is asked of this engine from now on raises the error; it has still to be closed.
        """
        if self._closing or self.failed:
            return
        self.progress.error = own_error(error, self._rank)
        self.progress.notify()
        for server in range(len(self._streams)):
            self._say_goodbye(server, error)

    def close(self, *, failure: BaseException | None = None) -> None:
        """Send what is queued, say goodbye and wait until all ranks have, or tell why not.

        Idempotent. Raises `StepTimeout` for ranks that do not come within ``step_timeout_s``.
        """
        if self._closing:
            return
        self._closing = True
        error = failure or self.progress.error
        if error is None:
            self._dispatch(Closing())
            self._finished.wait(self._config.step_timeout_s)
        for server in range(len(self._streams)):
            self._say_goodbye(server, error)
        deadline = time.monotonic() + 2 * _GOODBYE_S
        for teller in self._tellers:
            teller.join(max(0.0, deadline - time.monotonic()))
        if error is None:
            self._await_the_end()
        self.abort()
        if self._unparted is not None and error is None:
            raise self._unparted

    def _await_the_end(self) -> None:
        """The servers close once every worker has left, or say who has not."""
        limit_s, started = self._config.step_timeout_s, time.monotonic()
        report_at, deadline = started + self._config.stall_report_s, started + limit_s + _NAMED_S
        silent = self._join_receivers(min(report_at, deadline))
        if silent and report_at < deadline:
            self.progress.report("is done and waits for ranks that have not closed their session")
            silent = self._join_receivers(deadline)
        if silent and self._unparted is None:
            names = " and ".join(self._servers[server] for server in silent)
            self._unparted = StepTimeout(
                f"rank {self._rank} has closed its session and waited {limit_s:g} s"
                f" (step_timeout_s) for {names}, which does not answer"
            )

    def _join_receivers(self, deadline: float) -> list[int]:
        """The servers whose connections are still there."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [server for server, thread in enumerate(self._threads) if thread.is_alive()]

    def abort(self) -> None:
        self._closing = True
        for stream in self._streams:
            stream.close()
        self._outbox.stop()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _say_goodbye(self, server: int, error: BaseException | None) -> None:
        data = b""
        if error is not None:
            data = failure_of(error, by=f"rank {self._rank}").encode()
        kind = Kind.BYE if error is None else Kind.FAILURE
        header = encode_header(kind, 0, self._rank, 0, 0, CONTROL_PRIORITY, len(data))

        teller = threading.Thread(
            target=self._tell,
            args=(server, header, memoryview(data)),
            name="foreprop-goodbye",
            daemon=True,
        )
        teller.start()
        if error is None:
            teller.join(self._config.step_timeout_s)
        else:
            self._tellers.append(teller)

    # Deciding and doing.
    def _dispatch(self, event: object) -> None:
        self.progress.raise_if_failed()
        with self._lock:
            instructions = self._machine.handle(event)
            depth = self._machine.queue_depth
        if depth > self.counters.max_queue_depth:
            self.counters.max_queue_depth = depth
        for instruction in instructions:
            kind = type(instruction)
            if kind is SendFrame:
                self._outbox.submit(instruction)  # type: ignore[arg-type]
            elif isinstance(instruction, CompleteParameter):
                self.progress.parameter_complete(instruction.parameter, instruction.step)
            elif kind is Finish:
                self._finished.set()

    def _next_after_sent(self, server: int) -> list[SendFrame]:
        with self._lock:
            instructions = self._machine.handle(FrameSent(server))
        if self._offering and not instructions:
            self.progress.notify()
        if any(isinstance(instruction, Finish) for instruction in instructions):
            self._finished.set()
        return frames_of(instructions)

    def _send_message(
        self,
        server: int,
        kind: Kind,
        step: int,
        priority: int,
        data: bytes,
        *,
        slice_: int = 0,
        flags: int = 0,
    ) -> None:
        with self._lock:
            token = self._next_token
            self._next_token += 1
            self._messages[token] = memoryview(data)
        self._dispatch(MessageReady(server, kind, step, priority, slice_, token, flags))

    def _transmit(self, frame: SendFrame) -> None:
        server, kind, step, slice_, priority, flags, token = frame
        payload = _EMPTY
        if token != NO_TOKEN:
            payload = self._messages.pop(token)
        elif kind == Kind.PUSH:
            if not flags & Flag.NO_GRADIENT:
                memory, start, stop = self._extent(slice_)
                payload = memory.take_gradient(start, stop)
                if slice_ in self._casts:
                    payload = self._casts.narrow(slice_, payload)
        elif kind == Kind.VALUE:
            payload = self._values(slice_)
        header = encode_header(kind, flags, self._rank, step, slice_, priority, len(payload))
        queued_ns = started_ns = 0
        if self._trace is not None and kind == Kind.PUSH:
            # read now: when this is sent, the next step's gradient may come at any time
            queued_ns = self._queued_ns[self.slices[slice_].parameter]
            started_ns = time.perf_counter_ns()
        with self._sending[server]:
            self._streams[server].send(header, payload)
        if kind == Kind.PUSH:
            with self._lock:
                self.counters.pushes += 1
                self.counters.pushed_bytes += len(payload)
            if self._trace is not None:
                size = len(payload)
                self._span(
                    Stage.PUSH_QUEUED, queued_ns, step, slice_, priority, size, stop_ns=started_ns
                )
                self._span(Stage.PUSH_SENT, started_ns, step, slice_, priority, size)

    def _extent(self, slice_: int) -> tuple[ParameterMemory, int, int]:
        """A slice's parameter and where it begins and ends in that, in bytes."""
        _, parameter, start, stop, _ = self.slices[slice_]
        itemsize = self._itemsize[parameter]
        return self._memory[parameter], start * itemsize, stop * itemsize

    def _values(self, slice_: int) -> memoryview:
        memory, start, stop = self._extent(slice_)
        return memory.values[start:stop]

    def _span(
        self,
        stage: Stage,
        started_ns: int,
        step: int,
        slice_: int,
        priority: int,
        size: int,
        stop_ns: int | None = None,
    ) -> None:
        if self._trace is not None:
            name = self.manifest.parameters[self.slices[slice_].parameter].name
            self._trace.span(
                stage.value,
                name,
                started_ns,
                stop_ns=stop_ns,
                step=step,
                slice_=slice_,
                priority=priority,
                size_bytes=size,
            )

    # Receiving.
    def _receive(self, server: int, stream: Stream) -> None:
        started_ns = 0

        def destination(header: Header) -> memoryview:
            nonlocal started_ns
            if self._trace is not None:
                started_ns = time.perf_counter_ns()
            return self._destination(server, header)

        reader = FrameReader(destination)
        try:
            while received := stream.receive_into(reader.buffer):
                frame = reader.advance(received)
                if frame is not None:
                    self._on_frame(server, frame, started_ns)
        except TransportError as error:
            self._lose(server, str(error))
        except ForepropError as error:
            self._fail(error)
        except BaseException as error:
            self._broke(error)
        else:
            self._lose(server, f"its connection to rank {self._rank} closed")

    def _lose(self, server: int, why: str) -> None:
        """A server has gone; if it went with its worker, the other servers name that."""
        if self._closing or self._failed.wait(_CAUSE_S):
            return
        awaited = self.progress.awaited
        if awaited == NOTHING:
            incomplete = (p for p in range(len(self._memory)) if not self.is_complete(p))
            awaited = next(incomplete, NOTHING)
        step = self._machine.step_of(max(0, awaited))
        if awaited == NOTHING:
            what = f"nothing; step {step} was complete"
        else:
            what = self._describe_wait(awaited, step)
        self._fail(
            PeerLost(
                f"{self._servers[server]} is gone: {why}; rank {self._rank} was waiting for {what}",
                peer=f"server {server}",
                step=step,
            )
        )

    def _destination(self, server: int, header: Header) -> memoryview:
        kind, size = header.kind, header.payload_bytes
        if header.rank != server:
            raise RemoteProtocolError(f"server {server} sent a frame of server {header.rank}")
        if kind == Kind.ROWS_REPLY:
            return self.rows.destination(server, header)
        if kind == Kind.REPLY:
            if header.flags & Flag.UNCHANGED:
                return _EMPTY
            if not self._machine.awaits(header.slice, header.step):
                raise RemoteProtocolError(
                    f"server {server} sent a reply for slice {header.slice}, step {header.step},"
                    " which is not awaited"
                )
            return self._reply_destination(header)
        limit = self._control_limit(header)
        if size > limit:
            raise RemoteProtocolError(f"{Kind(kind).name} of {size} bytes; at most {limit}")
        return memoryview(bytearray(size))

    def _reply_destination(self, header: Header) -> memoryview:
        slice_, values = header.slice, self._values(header.slice)
        if slice_ in self._casts and header.payload_bytes != len(values):
            return self._casts.destination(slice_)
        return values  # also of a slice that is cast, before its first update

    def _land(self, slice_: int, size_bytes: int) -> None:
        """A reply is where `_reply_destination` said: if it came cast, cast it back."""
        if slice_ in self._casts and size_bytes == self._casts.size_bytes(slice_):
            self._casts.widen(slice_, self._values(slice_))

    def _control_limit(self, header: Header) -> int:
        kind = header.kind
        if kind == Kind.STATE_REPLY and header.slice < len(self.slices):
            return state_limit_bytes(self.slices[header.slice].elems)
        if kind == Kind.STATE_REPLY and header.slice < len(self.slices) + len(self.rows.shards):
            shard = self.rows.shards[header.slice - len(self.slices)]
            return state_limit_bytes(shard.rows * shard.row_elems)
        if kind == Kind.TABLE_REPLY:
            return self._kept_limit_bytes(header.slice - len(self.slices))
        if kind == Kind.BLOB_REPLY and header.slice < len(self.manifest.blob_bytes):
            return self.manifest.blob_bytes[header.slice]
        if kind == Kind.STATUS_REPLY:
            return _STATUS_LIMIT_BYTES
        if kind in (Kind.NORM_PART, Kind.NORM):
            most = max(1, len(self.slices)) * ENCODED_BYTES
            return most if kind == Kind.NORM_PART else NORM_BYTES
        return MAX_CONTROL_BYTES if kind == Kind.FAILURE else 0

    def _kept_limit_bytes(self, place: int) -> int:
        known = 0 <= place < len(self.rows.shards)
        return kept_limit_bytes(self.rows.shards[place]) if known else 0

    def _on_frame(self, server: int, frame: Frame, started_ns: int) -> None:
        header, payload = frame
        kind, step, slice_ = header.kind, header.step, header.slice
        if kind == Kind.REPLY:
            with self._lock:
                self.counters.replies += 1
                self.counters.reply_bytes += header.payload_bytes
            if self._trace is not None:
                size = header.payload_bytes
                self._span(Stage.REPLY_RECEIVED, started_ns, step, slice_, header.priority, size)
            self._land(slice_, header.payload_bytes)
            self._dispatch(ReplyArrived(slice_, step, server))
        elif kind == Kind.ROWS_REPLY:
            with self._lock:
                self.counters.replies += 1
                self.counters.reply_bytes += header.payload_bytes
            self.rows.arrived(header)
        elif kind == Kind.NOTIFY:
            self._dispatch(NotifyArrived(slice_, step, server, header.flags))
        elif kind in (Kind.NORM_PART, Kind.NORM):
            self._on_norm(server, header, payload)
        elif kind == Kind.WELCOME:
            with self._lock:
                self._welcomes += 1
            self.progress.notify()
        elif kind == Kind.FAILURE:
            self._fail(decode_failure(payload).as_error())
        elif kind == Kind.BLOB_REPLY:
            self._blobs[slice_] = payload
            self.progress.notify()
        elif kind in (Kind.STATE_REPLY, Kind.TABLE_REPLY, Kind.STATUS_REPLY):
            self._answers[(kind, slice_)] = bytes(payload)
            self.progress.notify()
        else:
            raise RemoteProtocolError(f"server {server} sent {Kind(kind).name}")

    def _on_norm(self, server: int, header: Header, payload: memoryview) -> None:
        """Rank 0 adds up the servers' parts of a step's norm, and tells all servers the norm."""
        kind, step = header.kind, header.step
        if kind == Kind.NORM_PART and self._measures:
            self._squares.arrived(server, payload)
            self.progress.notify()
            return
        wanted = Kind.NORM if self._rank else Kind.NORM_PART
        if kind != wanted or not self._aggregation.needs_norm:
            raise RemoteProtocolError(
                f"server {server} sent rank {self._rank} {Kind(kind).name}, which is not awaited"
            )
        if kind == Kind.NORM:
            self._use_norm(step, decode_norm(header, payload))
        else:
            self._combine_norm(server, step, decode_square_sum(payload))

    def _combine_norm(self, whose: int, step: int, part: SquareSum) -> None:
        """Rank 0: with the last part the norm is known, and told."""
        with self._lock:
            total = self._norm_combiner.add(whose, step, part)
        if total is None:
            return
        for peer in range(len(self._streams)):
            self._send_message(peer, Kind.NORM, step, CONTROL_PRIORITY, encode_norm(total.norm))
        self._use_norm(step, total.norm)

    def _use_norm(self, step: int, norm: float) -> None:
        self._norms.note(step, norm)
        if self._norm_outside is not None:
            self._norm_outside.use_norm(step, norm)

    # Waiting and failing.
    def _describe_wait(self, parameter: int, step: int) -> str:
        name = self.manifest.parameters[parameter].name
        with self._lock:
            missing = self._machine.missing_slices(parameter)
        if not missing:
            return f"parameter {name}, step {step}"
        queued = [piece for piece, sent in missing if not sent]
        text = (
            f"parameter {name}, step {step}, stage "
            f"{(Stage.PUSH_QUEUED if queued else Stage.REPLY_RECEIVED).value}:"
            f" {len(missing)} of its slices are missing"
        )
        if queued:
            text += f", {len(queued)} of them not yet sent"
        sending_to = self._outbox.sending_to()
        if sending_to:
            text += f"; it is sending to {', '.join(self._servers[peer] for peer in sending_to)}"
        return "; ".join([text, *self._describe_answers(self._whom_to_ask(parameter))])

    def _describe_answers(self, asked: Mapping[int, int]) -> list[str]:
        """What servers have said about these slices or shards, by server."""
        parts = []
        for server, number in sorted(asked.items()):
            status = self._answers.get((Kind.STATUS_REPLY, number))
            parts.append(
                f"server {server} says: {status.decode(errors='replace')}"
                if status is not None
                else f"{self._servers[server]} has not answered"
            )
        return parts + ([self._norm_outside.describe()] if self._norm_outside else [])

    def _whom_to_ask(self, parameter: int) -> dict[int, int]:
        """By server, a slice that the parameter waits for: its own, or any that the norm needs."""
        with self._lock:
            missing = self._machine.missing_slices(parameter)
        return self._with_all_servers({piece.server: piece.number for piece, _ in missing[::-1]})

    def _with_all_servers(self, asked: dict[int, int]) -> dict[int, int]:
        """Also the other servers, if what waits for its update waits for the norm."""
        if not self._aggregation.needs_norm:
            return asked
        for awaited in range(len(self.parameters)):
            with self._lock:
                missing = self._machine.missing_slices(awaited)
            for piece, _ in missing:
                asked.setdefault(piece.server, piece.number)
        for shard in self.rows.shards:
            asked.setdefault(shard.server, shard.number)
        return asked

    def _ask_status(self, parameter: int) -> None:
        step = self._machine.step_of(parameter)
        self._ask_all(self._whom_to_ask(parameter), step)

    def _ask_all(self, asked: Mapping[int, int], step: int) -> None:
        """By server, about this slice or shard."""
        for server, number in asked.items():
            self._ask(server, number, step)
        if self._norm_outside is not None:
            self._norm_outside.look_around()

    def _ask(self, server: int, number: int, step: int) -> None:
        """What does this slice or shard wait for? The answer comes some time, or never."""
        self._answers.pop((Kind.STATUS_REPLY, number), None)
        frame = encode_header(Kind.STATUS_PULL, 0, self._rank, step, number, CONTROL_PRIORITY, 0)
        # past the queue, whose head may be what everybody waits for; nobody waits for this
        ask = threading.Thread(
            target=self._tell, args=(server, frame), name="foreprop-ask", daemon=True
        )
        ask.start()

    def _describe_pull(self, pull: Pull) -> str:
        name = self.manifest.parameters[pull.parameter].name
        text = f"{len(pull.numbers)} rows of {name} as of step {pull.step}"
        return "; ".join([text, *self._describe_answers(self._whom_to_ask_about_rows(pull))])

    def _whom_to_ask_about_rows(self, pull: Pull) -> dict[int, int]:
        """By server, the shard that the rows are in, or any that the norm needs."""
        shards = self.rows.shards_of(pull.parameter)
        servers = set(pull.missing.values())
        return self._with_all_servers({server: shards[server].number for server in servers})

    def _ask_about_rows(self, pull: Pull) -> None:
        self._ask_all(self._whom_to_ask_about_rows(pull), pull.step)

    def _tell(self, server: int, header: bytes, payload: memoryview = _EMPTY) -> None:
        if not self._sending[server].acquire(timeout=_GOODBYE_S):
            return  # stuck in the middle of a frame
        try:
            self._streams[server].send(header, payload)
        except TransportError:
            return  # the receiving thread has seen it, too
        finally:
            self._sending[server].release()

    def _fail(self, error: ForepropError) -> None:
        """Keep the first error, and give up all connections: nothing more is coming."""
        if self._closing and isinstance(error, StepTimeout):
            self._unparted = error
        if self.progress.error is None and not self._closing:
            self.progress.error = error
        self._failed.set()
        self._finished.set()
        self.progress.notify()

    def _broke(self, error: BaseException) -> None:
        if isinstance(error, ForepropError):
            # a broken connection is told better by its receiving end, which may know the cause
            if not isinstance(error, TransportError) or not self._failed.wait(2 * _CAUSE_S):
                self._fail(error)
        else:
            wrapped = InternalError(f"rank {self._rank}: {error!r}")
            wrapped.__cause__ = error
            self._fail(wrapped)

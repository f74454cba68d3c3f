"""A worker's shell: threads and sockets around `WorkerMachine`.

One thread sends and one receives per server, straight out of and into the parameters' memory. The
training thread dispatches gradients and waits for parameters. What else a worker does with its
servers are services of its own: `engine.requests`, and features (`backends.composedworker`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from foreprop.config import Config
from foreprop.core.frames import (
    CONTROL_PRIORITY,
    PACE_STEPS,
    CameAfter,
    Closing,
    CompleteParameter,
    GradientReady,
    NotifyArrived,
    Peers,
    PrioritiesLearned,
    PullsDue,
    ReplyArrived,
    SendFrame,
    Stage,
    ValuesAwaited,
    ValuesOffered,
)
from foreprop.core.manifest import Manifest
from foreprop.core.pushwindow import push_window
from foreprop.core.sendqueue import turns_of
from foreprop.core.wire import DAMAGE_BYTES, Damage, Flag, Header, Kind
from foreprop.core.worker_machine import WorkerMachine
from foreprop.engine.connection import EMPTY, Connection, FailureReports, Later, Receivers, exactly
from foreprop.engine.ending import GOODBYE_S, Ending, Losses
from foreprop.engine.executor import Encode, Executor, Pipeline
from foreprop.engine.memory import ParameterBytes, SliceMemory
from foreprop.engine.progress import Counters, Progress
from foreprop.engine.requests import Requests
from foreprop.engine.stream import Stream
from foreprop.errors import Failure, InternalError, RemoteProtocolError, TransportError

if TYPE_CHECKING:
    from foreprop.engine.plane import Plane
    from foreprop.engine.trace import TraceRecorder


_AHEAD_SHARE = 16
"""A worker is ahead if one slice in so many, or more, is not answered."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """What a session adds to its engine beside its slices; composition names each."""

    encode: Encode | None = None
    """Encodes a push's gradient."""
    flags_of: Callable[[int], int] | None = None
    """Gives more flags for the pushes of a step."""
    norm_of: Callable[[int], float] | None = None
    """Gives the norm of a step; blocks until it is known."""
    end_window: Callable[[int], None] | None = None
    """Told every ``window_steps`` how many steps are done, for this rank's pace."""
    window_steps: int = PACE_STEPS
    losses: Losses = field(default_factory=Losses)
    before_goodbye: Callable[[], None] | None = None


class WorkerEngine:
    """One worker's part in one session; owns the answers to its slices.

    ``streams`` are the connections to the servers, by index. Errors from any thread are kept and
    raised in the training thread at its next call.
    """

    kinds = frozenset({Kind.WELCOME, Kind.REPLY, Kind.NOTIFY, Kind.DAMAGED})

    def __init__(
        self,
        manifest: Manifest,
        memory: Sequence[ParameterBytes],
        streams: Sequence[Stream],
        *,
        rank: int,
        config: Config,
        trace: TraceRecorder | None = None,
        servers: Sequence[str] | None = None,
        look: Callable[[], None] | None = None,
        plane: Plane | None = None,
    ) -> None:
        """``look``: see `Progress`. ``plane`` carries the slices where there is one."""
        self.manifest, self.config, self.rank = manifest, config, rank
        self.parameters, self.slices = manifest.parameters, manifest.slices()
        self.shards = manifest.shards(len(self.slices))
        self.lock = threading.RLock()
        self.measures = False
        """Whether gradients are sent to be measured."""
        self._features = Features()
        self._servers = servers or [f"server {i}" for i in range(len(streams))]  # for messages
        self._aggregation = manifest.knobs.aggregation
        self.every_parameter = manifest.serves and self._aggregation.needs_every_parameter
        names = [info.name for info in manifest.parameters]
        span = None if trace is None else trace.span
        self.progress = Progress(names, rank=rank, config=config, span=span, look=look)
        self.memory = SliceMemory(manifest, self.slices, memory)
        self._streams, self.index, self.trace = streams, rank, trace
        # for the trace, of steps that are even and odd: the next may begin before one has left
        self._queued_ns = [0] * len(names), [0] * len(names)
        self.plane, self._memory = plane, memory
        self.lends = plane is not None
        """Whether gradients are read until their averages are here."""
        make = WorkerMachine if plane is None else partial(plane.make_worker, memory)
        self.machine: WorkerMachine = make(
            self.slices,
            parameters=len(names),
            order=manifest.knobs.order,
            reply=manifest.knobs.reply,
            window=push_window(
                manifest, self.slices, config.push_window_bytes, servers=len(streams)
            ),
            turns=turns_of(manifest.knobs.lanes, rank, manifest.knobs.servers),
            packs=manifest.knobs.packs,
            outlives=manifest.knobs.elastic,
        )
        self._counters = self.progress.counters
        if plane is not None:
            self.progress.wakes = plane.ring
            if trace is not None:
                plane.record(plane.WORKER, trace, names)
        self.priority_of, self.is_complete = self.machine.priority_of, self.machine.is_complete
        self._welcomes = self.steps = 0
        self._after_step: list[Callable[[], None]] = []
        # values of the start that have still to leave
        self._offered = len(self.slices) if rank == 0 and config.join is None else 0
        self._connect(streams)

    def _connect(self, streams: Sequence[Stream]) -> None:
        self.receivers = Receivers()
        self.connections = [
            Connection(
                stream,
                self.receivers,
                sender=self.rank,
                whose="server",
                give_up_s=GOODBYE_S,
                rank=server,
                number=server,
            )
            for server, stream in enumerate(streams)
        ]
        self.executor = Executor(
            self.machine.handle,
            self,
            Peers(()),
            dict(enumerate(self.connections)),
            "foreprop-send",
            undelivered=self._undelivered,
            carry=None if self.plane is None else self.plane.message,
        )
        self.executor.doers[CompleteParameter] = self.progress.parameter_complete
        asked = {Kind.BLOB_REPLY, Kind.STATE_REPLY, Kind.STATUS_REPLY}
        self._requests = Later(asked, self._make_requests)
        self.ending = Ending(
            self.connections,
            self._servers,
            self.progress,
            rank=self.rank,
            config=self.config,
            begin_closing=self._begin_closing,
            stop_sending=self.executor.stop,
            describe_last=lambda parameter: self.requests.describe_last(parameter),
        )
        failures = FailureReports(lambda _, failure: self.fail(failure))
        # what a session asks of its engine, and others do
        self.give_up, self.end = self.ending.give_up, self.ending.finished.set
        self.receivers.add(self, self._requests, failures)

    def compose(self, features: Features) -> None:
        """Set what is done with each frame, once and before `join`."""
        self._features = features
        encode = {} if features.encode is None else {Kind.PUSH: features.encode}
        self.executor.use(
            Pipeline(
                payload={
                    Kind.PUSH: lambda push: (
                        EMPTY
                        if push.flags & Flag.NO_GRADIENT
                        else self.memory.take_gradient(push.slice)
                    ),
                    Kind.VALUE: lambda value: self.memory.values(value.slice),
                },
                encode=encode,
                sent={Kind.PUSH: self._push_sent, Kind.VALUE: self._value_sent},
            )
        )
        self.ending.losses = features.losses

    # What only some sessions ask of servers, and any when something does not come.
    def _make_requests(self) -> Requests:
        return Requests(
            self.manifest,
            [*self.slices, *self.shards],
            self.machine,
            self.executor,
            self.connections,
            self._servers,
            self.progress,
            send=self.send_message,
            timeout_s=self.config.step_timeout_s,
        )

    @property
    def requests(self) -> Requests:
        return self._requests.service

    def publish_blob(self, which: int, step: int, data: bytes) -> None:
        self.requests.publish_blob(which, step, data)

    def fetch_blob(self, which: int, step: int) -> memoryview:
        return self.requests.fetch_blob(which, step)

    # The start.
    def join(self, look: Callable[[], None] = lambda: None) -> None:
        """Shake hands with every server; raises `HandshakeError` with both sides' values.

        ``look`` is called now and then, and may raise what came to be known on another way.
        """
        self.ending.start()
        self.send_to_all(Kind.MANIFEST, 0, CONTROL_PRIORITY, self.manifest.encode())

        def welcomed() -> bool:
            look()
            return self.has_joined

        self.progress.wait_until(
            welcomed,
            self.config.join_timeout_s,
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
        self._dispatch(ValuesOffered())
        self.progress.wait_until(
            lambda: not self._offered,
            self.config.join_timeout_s,
            lambda: f"the servers to take rank 0's values; {self.queue_depth} slices are queued",
            setting="join_timeout_s",
        )

    @property
    def has_joined(self) -> bool:
        """Whether all servers have welcomed all workers."""
        return self._welcomes == len(self._streams)

    def begins_with(self, server: int) -> bool:
        """Whether values of the start have still to go to a server, or to come from it."""
        machine, numbers = self.machine, range(len(self.slices))
        return self._offered > 0 or any(
            machine.awaits(n, 0) and machine.owner_of(n) == server for n in numbers
        )

    def await_values(self, step: int = 0) -> None:
        """Other ranks: make every parameter pending until rank 0's values have come."""
        self._dispatch(ValuesAwaited(step))

    def come_after(self, step: int) -> None:
        """Begin, as a newcomer, with what is after this step."""
        self._dispatch(CameAfter(step))

    # Training.
    def push(self, parameter: int, step: int, *, flags: int = 0, with_value: bool = False) -> None:
        """Queue a parameter's gradient, which its memory gives when it leaves. Any thread."""
        if flags & Flag.MEASURE:
            self.measures = True
        if self.trace is not None:
            self.progress.gradient_ready(parameter, step)
            self._queued_ns[step & 1][parameter] = self.trace.now_ns()
        self._dispatch(GradientReady(parameter, step, flags | self.flags_of(step), with_value))

    def flags_of(self, step: int) -> int:
        """What features add to the flags of this step's pushes."""
        return 0 if self._features.flags_of is None else self._features.flags_of(step)

    def announce_hyperparameters(self, step: int, data: bytes) -> None:
        """Send every server the optimizer's numbers for this step and the following ones."""
        self.send_to_all(Kind.HYPERPARAMETERS, step, CONTROL_PRIORITY, data)

    def learn_priorities(self, order: Sequence[int]) -> None:
        self._dispatch(PrioritiesLearned(tuple(order)))

    def start_step(self) -> None:
        """Begin the next forward pass; matters to ``reply="pull"`` only."""
        if self.manifest.knobs.reply == "pull":
            self._dispatch(PullsDue())

    def end_step(self, step: int) -> None:
        """End a step: every rank decides by itself what it sends next, and may tell its pace."""
        self.steps += 1
        while self._after_step:
            self._after_step.pop()()
        end_window = self._features.end_window
        if end_window is not None and self.steps % self._features.window_steps == 0:
            end_window(self.steps)

    def after_step(self, do: Callable[[], None]) -> None:
        """Have this called once, at the end of the step that comes."""
        self._after_step.append(do)

    def wait(self, parameter: int, step: int) -> None:
        """Block until the parameter's last reply is in; raises what went wrong meanwhile."""
        if self.progress.failed:
            self.progress.raise_if_failed()
        plane = self.plane
        if not self.is_complete(parameter):
            self.start_step()
            self.progress.wait_for_parameter(
                parameter,
                step,
                partial(self.is_complete, parameter),
                lambda: self.requests.describe_wait(parameter, step),
                lambda: self.requests.ask_about(parameter),
                sleep=None if plane is None else partial(plane.wait, parameter),
            )
        if plane is not None and plane.is_answered(parameter):
            self._memory[parameter].answered()

    def grad_norm(self, step: int) -> float | None:
        """The global norm of the step's gradients, once it is known; None if none is needed."""
        if not self.manifest.needs_norm:
            return None
        self.progress.raise_if_failed()
        if not self.slices and not self.shards:
            return 0.0
        if self._features.norm_of is None:
            raise InternalError(f"nobody knows the norm of step {step}")
        return self._features.norm_of(step)

    @property
    def counters(self) -> Counters:
        """The totals since the start."""
        if self.plane is not None:
            self.plane.count(self._counters)
        return self._counters

    @property
    def queue_depth(self) -> int:
        return self.machine.queue_depth

    @property
    def is_ahead(self) -> bool:
        """Whether much of what this worker has pushed is not answered: others may be behind."""
        return self.plane is None and self.machine.awaited > len(self.slices) // _AHEAD_SHARE

    # Deciding and doing.
    def _dispatch(self, event: object) -> None:
        if self.progress.failed:
            self.progress.raise_if_failed()
        self.executor.dispatch(event)
        if self.plane is None:
            self._counters.max_queue_depth = self.machine.most_queued

    def _begin_closing(self) -> None:
        if self.plane is not None:
            self.plane.flush(self.config.step_timeout_s)
        self._dispatch(Closing())

    def fail(self, failure: Failure) -> None:
        self.ending.fail(failure.as_error())

    def broke(self, error: BaseException) -> None:
        self.ending.broke(error)

    def _undelivered(self, server: int, error: TransportError) -> None:
        if not self._features.losses.undelivered(server):
            self.broke(error)

    def send_message(
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
        self.progress.raise_if_failed()
        self.executor.send(server, kind, step, priority, slice_, data, flags)

    def send_to_all(self, kind: Kind, step: int, priority: int, data: bytes) -> None:
        for server in range(len(self.connections)):
            self.send_message(server, kind, step, priority, data)

    def close(self, failure: BaseException | None = None) -> None:
        """Say goodbye, or why not: see `Ending.close`."""
        if failure is None and self._features.before_goodbye is not None:
            self._features.before_goodbye()
        self.ending.close(failure)

    # The sending threads.
    def _push_sent(self, frame: SendFrame, size_bytes: int, started_ns: int) -> None:
        with self.lock:
            self._counters.pushes += 1
            self._counters.pushed_bytes += size_bytes
        if self.trace is not None:
            peer, kind, step, slice_, priority, flags, _ = frame
            sent = Header(kind, flags, peer, step, slice_, priority, size_bytes)
            parameter = self.slices[slice_].parameter
            span, name = self.trace.slice_span, self.parameters[parameter].name
            queued_ns = self._queued_ns[step & 1][parameter]
            span(Stage.PUSH_QUEUED, name, sent, queued_ns, stop_ns=started_ns)
            span(Stage.PUSH_SENT, name, sent, started_ns)

    def _value_sent(self, frame: SendFrame, size_bytes: int, started_ns: int) -> None:
        if self._offered:
            with self.lock:
                self._offered -= 1
            self.progress.notify()

    # Receiving.
    def room(self, peer: Connection, header: Header) -> memoryview:
        if header.kind != Kind.REPLY:
            return exactly(header, DAMAGE_BYTES if header.kind == Kind.DAMAGED else 0)
        if header.flags & Flag.UNCHANGED:
            return EMPTY
        slice_ = header.slice
        if not self.machine.awaits(slice_, header.step):
            raise RemoteProtocolError(
                f"server {peer.number} sent a reply for slice {slice_}, step {header.step},"
                " which is not awaited"
            )
        return self.memory.room(slice_, header.payload_bytes)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        kind, flags, _, step, slice_, _, size_bytes = header
        if kind == Kind.REPLY:
            with self.lock:
                self._counters.replies += 1
                self._counters.reply_bytes += size_bytes
            if self.trace is not None:
                name = self.parameters[self.slices[slice_].parameter].name
                self.trace.slice_span(Stage.REPLY_RECEIVED, name, header, peer.receive_started_ns)
            if self.memory.casts is not None:
                self.memory.land(slice_, size_bytes)
            self._dispatch(ReplyArrived(slice_, step, peer.number, 0, flags))
        elif kind == Kind.NOTIFY:
            self._dispatch(NotifyArrived(slice_, step, peer.number, flags))
        elif kind == Kind.DAMAGED:
            self._push_again(peer, header, Damage.decode(payload))
        else:
            with self.lock:
                self._welcomes += 1
            self.progress.notify()

    def _push_again(self, peer: Connection, header: Header, damage: Damage) -> None:
        """Send a damaged push as its gradient is now, if that has changed since it left."""
        kind, _, _, step, slice_, *_ = header
        if not 0 <= slice_ < len(self.slices) or self.machine.owner_of(slice_) != peer.number:
            raise RemoteProtocolError(f"{Kind(kind).name} of slice {slice_}, which is not its own")
        now = self.memory.sent_gradient(slice_)
        data = None if now is None else bytes(now)  # it may be changing
        is_itself = data is not None and len(data) == damage.size_bytes  # and no shorter code
        checksum = peer.stream.checksum
        if data is None or not is_itself or checksum is None or checksum(data, 0) == damage.told:
            text = damage.describe(header)
            server = self._servers[peer.number]
            self.ending.fail(RemoteProtocolError(f"rank {self.rank} to {server}: {text}"))
            return
        self.executor.send(
            peer.number, Kind.PUSH, step, damage.priority, slice_, data, damage.flags
        )

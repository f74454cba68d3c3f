"""A whole cluster of state machines under one schedule: no threads, no clocks, no bytes.

Workers and servers are joined by FIFO links, one per direction and pair. Whatever may happen next
(a frame arrives, a link is free, an update ends, a worker computes on) is chosen by a seeded
schedule. The values of a slice are the story of its updates, so that a stale or a torn read shows.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from foreprop.core.barrier import NormCombiner, StepBarrier
from foreprop.core.closing import AllMembers
from foreprop.core.collect import SendSquares, SliceSummed, SliceUpdated, SumSlice, UpdateSlice
from foreprop.core.frames import (
    CONTROL_PRIORITY,
    Closing,
    CompleteParameter,
    Finish,
    FrameSent,
    GradientReady,
    InstallValue,
    MessageReady,
    NormArrived,
    NotifyArrived,
    PeerLeft,
    PrioritiesLearned,
    PullArrived,
    PullsDue,
    PushArrived,
    ReplyArrived,
    SendFrame,
    ValueArrived,
    ValuesAwaited,
    ValuesOffered,
)
from foreprop.core.norm import ZERO, SendNormPart, SquareSum
from foreprop.core.pushwindow import PushWindow
from foreprop.core.sendqueue import USUAL_TURNS, Order, Reply, Turns
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Partition, Slice, plan_slices
from foreprop.core.wire import ROUND_SHIFT, Flag, Kind
from foreprop.core.worker_machine import WorkerMachine
from tests.simulated_relay import Relay

Story = tuple[tuple[int, tuple[int, ...]], ...]
"""The updates of a slice: (step, the server's peers that had a gradient).

Of an average: the start's, and (the round's serial number, the peers)."""

INITIAL: Story = ((0, ()),)

ONE = SquareSum(0, (0, 0, 1))
"""Every sum's part of the norm, so that the total counts the slices that had a gradient."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is run; the schedule is not part of it."""

    sizes_elems: Sequence[int]
    partition: Partition
    order: Order
    reply: Reply
    workers: int
    steps: int
    forward_order: tuple[int, ...] = ()
    """Learned before the second step; by default the parameters' own order."""
    unused: frozenset[tuple[int, int, int]] = frozenset()
    """(rank, parameter, step) without a gradient."""
    wait_at_end: bool = True
    window_elems: int | None = None
    """The push window, of each server."""
    needs_norm: bool = False
    """Updates wait for the sums of all slices."""
    turns: Turns = USUAL_TURNS
    """Of the servers at each worker, and of the workers (without relays) at each server."""
    averages: bool = False
    """Workers update: servers answer with what they have summed."""
    measures: bool = False
    """And tell the sums of squares, for which workers wait."""
    rounds: Sequence[int] = ()
    """How often each step averages; by default once."""
    workers_per_node: int = 1
    """More than one: a relay of each node stands between its workers and each server."""

    @property
    def forward(self) -> tuple[int, ...]:
        return self.forward_order or tuple(range(len(self.sizes_elems)))

    @property
    def peers(self) -> int:
        """How many push to each server."""
        return -(-self.workers // self.workers_per_node)

    def ranks(self, parameter: int, step: int) -> tuple[int, ...]:
        """Those that have a gradient."""
        return tuple(r for r in range(self.workers) if (r, parameter, step) not in self.unused)

    def pushing(self, parameter: int, step: int) -> tuple[int, ...]:
        """The servers' peers that have a gradient."""
        nodes = {rank // self.workers_per_node for rank in self.ranks(parameter, step)}
        return tuple(sorted(nodes))

    def rounds_in(self, step: int) -> int:
        return self.rounds[step - 1] if self.rounds else 1

    def serial(self, step: int, again: int) -> int:
        """Of the step's so-manieth round, counted from the start."""
        return sum(map(self.rounds_in, range(1, step))) + again + 1

    def story(self, parameter: int, step: int, again: int | None = None) -> Story:
        """What a slice must have been through after this step, or one of its rounds."""
        if not self.averages:
            updates = [(s, self.pushing(parameter, s)) for s in range(1, step + 1)]
            return (*INITIAL, *(update for update in updates if update[1]))
        ends = {s: self.rounds_in(s) - 1 for s in range(1, step + 1)}
        if again is not None:
            ends[step] = again
        shown = [(self.serial(s, end), self.pushing(parameter, s)) for s, end in ends.items()]
        return (*INITIAL, *[average for average in shown if average[1]][-1:])

    def flags(self, rank: int, parameter: int, step: int, again: int) -> int:
        """Of a push."""
        unused = (rank, parameter, step) in self.unused
        flags = int(Flag.NO_GRADIENT) if unused else 0
        if self.averages:
            flags |= Flag.GRADIENT | (Flag.MEASURE if self.measures else 0)
        return flags | again << ROUND_SHIFT


@dataclass
class _Links:
    """A machine's links to its peers, and what must leave on each next (if that is checked)."""

    checked: bool
    by_priority: bool
    turns: Turns
    queues: dict[int, deque[tuple[SendFrame, Story]]]
    busy_with: dict[int, SendFrame] = field(default_factory=dict)
    most_busy: int = 0
    """The largest number of links that had a frame in their hands at once."""
    queued: dict[int, list[tuple[tuple[int, int], int]]] = field(default_factory=dict)
    may_be_held: Callable[[int, tuple[int, int], int, bool], bool] = lambda *_: False
    """(peer, key, slice, are too few frames under way to others): whether what is first has to
    stay although the link is idle."""

    def expect(self, step: int, priority: int, slice_: int, peer: int) -> None:
        key = (step, priority) if self.by_priority else (0, 0)
        self.queued.setdefault(peer, []).append((key, slice_))

    def send(self, frame: SendFrame, story: Story) -> None:
        peer = frame.peer
        assert peer not in self.busy_with, "two frames are in the hands of one link"
        assert not self.by_priority or len(self.busy_with) < self.turns.at_once, "too many at once"
        if self.checked:
            first = min(self.queued[peer], key=lambda entry: entry[0])  # of equal ones, the first
            assert frame.slice == first[1], f"{frame} overtook {first}"
            assert not self._is_held(peer, *first), f"{frame} left although the window is full"
            waiting = self._first_of_idle().values()
            assert not any(key < first[0] for key, _ in waiting), f"{frame} left before {waiting}"
            self.queued[peer].remove(first)
        self.busy_with[peer] = frame
        self.most_busy = max(self.most_busy, len(self.busy_with))
        self.queues[peer].append((frame, story))

    def check_none_waits_for_another(self) -> None:
        """What is queued for a peer is behind a frame to it, or it is not that peer's turn."""
        if not self.by_priority or len(self.busy_with) < self.turns.at_once:
            idle = list(self._first_of_idle())
            assert not (self.checked and idle), f"links {idle} are idle while frames wait for them"

    def _is_held(self, peer: int, key: tuple[int, int], slice_: int) -> bool:
        is_short = len(self.busy_with) < self.turns.at_least
        return self.may_be_held(peer, key, slice_, is_short)

    def _first_of_idle(self) -> dict[int, tuple[tuple[int, int], int]]:
        """What is first for the peers to which nothing is under way, if it may leave."""
        idle = [peer for peer, entries in self.queued.items() if entries]
        idle = [peer for peer in idle if peer not in self.busy_with]
        first = {peer: min(self.queued[peer], key=lambda entry: entry[0]) for peer in idle}
        return {peer: entry for peer, entry in first.items() if not self._is_held(peer, *entry)}


class Cluster:
    """Runs a setup to its end; raises `AssertionError` as soon as a rule is broken."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup = setup
        self.slices = plan_slices(setup.sizes_elems, [4] * len(setup.sizes_elems), setup.partition)
        self.updates: list[tuple[int, int, tuple[int, ...]]] = []
        self.sums: list[tuple[int, int]] = []  # slice, step
        self._random = random.Random(seed)
        self._weights: dict[str, float] = {}
        self.servers = [_Server(self, i) for i in range(setup.partition.servers)]
        self.relays: dict[tuple[int, int], Relay] = {}  # by node and server
        if setup.workers_per_node > 1:
            places = [(n, s) for n in range(setup.peers) for s in range(setup.partition.servers)]
            self.relays = {place: Relay(self, *place) for place in places}
        self.workers = [_Worker(self, i) for i in range(setup.workers)]

    def run(self) -> Cluster:
        while not all(server.finished for server in self.servers):
            everybody = (*self.workers, *self.relays.values(), *self.servers)
            actions = [action for each in everybody for action in each.actions()]
            assert actions, "deadlock: " + "; ".join(w.describe() for w in self.workers)
            weights = [self._weight(name) for name, _ in actions]
            self._random.choices(actions, weights)[0][1]()
        return self

    def _weight(self, name: str) -> float:
        """Some links and processes are slow all the time."""
        if name not in self._weights:
            self._weights[name] = self._random.choice([0.02, 0.3, 1.0, 1.0, 5.0])
        return self._weights[name]

    def links(self, peers: int, turns: Turns) -> _Links:
        queues: dict[int, deque[tuple[SendFrame, Story]]] = {i: deque() for i in range(peers)}
        setup = self.setup
        return _Links(setup.reply == "broadcast", setup.order == "priority", turns, queues)

    def towards(self, rank: int, server: int) -> _Server | Relay:
        """Where a worker's frames for a server go."""
        node = rank // self.setup.workers_per_node
        return self.relays.get((node, server)) or self.servers[server]

    def gradient_order(self) -> list[int]:
        """In which gradients become ready; workers need not agree."""
        order = list(reversed(self.setup.forward))
        if self._random.random() < 0.5:
            self._random.shuffle(order)
        return order

    def with_gradient(self, step: int) -> set[tuple[int, int]]:
        """The slices, with the step, of which a rank has a gradient in it."""
        used = (p for p in self.slices if self.setup.ranks(p.parameter, step))
        return {(piece.number, step) for piece in used}

    def slices_of(self, parameter: int) -> list[Slice]:
        return [piece for piece in self.slices if piece.parameter == parameter]


Action = tuple[str, Callable[[], None]]


class _Worker:
    def __init__(self, cluster: Cluster, rank: int) -> None:
        setup = cluster.setup
        self.rank = rank
        self.completed: list[list[int]] = [[] for _ in setup.sizes_elems]
        self.stories = [INITIAL if rank == 0 else () for _ in cluster.slices]
        self._cluster = cluster
        self._machine = WorkerMachine(
            cluster.slices,
            parameters=len(setup.sizes_elems),
            order=setup.order,
            reply=setup.reply,
            window=self._push_window(),
            turns=setup.turns,
        )
        self.links = cluster.links(setup.partition.servers, setup.turns)
        if setup.window_elems is not None:
            self.links.may_be_held = self._is_held
        self._unanswered: list[tuple[int, tuple[int, int], int]] = []  # server, key, slice
        self._program = deque(self._plan())
        owners = {piece.server for piece in cluster.slices}
        self._norms = NormCombiner(owners)
        self._squares: dict[int, list[tuple[int, Any]]] = {server: [] for server in owners}
        self._said_goodbye = False
        if rank != 0:  # before the servers know us: values may come at once
            self._do(self._machine.handle(ValuesAwaited()))

    def _push_window(self) -> PushWindow | None:
        setup = self._cluster.setup
        if setup.window_elems is None:
            return None
        return PushWindow([piece.elems for piece in self._cluster.slices], setup.window_elems)

    def _is_held(self, server: int, key: tuple[int, int], slice_: int, is_short: bool) -> bool:
        """The rule in other words than the window's own."""
        assert self._cluster.setup.window_elems is not None
        if key[0] == 0:
            return False  # rank 0's first values are no pushes
        ahead = [e[2] for e in self._unanswered if e[0] == server and e[1:] < (key, slice_)]
        if is_short and any(e[0] == server and e[1] < key for e in self._unanswered):
            return False  # owed for another parameter, a more urgent one
        elems = sum(self._cluster.slices[number].elems for number in ahead)
        return len(ahead) >= 2 and elems >= self._cluster.setup.window_elems

    def _plan(self) -> Iterator[object]:
        """What the training thread does: events, and parameters (with a step) that it reads."""
        setup = self._cluster.setup
        if self.rank == 0:
            yield ValuesOffered()
        for step in range(1, setup.steps + 1):
            if step == 2:
                yield PrioritiesLearned(setup.forward)
            yield PullsDue()
            yield from ((parameter, step - 1) for parameter in setup.forward)
            yield from self._pushes(step)
        if setup.wait_at_end:
            yield PullsDue()
            yield from ((parameter, setup.steps) for parameter in setup.forward)
        yield Closing()

    def _pushes(self, step: int) -> Iterator[object]:
        setup = self._cluster.setup
        for again in range(setup.rounds_in(step)):
            # what leaves once more leaves at step(), or at a read: in the same order everywhere
            order = range(len(setup.sizes_elems)) if again else self._cluster.gradient_order()
            for parameter in order:
                if again:
                    yield PullsDue()  # as whoever waits does
                    yield parameter, step, again - 1
                flags = setup.flags(self.rank, parameter, step, again)
                yield GradientReady(parameter, step, flags)
            if setup.measures:
                yield "norm", step, again

    def actions(self) -> Iterator[Action]:
        if self._program and self._can_go_on():
            yield f"compute {self.rank}", self._compute
        for peer in self.links.busy_with:
            yield f"worker {self.rank} sends to {peer}", lambda p=peer: self._sent(p)
        for server, queue in self.links.queues.items():
            if queue:
                yield f"{self.rank} to {server}", lambda s=server, q=queue: self._arrive(s, q)

    def _can_go_on(self) -> bool:
        following = self._program[0]
        # a NamedTuple is a tuple too, but only a plain one is a wait
        if type(following) is not tuple:
            return True
        if following[0] == "norm":
            serial = self._cluster.setup.serial(*following[1:])
            return all(len(parts) >= serial for parts in self._squares.values())
        return self._machine.is_complete(following[0])

    def _compute(self) -> None:
        following: Any = self._program.popleft()
        if type(following) is tuple and following[0] == "norm":
            self._check_norm(*following[1:])
            return
        if type(following) is tuple:
            parameter, step, *again = following
            story = self._cluster.setup.story(parameter, step, *again)
            for piece in self._cluster.slices_of(parameter):
                assert self.stories[piece.number] == story, f"stale read of {piece}, step {step}"
            return
        if isinstance(following, GradientReady):
            self._expect(self._cluster.slices_of(following.parameter), following.step)
        elif isinstance(following, ValuesOffered):
            self._expect(self._cluster.slices, 0)
        self._do(self._machine.handle(following))

    def _check_norm(self, step: int, again: int) -> None:
        serial = self._cluster.setup.serial(step, again)
        told = [parts[serial - 1] for parts in self._squares.values()]
        assert all(of == step for of, _ in told)
        nonzero = sum(one.bins == ONE.bins for _, squares in told for one in squares)
        assert nonzero == len(self._cluster.with_gradient(step)), "another round's norm"

    def _expect(self, pieces: Sequence[Slice], step: int) -> None:
        for piece in pieces:
            priority = self._machine.priority_of(piece.parameter)
            self.links.expect(step, priority, piece.number, piece.server)

    def _sent(self, server: int) -> None:
        del self.links.busy_with[server]
        self._do(self._machine.handle(FrameSent(server)))

    def _arrive(self, server: int, queue: deque[tuple[SendFrame, Story]]) -> None:
        frame, story = queue.popleft()
        self._cluster.towards(self.rank, server).receive(self.rank, frame, story)

    def _add_norm_part(self, server: int, step: int, part: Any) -> None:
        total = self._norms.add(server, step, part)
        if total is None:
            return
        assert total.bins == (0, 0, len(self._cluster.with_gradient(step)))
        for peer in self.links.queues:
            self.links.expect(step, CONTROL_PRIORITY, 0, peer)
            message = MessageReady(peer, Kind.NORM, step, CONTROL_PRIORITY, 0, 0)
            self._do(self._machine.handle(message))

    def receive(self, server: int, frame: SendFrame, story: Story) -> None:
        if frame.kind == Kind.NORM_PART and self._cluster.setup.measures:
            self._squares[server].append((frame.step, story))
            return
        if frame.kind == Kind.NORM_PART:
            self._add_norm_part(server, frame.step, story)
            return
        if frame.kind == Kind.NOTIFY:
            event: object = NotifyArrived(frame.slice, frame.step, server, frame.flags)
        else:
            assert frame.kind == Kind.REPLY
            event = ReplyArrived(frame.slice, frame.step, server)
            assert self._machine.awaits(frame.slice, frame.step)
            if not frame.flags & Flag.UNCHANGED:
                self.stories[frame.slice] = story
        self._unanswered = [entry for entry in self._unanswered if entry[2] != frame.slice]
        self._do(self._machine.handle(event))

    def _do(self, instructions: Sequence[object]) -> None:
        for instruction in instructions:
            if isinstance(instruction, SendFrame):
                self.links.send(instruction, self.stories[instruction.slice])
                held = instruction.flags & (Flag.NO_GRADIENT | Flag.MEASURE)
                if instruction.kind == Kind.PUSH and not held:
                    key = (instruction.step, instruction.priority)
                    self._unanswered.append((instruction.peer, key, instruction.slice))
            elif isinstance(instruction, CompleteParameter):
                self.completed[instruction.parameter].append(instruction.step)
            elif isinstance(instruction, Finish) and not self._said_goodbye:
                assert not self._program
                assert not self._machine.queue_depth
                self._said_goodbye = True
                assert not self.links.busy_with
                for server, queue in self.links.queues.items():
                    queue.append((SendFrame(server, Kind.BYE, 0, 0, 0, 0, -1), ()))
        self.links.check_none_waits_for_another()

    def describe(self) -> str:
        waits = [p for p in self._cluster.setup.forward if not self._machine.is_complete(p)]
        return f"rank {self.rank} before {list(self._program)[:1]} waits for parameters {waits}"


class _Server:
    def __init__(self, cluster: Cluster, index: int) -> None:
        setup = cluster.setup
        self.finished = False
        self.stories: dict[int, Story] = {p.number: () for p in cluster.slices if p.server == index}
        self._index = index
        self._cluster = cluster
        self._machine = ServerMachine(
            cluster.slices,
            closing=AllMembers,
            index=index,
            workers=setup.peers,
            order=setup.order,
            reply=setup.reply,
            names=[f"p{i}" for i in range(len(setup.sizes_elems))],
            barrier=StepBarrier(len(self.stories)) if setup.needs_norm else None,
            turns=setup.turns,
        )
        self._parts: list[Any] = []  # by token
        self._measured: list[tuple[int, int]] = []  # slices, steps: answered when all are
        self._serials = dict.fromkeys(self.stories, 0)  # of each slice's last round
        self._summing: SumSlice | None = None
        self.links = cluster.links(setup.peers, setup.turns)
        self._updating: UpdateSlice | None = None
        self._priorities: dict[tuple[int, int], int] = {}

    def actions(self) -> Iterator[Action]:
        if self._updating is not None:
            yield f"update {self._index}", self._updated
        if self._summing is not None:
            yield f"sum {self._index}", self._summed
        for peer in self.links.busy_with:
            yield f"server {self._index} sends to {peer}", lambda p=peer: self._sent(p)
        for rank, queue in self.links.queues.items():
            if queue:
                yield f"{self._index} back to {rank}", lambda r=rank, q=queue: self._arrive(r, q)

    def receive(self, rank: int, frame: SendFrame, story: Story) -> None:
        _, kind, step, slice_, priority, flags, _ = frame
        key = (slice_, step)
        event: object
        if kind == Kind.PUSH:
            event = PushArrived(rank, slice_, step, priority, flags)
            self._priorities[key] = min(priority, self._priorities.get(key, priority))
        elif kind == Kind.VALUE:
            event = ValueArrived(rank, slice_, step, priority)
            self.stories[slice_] = story
            self._priorities[key] = priority
            self._expect(key, without=0)
        elif kind == Kind.PULL:
            event = PullArrived(rank, slice_, step, priority)
        elif kind == Kind.NORM:
            event = NormArrived(rank, step)
        else:
            event = PeerLeft(rank)
        self._do(self._machine.handle(event))

    def _expect(self, key: tuple[int, int], without: int = -1) -> None:
        for rank in range(self._cluster.setup.peers):
            if rank != without:
                self.links.expect(key[1], self._priorities[key], key[0], rank)

    def _summed(self) -> None:
        summed, self._summing = self._summing, None
        assert summed is not None
        self._cluster.sums.append((summed.slice, summed.step))
        self._do(self._machine.handle(SliceSummed(ONE)))

    def _send_norm_part(self, told: SendNormPart) -> None:
        self._parts.append(told.part)
        self.links.expect(told.step, CONTROL_PRIORITY, 0, 0)
        token = len(self._parts) - 1
        event = MessageReady(0, Kind.NORM_PART, told.step, CONTROL_PRIORITY, 0, token)
        self._do(self._machine.handle(event))

    def _send_squares(self, told: SendSquares) -> None:
        self._parts.append(told.squares)
        token = len(self._parts) - 1
        for rank in range(self._cluster.setup.peers):
            self.links.expect(told.step, CONTROL_PRIORITY, 0, rank)
            event = MessageReady(rank, Kind.NORM_PART, told.step, CONTROL_PRIORITY, 0, token)
            self._do(self._machine.handle(event))

    def _updated(self) -> None:
        update, self._updating = self._updating, None
        assert update is not None
        setup = self._cluster.setup
        assert (update.gradient, update.measure) == (setup.averages, setup.measures)
        self._serials[update.slice] += 1
        if update.ranks and update.gradient:
            average = (self._serials[update.slice], update.ranks)
            self.stories[update.slice] = (*INITIAL, average)
        elif update.ranks:
            self.stories[update.slice] += ((update.step, update.ranks),)
        squares = (ONE if update.ranks else ZERO,) if update.measure else ()
        self._measured.append((update.slice, update.step))
        if not update.measure or len(self._measured) == len(self.stories):
            for key in sorted(self._measured):
                self._expect(key)
            self._measured.clear()
        self._do(self._machine.handle(SliceUpdated(squares)))

    def _sent(self, rank: int) -> None:
        frame = self.links.busy_with.pop(rank)
        queue = self.links.queues[rank]
        if queue and queue[-1][0] is frame:  # otherwise it has arrived, and all bytes were read
            self._check_untouched(*queue[-1])
        self._do(self._machine.handle(FrameSent(rank)))

    def _arrive(self, rank: int, queue: deque[tuple[SendFrame, Story]]) -> None:
        frame, story = queue.popleft()
        if self.links.busy_with.get(rank) is frame:
            self._check_untouched(frame, story)
        relay = self._cluster.relays.get((rank, self._index))
        if relay is not None:
            relay.answer(frame, story)
        else:
            self._cluster.workers[rank].receive(self._index, frame, story)

    def _check_untouched(self, frame: SendFrame, story: Story) -> None:
        unchanged = frame.kind == Kind.NORM_PART or self.stories[frame.slice] == story
        assert unchanged, f"{frame} changed while it was sent"

    def _do(self, instructions: Sequence[object]) -> None:
        told = [each for each in instructions if isinstance(each, SendSquares)]
        for instruction in (each for each in instructions if not isinstance(each, SendSquares)):
            if isinstance(instruction, SendFrame):
                if instruction.kind == Kind.NORM_PART:
                    self.links.send(instruction, self._parts[instruction.token])
                else:
                    self.links.send(instruction, self.stories[instruction.slice])
            elif isinstance(instruction, SumSlice):
                assert self._summing is self._updating is None, "two operations at once"
                self._summing = instruction
            elif isinstance(instruction, SendNormPart):
                self._send_norm_part(instruction)
            elif isinstance(instruction, UpdateSlice):
                assert self._summing is self._updating is None, "two operations at once"
                assert instruction.ranks == tuple(sorted(instruction.ranks))
                if self._cluster.setup.needs_norm:
                    needed = self._cluster.with_gradient(instruction.step)
                    assert needed <= set(self._cluster.sums), "updated before the norm was known"
                self._updating = instruction
                self._cluster.updates.append(instruction[:3])
            elif isinstance(instruction, Finish):
                self.finished = True
            else:
                assert isinstance(instruction, InstallValue), instruction
        for squares in told:
            self._send_squares(squares)
        self.links.check_none_waits_for_another()

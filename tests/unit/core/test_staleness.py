"""BSP, SSP and ASGD: every interleaving of small cases, and random ones of larger cases."""

from __future__ import annotations

import functools
import math
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreprop.core.collect import SliceUpdated, UpdateSlice
from foreprop.core.frames import (
    FailSession,
    Finish,
    FrameSent,
    InstallValue,
    MessageReady,
    PeerLeft,
    PullArrived,
    PushArrived,
    SendFrame,
    ValueArrived,
    each_worker,
)
from foreprop.core.sendqueue import Order
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Slice
from foreprop.core.staleness import (
    BoundedStaleness,
    Staleness,
    compensate,
    most_steps_apart,
    rule_of,
)
from foreprop.core.wire import Flag, Kind
from foreprop.errors import ConfigError, InternalError, RemoteProtocolError
from tests.unit.exploration import explore_states

Story = tuple[tuple[int, tuple[int, ...]], ...]
"""The updates that a slice's values have been through, in order: (step, ranks)."""


def slices_of(count: int) -> list[Slice]:
    return [Slice(number, number, 0, 1, 0) for number in range(count)]


def names_of(count: int) -> list[str]:
    return [f"p{number}" for number in range(count)]


def server_of(
    staleness: Staleness, workers: int, names: list[str], order: Order = "priority"
) -> ServerMachine:
    return ServerMachine(
        slices_of(len(names)),
        index=0,
        workers=workers,
        order=order,
        names=names,
        closing=rule_of(staleness),
    )


class World:
    """Workers, a server, and FIFO links between them; what may happen next is chosen outside."""

    def __init__(
        self,
        staleness: Staleness,
        *,
        workers: int,
        steps: int,
        slices: int = 1,
        order: Order = "priority",
        unused: frozenset[tuple[int, int, int]] = frozenset(),
    ) -> None:
        self.apart = most_steps_apart(staleness)
        self.workers, self.steps, self.unused = workers, steps, unused
        self.server = server_of(staleness, workers, names_of(slices), order)
        self.stories: list[Story] = [()] * slices
        self.updating: UpdateSlice | None = None
        self.to_server: list[deque[tuple[int, int]]] = [deque() for _ in range(workers)]
        self.to_worker: list[deque[tuple[SendFrame, Story]]] = [deque() for _ in range(workers)]
        self.unsent: set[int] = set()
        self.known: list[list[Story]] = [[()] * slices for _ in range(workers)]
        self.pushed = [[0] * slices for _ in range(workers)]
        self.answered = [[0] * slices for _ in range(workers)]

    @property
    def begun(self) -> list[int]:
        """The step that each worker may compute."""
        return [min(answered) + 1 for answered in self.answered]

    @property
    def completed(self) -> list[int]:
        """The last step whose gradients each worker has pushed."""
        return [min(pushed) for pushed in self.pushed]

    @property
    def is_done(self) -> bool:
        return all(begun == self.steps + 1 for begun in self.begun)

    def state(self) -> tuple[Any, ...]:
        """All that what may follow depends on."""
        server, lanes = self.server, self.server._replies.lanes
        clocks = [
            (s.done, s.rounds, s.last, sorted(s.owed.items())) for s in server._states.values()
        ]
        rule = server.closing
        if isinstance(rule, BoundedStaleness):
            clocks += [(rule._applied, rule._versions, rule._seen)]
        queues = server._updates.items(), server._updating, lanes.items()
        links = self.to_server, self.to_worker, sorted(self.unsent), sorted(lanes._busy)
        own = self.stories, self.updating, self.known, self.pushed, self.answered
        return tuple(map(repr, (clocks, queues, links, own)))

    def choices(self) -> list[tuple[str, int, int]]:
        """What may happen next."""
        found = [("arrive", rank, 0) for rank in range(self.workers) if self.to_server[rank]]
        found += [("answer", rank, 0) for rank in range(self.workers) if self.to_worker[rank]]
        found += [("sent", rank, 0) for rank in sorted(self.unsent)]
        if self.updating is not None:
            found.append(("updated", 0, 0))
        for rank, begun in enumerate(self.begun):
            pushed = self.pushed[rank]
            ready = [s for s in range(len(pushed)) if pushed[s] < begun <= self.steps]
            found += [("push", rank, slice_) for slice_ in ready[-1:]]  # last layer first
        return found

    def happen(self, choice: tuple[str, int, int]) -> None:
        what, rank, slice_ = choice
        if what == "push":
            self._push(rank, slice_)
        elif what == "arrive":
            number, step = self.to_server[rank].popleft()
            flags = Flag.NO_GRADIENT if (rank, number, step) in self.unused else 0
            self._handle(PushArrived(rank, number, step, number, int(flags)))
        elif what == "sent":
            self.unsent.remove(rank)
            self._handle(FrameSent(rank))
        elif what == "answer":
            self._answer(rank, *self.to_worker[rank].popleft())
        else:
            self._update()

    def _push(self, rank: int, slice_: int) -> None:
        step = self.begun[rank]
        if self.pushed[rank].count(step) == 0:
            self.check_read(rank, step)
        self.pushed[rank][slice_] = step
        self.to_server[rank].append((slice_, step))

    def _answer(self, rank: int, frame: SendFrame, story: Story) -> None:
        assert (frame.kind, frame.step) == (Kind.REPLY, self.answered[rank][frame.slice] + 1)
        if frame.flags & Flag.UNCHANGED:
            assert self.known[rank][frame.slice] == story[: len(self.known[rank][frame.slice])]
        else:
            self.known[rank][frame.slice] = story
        self.answered[rank][frame.slice] = frame.step

    def _update(self) -> None:
        update, self.updating = self.updating, None
        assert update is not None
        if update.ranks:
            self.stories[update.slice] += ((update.step, update.ranks),)
        self._handle(SliceUpdated())

    def _handle(self, event: Any) -> None:
        for instruction in self.server.handle(event):
            if isinstance(instruction, SendFrame):
                assert instruction.peer not in self.unsent, "two frames are under way to one worker"
                self.unsent.add(instruction.peer)
                values = self.stories[instruction.slice]
                self.to_worker[instruction.peer].append((instruction, values))
            else:
                assert isinstance(instruction, UpdateSlice), instruction
                assert self.updating is None, "two updates at once"
                self.updating = instruction

    # What must hold.
    def has_updates(self, rank: int, slice_: int, of: int, step: int) -> bool:
        """Whether a worker knows all updates of another one up to this step."""
        seen = {(at, by) for at, ranks in self.known[rank][slice_] for by in ranks}
        wanted = ((at, of) for at in range(1, step + 1) if (of, slice_, at) not in self.unused)
        return all(each in seen for each in wanted)

    def check_read(self, rank: int, step: int) -> None:
        """Check, before a worker computes a step, its gap, what it reads, and its own writes."""
        gap = step - 1 - min(self.completed)
        assert gap <= self.apart, f"rank {rank} computes step {step}, {gap} steps ahead"
        for slice_ in range(len(self.stories)):
            assert self.has_updates(rank, slice_, rank, step - 1), "its own updates are missing"
            if math.isinf(self.apart):
                continue
            for other in range(self.workers):
                fresh = self.has_updates(rank, slice_, other, step - int(self.apart) - 1)
                assert fresh, f"rank {rank} reads a value in step {step} that is too old"


def explore(world: World, look: Callable[[World], None] = lambda _: None) -> int:
    """All states that any order of events can reach; returns how many. Each end must be done."""

    def visit(here: World) -> list[tuple[str, int, int]]:
        look(here)
        choices = here.choices()
        assert choices or here.is_done, "deadlock"
        return choices

    return explore_states(world, visit)


SomeWorld = TypeVar("SomeWorld", bound=World)


def run(world: SomeWorld, seed: int) -> SomeWorld:
    """One random order, in which some workers may be slow."""
    rng = random.Random(seed)
    pace = [rng.choice([0.1, 1.0, 1.0]) for _ in range(world.workers)]
    while choices := world.choices():
        weights = [pace[rank] if what == "push" else 1.0 for what, rank, _ in choices]
        world.happen(rng.choices(choices, weights)[0])
    assert world.is_done
    return world


@dataclass
class Seen:
    """What was seen in all states of a small world."""

    states: int = 0
    gaps: set[int] = field(default_factory=set)
    waited: set[tuple[int, ...]] = field(default_factory=set)
    ends: set[Story] = field(default_factory=set)


@functools.cache
def explored(staleness: Staleness, workers: int, steps: int, slices: int) -> Seen:
    seen = Seen()

    def look(world: World) -> None:
        seen.gaps.add(max(world.begun) - 1 - min(world.completed))
        rule = world.server.closing
        seen.waited.add(rule.waiting(0) if isinstance(rule, BoundedStaleness) else ())
        if not world.choices():
            seen.ends.add(world.stories[0])

    world = World(staleness, workers=workers, steps=steps, slices=slices)
    seen.states = explore(world, look)
    return seen


CASES: list[tuple[Staleness, int, int, int]] = [
    *((staleness, 2, 3, 1) for staleness in (0, 1, 2, "async")),
    (0, 2, 2, 2),
    (0, 3, 2, 1),
]
"""Staleness, workers, steps, slices."""
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("staleness", "workers", "steps", "slices"),
    [case if case[3] > 1 or case[0] == 1 else pytest.param(*case, marks=LONG) for case in CASES],
)
def test_in_any_interleaving_reads_are_fresh_enough_and_nobody_is_too_far_ahead(
    staleness: Staleness, workers: int, steps: int, slices: int
) -> None:
    seen = explored(staleness, workers, steps, slices)
    assert seen.states > 50
    # the bound is reached; a worker that has done all steps begins no other one
    assert max(seen.gaps) == min(most_steps_apart(staleness), steps)


@pytest.mark.parametrize("steps", [2, pytest.param(3, marks=LONG)])
def test_without_a_bound_nobody_ever_waits_for_others(steps: int) -> None:
    assert explored("async", 2, steps, 1).waited == {()}


def test_with_a_bound_somebody_waits() -> None:
    assert explored(1, 2, 3, 1).waited == {(), (0,), (1,)}


@pytest.mark.parametrize("steps", [2, pytest.param(3, marks=LONG)])
def test_bsp_has_one_story_in_any_interleaving(steps: int) -> None:
    """All workers' gradients of a step, in rank order: so there is one result, to the bit."""
    assert explored(0, 2, steps, 1).ends == {tuple((1 + step, (0, 1)) for step in range(steps))}
    assert len(explored("async", 2, steps, 1).ends) == math.comb(2 * steps, steps)


def test_the_exploration_notices_an_answer_that_comes_too_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This shows that the checks above can fail."""

    def eager(self: BoundedStaleness, *args: Any) -> Any:
        bound, self._bound = self._bound, 2
        answers = original(self, *args)
        self._bound = bound
        return answers

    original = BoundedStaleness.updated
    monkeypatch.setattr(BoundedStaleness, "updated", eager)
    with pytest.raises(AssertionError, match=r"steps ahead|too old"):
        explore(World(1, workers=2, steps=4))


def test_the_exploration_notices_a_worker_that_does_not_see_its_own_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = World._handle

    def forgetful(self: World, event: Any) -> None:
        stories, self.stories = self.stories, [story[:-1] for story in self.stories]
        original(self, event)
        self.stories = stories

    monkeypatch.setattr(World, "_handle", forgetful)
    with pytest.raises(AssertionError, match="its own updates are missing"):
        explore(World("async", workers=2, steps=2))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_larger_cases_in_random_order(data: st.DataObject) -> None:
    workers, slices, steps = (data.draw(st.integers(1, most)) for most in (4, 3, 6))
    cells = [(r, n, c) for r in range(workers) for n in range(slices) for c in range(1, steps + 1)]
    world = World(
        data.draw(st.sampled_from([0, 1, 2, 3, "async"])),
        workers=workers,
        steps=steps,
        slices=slices,
        order=data.draw(st.sampled_from(["priority", "fifo"])),
        unused=data.draw(st.frozensets(st.sampled_from(cells), max_size=5)),
    )
    done = run(world, data.draw(st.integers(0, 2**32)))
    for slice_, story in enumerate(done.stories):
        updates = sorted((by, step) for step, ranks in story for by in ranks)
        wanted = [(r, c) for r, n, c in sorted(cells) if n == slice_]
        assert updates == sorted(set(wanted) - {(r, c) for r, n, c in done.unused if n == slice_})
        for rank in range(workers):  # each worker's own, in order
            own = [step for step, ranks in story if rank in ranks]
            assert own == sorted(own)


# Training with numbers: a linear model per slice, whose gradients depend on what was read.
class Trained(World):
    """Applies what the server says to float32 vectors; the workers' gradients are of what they see.

    ``strength``: of delay compensation; None: without.
    """

    def __init__(self, *args: Any, strength: float | None = None, **named: Any) -> None:
        super().__init__(*args, **named)
        self.strength = strength
        count = len(self.stories)
        self.values = [np.linspace(1, 2, 5, dtype=np.float32) for _ in range(count)]
        self.read = [[value.copy() for value in self.values] for _ in range(self.workers)]
        self.gradients: dict[tuple[int, int, int], Any] = {}

    def _push(self, rank: int, slice_: int) -> None:
        super()._push(rank, slice_)
        step = self.pushed[rank][slice_]
        read = self.read[rank][slice_]
        self.gradients[rank, slice_, step] = gradient_of(read, rank, step), read

    def _answer(self, rank: int, frame: SendFrame, story: Story) -> None:
        super()._answer(rank, frame, story)
        self.read[rank][frame.slice] = replay(self, frame.slice, story)

    def _update(self) -> None:
        slice_ = self.updating.slice if self.updating is not None else 0
        before = self.stories[slice_]
        super()._update()
        if self.stories[slice_] != before:
            self.values[slice_] = replay(self, slice_, self.stories[slice_])


def gradient_of(value: Any, rank: int, step: int) -> Any:
    target = np.float32(math.sin(rank + 10 * step))
    return (value - target) * np.float32(0.3)


def replay(world: Trained, slice_: int, story: Story) -> Any:
    """The values after these updates, with SGD on each one's share of the mean."""
    value = np.linspace(1, 2, 5, dtype=np.float32)
    for step, ranks in story:
        total = np.zeros(5, dtype=np.float32)
        for rank in ranks:
            gradient, read = world.gradients[rank, slice_, step]
            if world.strength is not None:
                gradient = compensate(gradient, value, read, strength=world.strength)
            total = total + gradient
        value = value - total / np.float32(world.workers)
    return value


def synchronous(workers: int, steps: int) -> Any:
    """BSP by hand."""
    value = np.linspace(1, 2, 5, dtype=np.float32)
    for step in range(1, steps + 1):
        total = np.zeros(5, dtype=np.float32)
        for rank in range(workers):
            total = total + gradient_of(value, rank, step)
        value = value - total / np.float32(workers)
    return value


@settings(max_examples=10)
@given(st.integers(0, 2**32), st.sampled_from([None, 0.0, 0.5]))
def test_with_0_the_bits_are_those_of_synchronous_training(
    seed: int, strength: float | None
) -> None:
    """Also with delay compensation: there is no delay, so w is w_bak."""
    world = Trained(0, workers=3, steps=4, slices=2, strength=strength)
    run(world, seed)
    for value in world.values:
        assert value.tobytes() == synchronous(3, 4).tobytes()


@pytest.mark.parametrize("seed", range(3))
def test_no_compensation_has_the_bits_of_plain_asgd(seed: int) -> None:
    plain, none, some = (
        run(Trained("async", workers=3, steps=5, strength=strength), seed)
        for strength in (None, 0.0, 0.5)
    )
    assert plain.stories == none.stories == some.stories
    assert plain.values[0].tobytes() == none.values[0].tobytes()
    assert plain.values[0].tobytes() != some.values[0].tobytes()
    assert plain.values[0].tobytes() != synchronous(3, 5).tobytes()


# Delay compensation.
def test_compensation_by_hand() -> None:
    """g + lambda g g (w - w_bak) = 3 + 0.5 x 9 x (2 - 4)."""
    assert compensate(3.0, 2.0, 4.0, strength=0.5) == -6.0
    array = compensate(np.array([3.0, 1.0]), np.array([2.0, 1.0]), np.array([4.0, 1.0]), strength=1)
    assert array.tolist() == [-15.0, 1.0]
    minus_zero = compensate(-0.0, 1.0, 2.0, strength=0.0)
    assert math.copysign(1, minus_zero) == -1


@pytest.mark.parametrize("strength", [-0.1, math.inf, math.nan])
def test_a_strength_that_cannot_be_is_refused(strength: float) -> None:
    with pytest.raises(ConfigError, match=r"strength is .*; it must be finite and at least 0"):
        compensate(1.0, 1.0, 1.0, strength=strength)


# What goes wrong.
def server(staleness: Staleness = 1, workers: int = 2) -> ServerMachine:
    return server_of(staleness, workers, ["w"])


def events() -> Iterator[tuple[Sequence[Any], str]]:
    push = PushArrived(0, 0, 1, 0, 0)
    yield [push._replace(rank=2)], "rank 2 of a world of 2"
    yield [push._replace(slice=1)], "slice 1 does not belong to server 0"
    yield [push, push], "rank 0 pushed slice 0 of w for step 1 after step 1"
    early = "rank 0 pushed slice 0 of w for step 2 before it was answered about step 1"
    yield [push, push._replace(step=2)], early
    yield [PeerLeft(0), push], "rank 0 pushed slice 0 of w for step 1 after its goodbye"


@pytest.mark.parametrize(("happening", "told"), list(events()))
def test_a_push_that_cannot_be_is_told_and_changes_nothing(
    happening: Sequence[Any], told: str
) -> None:
    machine = server()
    for event in happening[:-1]:
        machine.handle(event)
    before = pickle.dumps(pickle.loads(pickle.dumps(machine)))
    with pytest.raises(RemoteProtocolError) as raised:
        machine.handle(happening[-1])
    assert str(raised.value) == told
    assert pickle.dumps(pickle.loads(pickle.dumps(machine))) == before


def test_who_waits_for_one_that_has_left_is_told() -> None:
    machine = server(staleness=1)
    assert machine.handle(PeerLeft(1)) == []
    assert machine.handle(PushArrived(0, 0, 1, 0, 0)) == [UpdateSlice(0, 1, (0,), counted=(0,))]
    assert [frame.peer for frame in machine.handle(SliceUpdated())] == [0]
    failure, update = machine.handle(PushArrived(0, 0, 2, 0, 0))
    assert failure == FailSession(
        "rank 1 has left the session after step 0, but rank 0 is at step 2, and may be 1 steps"
        " ahead with w: all ranks must make the same number of steps",
        1,
        0,
    )
    assert update == UpdateSlice(0, 2, (0,), counted=(0,))
    later = server(staleness=1)
    for step in (1, 2):
        later.handle(PushArrived(0, 0, step, 0, 0))
        later.handle(SliceUpdated())
    assert later.handle(PeerLeft(1)) == [failure]


def test_workers_that_are_never_apart_are_closed_together() -> None:
    machine = server(staleness=0)
    assert machine.handle(PushArrived(1, 0, 1, 0, 0)) == []
    assert machine.handle(PushArrived(0, 0, 1, 0, 0)) == [UpdateSlice(0, 1, (0, 1))]
    with pytest.raises(InternalError, match="never apart"):
        BoundedStaleness({}, each_worker(2), staleness=0)


def test_without_a_bound_who_leaves_is_not_missed() -> None:
    machine = server("async")
    assert machine.handle(PeerLeft(1)) == []
    assert machine.handle(PushArrived(0, 0, 1, 0, 0)) == [UpdateSlice(0, 1, (0,), counted=(0,))]
    assert [frame.peer for frame in machine.handle(SliceUpdated())] == [0]  # type: ignore[union-attr]
    assert machine.handle(PeerLeft(0)) == [Finish()]


def test_events_that_it_does_not_know() -> None:
    with pytest.raises(InternalError, match="does not know the event 'x'"):
        server().handle("x")
    with pytest.raises(InternalError, match="an update finished that nobody started"):
        server().handle(SliceUpdated())


# Settings.
@pytest.mark.parametrize("value", [-1, 1.5, "none", None])
def test_a_staleness_that_cannot_be_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        most_steps_apart(value)
    assert f"staleness is {value!r}; it must be a number of steps from 0" in str(raised.value)


# Values: those to begin from, and those of a moment.
class Asking(World):
    """Each worker may ask once for the values as they are, when it is owed no answer."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.asked: set[int] = set()
        self.at_rest: set[int] = set(range(self.workers))

    def state(self) -> tuple[Any, ...]:
        return (*super().state(), repr((sorted(self.asked), sorted(self.at_rest))))

    def choices(self) -> list[tuple[str, int, int]]:
        found = [each for each in super().choices() if each[0] != "push" or self._rests(each[1])]
        asking = (rank for rank in range(self.workers) if rank not in self.asked)
        found += [("ask", rank, 0) for rank in asking if self._rests(rank) and self._answered(rank)]
        return found

    def _rests(self, rank: int) -> bool:
        return rank in self.at_rest

    def _answered(self, rank: int) -> bool:
        return self.answered[rank] == self.pushed[rank] and self.begun[rank] == 2

    def happen(self, choice: tuple[str, int, int]) -> None:
        what, rank, _ = choice
        if what != "ask":
            super().happen(choice)
            return
        self.asked.add(rank)
        self.at_rest.remove(rank)
        self._handle(PullArrived(rank, 0, 0, 0))

    def _answer(self, rank: int, frame: SendFrame, story: Story) -> None:
        if frame.step:
            super()._answer(rank, frame, story)
            return
        assert story[: len(self.known[rank][0])] == self.known[rank][0], "an older value"
        self.known[rank][frame.slice] = story
        self.at_rest.add(rank)


@pytest.mark.parametrize("staleness", [1, pytest.param("async", marks=LONG)])
def test_whoever_asks_for_values_gets_none_that_are_older(staleness: Staleness) -> None:
    asked: set[int] = set()
    explore(Asking(staleness, workers=2, steps=2), lambda world: asked.update(world.asked))  # type: ignore[attr-defined]
    assert asked == {0, 1}


def test_rank_0s_values_go_to_all_others_once() -> None:
    machine = server(workers=3)
    first = list(machine.handle(ValueArrived(0, 0, 0, 4)))
    frames = [frame for frame in first if isinstance(frame, SendFrame)]
    assert first[0] == InstallValue(0)
    assert [(frame.peer, frame.step, frame.priority) for frame in frames] == [(1, 0, 4), (2, 0, 4)]
    with pytest.raises(
        RemoteProtocolError, match="values for slice 0 of w came for step 0: step 0 is done"
    ):
        machine.handle(ValueArrived(0, 0, 0, 4))
    with pytest.raises(RemoteProtocolError, match="rank 1 sent parameter values; only rank 0 may"):
        machine.handle(ValueArrived(1, 0, 0, 4))
    assert machine.handle(ValueArrived(0, 0, 3, 4)) == []  # as it reads them


def test_who_is_owed_an_answer_asks_for_nothing() -> None:
    machine = server()
    machine.handle(PushArrived(0, 0, 1, 0, 0))
    told = r"rank 0 pulled slice 0 after step 0; .* when it is owed no answer"
    with pytest.raises(RemoteProtocolError, match=told):
        machine.handle(PullArrived(0, 0, 0, 0))
    with pytest.raises(RemoteProtocolError, match="rank 1 pulled slice 0 of step 1"):
        machine.handle(PullArrived(1, 0, 1, 0))


def test_a_step_without_a_push_counts_as_one_without_gradient() -> None:
    """A parameter that is frozen for a while, on all ranks alike, has such steps."""
    machine = server(staleness=1)
    machine.handle(PushArrived(0, 0, 5, 0, 0))
    assert machine.handle(SliceUpdated()) == []
    assert machine.incomplete() == [(0, 5)]
    assert machine.describe_wait(0, 5) == (
        "w waits for rank 1, which is at step 0: step 5 may be 1 ahead"
    )
    machine.handle(PushArrived(1, 0, 4, 0, 0))
    answers = machine.handle(SliceUpdated())
    assert sorted((frame.peer, frame.step) for frame in answers) == [(0, 5), (1, 4)]  # type: ignore[union-attr]
    assert machine.incomplete() == []
    assert machine.describe_wait(0, 6) == "w has not been pushed"


@pytest.mark.parametrize(
    ("flag", "told"),
    [(Flag.GRADIENT, "the average gradient of w is asked for"), (Flag.VALUE_CHANGED, "by hand")],
)
def test_a_push_that_means_all_ranks_together_ends_the_session(flag: Flag, told: str) -> None:
    (failure,) = server().handle(PushArrived(1, 0, 1, 0, int(flag)))
    assert isinstance(failure, FailSession)
    assert (failure.rank, failure.step) == (-1, 1)
    assert told in failure.reason


def test_control_frames_take_their_turn() -> None:
    machine = server()
    (frame,) = machine.handle(MessageReady(1, Kind.STATE_REPLY, 0, -1, 0, 7))
    assert frame == SendFrame(1, Kind.STATE_REPLY, 0, 0, -1, 0, 7)
    assert machine.handle(FrameSent(1)) == []

"""Whatever the order in which things happen, every parameter is updated exactly once per step."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreprop.config import PRESETS
from foreprop.core import worker_machine as worker
from foreprop.core.barrier import NormCombiner
from foreprop.core.collect import SendSquares
from foreprop.core.frames import SendFrame
from foreprop.core.norm import SquareSum
from foreprop.core.pushwindow import PushWindow, may_hold_back
from foreprop.core.sendqueue import AT_ONCE, ONE_LANE, USUAL_TURNS, SendLanes, Turns
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Partition
from foreprop.core.wire import Flag
from foreprop.core.worker_machine import WorkerMachine
from foreprop.errors import RemoteProtocolError
from tests.simulator import Cluster, Setup, _Links, _Worker
from tests.tiers import long_cases

SEEDS = st.integers(0, 2**32 - 1)
KNOBS = {
    "granularity": ["slice", "array"],
    "order": ["priority", "fifo"],
    "reply": ["broadcast", "notify", "pull"],
    "placement": ["round_robin", "kvstore", "balanced", "strict_round_robin"],
}


@st.composite
def setups(draw: st.DrawFn, preset: str | None = None) -> Setup:
    if preset is None:
        knobs: dict[str, Any] = {name: draw(st.sampled_from(c)) for name, c in KNOBS.items()}
    else:
        knobs = dict(PRESETS[preset])
    sizes = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    workers, steps = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    workers_per_node = draw(st.integers(1, 3))
    averages = draw(st.booleans())
    needs_norm = not averages and draw(st.booleans())
    may_hold = may_hold_back(knobs["order"], knobs["reply"], needs_norm=needs_norm)
    cells = [(r, p, s) for r in range(workers) for p in range(len(sizes)) for s in range(1, 4)]
    return Setup(
        sizes_elems=sizes,
        partition=Partition(
            granularity=knobs["granularity"],
            placement=knobs["placement"],
            servers=draw(st.integers(1, 3)),
            slice_elems=draw(st.integers(1, 4)),
            big_array_elems=3,
        ),
        order=knobs["order"],
        reply=knobs["reply"],
        workers=workers,
        workers_per_node=workers_per_node,
        steps=steps,
        turns=Turns(
            draw(st.integers(0, 2)),
            draw(st.sampled_from([1, 2, AT_ONCE])),
            draw(st.integers(0, 2)),
        )
        if knobs.get("lanes") != "one"
        else ONE_LANE,
        forward_order=tuple(draw(st.permutations(range(len(sizes))))),
        unused=draw(st.frozensets(st.sampled_from(cells), max_size=6)),
        wait_at_end=needs_norm or draw(st.booleans()),  # rank 0 stays until the norm is told
        needs_norm=needs_norm,
        averages=averages,
        measures=averages and draw(st.booleans()),
        rounds=draw(st.lists(st.integers(1, 3), min_size=3, max_size=3)) if averages else (),
        window_elems=draw(st.none() | st.integers(0, 6)) if may_hold else None,
    )


def check(setup: Setup, seed: int) -> Cluster:
    """Run it (the simulator checks every step of the way), then look at how it ended."""
    cluster = Cluster(setup, seed).run()
    expected = Counter(
        (piece.number, step, setup.pushing(piece.parameter, step))
        for piece in cluster.slices
        for step in range(1, setup.steps + 1)
        for _ in range(setup.rounds_in(step))
    )
    # a session may end while its last update is still under way if nobody waits for it
    done = Counter(tuple(update) for update in cluster.updates)
    if setup.wait_at_end:
        assert done == expected
        for worker in cluster.workers:
            steps = [s for s in range(1, setup.steps + 1) for _ in range(setup.rounds_in(s))]
            steps = steps if worker.rank == 0 else [0, *steps]
            assert all(completed == steps for completed in worker.completed)
            assert worker.stories == [
                setup.story(piece.parameter, setup.steps) for piece in cluster.slices
            ]
        for (node, server), relay in cluster.relays.items():
            assert sorted(relay.sums) == sorted(sums_of(cluster, node, server))
    else:
        assert done <= expected
        assert all(done[update] == n for update, n in expected.items() if update[1] < setup.steps)
    return cluster


def sums_of(cluster: Cluster, node: int, server: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """What a relay has to sum: slice, step and the node's ranks that have a gradient."""
    setup = cluster.setup
    for piece in cluster.slices:
        for step in range(1, setup.steps + 1):
            ranks = setup.ranks(piece.parameter, step)
            own = tuple(rank for rank in ranks if rank // setup.workers_per_node == node)
            if piece.server == server:
                for _ in range(setup.rounds_in(step)):
                    yield piece.number, step, own


@pytest.mark.parametrize("examples", [12, *long_cases(150)])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_updates_every_parameter_once_per_step(preset: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(setups(preset), SEEDS)
    def run(setup: Setup, seed: int) -> None:
        check(setup, seed)

    run()


@pytest.mark.parametrize("examples", [100, *long_cases(400)])
def test_so_does_every_combination_of_knobs(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(setups(), SEEDS)
    def run(setup: Setup, seed: int) -> None:
        check(setup, seed)

    run()


def example(preset: str, **changes: Any) -> Setup:
    knobs: dict[str, Any] = dict(PRESETS[preset])
    partition = Partition(
        granularity=knobs["granularity"],
        placement=knobs["placement"],
        servers=2,
        slice_elems=2,
        big_array_elems=3,
    )
    setup: dict[str, Any] = {
        "sizes_elems": (3, 7, 1, 0, 5),
        "partition": partition,
        "order": knobs["order"],
        "reply": knobs["reply"],
        "turns": ONE_LANE if knobs["lanes"] == "one" else USUAL_TURNS,
        "workers": 3,
        "steps": 3,
        "forward_order": (2, 0, 4, 1, 3),
        "unused": frozenset({(0, 1, 2), (1, 1, 2), (2, 1, 2), (1, 0, 3)}),
    }
    return Setup(**{**setup, **changes})


ALL = list(itertools.product(PRESETS, [False, True], [1, 2]))
"""Presets; with a norm, or with averages that are measured; and workers per node."""
USUAL = [case for number, case in enumerate(ALL) if number % 4 == number // 4 % 4]
CASES = [*USUAL, *long_cases(*(case for case in ALL if case not in USUAL))]


@pytest.mark.parametrize("seeds", [range(4), *long_cases(range(4, 40))])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_updates_are_the_same_under_any_interleaving(
    case: tuple[str, bool, int], seeds: range
) -> None:
    preset, needs_norm, workers_per_node = case
    setup = example(preset, needs_norm=needs_norm, workers_per_node=workers_per_node)
    clusters = [check(setup, seed) for seed in seeds]
    orders = {tuple(cluster.updates) for cluster in clusters}
    assert len(orders) > 1  # the schedules do differ
    assert len({tuple(sorted(order)) for order in orders}) == 1


def test_the_simulator_notices_an_order_that_is_not_total(monkeypatch: pytest.MonkeyPatch) -> None:
    """This shows that the checks above can fail."""
    original = WorkerMachine._on_frame_sent

    def lifo(self: WorkerMachine, event: Any) -> Any:
        queue = self._lanes._queues[event.peer]
        items = queue.items()
        while queue:
            queue.pop()
        for i, frame in enumerate(reversed(items)):
            queue.push(0, i, frame)
        return original(self, event)

    monkeypatch.setattr(WorkerMachine, "_on_frame_sent", lifo)
    with pytest.raises(AssertionError, match="overtook"):
        check(example("p3"), 1)


def test_the_simulator_notices_a_second_frame_to_one_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def never_busy(self: SendLanes[Any], peer: int) -> list[Any]:
        queue = self._queues.get(peer)
        return [queue.pop()] if queue else []

    monkeypatch.setattr(SendLanes, "depart_to", never_busy)
    with pytest.raises(AssertionError, match="two frames are in the hands of one link"):
        check(example("p3"), 1)


def test_the_simulator_notices_a_peer_that_holds_up_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = SendLanes.depart

    def one_at_a_time(self: SendLanes[Any]) -> list[Any]:
        return [] if self._busy else original(self)[:1]

    monkeypatch.setattr(SendLanes, "depart", one_at_a_time)
    with pytest.raises(AssertionError, match="idle while frames wait"):
        check(example("p3"), 1)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_peer_may_have_a_frame_under_way_at_once_unless_there_is_one_lane(
    preset: str,
) -> None:
    clusters = [check(example(preset), seed) for seed in range(3)]
    servers, workers = (2, 3) if PRESETS[preset]["lanes"] == "peers" else (1, 1)
    assert max(worker.links.most_busy for c in clusters for worker in c.workers) == servers
    assert max(server.links.most_busy for c in clusters for server in c.servers) == workers


@pytest.mark.parametrize("admits", [True, False])
def test_the_simulator_notices_a_window_with_another_rule(
    admits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PushWindow, "admits", lambda *_, **__: admits)
    words = "left although the window is full" if admits else "idle while frames wait"
    with pytest.raises(AssertionError, match=words):
        check(example("p3", window_elems=2), 1)


@pytest.mark.parametrize("always", [True, False])
def test_the_simulator_notices_a_window_with_another_rule_for_links_that_are_short(
    always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = PushWindow.admits

    def admits(self: PushWindow, *push: int, is_short: bool) -> bool:
        return right(self, *push) or (always and is_short)

    monkeypatch.setattr(PushWindow, "admits", admits)

    sizes_elems = (3, 13, 1, 0, 5)  # the second one has more slices at each server than may leave
    setup = example("p3", sizes_elems=sizes_elems, window_elems=2, turns=Turns(at_least=2))

    def any_seed() -> None:
        for seed in range(100):
            check(setup, seed)

    words = "left although the window is full" if always else "idle while frames wait"
    with pytest.raises(AssertionError, match=words):
        any_seed()


def test_the_simulator_notices_a_window_that_regards_only_the_amount(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then a worker's less urgent pushes keep back what the others wait for."""

    def rule(unanswered: Any, window: int) -> bool:
        return len(unanswered) >= 2 and window <= 2

    def admits(self: PushWindow, server: int, *_: int, **__: bool) -> bool:
        return not rule(self._unanswered.get(server, ()), self._window_bytes)

    def is_held(self: Any, server: int, *_: Any) -> bool:
        return rule([e for e in self._unanswered if e[0] == server], 2)

    monkeypatch.setattr(PushWindow, "admits", admits)
    monkeypatch.setattr(_Worker, "_is_held", is_held)

    def any_seed() -> None:
        for seed in range(100):
            check(example("p3", window_elems=2), seed)

    with pytest.raises(AssertionError, match="deadlock"):
        any_seed()


def test_a_push_window_and_the_wait_for_all_pushes_would_be_a_deadlock() -> None:
    """Which is why `may_hold_back` is false then."""
    assert not may_hold_back("priority", "broadcast", needs_norm=True)
    with pytest.raises(AssertionError, match="deadlock"):
        check(example("p3", needs_norm=True, window_elems=2), 1)


def test_the_simulator_notices_an_update_before_the_norm_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = example("p3", needs_norm=True)
    whole = SquareSum(0, (0, 0, len(Cluster(setup, 1).with_gradient(1))))
    monkeypatch.setattr(NormCombiner, "add", lambda *_: whole)  # with the first part already
    with pytest.raises(AssertionError, match="updated before the norm was known"):
        check(setup, 1)


def test_the_simulator_notices_a_norm_that_is_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NormCombiner, "add", lambda *_: None)
    with pytest.raises(AssertionError, match="deadlock"):
        check(example("p3", needs_norm=True), 1)


@pytest.mark.parametrize("seeds", [range(3), *long_cases(range(3, 20))])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_averages_are_the_same_under_any_interleaving(
    case: tuple[str, bool, int], seeds: range
) -> None:
    preset, measures, workers_per_node = case
    setup = example(
        preset,
        averages=True,
        measures=measures,
        rounds=(1, 3, 2),
        workers_per_node=workers_per_node,
        window_elems=2 if preset == "p3" else None,
    )
    clusters = [check(setup, seed) for seed in seeds]
    assert len({tuple(cluster.updates) for cluster in clusters}) > 1


def averaging(**changes: Any) -> Setup:
    return example("p3", averages=True, measures=True, **changes)


def test_the_simulator_notices_squares_that_are_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ServerMachine._note_squares

    def silent(self: ServerMachine, *measured: Any) -> Any:
        return [each for each in original(self, *measured) if not isinstance(each, SendSquares)]

    monkeypatch.setattr(ServerMachine, "_note_squares", silent)
    with pytest.raises(AssertionError, match="deadlock"):
        check(averaging(), 1)


def test_a_push_window_that_waits_for_measured_gradients_would_be_a_deadlock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Servers answer when all have come, so the window lets them pass."""
    setup = averaging(window_elems=2, sizes_elems=(3, 13, 1, 0, 5))

    def any_seed(seeds: int) -> None:
        for seed in range(seeds):
            check(setup, seed)

    any_seed(10)
    original = worker._may_leave

    def may_leave(window: PushWindow, frame: SendFrame, is_short: bool) -> bool:
        return original(window, frame._replace(flags=0), is_short)

    monkeypatch.setattr(worker, "_UNCOUNTED", Flag.NO_GRADIENT)
    monkeypatch.setattr(worker, "_may_leave", may_leave)
    monkeypatch.setattr(_Links, "check_none_waits_for_another", lambda _: None)
    with pytest.raises(AssertionError, match="deadlock"):
        any_seed(100)


def test_the_simulator_notices_a_round_that_is_taken_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = Setup.flags

    def flags(self: Setup, rank: int, parameter: int, step: int, again: int) -> int:
        return original(self, rank, parameter, step, min(again, 1))

    monkeypatch.setattr(Setup, "flags", flags)
    with pytest.raises(RemoteProtocolError, match="which is past"):
        check(averaging(rounds=(1, 3, 1)), 1)


def test_the_simulator_notices_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerMachine, "_pull_if_all_notified", lambda self, parameter: [])
    with pytest.raises(AssertionError, match="deadlock: rank 0"):
        check(example("kvstore", unused=frozenset()), 1)

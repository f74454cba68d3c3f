"""Deaths and late workers: every interleaving of small cases, and seeded ones of larger cases."""

from __future__ import annotations

from typing import Any

import pytest

from foreprop.core.collect import AnswerSlice, DropPush, SliceUpdated, UpdateSlice
from foreprop.core.firstmembers import FirstMembers
from foreprop.core.frames import (
    FailSession,
    Finish,
    InstallValue,
    PeerLeft,
    PullArrived,
    PushArrived,
    ValueArrived,
)
from foreprop.core.membership import (
    CountedLog,
    CountedReplay,
    MemberLeft,
    Members,
    PeerDropped,
)
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Slice
from foreprop.core.wire import ROUND_SHIFT, Flag
from foreprop.errors import ConfigError, InternalError, RemoteProtocolError
from tests.tiers import long_cases
from tests.unit.counting_world import World, counting_server, explore, replayed, run, sets_of

LONG = pytest.mark.long


# Deaths.
@pytest.mark.parametrize(
    ("workers", "servers", "steps", "kill"),
    [(2, 1, 2, 1), (2, 2, 1, 0), pytest.param(3, 1, 1, 2, marks=LONG)],
)
def test_in_any_interleaving_survivors_of_a_death_end_alike(
    workers: int, servers: int, steps: int, kill: int
) -> None:
    sets: set[tuple[int, ...]] = set()

    def look(world: World) -> None:
        if world.is_done and world.dead:
            sets.update(sets_of(world.stories))

    about: dict[str, Any] = {
        "workers": workers,
        "servers": servers,
        "slices": servers,
        "steps": steps,
    }
    assert explore(World(**about, kill=kill, prompt=True, leaves=servers == 1), look) > 100
    everybody = tuple(range(workers))
    assert sets == {everybody, tuple(rank for rank in everybody if rank != kill)}


@pytest.mark.timeout(600)  # ten thousand take 20 s of a processor
@pytest.mark.parametrize("seeds", [120, *long_cases(10_000)])
def test_seeded_kill_points(seeds: int) -> None:
    """Three workers, two servers, four slices: one dies anywhere; the log gives the same bits."""
    within, events = 0, 0
    for seed in range(seeds):
        world = World(workers=3, servers=2, slices=4, steps=3, kill=seed % 3)
        run(world, seed, kill_after=(seed * 7) % 190)
        events += bool(world.left)
        if len(world.left) == 2:  # or it has said goodbye to a server
            last = max(left.step for left in world.left)
            counted = [left.counted for left in world.left if left.step == last]
            within += 0 < sum(counted) < 4
            check_left(world, last)
        if seed % 10 == 0:
            assert replayed(world, seed).stories == world.stories
    assert events > seeds / 2, "hardly anybody has died"
    assert within > seeds / 20, "no step was left in its middle"


def check_left(world: World, last: int) -> None:
    """What servers say of it is so, and it is counted in no later step."""
    (rank,) = world.dead
    for server, left in enumerate(sorted(world.left, key=lambda each: each.slices)):
        assert (left.rank, left.slices) == (rank, 2), server
    for story in world.stories:
        counting = [step for step, counted in story if rank in counted]
        assert counting == list(range(1, len(counting) + 1))
        assert last - 1 <= len(counting) <= last
    at_last = sum((last, rank) in [(s, r) for s, c in story for r in c] for story in world.stories)
    assert at_last == sum(left.counted for left in world.left if left.step == last)


def test_the_exploration_notices_a_server_that_waits_for_the_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FirstMembers, "_close_if_complete", waits_for_all)
    with pytest.raises(AssertionError, match="deadlock"):
        explore(World(workers=2, steps=1, kill=1))


def waits_for_all(self: FirstMembers, slice_: int, state: object) -> object:
    if len(state.collecting) < self.members.workers:  # type: ignore[attr-defined]
        return []
    return ORIGINAL(self, slice_, state)  # type: ignore[arg-type]


ORIGINAL = FirstMembers._close_if_complete


# Backup workers.
@pytest.mark.parametrize(
    ("workers", "slices", "steps"), [(2, 1, 3), (2, 2, 2), pytest.param(3, 1, 2, marks=LONG)]
)
def test_in_any_interleaving_what_counts_is_of_one_step_s_values(
    workers: int, slices: int, steps: int
) -> None:
    """`World._check_reads` looks at each gradient that is counted, `explore` for deadlocks."""
    late: set[int] = set()
    world = World(workers=workers, slices=slices, steps=steps, backups=1, prompt=True, leaves=False)
    assert explore(world, lambda each: late.update(each.newer)) > 100
    assert late > {0}, "nobody has met newer values"


@pytest.mark.parametrize("seeds", [60, *long_cases(1000)])
def test_seeded_lateness(seeds: int) -> None:
    sets, late = set(), 0
    for seed in range(seeds):
        backups = 1 + seed % 2
        world = World(workers=4, servers=2, slices=4, steps=4, backups=backups)
        run(world, seed)
        sets |= sets_of(world.stories)
        late += any(world.newer)
        if seed % 5 == 0:
            assert replayed(world, seed).stories == world.stories
    assert len(sets) == 4 + 6, "three of four, and two of four"
    assert late > seeds / 10


def test_the_world_notices_gradients_of_newer_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """This shows that `_check_reads` can fail."""
    original = World._push

    def forgetful(self: World, rank: int, slice_: int) -> None:
        self.newer[rank] = 0
        original(self, rank, slice_)

    monkeypatch.setattr(World, "_push", forgetful)

    def run_many() -> None:
        for seed in range(300):
            run(World(workers=3, servers=2, slices=4, steps=4, backups=1), seed)

    with pytest.raises(AssertionError, match="was read in step"):
        run_many()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "about",
    [
        {"workers": 2, "meets": (1, 2), "steps": 2},
        {"workers": 2, "meets": (2,), "steps": 2, "kill": 0},
        {"workers": 2, "meets": (2,), "steps": 2, "kill": 1},
        {"workers": 2, "steps": 2, "norm": True, "kill": 0},
        pytest.param(
            {"workers": 2, "slices": 2, "servers": 2, "steps": 1, "norm": True}, marks=LONG
        ),
        pytest.param({"workers": 3, "meets": (1,), "steps": 1, "kill": 2}, marks=LONG),
    ],
    ids=str,
)
def test_in_any_interleaving_of_meetings_norms_and_deaths(about: dict[str, Any]) -> None:
    """All that meet have the same values, and nobody waits for a norm in vain."""
    world = World(backups=1, prompt=True, leaves=False, **about)
    assert explore(world) > 100


@pytest.mark.timeout(600)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("seeds", [40, *long_cases(3000)])
def test_seeded_deaths_of_those_who_are_late_and_of_others(seeds: int, norm: bool) -> None:
    """As many die as there are backups, or more of four: the rest goes on, the log is true."""
    sets, late = set(), 0
    for seed in range(seeds):
        about: dict[str, Any] = {"backups": 1 + seed % 3, "kill": seed % 4, "norm": norm}
        about["meets"] = [(2, 4), (2,)][seed % 2]
        world = World(workers=4, servers=2, slices=4, steps=4, **about)
        run(world, seed, kill_after=(seed * 7) % 290)
        sets |= sets_of(world.stories)
        late += any(world.newer)
        if seed % 10 == 0:
            again = replayed(world, seed)
            assert (again.stories, again.norms) == (world.stories, world.norms)
    assert {len(counted) for counted in sets} >= {1, 2, 3}
    assert late > seeds / 10


def test_without_lateness_and_deaths_all_are_counted() -> None:
    ends = set()

    def look(world: World) -> None:
        if world.is_done:
            ends.add(tuple(world.stories))

    explore(World(workers=2, servers=1, slices=2, steps=2), look)
    story = tuple((step, (0, 1)) for step in (1, 2))
    assert ends == {(story, story)}


def test_slices_that_nobody_has_a_gradient_of() -> None:
    cells = frozenset((rank, 0, step) for rank in range(3) for step in (1, 2))
    for seed in range(20):
        world = World(workers=3, servers=2, slices=3, steps=3, unused=cells, kill=2)
        run(world, seed, kill_after=seed * 6)


# One server by itself.
def server_of(workers: int = 2, backups: int = 0, slices: int = 1) -> ServerMachine:
    server = counting_server(
        [Slice(number, number, 0, 1, 0) for number in range(slices)],
        Members(workers, backups=backups),
        [f"p{number}" for number in range(slices)],
    )
    others = tuple(range(1, workers))
    for number in range(slices):
        told = server.handle(ValueArrived(0, number, 0, 5))
        assert told == [InstallValue(number), AnswerSlice(number, 0, 5, others)]
    return server


def push(rank: int, step: int = 1, flags: int = 0, slice_: int = 0) -> PushArrived:
    return PushArrived(rank, slice_, step, 7, flags)


def test_a_death_closes_what_waited_for_it() -> None:
    server = server_of(3, slices=2)
    for rank in (0, 2):
        assert server.handle(push(rank)) == []
    assert server.awaited() == {1}
    assert server.describe_wait(0, 1) == "p0 waits for the push of rank 1"
    told = server.handle(PeerDropped(1))
    assert isinstance(told[0], MemberLeft)
    assert tuple(told[0]) == (1, 0, 0, 2)
    assert isinstance(told[1], UpdateSlice)
    assert (told[1].ranks, told[1].counted) == ((0, 2), (0, 2))
    assert server.handle(PeerDropped(1)) == []
    assert server.handle(push(1)) == [DropPush(0, 1, 1)]
    assert server.handle(SliceUpdated()) == [AnswerSlice(0, 1, 7, (0, 2))]
    assert server.describe_wait(0, 1) == "p0 is updated; no reply is queued"
    assert server.awaited() == set()


def test_what_a_dead_worker_has_pushed_counts() -> None:
    server = server_of(2)
    server.handle(push(1))
    told = server.handle(PeerDropped(1))
    assert [type(each) for each in told] == [MemberLeft]
    assert tuple(told[0]) == (1, 1, 1, 1)
    assert server.awaited() == set(), "nobody who is here waits for rank 0"
    (due,) = server.handle(push(0, flags=Flag.NO_GRADIENT))
    assert isinstance(due, UpdateSlice)
    assert (due.ranks, due.counted) == ((1,), (0, 1))
    assert server.handle(SliceUpdated()) == [AnswerSlice(0, 1, 7, (0,))]


def test_where_workers_update_it_counts_beside_one_that_stays() -> None:
    """Alone in a round it may have been ahead, with an average that its own server gave it alone.

    Of two slices: in the first one a member that stays has pushed the same round, in the other not.
    """
    names = ["p0", "p1"]
    pieces = [Slice(number, number, 0, 1, 0) for number in range(2)]
    server = counting_server(pieces, Members(3), names, has_values=False)
    average = int(Flag.GRADIENT)
    for slice_ in range(2):
        server.handle(push(1, flags=average, slice_=slice_))
    assert server.handle(push(2, flags=average)) == []
    left, dropped = server.handle(PeerDropped(1))
    assert left == MemberLeft(1, 1, 1, 2)
    assert dropped == DropPush(1, 1, 1)
    (due,) = server.handle(push(0, flags=average))
    assert isinstance(due, UpdateSlice)
    assert due.counted == (0, 1, 2)
    server.handle(SliceUpdated())
    server.handle(push(2, flags=average, slice_=1))
    (due,) = server.handle(push(0, flags=average, slice_=1))
    assert isinstance(due, UpdateSlice)
    assert due.counted == (0, 2)


def test_of_two_that_are_lost_after_each_other_neither_counts_alone() -> None:
    server = counting_server([Slice(0, 0, 0, 1, 0)], Members(3), ["p0"], has_values=False)
    for rank in (1, 2):
        server.handle(push(rank, flags=Flag.GRADIENT))
    assert server.handle(PeerDropped(1)) == [MemberLeft(1, 1, 1, 1)]
    left, *dropped = server.handle(PeerDropped(2))
    assert left == MemberLeft(2, 1, 0, 1)
    assert dropped == [DropPush(0, 1, 1), DropPush(0, 2, 1)]
    (due,) = server.handle(push(0, flags=Flag.GRADIENT))
    assert isinstance(due, UpdateSlice)
    assert due.counted == (0,)


def test_who_cannot_be_spared() -> None:
    server = counting_server([Slice(0, 0, 0, 1, 0)], Members(2), ["p0"])
    assert server.can_spare(1)
    assert not server.can_spare(0), "nobody else has the values"
    with pytest.raises(InternalError, match="rank 0 was dropped, and cannot be spared"):
        server.handle(PeerDropped(0))
    begun = server_of(2)
    begun.handle(PeerDropped(0))
    assert not begun.can_spare(1), "nobody would be left"


def test_the_end_waits_for_members_only() -> None:
    server = server_of(3)
    assert server.handle(PeerLeft(0)) == []
    assert server.awaited() == {1, 2}
    assert server.handle(PeerLeft(2)) == []
    told = server.handle(PeerDropped(1))
    assert [type(each) for each in told] == [MemberLeft, Finish]


def test_steps_that_one_rank_does_not_make() -> None:
    server = server_of(2)
    server.handle(push(0))
    (failed,) = server.handle(PeerLeft(1))
    assert isinstance(failed, FailSession)
    assert failed.reason == (
        "rank 1 has left the session, but ranks [0] are at step 1 and need its gradient of p0: all"
        " ranks must make the same number of steps"
    )


def test_a_late_push_is_dropped_and_answered() -> None:
    server = server_of(2, backups=1)
    (due,) = server.handle(push(0))
    assert isinstance(due, UpdateSlice)
    assert due.counted == (0,)
    assert server.handle(push(1)) == [DropPush(0, 1, 1)]
    late = AnswerSlice(0, 1, 7, (1,), int(Flag.DROPPED))
    assert server.handle(SliceUpdated()) == [AnswerSlice(0, 1, 7, (0,)), late]
    server.handle(push(0, 2))
    server.handle(SliceUpdated())
    assert server.handle(push(1, 2)) == [DropPush(0, 1, 2), late._replace(step=2)]


def test_who_comes_to_meet_is_answered_with_the_last_one() -> None:
    server = server_of(3, backups=1)
    for rank in range(3):
        server.handle(push(rank))
    with pytest.raises(RemoteProtocolError, match=r"slice 0 after step 1; .* is owed"):
        server.handle(PullArrived(1, 0, 1, 3))
    server.handle(SliceUpdated())
    assert server.handle(PullArrived(1, 0, 1, 3)) == []
    waits = "p0 is to be read by all together, and waits for ranks 0, 2"
    assert server.describe_wait(0, 0) == waits
    assert server.awaited() == {0, 2}
    assert server.handle(PullArrived(0, 0, 1, 2)) == []
    told = server.handle(PeerDropped(2))
    assert told[1:] == [AnswerSlice(0, 0, 2, (0, 1))]
    assert server.handle(PullArrived(2, 0, 1, 3)) == []
    assert server.awaited() == set()


def test_never_fewer_than_one_is_counted_when_members_are_lost() -> None:
    """Two backups of four: with three or fewer members one is enough."""
    server = server_of(4, backups=2)
    server.handle(push(0))
    (due,) = server.handle(push(1))
    assert due.counted == (0, 1)  # type: ignore[attr-defined]
    server.handle(SliceUpdated())
    told = server.handle(PeerDropped(3))
    assert told == [MemberLeft(3, 1, 0, 1)]
    (due,) = server.handle(push(1, 2))
    assert due.counted == (1,)  # type: ignore[attr-defined]
    server.handle(SliceUpdated())
    server.handle(PeerDropped(2))
    (due,) = server.handle(push(0, 3))
    assert due.counted == (0,)  # type: ignore[attr-defined]
    server.handle(SliceUpdated())
    server.handle(PeerDropped(0))
    assert server.handle(push(1, 3, Flag.LATE))[0] == DropPush(0, 1, 3)


def test_where_all_who_had_the_values_are_lost_nobody_counts() -> None:
    server = server_of(3, backups=1)
    server.handle(push(0, flags=Flag.LATE))
    server.handle(PeerDropped(2))
    dropped = server.handle(push(1, flags=Flag.LATE))
    assert dropped == [DropPush(0, 0, 1), DropPush(0, 1, 1), UpdateSlice(0, 1, (), counted=())]
    flags = Flag.UNCHANGED | Flag.DROPPED
    assert server.handle(SliceUpdated()) == [AnswerSlice(0, 1, 7, (0, 1), flags)]


def test_who_comes_is_no_backup_in_its_first_step() -> None:
    members = Members(3, backups=1, started=2)
    members.here.add(2)
    members.since[2] = 5
    assert members.may_close(4, 1, [1])
    assert not members.may_close(5, 2, [2])
    assert members.may_close(5, 3, [])
    assert members.may_close(6, 2, [2])
    assert not members.may_close(6, 1, [0, 2])


def test_pushes_of_newer_values_are_waited_for_and_do_not_count() -> None:
    server = server_of(3, backups=1)
    assert server.handle(push(0, flags=Flag.LATE)) == []
    assert server.handle(push(1, flags=Flag.LATE)) == []
    dropped = server.handle(push(2))
    assert dropped[:2] == [DropPush(0, 0, 1), DropPush(0, 1, 1)]
    assert isinstance(dropped[2], UpdateSlice)
    assert dropped[2].counted == (2,)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (push(2), "rank 2 of a world of 2"),
        (push(0), "rank 0 pushed slice 0 of p0 for step 1 after step 1"),
        (
            push(1, 2),
            "rank 1 pushed slice 0 of p0 for step 2 while step 1 is open: all ranks must make the"
            " same number of steps, and of backward passes in each",
        ),
        (push(1, slice_=3), "slice 3 does not belong to server 0"),
        (ValueArrived(1, 0, 0, 0), "rank 1 sent parameter values; only rank 0 may"),
        (ValueArrived(0, 0, 0, 0), "values for slice 0 of p0 came for step 0: step 0 is done"),
        (ValueArrived(0, 0, 1, 0), "values for slice 0 of p0 came for step 1: twice or late"),
        (PullArrived(1, 0, 0, 0), "rank 1 pulled slice 0; replies are broadcast"),
    ],
)
def test_what_the_protocol_does_not_allow(event: object, message: str) -> None:
    server = server_of(2)
    server.handle(push(0))
    with pytest.raises(RemoteProtocolError) as caught:
        server.handle(event)
    assert str(caught.value) == message
    assert [type(each) for each in server.handle(push(1))] == [UpdateSlice]


@pytest.mark.parametrize(
    ("backups", "flag", "dead", "why"),
    [
        (1, Flag.GRADIENT, None, "the average gradient is asked for by rank 1"),
        (1, Flag.VALUE_CHANGED, None, "it was changed by hand on rank 1: change parameters before"),
        (0, Flag.VALUE_CHANGED, 0, "by hand on rank 1, and rank 0, whose values count, has left"),
    ],
)
def test_what_has_no_meaning(backups: int, flag: Flag, dead: int | None, why: str) -> None:
    server = server_of(3, backups=backups)
    if dead is not None:
        server.handle(PeerDropped(dead))
    (failed,) = server.handle(push(1, flags=flag))
    assert isinstance(failed, FailSession)
    assert why in failed.reason


def test_a_step_may_have_several_rounds_where_workers_update() -> None:
    """Each is closed by itself; who leaves between two is in the first one."""
    server = server_of(3)
    again = Flag.GRADIENT | 1 << ROUND_SHIFT
    for rank in (0, 1):
        assert server.handle(push(rank, flags=Flag.GRADIENT)) == []
    first = UpdateSlice(0, 1, (0, 1, 2), gradient=True, counted=(0, 1, 2))
    assert server.handle(push(2, flags=Flag.GRADIENT)) == [first]
    (answer,) = server.handle(SliceUpdated())
    assert (answer.ranks, answer.is_average) == ((0, 1, 2), True)
    assert server.handle(push(0, flags=again)) == []
    server.handle(push(2, flags=again))
    _, second = server.handle(PeerDropped(1))
    assert second == UpdateSlice(0, 1, (0, 2), gradient=True, counted=(0, 2))
    (answer,) = server.handle(SliceUpdated())
    assert answer.ranks == (0, 2)
    with pytest.raises(RemoteProtocolError, match="for step 1, round 2 after step 1, round 2"):
        server.handle(push(0, flags=again))


def test_values_that_are_changed_by_hand() -> None:
    server = server_of(2)
    assert server.handle(ValueArrived(0, 0, 1, 0)) == []
    server.handle(push(0, flags=Flag.VALUE_CHANGED))
    (failed,) = server.handle(push(1))
    assert isinstance(failed, FailSession)
    assert "before step 1 on ranks [0] but not on ranks [1]" in failed.reason
    alike = server_of(2)
    alike.handle(ValueArrived(0, 0, 1, 0))
    without = Flag.NO_GRADIENT | Flag.VALUE_CHANGED
    alike.handle(push(0, flags=without))
    alike.handle(push(1, flags=without))
    assert alike.handle(SliceUpdated()) == [AnswerSlice(0, 1, 7, (0, 1))], "they have changed"


def test_nobody_counts() -> None:
    with pytest.raises(
        ConfigError, match="backup_workers is 2, and must be below the number of workers, 2"
    ):
        Members(2, backups=2)


# The log.
def test_lines_are_few() -> None:
    log = CountedLog(3, [0, 2, 4, 6])
    for step in (1, 2):
        for slice_ in (0, 2, 4, 6):
            assert log.note(slice_, step, (0, 1, 2)) == []
    log.note(0, 3, (0, 1, 2))
    for slice_ in (6, 2, 4):
        assert log.note(slice_, 3, (0, 2)) == []
    log.note(0, 4, (0, 2))
    assert log.note(2, 5, (0, 2)) == ["3 2 6 0,2"]
    assert log.rest() == ["4 0 0 0,2"]
    assert log.uncounted == 5
    replay = CountedReplay([log.head(), "3 2 6 0,2", "4 0 0 0,2"], 3, [0, 2, 4, 6])
    assert [replay.at(0, step) for step in (3, 4, 9)] == [(0, 1, 2), (0, 2), (0, 2)]
    assert [replay.at(6, step) for step in (2, 3)] == [(0, 1, 2), (0, 2)]


def test_the_log_says_who_has_left() -> None:
    log = CountedLog(3, [0, 2])
    lines = [log.head(), *log.left(1, 7), "8 0 2 0,2"]
    assert lines[1] == "7 left 1"
    replay = CountedReplay(lines, 3, [0, 2])
    assert replay.left == {1: 7}
    assert [replay.at(2, step) for step in (7, 8)] == [(0, 1, 2), (0, 2)]
    assert CountedLog(3, []).left(1, 0) == [], "who holds nothing knows nothing of its steps"


def test_the_log_of_a_session_that_has_grown() -> None:
    """It began with two of up to five, of which a third has come; so three are enough to replay."""
    log = CountedLog(5, [0, 1], started=2)
    lines = [log.head(), *log.note(0, 1, (0, 1)), *log.note(1, 1, (0, 1))]
    assert lines == ["foreprop counted sets 1: 2 to 5 workers, 2 slices"]
    for step in (2, 3):
        for slice_ in (0, 1):
            lines += log.note(slice_, step, (0, 1, 2))
    lines += log.rest()
    assert lines[1:] == ["2 0 1 0,1,2"]
    for workers in (3, 4, 5):
        replay = CountedReplay(lines, workers, [0, 1])
        assert [replay.at(0, step) for step in (1, 2, 3)] == [(0, 1), (0, 1, 2), (0, 1, 2)]
    with pytest.raises(ConfigError, match="'2 0 1 0,1,2' counts ranks that there are not"):
        CountedReplay(lines, 2, [0, 1])
    for workers in (1, 6):
        with pytest.raises(ConfigError, match=r"begins with .*2 to 5 workers"):
            CountedReplay(lines, workers, [0, 1])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "the log begins with '', not 'foreprop counted sets 1: 2 workers, 1 slices'"),
        (["foreprop counted sets 1: 3 workers, 1 slices"], "begins with .*3 workers"),
        ([CountedLog(2, [0]).head(), "1 0 0"], "'1 0 0' is no line of a log"),
        ([CountedLog(2, [0]).head(), "1 left"], "'1 left' is no line of a log"),
        ([CountedLog(2, [0]).head(), "1 left 2"], "'1 left 2' counts ranks that there are not"),
        ([CountedLog(2, [0]).head(), "1 0 0 0,2"], "'1 0 0 0,2' counts ranks that there are not"),
        ([CountedLog(2, [0]).head(), "1 0 0 1,0"], "'1 0 0 1,0' counts ranks that there are not"),
    ],
)
def test_logs_of_something_else(lines: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"counted_replay: .*{message}"):
        CountedReplay(lines, 2, [0])

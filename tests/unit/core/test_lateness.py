"""Stragglers: what arrivals say, whatever their order, and what ranks conclude from reports."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreprop.core.frames import PACE_STEPS
from foreprop.core.lateness import (
    ArrivalLog,
    Pace,
    Straggler,
    StragglerWatch,
    WindowReport,
    find_straggler,
)


def paces(*busy_s: float, step_s: float = 1.0) -> tuple[Pace, ...]:
    return tuple(Pace(step_s=step_s, busy_s=each) for each in busy_s)


def a_report(
    late_s: Sequence[float], busy_s: Sequence[float], *, answer_s: float = 0.0, step_s: float = 1.0
) -> WindowReport:
    return WindowReport(
        slices=10, late_s=tuple(late_s), answer_s=answer_s, paces=paces(*busy_s, step_s=step_s)
    )


@settings(max_examples=40)
@given(
    times_s=st.lists(
        st.lists(st.integers(0, 1000), min_size=3, max_size=3), min_size=1, max_size=8
    ),
    seed=st.integers(0, 2**16),
)
def test_lateness_depends_on_times_and_not_on_who_is_told_first(
    times_s: list[list[int]], seed: int
) -> None:
    """Slices come interleaved, in any order of the ranks within each."""
    events = [
        (rank, slice_, at) for slice_, times in enumerate(times_s) for rank, at in enumerate(times)
    ]
    random.Random(seed).shuffle(events)
    log = ArrivalLog(3)
    for rank, slice_, at in events:
        log.arrived(rank, slice_, 1, float(at))
    report = log.report(paces(0, 0, 0))
    assert report.slices == len(times_s)
    for rank in range(3):
        expected = sum(times[rank] - sorted(times)[1] for times in times_s) / len(times_s)
        assert report.late_s[rank] == pytest.approx(expected)


def test_a_log_that_begins_in_the_middle_of_a_step_counts_whole_slices_only() -> None:
    log = ArrivalLog(2)
    log.arrived(1, 7, 4, 10.0)  # rank 0's came before the log began
    log.arrived(0, 7, 5, 20.0)
    log.arrived(1, 7, 5, 20.5)
    log.arrived(0, 7, 6, 30.0)  # rank 1's is still to come
    report = log.report(paces(0, 0))
    assert (report.slices, report.late_s) == (1, (0.0, 0.5))
    log.arrived(1, 7, 6, 30.25)
    assert log.report(paces(0, 0)).late_s == (0.0, 0.25)


def test_an_update_is_counted_from_the_last_push() -> None:
    log = ArrivalLog(2)
    log.updated(3, 1.0)  # completed before the log began
    log.arrived(0, 3, 2, 2.0)
    log.arrived(1, 3, 2, 4.0)
    log.updated(3, 4.5)
    assert log.report(paces(0, 0)).answer_s == 0.5


@given(
    ranks=st.integers(2, 8),
    data=st.data(),
    late_s=st.floats(0.25, 5.0),
    by_compute=st.booleans(),
)
def test_the_one_that_is_late_is_found_with_its_cause(
    ranks: int, data: st.DataObject, late_s: float, by_compute: bool
) -> None:
    """Others differ from each other by up to a tenth of it."""
    slow = data.draw(st.integers(0, ranks - 1))
    noise = st.floats(0.0, late_s / 10)
    late = [data.draw(noise) + (late_s if rank == slow else 0.0) for rank in range(ranks)]
    extra = late_s if by_compute else 0.0
    busy = [0.3 + data.draw(noise) + (extra if rank == slow else 0.0) for rank in range(ranks)]
    reports = {server: a_report(late, busy) for server in range(ranks)}
    found = find_straggler(reports, list(range(ranks)), 9)
    assert found is not None
    assert (found.rank, found.since_step) == (slow, 9)
    assert found.cause == ("compute" if by_compute else "link")
    assert 0.99 * late_s <= found.late_s <= 1.11 * late_s


@given(st.lists(st.floats(0.0, 0.199), min_size=2, max_size=8))
def test_nobody_is_named_for_less_than_a_fifth_of_a_step(late_s: list[float]) -> None:
    report = a_report(late_s, [0.5] * len(late_s))
    assert find_straggler({0: report}, [0], 1) is None


@pytest.mark.parametrize(("late_s", "named"), [(0.009, False), (0.011, True)])
def test_nobody_is_named_for_less_than_ten_milliseconds(late_s: float, named: bool) -> None:
    report = a_report([0.0, late_s], [0.01, 0.01 + late_s], step_s=0.02)
    assert (find_straggler({0: report}, [0], 1) is not None) == named


def test_nobody_is_named_if_half_of_them_are_late() -> None:
    report = a_report([0.0, 0.0, 0.5, 0.45], [0.5] * 4)
    assert find_straggler({0: report}, [0], 1) is None


def test_a_server_that_answers_late_is_named_with_its_rank() -> None:
    reports = {
        server: a_report([0.01, 0.0, 0.0], [0.5] * 3, answer_s=0.3 if server == 2 else 0.01)
        for server in range(3)
    }
    found = find_straggler(reports, [0, 1, 2], 1)
    assert found is not None
    assert (found.rank, found.server, found.cause) == (2, 2, "server")
    assert found.late_s == pytest.approx(0.29)
    dedicated = find_straggler(reports, [None, None, None], 1)
    assert dedicated is not None
    assert dedicated.rank is None
    assert "server 2 is late by 290 ms per step: its server" in str(dedicated)


def test_nothing_is_said_before_anything_is_measured() -> None:
    unknown = a_report([0.0, 0.9], [0.0, 0.0], step_s=0.0)
    assert find_straggler({0: unknown}, [0], 1) is None
    nothing = WindowReport(slices=0, late_s=(0.0, 0.9), answer_s=0.0, paces=paces(1, 1))
    assert find_straggler({0: nothing}, [0], 1) is None


def conclude(seed: int) -> list[Straggler | None]:
    """What a rank says after each window, told by two servers in some order: even, rank 1 late by
    its compute, then by its link, then even again."""
    windows = [
        *[a_report([0.0, 0.0], [0.5, 0.5])] * 2,
        *[a_report([0.0, 0.4], [0.3, 0.7])] * 5,
        *[a_report([0.0, 0.4], [0.5, 0.5])] * 5,
        *[a_report([0.0, 0.0], [0.5, 0.5])] * 5,
    ]
    schedule = random.Random(seed)
    told = {server: list(enumerate(windows, 1)) for server in range(2)}
    watch, said, changes = StragglerWatch([0, 1], steps_before=4), [], 0
    while any(told.values()):
        server = schedule.choice([s for s, left in told.items() if left])
        window, report = told[server].pop(0)
        changes += watch.heard(server, window, report)
        if all(not left or left[0][0] > window for left in told.values()):
            said.append(watch.straggler)
    assert changes == 3
    return said


@given(st.integers(0, 2**16))
def test_ranks_conclude_alike_in_whatever_order_servers_are_heard(seed: int) -> None:
    said = conclude(seed)
    assert said == conclude(0)
    causes = [None if each is None else each.cause for each in said]
    compute, link = ["compute"] * 5, ["link"] * 5
    assert causes == [None] * 5 + [*compute, *link, None, None]
    first = said[5]
    assert first is not None
    assert first.since_step == 4 + 2 * PACE_STEPS + 1
    assert said[6] is not None
    assert said[6].since_step == first.since_step


def named_after(windows: Sequence[WindowReport], *, links: bool) -> list[str]:
    """The causes after each window that one server tells of."""
    watch = StragglerWatch([0], links=links)
    causes = []
    for window, report in enumerate(windows, 1):
        watch.heard(0, window, report)
        causes.append("" if watch.straggler is None else watch.straggler.cause)
    return causes


BY_COMPUTE, BY_LINK = a_report([0.0, 0.4], [0.3, 0.7]), a_report([0.0, 0.4], [0.5, 0.5])
EVEN = a_report([0.0, 0.0], [0.5, 0.5])


def test_at_least_thirty_steps_name_one() -> None:
    causes = named_after([BY_COMPUTE] * 4, links=True)
    assert causes == ["", "", "", "compute"]
    assert 3 * PACE_STEPS < 30 <= 4 * PACE_STEPS
    assert named_after([BY_COMPUTE, BY_COMPUTE, BY_COMPUTE, EVEN] * 3, links=True) == [""] * 12


def test_a_link_is_suspected_before_it_is_named() -> None:
    """Less lateness is enough, and sooner: links may then be measured."""
    watch = StragglerWatch([0])
    for window in (1, 2, 3, 4, 5):
        watch.heard(0, window, a_report([0.0, 0.1], [0.5, 0.5]))
        assert (watch.suspect is not None) == (window >= 2)
        assert watch.straggler is None
    assert watch.suspect is not None
    assert (watch.suspect.rank, watch.suspect.cause) == (1, "link")


def test_a_link_that_is_not_there_is_not_blamed() -> None:
    assert named_after([BY_LINK] * 5, links=True)[-1] == "link"
    assert named_after([BY_LINK] * 5, links=False) == [""] * 5
    assert named_after([BY_COMPUTE] * 4, links=False)[-1] == "compute"

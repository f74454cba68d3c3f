"""Which host of an elastic run is tried again, in which place, and when."""

from __future__ import annotations

import pytest

from foreprop.errors import ConfigError
from foreprop.tools.run.rejoins import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    NodeRange,
    Rejoins,
    parse_nodes,
)
from foreprop.tools.run.resources import Host

A, B, C, D = (Host(name=name) for name in "abcd")


def began(*others: Host, most_restarts: int = 2) -> Rejoins:
    """A run of a, b and c that began at second 0."""
    rejoins = Rejoins(NodeRange(1, 3), (A, B, C), others, most_restarts)
    for host in (A, B, C):
        rejoins.start(host.name, 0.0)
    return rejoins


def starts(rejoins: Rejoins, now_s: float) -> list[tuple[str, int]]:
    found = []
    while pair := rejoins.next_start(now_s):
        found.append((pair[0].name, pair[1]))
    return found


def test_no_worker_is_started_while_all_are_running() -> None:
    rejoins = began(D)
    assert starts(rejoins, 1e6) == []
    assert rejoins.next_due_s() is None


def test_a_host_that_failed_comes_back_to_its_place_after_a_pause() -> None:
    rejoins = began()
    rejoins.leave("b", 1, 10.0)
    assert rejoins.next_due_s() == 10.0 + FIRST_PAUSE_S
    assert starts(rejoins, 10.5) == []
    assert starts(rejoins, 11.0) == [("b", 1)]
    assert rejoins.next_due_s() is None


def test_pauses_double_up_to_a_limit_and_no_answer_is_no_restart() -> None:
    rejoins, now_s, pauses = began(most_restarts=1), 10.0, []
    rejoins.leave("b", 1, now_s)
    for _ in range(9):
        due_s = rejoins.next_due_s()
        assert due_s is not None
        pauses.append(due_s - now_s)
        now_s = due_s
        assert starts(rejoins, now_s) == [("b", 1)]
        rejoins.miss("b", 1, now_s)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert starts(rejoins, now_s + LONGEST_PAUSE_S) == [("b", 1)]


def test_restarts_are_counted_by_host() -> None:
    rejoins, now_s = began(most_restarts=2), 0.0
    for restart in (1, 2):
        rejoins.leave("b", 1, now_s)
        told = f"b is started again (restart {restart} of 2)"
        assert rejoins.after_failure("b") == told
        now_s = rejoins.next_due_s() or 0.0
        assert starts(rejoins, now_s) == [("b", 1)]
        rejoins.start("b", now_s)
    rejoins.leave("b", 1, now_s)
    assert rejoins.after_failure("b") == "without b, after restart 2 of 2"
    assert (starts(rejoins, 1e6), rejoins.next_due_s()) == ([], None)
    rejoins.leave("c", 2, now_s)
    assert starts(rejoins, 1e6) == [("c", 2)]


def test_without_restarts_it_is_left_out() -> None:
    rejoins = began(most_restarts=0)
    rejoins.leave("b", 1, 5.0)
    assert rejoins.after_failure("b") == "without b"
    assert starts(rejoins, 1e6) == []


@pytest.mark.parametrize("worked_s", [LONGEST_PAUSE_S - 1.0, LONGEST_PAUSE_S])
def test_a_host_that_has_worked_long_begins_with_the_first_pause(worked_s: float) -> None:
    rejoins = began()
    rejoins.leave("b", 1, 0.0)
    assert starts(rejoins, 1.0) == [("b", 1)]
    rejoins.start("b", 1.0)
    rejoins.leave("b", 1, 1.0 + worked_s)
    pause_s = FIRST_PAUSE_S if worked_s == LONGEST_PAUSE_S else 2 * FIRST_PAUSE_S
    assert rejoins.next_due_s() == 1.0 + worked_s + pause_s


def test_a_host_that_did_not_answer_at_first_takes_a_free_place() -> None:
    """Its first start is no restart; the host whose place it was waits for the next one."""
    rejoins = began(D, most_restarts=1)
    rejoins.leave("b", 1, 10.0)
    assert starts(rejoins, 10.0) == [("d", 1)]
    rejoins.start("d", 10.0)
    assert (starts(rejoins, 20.0), rejoins.next_due_s()) == ([], None)
    rejoins.leave("d", 1, 20.0)
    assert rejoins.after_failure("d") == "d is started again (restart 1 of 1)"
    assert starts(rejoins, 20.0) == [("b", 1)]


def test_two_free_places_and_each_its_own() -> None:
    rejoins = began()
    rejoins.leave("c", 2, 10.0)
    rejoins.leave("b", 1, 10.0)
    assert sorted(starts(rejoins, 11.0)) == [("b", 1), ("c", 2)]


def test_a_place_whose_workers_may_still_run_waits() -> None:
    """Of a host that nobody reaches: until it has ended them by itself."""
    rejoins = began(D)
    rejoins.leave("b", 1, 10.0, gone_s=70.0)
    assert rejoins.next_due_s() == 80.0
    assert starts(rejoins, 79.0) == []
    assert starts(rejoins, 80.0) == [("d", 1)]


def test_a_place_is_for_as_many_workers() -> None:
    rejoins = began(Host(name="d", workers=2))
    rejoins.leave("b", 1, 10.0)
    assert starts(rejoins, 10.5) == []
    assert starts(rejoins, 11.0) == [("b", 1)]


# Growing.
E = Host(name="e", workers=3)


def grows(*others: Host, most: int = 3) -> Rejoins:
    """A run that a began alone at second 0."""
    rejoins = Rejoins(NodeRange(1, most), (A,), others, 0)
    rejoins.start("a", 0.0)
    return rejoins


def test_hosts_that_come_later_get_new_places_up_to_the_most() -> None:
    rejoins = grows(B, C, D)
    assert (rejoins.places, rejoins.most_workers, rejoins.next_due_s()) == (1, 3, 0.0)
    assert starts(rejoins, 5.0) == [("b", 1), ("c", 2)]
    for name in "bc":
        rejoins.start(name, 5.0)
    assert (rejoins.places, rejoins.next_due_s()) == (3, None)
    rejoins.leave("b", 1, 9.0)
    assert starts(rejoins, 9.0) == [("d", 1)], "it had to stand by"


def test_a_place_that_no_host_took_goes_to_another_host() -> None:
    """Whatever its number of workers; one that answers takes its own ranks after the first."""
    rejoins = grows(E, B)
    assert rejoins.most_workers == 5
    assert starts(rejoins, 0.0) == [("e", 1), ("b", 2)]
    rejoins.miss("b", 2, 1.0)
    rejoins.miss("e", 1, 1.0)
    assert rejoins.places == 1
    assert rejoins.next_due_s() == 1.0 + FIRST_PAUSE_S
    assert starts(rejoins, 2.0) == [("e", 1), ("b", 2)]
    rejoins.start("b", 2.0)
    rejoins.miss("e", 1, 2.0)
    assert starts(rejoins, 100.0) == [("e", 1)], "b's ranks come after these"


def test_no_more_workers_than_there_are_places_for() -> None:
    """Of two hosts that may come one; then e, which lost its place, has no other one."""
    rejoins = grows(E, Host(name="f", workers=3), most=2)
    assert rejoins.most_workers == 4
    assert starts(rejoins, 0.0) == [("e", 1)]
    rejoins.start("e", 0.0)
    assert (starts(rejoins, 1e6), rejoins.next_due_s()) == ([], None)


# What is typed.
@pytest.mark.parametrize(
    ("text", "expected"), [("1:4", (1, 4)), ("2:2", (2, 2)), ("3", (3, 3)), (" 2:4 ", (2, 4))]
)
def test_ranges(text: str, expected: tuple[int, int]) -> None:
    assert parse_nodes(text, 4) == expected


@pytest.mark.parametrize("text", ["", ":", "2:", ":3", "a:b", "2:3:4", "-1:2", "0:2", "0", "1.5"])
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(ConfigError, match="it must be MIN:MAX, two whole numbers, as 2:4"):
        parse_nodes(text, 4)


@pytest.mark.parametrize(
    ("text", "hosts", "message"),
    [
        ("3:2", 4, r"nodes is '3:2'; the first number is the smaller one: 2:3"),
        ("2:5", 4, r"nodes is '2:5', and there are 4 hosts; give at most 2:4"),
        ("5", 4, r"nodes is '5', and there are 4 hosts; give at most 4:4"),
        ("2:3", 1, r"nodes is '2:3', and there is 1 host; give at most 1:1, or name more hosts"),
    ],
)
def test_a_range_that_cannot_be(text: str, hosts: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_nodes(text, hosts)

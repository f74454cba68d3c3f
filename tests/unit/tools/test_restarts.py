"""What `foreprop run` does after a failure, with tries that end as they are told."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import Any

import pytest

from foreprop.config.launchers import STEPS_FILE, report_lost
from foreprop.errors import ConfigError
from foreprop.tools.run import restarts
from foreprop.tools.run.agent import last_step, lost_by
from foreprop.tools.run.plan import Plan
from foreprop.tools.run.rejoins import NodeRange, Rejoins
from foreprop.tools.run.resources import Host
from foreprop.tools.run.restarts import Restarts
from foreprop.tools.run.run import Outcome, WorkerError

HOSTS = tuple(Host(name=name, workers=1) for name in ("a", "b", "c"))


def plan(**changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "hosts": HOSTS,
        "here": frozenset(),
        "script": ("train.py",),
        "directory": "/work",
        "python": "python",
        "environment": {},
        "master_address": "a",
    }
    return Plan(**settings | changes)


class Tries:
    """Stands for `Launcher`: each try ends as the next outcome, and its plan is kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *outcomes: Outcome) -> None:
        self.plans: list[Plan] = []
        self.spare: list[int] = []
        self.rejoins: list[Rejoins | None] = []
        self.said: list[str] = []
        self._outcomes: Iterator[Outcome] = iter(outcomes)
        monkeypatch.setattr(restarts, "Launcher", self._launcher)

    def _launcher(
        self, plan: Plan, out: Any, err: Any, *, spare_hosts: int, say: Any, rejoins: Any
    ) -> Tries:
        self.plans.append(plan)
        self.spare.append(spare_hosts)
        self.rejoins.append(rejoins)
        return self

    def run(self) -> Outcome:
        return next(self._outcomes)

    def restarted(self, plan: Plan, **options: Any) -> Outcome:
        runs = Restarts(plan, io.BytesIO(), io.BytesIO(), say=self.said.append, **options)
        return runs.run()

    def hosts(self) -> list[str]:
        return ["".join(host.name for host in plan.hosts) for plan in self.plans]


KILLED = Outcome(137, "rank 1 on b was killed by SIGKILL")
LOST = Outcome(1, "the connection to b was lost")


def raised(step: int | None, code: int = 1) -> Outcome:
    error = WorkerError(code, step)
    return Outcome(code, f"rank 0 on a ended with exit code {code}", worker_error=error)


def without(*names: str) -> Outcome:
    return Outcome(1, "x", absent={name: f"{name} cannot be reached" for name in names})


def test_it_starts_again_until_it_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = Tries(monkeypatch, KILLED, LOST, Outcome(0))
    assert tries.restarted(plan(), most=3) == Outcome(0)
    assert tries.said == [
        "rank 1 on b was killed by SIGKILL; restart 1 of 3",
        "the connection to b was lost; restart 2 of 3",
    ]


def test_it_gives_up_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = Tries(monkeypatch, LOST, LOST, KILLED)
    failure = "rank 1 on b was killed by SIGKILL; that was restart 2 of 2"
    assert tries.restarted(plan(), most=2) == Outcome(137, failure)
    assert len(tries.said) == 2


def test_by_default_it_does_not_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = Tries(monkeypatch, KILLED)
    assert tries.restarted(plan()) == KILLED
    assert (tries.said, tries.spare) == ([], [0])


def test_what_cannot_be_started_at_first_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mistake in the command, say; hosts that have trained may be back soon."""
    refused = Outcome(1, "b: there is no directory /work", started=False)
    tries = Tries(monkeypatch, refused)
    assert tries.restarted(plan(), most=9) == refused
    tries = Tries(monkeypatch, LOST, refused, Outcome(0))
    assert tries.restarted(plan(), most=9) == Outcome(0)


def test_a_run_that_was_interrupted_is_not_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Outcome(130, "ended by SIGINT", interrupted=True)
    tries = Tries(monkeypatch, KILLED, ended)
    assert tries.restarted(plan(), most=9) == ended
    assert len(tries.said) == 1


@pytest.mark.parametrize(
    ("outcomes", "tried"),
    [
        ((raised(7), raised(7)), 2),
        ((raised(7), raised(6)), 2),
        ((raised(7), KILLED, raised(7), raised(7)), 4),
        ((raised(7), raised(9), raised(9)), 3),
        ((raised(7), raised(7, code=3), raised(7)), 4),
        ((raised(None), raised(None), raised(None)), 4),
    ],
    ids=[
        "the same",
        "another rank's",
        "a kill between",
        "another step",
        "another code",
        "no step is known",
    ],
)
def test_an_error_that_repeats_at_its_step(
    monkeypatch: pytest.MonkeyPatch, outcomes: tuple[Outcome, ...], tried: int
) -> None:
    tries = Tries(monkeypatch, *outcomes, Outcome(0))
    outcome = tries.restarted(plan(), most=9)
    assert len(tries.plans) == tried
    ended = tried == len(outcomes)
    assert (outcome.code != 0) == ended
    if ended:
        step = outcomes[-1].worker_error
        assert step is not None
        says = f"it ended at step {step.step} the last time, too, so a restart would not help"
        assert str(outcome.failure).endswith(says)


def test_hosts_that_do_not_answer_are_left_out_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = Tries(monkeypatch, LOST, without("b"), without("a"), KILLED, Outcome(0))
    assert tries.restarted(plan(), most=2, least_hosts=1) == Outcome(0)
    assert tries.hosts() == ["abc", "abc", "ac", "c", "abc"]
    assert tries.spare == [2, 2, 1, 0, 2]
    assert [plan.master_address for plan in tries.plans] == ["a", "a", "a", "c", "a"]
    assert tries.said == [
        "the connection to b was lost; restart 1 of 2",
        "goes on without b: b cannot be reached",
        "goes on without a: a cannot be reached",
        "rank 1 on b was killed by SIGKILL; restart 2 of 2",
    ]


def test_an_address_that_was_given_is_the_first_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = Tries(monkeypatch, without("b"), without("a"), Outcome(0))
    tries.restarted(plan(master_address="10.0.0.1"), least_hosts=1)
    assert [plan.master_address for plan in tries.plans] == ["10.0.0.1", "10.0.0.1", "c"]


def test_the_next_host_must_be_reachable_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = (Host(name="a"), Host(name="127.0.0.1"), Host(name="c"))
    tries = Tries(monkeypatch, without("a"))
    outcome = tries.restarted(plan(hosts=hosts, here=frozenset({"127.0.0.1"})), least_hosts=2)
    assert outcome.code == 1
    assert "no other machine can reach it" in str(outcome.failure)


def test_a_range_of_nodes_has_one_try_with_the_first_that_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a, b and c two are enough, and no more begin: c takes the place of a."""
    tries = Tries(monkeypatch, without("a"), KILLED)
    assert tries.restarted(plan(), most=5, nodes=NodeRange(2, 2)) == KILLED
    assert tries.hosts() == ["ab", "bc"]
    assert tries.spare == [1, 0]
    rejoins = tries.rejoins[1]
    assert rejoins is not None
    for name in ("b", "c"):
        rejoins.start(name, 0.0)
    rejoins.leave("c", 1, 0.0)
    assert rejoins.next_start(0.0) == (HOSTS[0], 1)  # a comes in for c
    assert rejoins.after_failure("c") == "c is started again (restart 1 of 5)"


def test_more_hosts_than_there_are() -> None:
    with pytest.raises(ConfigError, match="min_hosts is 4, of 3 hosts"):
        Restarts(plan(), io.BytesIO(), io.BytesIO(), say=print, least_hosts=4)


def test_the_last_step_that_a_rank_has_reported() -> None:
    descriptor = os.memfd_create("steps")
    try:
        assert last_step(descriptor, 0) is None
        os.write(descriptor, b"0 3\n1 3\n0 12\nx\n0 y\n")
        assert [last_step(descriptor, rank) for rank in range(3)] == [12, 3, None]
        os.write(descriptor, b"1 4\n" * 40_000)
        assert [last_step(descriptor, rank) for rank in range(2)] == [None, 4]
    finally:
        os.close(descriptor)
    assert last_step(None, 0) is None


def test_whom_a_rank_has_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own name is no news; a peer's name is one line, whatever that says."""
    descriptor = os.memfd_create("steps")
    try:
        monkeypatch.setenv(STEPS_FILE, f"/proc/self/fd/{descriptor}")
        for rank, peer in ((0, "rank 0"), (1, "server 0"), (2, "x\n0 lost \u00e9" + 99 * "y")):
            report_lost(rank, peer)
        found = [lost_by(descriptor, rank) for rank in range(4)]
    finally:
        os.close(descriptor)
    assert found[:2] == ["", "server 0"]
    assert found[2].startswith("x 0 lost \\xe9yyy")
    assert (len(found[2]) < 100, found[3], lost_by(None, 1)) == (True, "", "")

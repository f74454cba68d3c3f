"""Who is asked what and when: on a panel whose probes answer from a script."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from foreprop.engine.traffic import Flow, Trip
from foreprop.tools.cli.app import app
from foreprop.tools.doctor.examine import Panel, Questions, examine, plan_rounds
from foreprop.tools.doctor.findings import find
from foreprop.tools.doctor.records import (
    Answer,
    Command,
    Defect,
    Examination,
    Failure,
    Introduce,
    Ping,
    Pinged,
    Reach,
    Reached,
    Send,
    Sent,
)
from foreprop.tools.doctor.show import report, show, to_json
from tests.unit.doctor_example import NAMES, attempt, examination, facts, flows

Script = Callable[[int, Command], Answer | None]


class ScriptedPanel(Panel):
    """Answers as healthy probes would, or as the script says; None: no answer."""

    def __init__(self, script: Script | None = None) -> None:
        super().__init__()
        self.asked: list[dict[int, Command]] = []
        self._script = script or healthy

    def __exit__(self, *_: object) -> None:
        """No probe is there to be ended."""

    def ask(self, commands: Mapping[int, Command], *, within_s: float) -> dict[int, Answer]:
        assert within_s > 0
        self.asked.append(dict(commands))
        answers = {host: self._script(host, command) for host, command in commands.items()}
        for host, answer in answers.items():
            if answer is None:
                self.failures[host] = Failure(kind="silent", text="no answer")
        return {host: answer for host, answer in answers.items() if answer is not None}

    def pairs(self, kind: type[Ping] | type[Send]) -> list[list[tuple[int, int]]]:
        """What each round measured."""
        rounds = []
        for asked in self.asked:
            pairs = [
                (host, peer.host)
                for host, command in asked.items()
                if isinstance(command, kind)
                for peer in command.peers
            ]
            rounds += [pairs] if pairs else []
        return rounds


def healthy(host: int, command: Command) -> Answer:
    match command:
        case Introduce():
            return facts(host)
        case Reach():
            return Reached(
                attempts=[attempt(host, peer.host, purpose=peer.purpose) for peer in command.peers]
            )
        case Ping():
            return Pinged(trips=[Trip(source=host, to=p.host, count=9) for p in command.peers])
        case Send():
            sent = [Flow(source=host, to=p.host, bits_per_s=1e9) for p in command.peers]
            return Sent(flows=sent)
    raise TypeError(command)


def questions(count: int, **changes: Any) -> Questions:
    values: dict[str, Any] = {
        "names": NAMES[:count] if count <= 4 else tuple(f"host{n}" for n in range(count)),
        "workers": (1,) * count,
        "rendezvous": "node0",
        "look_up": NAMES[:count],
        "serve_rendezvous": True,
        "environments": ({},) * count,
        "seconds": 1.0,
        "wait_s": 60.0,
    }
    return Questions(**values | changes)


def run(count: int, script: Script | None = None) -> tuple[ScriptedPanel, Examination]:
    panel = ScriptedPanel(script)
    return panel, examine(panel, questions(count), lambda _: None)


def test_every_pair_is_measured_alone_and_all_at_once() -> None:
    panel, found = run(3)
    every = list(itertools.permutations(range(3), 2))
    assert sorted((a.source, a.to) for a in found.attempts if a.purpose == "server") == every
    assert [(a.source, a.to) for a in found.attempts if a.purpose == "rendezvous"] == [
        (1, 0),
        (2, 0),
    ]
    assert sorted((t.source, t.to) for t in found.trips) == [(0, 1), (0, 2), (1, 2)]
    assert sorted((f.source, f.to) for f in found.alone) == every
    assert sorted((f.source, f.to) for f in found.together) == every
    *alone, together = panel.pairs(Send)
    assert [len(pairs) for pairs in alone] == [1] * 6
    assert sorted(together) == every


def test_a_single_host_is_only_asked_for_its_facts() -> None:
    panel, found = run(1)
    assert found.hosts[0].facts == facts(0)
    assert [*found.trips, *found.alone, *found.together] == []
    assert [type(asked[0]).__name__ for asked in panel.asked] == ["Introduce", "Reach"]


def test_a_host_that_never_answers_is_a_finding_and_the_rest_goes_on() -> None:
    def script(host: int, command: Command) -> Answer | None:
        return None if host == 1 else healthy(host, command)

    panel, found = run(3, script)
    assert all(1 not in asked for asked in panel.asked[1:])
    assert sorted((f.source, f.to) for f in found.alone) == [(0, 2), (2, 0)]
    assert found.hosts[1].failure == Failure(kind="silent", text="no answer")
    assert [finding.hosts for finding in find(found) if finding.severity == "error"] == [["node1"]]


@pytest.mark.parametrize("kind", [Reach, Ping, Send])
def test_a_host_that_is_lost_on_the_way_is_a_finding(kind: type) -> None:
    def script(host: int, command: Command) -> Answer | None:
        return None if host == 1 and isinstance(command, kind) else healthy(host, command)

    panel, found = run(3, script)
    assert found.hosts[1].facts is not None
    assert found.hosts[1].failure is not None
    last = panel.asked[-1]
    assert last.keys() == {0, 2}
    assert {f.source for f in found.together} == {0, 2}


def test_a_defect_of_a_probe_is_reported() -> None:
    def script(host: int, command: Command) -> Answer | None:
        return Defect(text="ConfigError: oops") if host == 2 else healthy(host, command)

    _, found = run(3, script)
    assert found.hosts[2].failure == Failure(kind="defect", text="ConfigError: oops")


def test_what_is_not_connected_is_not_measured() -> None:
    """From 0 to 1 there is no way, from 1 to 0 there is: the round trip goes the other way."""

    def script(host: int, command: Command) -> Answer | None:
        answer = healthy(host, command)
        if host == 0 and isinstance(answer, Reached):
            return Reached(attempts=[attempt(0, a.to, "timeout") for a in answer.attempts])
        return answer

    _, found = run(2, script)
    assert [(t.source, t.to) for t in found.trips] == [(1, 0)]
    assert [(f.source, f.to) for f in found.alone] == [(1, 0)]
    (finding,) = [f for f in find(found) if f.check == "reach"]
    assert finding.hosts == ["node0", "node1"]


def test_a_host_without_an_address_is_left_out() -> None:
    def script(host: int, command: Command) -> Answer | None:
        if host == 1 and isinstance(command, Introduce):
            return facts(1, address=None, address_error="no route", port=None)
        return healthy(host, command)

    _, found = run(3, script)
    assert {f.to for f in found.alone} == {0, 2}
    assert found.hosts[1].failure is None


@pytest.mark.parametrize("hosts", [7, 8, 16, 63])
def test_rounds_of_many_hosts_share_no_host_and_leave_out_no_pair(hosts: int) -> None:
    pairs = list(itertools.permutations(range(hosts), 2))
    rounds = plan_rounds(pairs, hosts)
    assert sorted(pair for together in rounds for pair in together) == pairs
    for together in rounds:
        taken = [host for pair in together for host in pair]
        assert len(taken) == len(set(taken))
    assert len(rounds) == 2 * (hosts + hosts % 2 - 1)


# The report.
def shown(found: Examination, width: int = 80) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        show(console, report(found, find(found)))
    return capture.get()


def test_the_report_has_hosts_pairs_and_findings() -> None:
    text = shown(examination(alone=flows(3, _0_1=0.1)))
    assert "node2" in text
    assert "10.0.0.3" in text
    assert "foreprop 0.1.0, torch 2.13.0, Python 3.11.7 on 3 hosts" in text
    assert "100 Mbit/s" in text
    assert "warning  node0 sends to node1 at 100 Mbit/s" in text
    assert "-> see the link's negotiated speed" in text
    assert "Nothing keeps training from working: 1 warning." in text


def test_the_report_says_if_training_would_not_work() -> None:
    found = examination(spoilt={1: {"torch": "2.6.0"}})
    text = shown(found)
    assert "Training would not work: 1 error." in text
    assert "node0, node2: foreprop 0.1.0, torch 2.13.0" in text
    assert not report(found, find(found)).ok


def test_many_pairs_are_cut_to_the_slowest() -> None:
    panel = ScriptedPanel(healthy_of_many)
    found = examine(panel, questions(7), lambda _: None)
    text = shown(found)
    assert "The slowest 30 of 42 directions (--json has all)" in text


def healthy_of_many(host: int, command: Command) -> Answer:
    if isinstance(command, Introduce):
        return facts(0, address=f"10.0.0.{host + 1}", names=[])
    return healthy(host, command)


def test_json_has_everything() -> None:
    found = examination(alone=flows(3, _0_1=0.1))
    told = json.loads(to_json(report(found, find(found))))
    assert told["ok"] is True
    assert told["findings"][0]["check"] == "rate"
    assert len(told["examination"]["alone"]) == 6
    assert told["examination"]["hosts"][1]["facts"]["address"] == "10.0.0.2"


# Wrong usage.
def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_a_resource_file_under_torchrun_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = invoke("--resources", str(tmp_path / "hosts"))
    assert result.exit_code == 2
    assert "but this is rank 1 of torchrun's; leave it out" in result.stderr


@pytest.mark.parametrize(
    "arguments", [("--seconds", "0"), ("--seconds", "11"), ("--wait", "0"), ("--port", "70000")]
)
def test_numbers_out_of_range_are_wrong_usage(arguments: tuple[str, ...]) -> None:
    assert invoke(*arguments).exit_code == 2


def test_a_resource_file_that_is_not_there() -> None:
    result = invoke("--resources", "/none")
    assert result.exit_code == 2
    assert "--resources is '/none', which cannot be read" in result.stderr

"""Every numeric option of every command at 0, -1, huge and NaN: it works, or the option is named.

No command does its work here: where that begins stands a function which says that it was reached.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foreprop.tools.cli import registry
from foreprop.tools.cli.app import app
from tests.tiers import long_cases

WORK = {
    "demo": ["foreprop_lab.commands.demo.run_demo"],
    "run": ["foreprop.tools.cli.run.check_script"],
    "server": ["foreprop.tools.cli.server.Supervisor"],
    "doctor": ["foreprop.tools.cli.doctor.examine_hosts"],
    "compare": ["foreprop.tools.cli.compare.check_request"],
    "report": ["foreprop.tools.cli.report.read_job"],
    "top": ["foreprop.tools.cli.top.live_page"],
    "lab run": ["foreprop_lab.commands.lab.run_lab"],
    "lab simulate": ["foreprop_lab.commands.simulate.simulate_lab"],
    "lab layers": ["foreprop_lab.experiments.layers.command.run_lab"],
    "lab mlp": ["foreprop_lab.experiments.mlp.command.run_mlp"],
    "lab language": ["foreprop_lab.experiments.language.command.Text"],
    "lab accuracy": ["foreprop_lab.experiments.accuracy.command.train_all"],
    "lab faults": ["foreprop_lab.experiments.faults.command.run_faults"],
    "lab figures": ["foreprop_lab.experiments.figures.command.make_figures"],
    "bench wire": ["foreprop_lab.benchmarks.command.measure_wire"],
    "bench overhead": ["foreprop_lab.benchmarks.command.measure_scheduling"],
    "bench trainer": ["foreprop_lab.benchmarks.command.measure_trainer"],
    "bench alone": ["foreprop_lab.benchmarks.command.measure_alone"],
    "bench loopback": ["foreprop_lab.benchmarks.command.measure_loopback"],
    "bench memory": ["foreprop_lab.benchmarks.command.measure_memory"],
    "bench compression": [
        "foreprop_lab.benchmarks.command.measure_on_gradients",
        "foreprop_lab.benchmarks.command.measure_compression",
    ],
    "bench exchange": ["foreprop_lab.benchmarks.command.measure_exchange"],
    "bench jitter": ["foreprop_lab.benchmarks.command.simulate_jitter"],
    "bench codecs": ["foreprop_lab.benchmarks.command.measure_codecs"],
    "bench tables": ["foreprop_lab.benchmarks.command.measure_tables"],
}
"""Where each command's work begins. `plan` only computes: it is run."""
NEEDED = {
    "plan": ["--model", "resnet110_cifar", "--nodes", "2", "--rate", "1Gbit", "--compute", "50ms"],
    "run": ["--", "train.py"],
    "compare": ["train.py"],
    "report": ["."],
    "top": ["."],
    "lab accuracy": ["codecs"],
    "lab figures": ["--out", "figures"],
}
QUANTITIES = {"rate": "bit", "server_rate": "bit", "compute": "s", "latency": "s"}
"""Options that are typed with a unit."""
NUMBERS = ("0", "-1", "1" + "0" * 30, "nan")


class Reached(Exception):
    """A command has accepted its options."""


def reached(*arguments: Any, **named: Any) -> None:
    """What follows from the setting is computed, as the work would begin with it."""
    for setting in (*arguments, *named.values()):
        for follows in ("rate", "limit_s", "wire_s", "ideal_s"):
            getattr(setting, follows, None)
    raise Reached


def commands() -> Iterator[tuple[str, Any]]:
    for entry in registry.commands():
        command = registry.command_of(entry)
        below = getattr(command, "commands", None) or {"": command}
        yield from ((f"{entry.name} {name}".strip(), below[name]) for name in below)


def cases() -> Iterator[tuple[str, str, str]]:
    """A command, an option, and what is typed for it."""
    for name, command in commands():
        for parameter in command.params:
            option = parameter.opts[-1]
            kind = parameter.type_descriptor.annotation
            unit = QUANTITIES.get(parameter.name, "")
            if unit or kind in (int, float):
                yield from ((name, option, f"{number}{unit}") for number in NUMBERS)


CASES = list(cases())


def test_there_are_cases_of_every_command_with_numbers() -> None:
    assert {name for name, _, _ in CASES} == {*WORK, "plan"}
    assert len(CASES) > 200
    for name, option in (("lab run", "--nodes"), ("plan", "--rate"), ("bench jitter", "--share")):
        assert sum(case[:2] == (name, option) for case in CASES) == len(NUMBERS)


def is_taken_or_named(name: str, option: str, value: str) -> bool:
    given = NEEDED.get(name, [])
    arguments = [*name.split(), f"{option}={value}", *given]
    if name == "plan":  # the last one counts
        arguments = [*name.split(), *given, f"{option}={value}"]
    result = CliRunner().invoke(app, arguments)
    if result.exit_code != 2:
        return result.exit_code == 0 or isinstance(result.exception, Reached)
    said = result.stderr
    return said.startswith("foreprop: ") and said.count("\n") == 1 and option in said


@pytest.mark.parametrize("every", [len(NUMBERS) + 1, *long_cases(1)])
def test_a_number_is_taken_or_its_option_is_named(
    every: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the usual run options have one number each, in turn, and `plan` does not compute."""
    if every > 1:
        monkeypatch.setattr("foreprop.tools.cli.plan.forecasts", reached)
    monkeypatch.chdir(tmp_path)
    for works in WORK.values():
        for work in works:
            monkeypatch.setattr(work, reached)
    assert [case for case in CASES[::every] if not is_taken_or_named(*case)] == []

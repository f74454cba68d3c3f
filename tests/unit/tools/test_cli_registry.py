"""Commands are loaded when they are called; each says what it does, with examples; Ctrl-C."""

from __future__ import annotations

import functools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from foreprop.tools.cli.app import app
from foreprop.tools.cli.output import print_table
from foreprop.tools.cli.registry import Entry, command_of, commands
from tests.tiers import long_cases

_WITHOUT_TORCH = [
    ["config"],
    ["--version"],
    ["-V"],
    ["-h"],
    ["lab", "-h"],
    ["plan", "-h"],
    ["run", "-h"],
    ["doctor", "-h"],
    ["config", "--json"],
    ["lab", "simulate", "-h"],
    ["run", "--dry-run", "train.py"],
    ["plan", "--nodes", "0"],
    ["nonsense"],
]

_IMPORTED = """
import json, sys
from foreprop.tools.cli import main
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    try:
        main.main()
    except SystemExit:
        pass
    ours = [name for name in sys.modules if name.startswith("foreprop.tools.cli.")]
    print(f"told: {json.dumps([arguments, 'torch' in sys.modules, ours])}", file=sys.stderr)
"""


@functools.cache
def _imported() -> list[tuple[list[str], bool, list[str]]]:
    """In one process, one after the other: arguments, if torch is there, and our modules."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTED, json.dumps(_WITHOUT_TORCH)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("told: ")]
    return [json.loads(line.removeprefix("told: ")) for line in lines]


def test_what_needs_no_torch_imports_none() -> None:
    """None of them may be the first."""
    told = [(arguments, has_torch) for arguments, has_torch, _ in _imported()]
    assert told == [(arguments, False) for arguments in _WITHOUT_TORCH]


def test_a_command_that_is_not_called_is_not_imported() -> None:
    arguments, _, names = _imported()[0]
    assert arguments == ["config"]
    loaded = {name.rpartition(".")[2] for name in names}
    assert loaded == {"app", "checked", "config", "main", "output", "registry"}


# Help.
def leaves() -> Iterator[tuple[str, Any]]:
    for entry in commands():
        command = command_of(entry)
        below = getattr(command, "commands", None)
        if below is None:
            yield entry.name, command
        else:
            yield from ((f"{entry.name} {name}", below[name]) for name in below)


LEAVES = dict(leaves())


def test_the_table_says_of_each_command_what_it_says_itself() -> None:
    for entry in commands():
        assert " ".join(command_of(entry).help.split("\n\n")[0].split()) == entry.summary


def test_every_help_has_examples_that_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/demo/p3", "runs/trace", "runs/watch"):
        Path(folder).mkdir(parents=True)
    for name, command in LEAVES.items():
        _, _, text = command.help.partition("\n\nExamples:\n")
        examples = text.replace("\\\n", " ").strip().splitlines()
        assert examples, name
        for example in examples:
            words = shlex.split(example)
            given = name.split()
            assert words[: len(given) + 1] == ["foreprop", *given]
            with command.make_context(name, words[len(given) + 1 :]):
                pass


def test_every_option_of_a_command_with_many_has_its_group() -> None:
    for name, command in LEAVES.items():
        panels = [p.rich_help_panel for p in command.params if p.opts[0].startswith("-")]
        if len(panels) > 8:
            assert len(set(panels)) > 2, name
            assert panels.count(None) <= 3, name


def test_short_help_is_help() -> None:
    for path in ([], ["lab"], ["lab", "run"], ["plan"], ["bench", "wire"]):
        short = CliRunner().invoke(app, [*path, "-h"])
        assert short.exit_code == 0
        assert short.output == CliRunner().invoke(app, [*path, "--help"]).output


def test_a_paragraph_is_wrapped_by_the_terminal_only() -> None:
    output = help_of("run", 400)
    (line,) = [line for line in output.splitlines() if "Every line that a worker prints" in line]
    assert "No process is left on any host, however this command ends." in line
    assert "foreprop run --resources hosts.txt --dry-run train.py" in output


# Completion.
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("foreprop pl", {"plan"}),
        ("foreprop lab s", {"simulate"}),
        ("foreprop plan --no", {"--nodes"}),
        ("foreprop lab run --compu", {"--compute"}),
    ],
)
def test_the_shell_completes_commands_and_options(typed: str, offered: set[str]) -> None:
    shell = {
        "_FOREPROP_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }
    done = CliRunner().invoke(app, [], prog_name="foreprop", env=shell)
    assert set(done.output.split()) == offered


# Width.
def example(least: int | None = None) -> Table:
    table = Table()
    for heading in ("system", "step\nms", "limited by"):
        table.add_column(heading, no_wrap=True, min_width=least)
    table.add_row("p2p p3", "183.25", "compute and a word")
    table.add_row("[bold]ddp[/bold]", "243.8", "")
    return table


def printed(width: int, least: int | None = None) -> list[str]:
    console = Console(width=width, record=True, quiet=True, force_terminal=False)
    with console.capture() as capture:
        console.quiet = False
        print_table(console, example(least))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_table_that_does_not_fit_is_printed_row_by_row_with_nothing_cut() -> None:
    assert any("compute and a word" in line and "183.25" in line for line in printed(60))
    assert printed(30)[0] == "p2p p3", "its last cell has room for its words, one by one"
    assert printed(20) == [
        "p2p p3",
        "  step ms: 183.25",
        "  limited by: compute and a word",
        "ddp",
        "  step ms: 243.8",
    ]
    assert printed(50, least=20) == printed(20), "columns that may not shrink"


def help_of(command: str, columns: int) -> str:
    env, words = {"COLUMNS": str(columns)}, [*command.split(), "--help"]
    plain = {"terminal_width": columns - 2}  # the runner says 80 to what draws no frames
    return CliRunner().invoke(app, words, env=env, **plain).output


@pytest.mark.parametrize("columns", [60, *long_cases(80)])
@pytest.mark.parametrize("entry", commands(), ids=lambda entry: entry.name)
def test_a_help_fits_the_terminal_with_nothing_cut(entry: Entry, columns: int) -> None:
    lines = help_of(entry.name, columns).splitlines()
    shown = " ".join(lines)
    options = [p for p in command_of(entry).params if p.param_type_name == "option"]
    assert [p.opts[-1] for p in options if p.opts[-1] not in shown] == []
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    assert [line for line in lines if len(line) > columns and not line.startswith("    fore")] == []


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("words", ["", "lab"])
def test_a_group_shows_its_commands_whole(words: str, columns: int) -> None:
    typed, env = words.split(), {"COLUMNS": str(columns)}
    bare = CliRunner().invoke(app, typed, env=env, terminal_width=columns - 2)
    shown = help_of(words, columns)
    assert (bare.exit_code, bare.output.strip()) == (2, shown.strip())
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    assert "--install-completion" in shown or words
    told = " ".join(re.sub("[│╭╮╰╯─]", " ", shown).split())
    mine = [e for e in commands() if e.name.rpartition(" ")[0] == words and e.name != "bench"]
    assert [e.name for e in mine if f"{e.name.split()[-1]} {e.summary}" not in told] == []


def test_a_help_that_does_not_fit_keeps_its_headings_and_examples() -> None:
    output = help_of("compare", 60)
    assert output.splitlines()[0].endswith(" compare [OPTIONS] SCRIPT [ARGS]...")
    assert "\n    foreprop compare --workers-per-node 2 train.py\n" in output
    headings = [line for line in output.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings[:3] == ["Arguments:", "Cluster:", "On every host:"]


@pytest.mark.parametrize("columns", ["60", "200"])
def test_what_is_piped_is_never_wrapped(columns: str) -> None:
    output = CliRunner().invoke(app, ["config", "--all"], env={"COLUMNS": columns}).output
    (line,) = [line for line in output.splitlines() if line.startswith("slice_elems ")]
    told = next(
        spec["meaning"]
        for name, spec in json.loads(CliRunner().invoke(app, ["config", "--json"]).output).items()
        if name == "slice_elems"
    )
    assert told in line


# JSON.
def test_a_dry_run_as_json_is_what_it_prints() -> None:
    options = ["run", "--workers-per-node", "2", "--port", "1234", "--dry-run"]
    plain = CliRunner().invoke(app, [*options, "train.py"]).output
    made = json.loads(CliRunner().invoke(app, [*options, "--json", "train.py"]).output)
    assert made["port"] == 1234
    (host,) = made["hosts"]
    assert host["ranks"] == [0, 1]
    assert host["here"] is True
    assert host["command"] in plain


# Ctrl-C.
_INTERRUPTED = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

# A shell that starts tests in the background lets them, and so their children, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
from foreprop.tools.cli.main import main
sys.meta_path.insert(0, Interrupting())
main()
"""


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("typer", ["--version"]),
        pytest.param("foreprop.tools.cli.app", ["--version"], marks=pytest.mark.long),
        pytest.param("foreprop.tools.cli.registry", ["-h"], marks=pytest.mark.long),
        pytest.param("foreprop.tools.cli.plan", ["plan", "-h"], marks=pytest.mark.long),
        pytest.param("foreprop.plan.planner", ["plan", "-h"], marks=pytest.mark.long),
        pytest.param("foreprop.tools.cli.config", ["config"], marks=pytest.mark.long),
    ],
)
def test_ctrl_c_while_it_imports_shows_no_traceback(module: str, arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED.replace("MODULE", repr(module)), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 130
    assert done.stderr == ""

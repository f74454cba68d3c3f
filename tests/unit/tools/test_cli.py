"""The command line: help, wrong usage, where settings come from, and how it says what failed."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from typer.testing import CliRunner, Result

from foreprop.config import PRESETS, Config
from foreprop.config.settings import TIERS, settings_in
from foreprop.engine.trace import TraceRecorder
from foreprop.errors import ConfigError, PeerLost
from foreprop.tools.cli import app as cli
from foreprop.tools.cli import main as script
from foreprop.tools.cli import registry
from foreprop.tools.cli.config import settings_from, value_text
from foreprop.version import __version__
from foreprop_lab.commands.options import presets_from
from tests.tiers import long_cases


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for spec in (*(field.name for field in fields(Config)), "preset"):
        monkeypatch.delenv(f"FOREPROP_{spec.upper()}", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    loggers = [x for x in logging.root.manager.loggerDict.values() if isinstance(x, logging.Logger)]
    levels = {logger: logger.level for logger in loggers}
    yield
    for logger, level in levels.items():
        if logger.level != level:  # to set one takes as long as there are others
            logger.setLevel(level)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(cli.app)))


# Help.
@pytest.mark.parametrize("path", [("lab", "run"), *long_cases(*COMMANDS)], ids=" ".join)
def test_every_command_has_help(path: tuple[str, ...]) -> None:
    result = invoke(*path, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.output


def parameters() -> Iterator[tuple[str, Any]]:
    for path, command in COMMANDS.items():
        yield from ((f"{' '.join(path)} {each.name}", each) for each in command.params)


def test_every_option_and_argument_has_help() -> None:
    assert [" ".join(path) for path, command in COMMANDS.items() if not command.help] == []
    assert [name for name, each in parameters() if not getattr(each, "help", None)] == []


UNITS = {"s": "second", "mbit": "Mbit/s", "bytes": "byte", "elems": "element", "us": "microsecond"}


def test_help_names_the_unit_of_every_option_that_has_one() -> None:
    for name, parameter in parameters():
        unit = UNITS.get(parameter.name.rpartition("_")[2]) if "_" in parameter.name else None
        assert unit is None or unit.lower() in parameter.help.lower(), name


def test_the_expected_commands_are_there() -> None:
    expected = {"demo", "run", "server", "bench", "config", "trace"}
    assert expected <= {path[0] for path in COMMANDS if path}


def test_version() -> None:
    for option in ("--version", "-V"):
        told = invoke(option).output
        assert told.startswith(f"foreprop {__version__} (torch {version('torch')}, Python 3.")
        assert told.count("\n") == 1


# Wrong usage.
USED_WRONGLY = [
    (["nonsense"], "nonsense"),
    (["demo", "--steps", "3"], "--steps"),
    (["demo", "--steps", "many"], "--steps"),
    (["demo", "--batch-size", "7501"], "--batch-size"),
    (["demo", "--workers", "1"], "--workers"),
    (["bench", "wire", "--slice-elems", "0"], "--slice-elems"),
    (["bench", "exchange", "--nodes", "1"], "--nodes"),
    (["trace", "/nowhere/at/all"], "/nowhere/at/all"),
    (["config", "--nonsense"], "--nonsense"),
]


def test_wrong_usage_is_reported_with_exit_code_2() -> None:
    for arguments, told in USED_WRONGLY:
        result = invoke(*arguments)
        assert result.exit_code == 2, arguments
        assert told in result.output
        assert "Traceback" not in result.output


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The console script's exit code."""
    monkeypatch.setattr(sys, "argv", ["foreprop", *arguments])
    with pytest.raises(SystemExit) as caught:
        script.main()
    return int(caught.value.code or 0)


WRONG = [
    (["demo", "--presets", "p3,p4"], "--presets has 'p4'; it must be one of ['p3'"),
    (["demo", "--presets", ","], "--presets has ''; it must be one of"),
    (["config", "--preset", "p4"], "--preset is 'p4'; it must be one of"),
    (
        ["config", "slice_elem=1"],
        "no setting is called 'slice_elem'; did you mean 'slice_elems'?",
    ),
    (["config", "xyz=1"], "no setting is called 'xyz'; `foreprop config --all` lists them"),
    (["report", "nowhere"], "directory: dir 'nowhere' does not exist; see"),
    (["run", "nowhere.py"], "script is 'nowhere.py'; there is no such file in "),
    (["run", "--dry-run", "--ssh", "", "x.py"], "--ssh is ''; it must begin with"),
    (
        ["compare", "--backend", "mpi", "x.py"],
        "--backend is 'mpi'; it must be one of 'gloo', 'nccl'; see",
    ),
    (["config", "slice_elems"], "'slice_elems' is not a setting; write it as NAME=VALUE"),
    (["config", "slice_elems=few"], "slice_elems is 'few'; it must be a whole number"),
    (["config", "slice_elems=0"], "slice_elems is 0; it must be at least 1"),
    (["bench", "exchange", "--rate", "0Mbit"], "--rate is 0.0 bit/s; it must be positive"),
    (["bench", "exchange", "--rate", "5"], "--rate is '5'; it must be a number with its unit"),
    (["lab", "run", "--nodes", "0"], "--nodes is 0; at least 2"),
    (["lab", "run", "--workers-per-node", "0"], "--workers-per-node is 0; at least 1"),
    (["lab", "simulate", "--nodes", "0"], "--nodes is 0; at least 2"),
    (["lab", "simulate", "--systems", "foo"], "--systems has 'foo'; there are"),
    (["lab", "simulate", "--rate", "0Gbit"], "--rate is '0Gbit'; it must be positive"),
    (["lab", "simulate", "--rate", "1G", "--balance", "1"], "--rate and --balance are both"),
    (["lab", "simulate", "--compute", "2"], "--compute is '2'; it must be a number with its"),
    (["lab", "simulate", "--steps", "0"], "--steps is 0; at least 1"),
    (["plan", "--nodes", "2", "--rate", "1G"], "neither --model nor --profile is given"),
    (["run", "--json", "train.py"], "--json is given without --dry-run"),
    (["demo", "--steps", "many"], "--steps is 'many'; it must be a valid integer"),
    (["demo", "--nodes", "1"], "--nodes is '1'; it must be greater than or equal to 2"),
    (["doctor", "--seconds", "nan"], "--seconds is 'nan'; it must be less than or equal to 10"),
    (["lab", "run", "--balance", "nan"], "--balance is nan; it must be a finite number"),
    (["nonsense"], "No such command 'nonsense'"),
    (["config", "preset=p3"], "'preset=p3' is not a setting; write it as --preset p3"),
    (
        ["bench", "exchange", "--nodes", "3", "--node-mb", "1", "--message-kb", "501"],
        "a message has 501000 bytes; each node gets 500000",
    ),
    (["config", "order=random"], "order is 'random'; it must be one of ['priority', 'fifo']"),
]


def test_wrong_usage_is_one_line_that_names_what_was_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, told in WRONG:
        assert run_main(monkeypatch, *arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"foreprop: {told}"), arguments
        assert error.count("\n") == 1, arguments


def test_a_report_that_cannot_be_written_is_reported_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.html").mkdir()
    for report in (tmp_path / "folder.html", tmp_path / "file" / "report.html"):
        assert run_main(monkeypatch, "demo", "--out", str(report)) == 2
        captured = capsys.readouterr()
        assert f"--out is {report}, which cannot be written" in captured.err
        assert not captured.out


# Errors while a command runs.
def failing_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    def run(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("foreprop_lab.commands.demo.run_demo", run)
    return run_main(monkeypatch, "demo")


def worker_failure(tmp_path: Path, message: object) -> ChildFailedError:
    file = tmp_path / "error.json"
    file.write_text(json.dumps({"message": message}))
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=1, error_file=str(file))
    return ChildFailedError("work", {1: failure})


def told(message: str, stack: str = "Traceback ...") -> dict[str, object]:
    return {"message": message, "extraInfo": {"py_callstack": stack, "timestamp": "1"}}


def test_a_failing_worker_is_reported_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    error = worker_failure(tmp_path, told("PeerLost: rank 2 is gone"))
    assert failing_with(monkeypatch, error) == 1
    assert capsys.readouterr().err == "foreprop: worker 1 failed: PeerLost: rank 2 is gone\n"


def test_a_defect_in_a_worker_is_reported_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    error = worker_failure(tmp_path, told("ValueError: oops", "File x, line 3"))
    assert failing_with(monkeypatch, error) == 1
    assert capsys.readouterr().err == (
        "foreprop: worker 1 failed: ValueError: oops\nFile x, line 3\n"
    )


def test_a_killed_worker_is_reported_with_its_signal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = ProcessFailure(local_rank=0, pid=77, exitcode=-9, error_file="")
    error = ChildFailedError("work", {3: failure})
    assert failing_with(monkeypatch, error) == 1
    assert capsys.readouterr().err == (
        "foreprop: worker 3 died: Signal 9 (SIGKILL) received by PID 77\n"
    )


def test_an_error_of_ours_is_its_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing_with(monkeypatch, PeerLost("rank 2 is gone", peer="rank 2")) == 1
    assert capsys.readouterr().err == "foreprop: rank 2 is gone\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SignalException("Ctrl-C", 2)])
def test_ctrl_c_is_exit_code_130_and_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    assert failing_with(monkeypatch, error) == 130
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


# Presets.
def test_presets_are_separated_by_commas() -> None:
    assert presets_from("kvstore,p3") == ("kvstore", "p3")
    assert presets_from(" p3 , wfbp,,p3") == ("p3", "wfbp")


# Settings.
def shown_settings(*arguments: str) -> dict[str, tuple[str, str]]:
    """Value and source of every setting."""
    result = invoke("config", "--all", *arguments)
    assert result.exit_code == 0
    rows = [re.split(r"\s{2,}", line.strip()) for line in result.output.splitlines()]
    return {row[0]: (row[1], row[2]) for row in rows if len(row) > 3 and row[0] != "setting"}


def test_config_shows_every_setting_with_value_source_and_meaning() -> None:
    output = invoke("config", "--all").output
    shown = shown_settings()
    assert list(shown) == [spec.name for spec in fields(Config)]
    for spec in fields(Config):
        source = "preset p3" if spec.name in PRESETS["p3"] else "default"
        assert shown[spec.name] == (value_text(spec.name, spec.default), source)
        assert spec.metadata["help"].split()[0] in output
    lines = output.splitlines()
    for tier, heading in TIERS.items():
        first, *_ = settings_in(tier, Config)
        assert lines[lines.index(heading) + 2].startswith(first.name)
    told = json.loads(invoke("config", "--json").output)
    tiers = {spec.name: spec.metadata["tier"] for spec in fields(Config)}
    assert {name: about["tier"] for name, about in told.items()} == tiers


def test_config_shows_where_each_value_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREPROP_SLICE_ELEMS", "300")
    monkeypatch.setenv("FOREPROP_ORDER", "priority")
    monkeypatch.setenv("FOREPROP_STEP_TIMEOUT_S", "7.5")
    shown = shown_settings("--preset", "kvstore", "slice_elems=20", "interface=eth1")
    assert shown["slice_elems"] == ("20 elements", "argument")
    assert shown["interface"] == ("eth1", "argument")
    assert shown["order"] == ("priority", "environment")
    assert shown["step_timeout_s"] == ("7.5 s", "environment")
    assert shown["placement"] == ("kvstore", "preset kvstore")
    assert shown["join_timeout_s"] == ("120 s", "default")


def test_config_shows_the_first_tier_and_what_differs_from_the_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rest = "other settings have their defaults: `foreprop config --all` shows them."
    first = [
        [spec.name, value_text(spec.name, spec.default)] for spec in settings_in("use", Config)
    ]
    others = len(fields(Config)) - len(first)
    assert config_lines() == [["setting", "value"], *first, [f"{others} {rest}"]]
    monkeypatch.setenv("FOREPROP_SLICE_ELEMS", "300")
    monkeypatch.setenv("FOREPROP_REPLY", "broadcast")  # as it is anyway
    first[4] = ["slice_elems", "300 elements (environment; by default not set)"]
    assert config_lines("--preset", "slicing", "interface=[eth1]") == [
        ["setting", "value"],
        *first,
        ["interface", "[eth1] (argument; by default not set)"],
        ["order", "fifo (preset slicing; by default priority)"],
        [f"{others - 2} {rest}"],
    ]


def config_lines(*arguments: str) -> list[list[str]]:
    lines = invoke("config", *arguments).output.splitlines()
    return [re.split(r"\s{2,}", line.strip()) for line in lines]


def test_the_error_of_a_misspelt_setting_names_the_nearest_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "config", "slice_elem=1") == 2
    assert capsys.readouterr().err.endswith("; did you mean 'slice_elems'?\n")


def test_the_environment_chooses_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREPROP_PRESET", "wfbp")
    assert shown_settings()["granularity"] == ("array", "preset wfbp")


def test_settings_from_reads_numbers_names_and_none() -> None:
    texts = ["slice_elems=5", "order=fifo", "link_rate_bits_per_s=1e9", "trace=none"]
    assert settings_from(texts) == {
        "slice_elems": 5,
        "order": "fifo",
        "link_rate_bits_per_s": 1e9,
        "trace": None,
    }
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        settings_from(["order"])


# Traces.
def write_trace(folder: Path, process: str, count: int) -> None:
    recorder = TraceRecorder(folder / f"{process}.abc.trace.json", process.replace("-", " "), 0)
    for i in range(count):
        recorder.span("updated", f"{process}-{i}", recorder.now_ns(), step=1)
    recorder.write()


def test_trace_merges_all_processes(tmp_path: Path) -> None:
    write_trace(tmp_path, "worker-0", 2)
    write_trace(tmp_path, "server-0", 3)
    target = tmp_path / "all.json"
    result = invoke("trace", str(tmp_path), "--out", str(target))
    assert result.exit_code == 0
    events = json.loads(target.read_text())["traceEvents"]
    assert f"{len(events)} events in {target}" in result.output
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert sorted(names) == [f"server-0-{i}" for i in range(3)] + [f"worker-0-{i}" for i in (0, 1)]


def test_trace_writes_beside_the_traces_by_default_and_can_be_repeated(tmp_path: Path) -> None:
    write_trace(tmp_path, "worker-0", 2)
    for _ in range(2):
        assert f" events in {tmp_path / 'merged.json'}" in invoke("trace", str(tmp_path)).output


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "has no *.trace.json"),
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"other": 1}', "is damaged"),
    ],
)
def test_trace_says_what_is_wrong_with_the_folder(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    content: str | None,
    told: str,
) -> None:
    if content is not None:
        (tmp_path / "worker-0.abc.trace.json").write_text(content)
    assert run_main(monkeypatch, "trace", str(tmp_path)) == 2
    assert told in capsys.readouterr().err


def test_trace_says_where_it_cannot_write(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_trace(tmp_path, "worker-0", 1)
    target = tmp_path / "no" / "folder.json"
    assert run_main(monkeypatch, "trace", str(tmp_path), "--out", str(target)) == 2
    assert f"cannot write {target}" in capsys.readouterr().err


# Commands of foreprop-lab.
def test_a_command_of_the_lab_names_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("foreprop.tools.cli.registry.entry_points", lambda group: ())
    registry.commands.cache_clear()
    try:
        for arguments in (["bench", "wire", "--slices", "5"], ["lab", "mlp", "--help"], ["demo"]):
            assert run_main(monkeypatch, *arguments) == 1
            told = f"`foreprop {arguments[0]}` is a command of foreprop-lab, which is not installed"
            assert capsys.readouterr().err == (
                f"foreprop: {told}: pip install ./lab in a clone of foreprop\n"
            )
    finally:
        registry.commands.cache_clear()


def test_a_missing_library_of_the_lab_is_named_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "foreprop_lab.benchmarks.command"
    monkeypatch.delitem(sys.modules, command, raising=False)
    monkeypatch.setitem(sys.modules, "foreprop_lab.benchmarks.memory", None)
    missing = registry.Entry("bench", f"{command}:bench", "", registry.MEASURE)
    with pytest.raises(registry.NotInstalled, match=r"needs .*, which is not installed: pip inst"):
        registry.command_of(missing)


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [("report", "jinja2", "report"), ("demo", "jinja2", "report")],
)
def test_a_command_of_the_package_names_the_extra_that_it_needs(
    command: str,
    missing: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours = [
        name
        for name in sys.modules
        if name.startswith(("foreprop.tools.report", "foreprop_lab.demo"))
    ]
    for name in [*ours, f"foreprop.tools.cli.{command}", f"foreprop_lab.commands.{command}"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    assert run_main(monkeypatch, command, "--steps", "3") == 1
    told = f"`foreprop {command}` needs {missing}, which is not installed: pip install '.[{extra}]'"
    assert told in capsys.readouterr().err


# One vocabulary.
@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The settings that `lab simulate` has been given; it does nothing with them."""
    given: list[Any] = []

    def simulate(setting: Any, **_: Any) -> list[Any]:
        given.append(setting)
        raise PeerLost("nothing is simulated")

    monkeypatch.setattr("foreprop_lab.commands.simulate.simulate_lab", simulate)
    monkeypatch.chdir(tmp_path)
    return given


@pytest.mark.parametrize(
    ("old", "new", "notice"),
    [
        ("--rate-mbit 100", "--rate 100Mbit", "--rate-mbit is now --rate 100Mbit"),
        ("--rate-mbit=2.5", "--rate=2500kbit", "--rate-mbit is now --rate 2.5Mbit"),
        ("--compute-s 0.25", "--compute 250ms", "--compute-s is now --compute 0.25s"),
        ("--iterations 7", "--steps 7", "--iterations is now --steps 7"),
    ],
)
def test_old_names_mean_the_new_ones_and_say_so(
    simulated: list[Any], old: str, new: str, notice: str
) -> None:
    common = ("lab", "simulate", "--systems", "p3", "--nodes", "2")
    before, after = invoke(*common, *old.split()), invoke(*common, *new.split())
    assert simulated[0] == simulated[1]
    assert f"foreprop: {notice}; the old name goes with the next version\n" in before.stderr
    assert "is now" not in after.output


def test_an_old_name_is_reported_as_it_was_typed(simulated: list[Any]) -> None:
    result = invoke("lab", "simulate", "--iterations", "0")
    assert "foreprop: --iterations is 0; at least 1\n" in result.stderr
    assert not simulated


def test_names_of_other_tools_are_taken_without_a_word() -> None:
    ours = invoke("run", "--workers-per-node", "3", "--dry-run", "train.py")
    theirs = invoke("run", "--nproc-per-node", "3", "--dry-run", "train.py")
    assert ours.exit_code == theirs.exit_code == 0
    assert ours.output == theirs.output


def test_a_scripts_own_options_are_left_alone() -> None:
    result = invoke("run", "--dry-run", "train.py", "--nproc-per-node", "3", "--iterations", "4")
    assert "train.py --nproc-per-node 3 --iterations 4" in result.output
    assert not result.stderr

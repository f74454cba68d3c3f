"""The order of runs, what becomes of those that fail, and the rows of the table."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from foreprop.errors import ConfigError
from foreprop.tools.cli.compare import show
from foreprop.tools.compare.records import MARK, Began, Ended, Record, Task, chunks
from foreprop.tools.compare.result import Comparison
from foreprop.tools.compare.run import Lines, Request, ScriptFailed, Stopped, compare
from foreprop.tools.run.run import Outcome

LOSSES = [2.0, 1.5, 1.0, 0.75, 0.5]
SECONDS = {"alone": 0.5, "ddp": 1.0, "p3": 0.8}
REQUEST = Request(
    script="train.py",
    systems=("alone", "ddp", "p3"),
    workers=2,
    machines=2,
    rounds=3,
    steps=4,
    warm_up=1,
    batch=8,
)


def told_by(rank: int, system: str, losses: Sequence[float] = LOSSES, **ended: Any) -> list[Record]:
    """Of a rank whose run goes well. Its first step that counts takes as long as the others."""
    seconds = [SECONDS.get(system, 1.0)] * (len(losses) - 1)
    fields: dict[str, Any] = {
        "steps": len(losses),
        "digest": "same",
        "interface": "eth0",
        "sent_bytes": 4_000_000,
        "is_ready": True,
    }
    return [
        Began(rank=rank, about=system),
        *chunks(rank, list(losses), seconds),
        Ended(rank=rank, **fields | ended),
    ]


class Script:
    """Starts nothing; answers for each run what ``ranks`` gives."""

    def __init__(self, ranks: Callable[[str, int], list[Record]], code: int = 0) -> None:
        self.started: list[str] = []
        self._ranks, self._outcome = ranks, Outcome(code, "rank 0 ended" if code else None)

    def __call__(self, task: Task, lines: Lines) -> Outcome:
        self.started.append(task.system)
        for rank in range(2):
            lines.write(b"[%d] hello\n" % rank)
            for record in self._ranks(task.system, rank):
                lines.write(b"[%d] %s" % (rank, MARK + msgspec.json.encode(record)) + b"\n")
        return self._outcome


def well(system: str, rank: int) -> list[Record]:
    return told_by(rank, system)


def test_systems_take_turns_and_each_is_once_first(tmp_path: Path) -> None:
    script = Script(well)
    compare(REQUEST, script, tmp_path)
    assert script.started == ["alone", "ddp", "p3", "ddp", "p3", "alone", "p3", "alone", "ddp"]
    assert (tmp_path / "1-p3.log").read_text() == "[0] hello\n[1] hello\n"


def test_the_rows(tmp_path: Path) -> None:
    found = compare(REQUEST, Script(well), tmp_path)
    alone, ddp, p3 = found.rows
    assert [row.steps for row in found.rows] == [12, 12, 12]
    assert p3.step_s is not None
    assert p3.step_s.median == pytest.approx(0.8)
    assert p3.steps_per_s == pytest.approx(1.25)
    assert p3.samples_per_s == pytest.approx(20)
    assert p3.over_ddp == pytest.approx(1.25)
    assert [row.waiting_share for row in found.rows] == [None, 0.5, pytest.approx(0.375)]
    assert p3.sent_bytes_per_step == 1e6
    assert [alone.losses, ddp.losses, p3.losses] == ["not compared", "equal", "equal"]
    assert msgspec.json.decode(msgspec.json.encode(found), type=Comparison) == found


def test_a_system_that_fails_is_left_out_from_then_on(tmp_path: Path) -> None:
    def ranks(system: str, rank: int) -> list[Record]:
        error = "PeerLost: rank 1 is gone" if rank == 0 else "ConfigError: not with ring"
        if system == "p3":
            return [Ended(rank=rank, steps=0, error=error, is_ready=True)]
        return told_by(rank, system)

    script = Script(ranks)
    found = compare(REQUEST, script, tmp_path)
    assert script.started.count("p3") == 1
    assert found.rows[2].error == "rank 1: ConfigError: not with ring", (
        "the cause, not what follows"
    )
    assert found.rows[2].step_s is None
    assert found.rows[1].losses == "equal"


def test_ranks_with_other_parameters_did_not_train_together(tmp_path: Path) -> None:
    def ranks(system: str, rank: int) -> list[Record]:
        return told_by(rank, system, digest=f"of rank {rank}")

    alone, ddp, p3 = compare(REQUEST, Script(ranks), tmp_path).rows
    assert alone.error == ""
    assert "DDP averages only what goes through model(...)" in ddp.error
    assert p3.error == "the ranks' parameters were not the same in the end"


def test_runs_with_other_random_numbers_are_reported(tmp_path: Path) -> None:
    draws = iter(range(100))

    def ranks(system: str, rank: int) -> list[Record]:
        return told_by(rank, system, [2 + next(draws) / 10, 1.0, 1.0])

    found = compare(REQUEST, Script(ranks), tmp_path)
    assert any("draws other random numbers" in notice for notice in found.notices)
    assert any("of a run 2 steps count, not 4" in notice for notice in found.notices)
    assert found.rows[2].losses == "other draws"


def test_busy_processors_are_reported(tmp_path: Path) -> None:
    def ranks(system: str, rank: int) -> list[Record]:
        return told_by(rank, system, cpu_share=0.9 if system == "p3" and rank == 1 else 0.5)

    found = compare(REQUEST, Script(ranks), tmp_path)
    assert [notice.partition(" processors")[0] for notice in found.notices] == ["p3: a machine's"]


def test_a_script_without_parallelize_is_an_error_at_once(tmp_path: Path) -> None:
    script = Script(lambda _, rank: [Ended(rank=rank, steps=0)])
    with pytest.raises(ConfigError, match=r"train\.py: the script ended without calling"):
        compare(REQUEST, script, tmp_path)
    assert script.started == ["alone"]


def test_a_script_that_fails_by_itself_is_an_error_at_once(tmp_path: Path) -> None:
    script = Script(lambda _, rank: [Ended(rank=rank, steps=0, error="OSError: no data")], code=1)
    with pytest.raises(ScriptFailed, match=r"failed before parallelize.*OSError: no data.*1-alone"):
        compare(REQUEST, script, tmp_path)


def test_a_process_that_dies_without_a_word_is_the_launchers_to_tell(tmp_path: Path) -> None:
    script = Script(lambda system, rank: [Began(rank=rank, about=system)], code=137)
    found = compare(REQUEST, script, tmp_path)
    assert [row.error for row in found.rows] == ["rank 0 ended"] * 3


@pytest.mark.parametrize("failing", [{"alone", "ddp", "p3"}, {"p3"}], ids=["all", "one"])
def test_what_failed_is_shown_with_its_log(tmp_path: Path, failing: set[str]) -> None:
    def ranks(system: str, rank: int) -> list[Record]:
        if system in failing:
            return [Ended(rank=rank, steps=3, error="ValueError: mine", is_ready=True)]
        return told_by(rank, system)

    shown = io.StringIO()
    show(Console(file=shown, width=200), compare(REQUEST, Script(ranks), tmp_path))
    text = shown.getvalue()
    log = tmp_path / "1-p3.log"
    assert f"p3 failed: rank 0: ValueError: mine; what it printed is in {log}\n" in text
    assert log.read_text() == "[0] hello\n[1] hello\n"
    assert ("median of all rounds" in text) == (len(failing) < 3)  # else there is no row to read


def test_a_signal_ends_the_comparison(tmp_path: Path) -> None:
    def start(_: Task, lines: Lines) -> Outcome:
        return Outcome(130, "ended by SIGINT")

    with pytest.raises(Stopped, match="SIGINT") as stopped:
        compare(REQUEST, start, tmp_path)
    assert stopped.value.code == 130


@pytest.mark.parametrize("width", [40, 200])
def test_the_table_is_whole_at_any_width(tmp_path: Path, width: int) -> None:
    found = compare(REQUEST, Script(well), tmp_path)
    shown = io.StringIO()
    show(Console(file=shown, width=width), found)
    text = shown.getvalue()
    assert "…" not in text
    (ratio,) = [line for line in text.splitlines() if "1.25x" in line]
    assert len(ratio) <= width
    assert "800.0-800.0" in text
    assert "itself: equal" in text
    assert "over eth0" in text

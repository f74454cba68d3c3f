"""`foreprop top`: a table of what ranks have left in a folder."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from foreprop.engine.status import RankStatus
from foreprop.tools.cli.app import app
from foreprop.tools.cli.top import is_over, live_page, top, waited_for

NOW_S = 1000.0


def status(rank: int, **changed: Any) -> RankStatus:
    values: dict[str, Any] = {
        "session": "s",
        "rank": rank,
        "world_size": 3,
        "host": f"node{rank}",
        "pid": 100 + rank,
        "at_s": NOW_S - 1,
        "state": "training",
        "step": 1500,
        "step_s": 0.182,
        "waiting_share": 0.3,
        "sent_bits_per_s": 1.1e9,
        "received_bits_per_s": 9e8,
    }
    return RankStatus(**{**values, **changed})


def shown(folder: Path, *statuses: RankStatus) -> str:
    for one in statuses:
        (folder / f"rank-{one.rank}.status.json").write_bytes(msgspec.json.encode(one))
    console = Console(width=120)
    with console.capture() as captured:
        console.print(live_page(folder, NOW_S)[0])
    return captured.get()


def test_every_rank_has_a_row_and_the_straggler_is_named(tmp_path: Path) -> None:
    text = shown(tmp_path, status(0), status(1, waiting_share=0.02), status(2))
    rows = text.splitlines()
    assert len(rows) == 4
    assert rows[1].split() == (
        [
            "0",
            "node0",
            "1,500",
            "182",
            "ms",
            "30%",
            "1.1",
            "Gbit/s",
            "900",
            "Mbit/s",
            "0",
            "training",
        ]
    )
    assert rows[2].endswith("training, the others wait for it")
    assert "wait for it" not in rows[1] + rows[3]


def test_errors_and_silence_are_reported(tmp_path: Path) -> None:
    text = shown(
        tmp_path,
        status(0, state="failed", error="PeerLost: rank 1 is gone"),
        status(2, at_s=NOW_S - 75, step_s=None, received_bits_per_s=0.0),
    )
    assert "0 bit/s" not in text  # a ring has no replies
    assert "rank 0 (node0) failed: PeerLost: rank 1 is gone" in text
    assert "no word for 75 s" in text
    assert "1 of 3 ranks have left no word yet" in text


def test_a_rank_that_came_later_is_none_of_the_first_ones(tmp_path: Path) -> None:
    ended = [status(rank, state="closed") for rank in range(4)]
    assert "1 of 3 ranks have left no word yet" in shown(tmp_path, *ended[:2], ended[3])
    assert not is_over([*ended[:2], ended[3]])
    assert "left no word" not in shown(tmp_path, ended[2])
    assert is_over(ended)


def test_an_empty_folder_says_what_to_do(tmp_path: Path) -> None:
    text = shown(tmp_path).replace("\n", "")
    assert "No rank has left word" in text
    assert "watch=" in text


@pytest.mark.parametrize(
    ("shares", "known", "expected"),
    [
        ([0.3, 0.02, 0.28], None, 1),
        ([0.3, 0.28, 0.29], None, None),
        ([0.3, 0.02, 0.28], 2, 2),
        ([None, 0.1, None], None, None),
    ],
)
def test_the_others_wait_for_the_rank_that_waits_least(
    shares: list[float | None], known: int | None, expected: int | None
) -> None:
    found = [status(r, waiting_share=s, straggler=known) for r, s in enumerate(shares)]
    assert waited_for(found) == expected


def test_it_is_over_when_all_have_ended() -> None:
    ended = [status(0, state="closed"), status(1, state="failed"), status(2, state="closed")]
    assert is_over(ended)
    assert not is_over(ended[:2])
    assert not is_over([*ended[:2], status(2)])
    assert not is_over([])


def test_piped_no_line_is_wrapped(tmp_path: Path) -> None:
    error = "ValueError: " + "x " * 100
    shown(tmp_path, *(status(rank, state="failed", error=error) for rank in range(3)))
    lines = CliRunner().invoke(app, ["top", str(tmp_path)], env={"COLUMNS": "60"}).output
    assert len(lines.splitlines()) == 1 + 3 + 3


@pytest.mark.parametrize("columns", [60, 80])
def test_on_a_narrow_terminal_nothing_is_cut(tmp_path: Path, columns: int) -> None:
    host = "a-host-with-a-name-of-its-own"
    shown(tmp_path, *(status(rank, host=host) for rank in range(3)))
    seen = io.StringIO()
    Console(file=seen, width=columns).print(live_page(tmp_path, NOW_S)[0])
    assert "\N{HORIZONTAL ELLIPSIS}" not in seen.getvalue()


def test_piped_the_table_is_printed_once(tmp_path: Path) -> None:
    shown(tmp_path, status(0), status(1), status(2))
    for arguments in (["top", str(tmp_path)], ["top", str(tmp_path), "--once"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0
        assert result.output.count("node1") == 1


def test_in_a_terminal_it_goes_on_until_all_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = io.StringIO()
    console = Console(file=seen, force_terminal=True, width=120)
    monkeypatch.setattr("foreprop.tools.cli.top.console", lambda: console)
    shown(tmp_path, status(0), status(1), status(2))
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            ended = [status(n, state="closed", step=1600) for n in (0, 2)]
            shown(tmp_path, *ended, status(1, state="failed", error="ValueError: odd"))

    monkeypatch.setattr("foreprop.tools.cli.top.time.sleep", sleep)
    top(tmp_path, every=0.25)
    assert slept == [0.25, 0.25]
    assert "1,500" in seen.getvalue()
    assert "1,600" in seen.getvalue()
    assert "rank 1 (node1) failed: ValueError: odd" in seen.getvalue()

"""Lightning with foreprop is Lightning with DDP: the same losses, weights and checkpoints."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.process.harness import ROOT, Run, Zygote, environment, forked_ranks, running

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

CASES = ROOT / "tests" / "process" / "lightning_cases.py"
WAIT_S = 500
USUAL = "plain clip_value accumulated scheduled bf16 bf16_true fp16"
UNUSUAL = "norms early averaged resumed rivals rivals_untoggled common fabric"
"""Together, because to import Lightning takes longer than a case."""


def variables(run: Run) -> dict[str, str]:
    return environment(run.mark, {"RESULTS": str(run.folder), "TMPDIR": str(run.temporary)})


def start(run: Run, zygote: Zygote, ranks: int, *cases: str) -> None:
    """By Lightning's own launcher."""
    run.start(zygote, variables(run), script=CASES, arguments=[str(ranks), *cases])


def check_alike(run: Run, ranks: int, *cases: str) -> None:
    """All that a case shows is DDP's, but for last bits."""
    results = run.results()
    assert sorted(results) == list(range(ranks)), run.output()
    for rank, found in results.items():
        assert sorted(found) == sorted(cases), run.output()
        for case, by_strategy in found.items():
            difference = differ(by_strategy["foreprop"], by_strategy["ddp"])
            assert not difference, f"{case}, rank {rank}: {difference}\n{run.output()}"
            assert len(by_strategy["ddp"]["losses"]) > 3
    run.check_nothing_left(within_s=30)


def differ(found: Any, expected: Any, where: str = "") -> str:
    """What differs, in words; nothing if they are alike."""
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            return f"{where} has {sorted(found)}, not {sorted(expected)}"
        parts = [differ(found[key], expected[key], f"{where}.{key}") for key in expected]
        return next(filter(None, parts), "")
    if isinstance(expected, list):
        if len(found) != len(expected):
            return f"{where} has {len(found)}, not {len(expected)}"
        pairs = enumerate(zip(found, expected, strict=True))
        parts = [differ(one, other, f"{where}[{number}]") for number, (one, other) in pairs]
        return next(filter(None, parts), "")
    alike = math.isclose(found, expected, rel_tol=1e-3, abs_tol=1e-5)
    return "" if alike else f"{where} is {found}, not {expected}"


def test_a_training_that_clips_is_ddps(zygote: Zygote, tmp_path: Path) -> None:
    """In ranks that Lightning finds started, as by torchrun."""
    with forked_ranks(zygote, tmp_path, 2, CASES, "2", "clip_norm") as run:
        run.wait()
        assert run.codes() == [0], run.output()
        check_alike(run, 2, "clip_norm")


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, ["clip_norm", *USUAL.split()]),
        (2, UNUSUAL.split()),
        (3, ["plain", "clip_norm", "accumulated", "rivals", "fabric"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_a_training_is_ddps(zygote: Zygote, tmp_path: Path, ranks: int, cases: list[str]) -> None:
    with running(tmp_path) as run:
        start(run, zygote, ranks, *cases)
        run.wait(WAIT_S)
        assert run.codes() == [0], run.output()
        check_alike(run, ranks, *cases)


@pytest.mark.long
def test_processes_that_torchrun_has_started(zygote: Zygote, tmp_path: Path) -> None:
    with running(tmp_path) as run:
        launcher = Path(torch.__path__[0]) / "distributed" / "run.py"
        told = ["--standalone", "--nproc-per-node", "2", str(CASES), "2", "plain"]
        run.start(zygote, variables(run), script=launcher, arguments=told)
        run.wait(WAIT_S)
        assert run.codes() == [0], run.output()
        check_alike(run, 2, "plain")


@pytest.mark.long
def test_processes_that_lightning_spawns(zygote: Zygote, tmp_path: Path) -> None:
    with running(tmp_path) as run:
        start(run, zygote, 2, "spawned")
        run.wait(WAIT_S)
        assert run.codes() == [0], run.output()
        (found,) = run.results().values()
        ddp, own = found["spawned"]["ddp"], found["spawned"]["foreprop"]
        assert not differ(own["weights"], ddp["weights"]), run.output()
        assert math.isclose(own["val_loss"], ddp["val_loss"], rel_tol=1e-3)
        run.check_nothing_left(within_s=30)


@pytest.mark.long
def test_an_error_on_one_rank_ends_the_fit_everywhere(zygote: Zygote, tmp_path: Path) -> None:
    with running(tmp_path) as run:
        start(run, zygote, 2, "fails")
        run.wait(WAIT_S)
        assert 0 not in run.codes(), run.output()
        assert "PeerLost: rank 1 ended: ValueError: the data are odd" in run.output()
        run.check_nothing_left(within_s=30)


@pytest.mark.long
def test_the_example_trains_and_logs(zygote: Zygote, tmp_path: Path) -> None:
    """160 steps of 2 ranks; the monitor says something every ten."""
    with running(tmp_path) as run:
        script = ROOT / "examples" / "train_with_lightning.py"
        run.start(
            zygote, variables(run), script=script, arguments=["--folder", str(tmp_path / "logs")]
        )
        run.wait(WAIT_S)
        assert run.codes() == [0], run.output()
        accuracy = re.search(r"accuracy (\S+) %", run.output())
        assert accuracy, run.output()
        assert float(accuracy[1]) > 70
        rows = logged(tmp_path / "logs")
        assert len(rows) == 16
        for row in rows:
            assert float(row["foreprop/steps_per_s"]) > 0
            assert 0 <= float(row["foreprop/waiting_share"]) <= 1
            assert float(row["foreprop/straggler"]) in (0, 1)
            assert float(row["foreprop/straggler_excess"]) >= 0
        values = 20 * 64 + 64 + 64 * 4 + 4
        for name in ("foreprop/sent_bytes", "foreprop/received_bytes"):
            total = 10 * sum(float(row[name]) for row in rows)
            assert math.isclose(total, 160 * 2 * 4 * values, rel_tol=0.1)
        run.check_nothing_left(within_s=30)


def logged(folder: Path) -> list[dict[str, str]]:
    """What the monitor has logged, line by line."""
    (path,) = folder.rglob("metrics.csv")
    with path.open() as file:
        return [row for row in csv.DictReader(file) if row["foreprop/straggler"]]

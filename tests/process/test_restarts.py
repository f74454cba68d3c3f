"""Runs that are killed, at chosen and at drawn moments, and started again: they end as others."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest

from foreprop.tools.run.host import free_port
from tests.process.harness import ROOT, Run, Zygote, running
from tests.process.restart_script import BATCH, EPOCHS, EVERY, SAMPLES
from tests.process.train_script import Scenario

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(300)]

SCRIPT = ROOT / "tests" / "process" / "restart_script.py"
STEPS = EPOCHS * SAMPLES // BATCH // 2
"""Of two ranks."""
MOST_S = 20.0
MOST_STARTS = 2.5
"""From a kill to the next step: by the clock, or where a start takes long, in starts."""


def told(folder: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"told-{rank}.jsonl").read_text().splitlines()]


def weights(run: Run, ranks: int = 2) -> str:
    """The SHA-256 that all ranks have told last."""
    sums = {told(run.folder, rank)[-1].get("sha256") for rank in range(ranks)}
    assert len(sums) == 1, run.output()
    found = sums.pop()
    assert found is not None, run.output()
    return str(found)


def start(zygote: Zygote, run: Run, kills: list[Any], *options: str, torchrun: bool) -> None:
    variables = run.environment(Scenario(), KILLS=json.dumps(kills))
    if torchrun:
        where = ("--nproc-per-node", "2", "--master-port", str(free_port()))
        script = (str(SCRIPT), str(run.folder))
        run.torchrun(zygote, variables, *where, *options, script[0], script=Path(script[1]))
        return
    hosts = run.folder / "hosts"
    hosts.write_text("127.0.0.1\n127.0.0.2\n")
    resources = ("--resources", str(hosts), "--master-addr", "127.0.0.1", "--grace", "2")
    run.foreprop(zygote, variables, "run", *resources, *options, str(SCRIPT), str(run.folder))


@pytest.fixture(scope="module")
def unbroken(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> str:
    with running(tmp_path_factory.mktemp("unbroken")) as run:
        start(zygote, run, [], torchrun=True)
        run.wait(60)
        assert run.codes() == [0], run.output()
        return weights(run)


def recoveries(folder: Path) -> list[tuple[float, int]]:
    """For each kill: the seconds until the next step on the killed rank, and the steps lost."""
    found = []
    for rank in range(2):
        lines = told(folder, rank)
        for number, line in enumerate(lines):
            if "killed" not in line:
                continue
            before = max((one["step"] for one in lines[:number] if "step" in one), default=0)
            after = next(one for one in lines[number:] if "step" in one)
            begun = next(one for one in lines[number:] if "begins" in one)
            found.append((after["at_s"] - line["at_s"], before - begun["begins"]))
    return found


@pytest.mark.alone
@pytest.mark.parametrize("torchrun", [False, True], ids=["foreprop run", "torchrun"])
def test_kills_cost_little_and_no_bit(
    zygote: Zygote, tmp_path: Path, unbroken: str, torchrun: bool
) -> None:
    """One rank, at a drawn moment of a drawn step."""
    numbers = random.Random(20 + torchrun)
    rank, step = int(torchrun), numbers.randrange(EVERY + 1, STEPS)
    kills = [[rank, step, 0.04 * numbers.random()]]
    with running(tmp_path) as run:
        started_s = time.monotonic()
        start(zygote, run, kills, "--max-restarts", "1", torchrun=torchrun)
        run.wait(180)
        assert run.codes() == [0], run.output()
        assert weights(run) == unbroken, kills
        start_s = min(line["at_s"] for line in told(tmp_path, 0) if "step" in line) - started_s
        found = recoveries(tmp_path)
        print(f"\nfrom the command to the first step: {start_s:.1f} s; from a kill to the next:")
        print([f"{seconds:.1f} s, {steps} steps lost" for seconds, steps in found])
        ((seconds, steps),) = found
        assert seconds < max(MOST_S, MOST_STARTS * start_s)
        assert steps < 2 * EVERY  # one checkpoint may have been under way
        killed = f"rank {rank} on 127.0.0.1 was killed by SIGKILL; restart 1 of 1"
        assert torchrun or f"foreprop run: {killed}" in run.output()
        run.check_nothing_left()


def test_with_dedicated_servers(zygote: Zygote, tmp_path: Path, unbroken: str) -> None:
    """They end with the run that they served; the next one, with one server, goes on."""
    kills = [[0, 2 * EVERY + 2, 0.0]]  # by then the first checkpoint is whole
    with running(tmp_path) as run:
        for servers in (2, 1):
            port = free_port()
            settings = {"FOREPROP_ARCHITECTURE": "ps", "FOREPROP_DEDICATED_SERVERS": str(servers)}
            variables = run.environment(Scenario(), KILLS=json.dumps(kills), **settings)
            count = ("--count", str(servers))
            run.foreprop(zygote, variables, "server", "--rendezvous", f"127.0.0.1:{port}", *count)
            where = ("--nproc-per-node", "2", "--master-port", str(port), str(SCRIPT))
            run.torchrun(zygote, variables, *where, script=tmp_path)
            run.wait(120)
        assert run.codes()[2:] == [0, 0], run.output()
        assert 0 not in run.codes()[:2]
        assert weights(run) == unbroken
        assert re.search("goes on from step [36]", run.output())
        run.check_nothing_left()

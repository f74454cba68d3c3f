"""Nodes of an elastic session killed at seeded moments, with real processes.

    python -m tests.faults.node_kill_points --seeds 100

Each session has four workers with a server beside each, and up to three deaths, each somewhere in a
backward pass or some milliseconds after. ``buddy_steps`` is 1, so what is left must have the bits
that plain arithmetic has by the servers' logs, optimizer state included.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from foreprop.core.slicing import Slice
from tests.countedlogs import counted_by
from tests.faults.kill_points import Survived, check_sets, survived
from tests.leaks import adopt_orphans
from tests.process.elastic_script import PARAMETERS, Plan, by_arithmetic
from tests.process.harness import ROOT, Run, Zygote, running, torchruns_variables
from tests.process.train_script import Scenario

SCRIPT = ROOT / "tests" / "process" / "node_script.py"
WORKERS = 4
_APART_STEPS = 5


def plan_of(seed: int, deaths: int = 1) -> Plan:
    rng = random.Random(seed)
    victims = rng.sample(range(WORKERS), deaths)
    moments = {
        str(rank): (
            3 + _APART_STEPS * place + rng.randrange(2),
            rng.randrange(PARAMETERS),
            rng.choice([0.0, 0.001, 0.01]) * rng.random(),
        )
        for place, rank in enumerate(victims)
    }
    return Plan(steps=4 + _APART_STEPS * (deaths + 1), pause_s=0.01, deaths=moments)


def start(run: Run, zygote: Zygote, plan: Plan, port: int, *, own_store: bool = False) -> None:
    """As torchrun does, but ended by nobody; ``own_store``: it is in rank 0's process."""
    settings = {
        "FOREPROP_ARCHITECTURE": "p2p",
        "FOREPROP_ELASTIC": "1",
        "FOREPROP_BUDDY_STEPS": "1",
        "FOREPROP_COUNTED_LOG": str(run.folder),
    }
    variables = run.environment(Scenario(), PLAN=plan.encode(), **settings)
    for rank in range(WORKERS):
        told = torchruns_variables(rank, port, WORKERS, 1)
        if own_store:
            told["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        run.start(zygote, {**variables, **told}, script=SCRIPT)


def run_plan(zygote: Zygote, folder: Path, plan: Plan) -> list[Survived]:
    """One session; raises `AssertionError` where something does not hold."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with running(folder) as run:
        start(run, zygote, plan, store.port)
        run.wait(60)
        check(run, plan)
        run.check_nothing_left()
        return [survived(run, plan, int(rank)) for rank in plan.deaths]


def check(run: Run, plan: Plan) -> None:
    results = run.results()
    alive = [rank for rank in range(WORKERS) if str(rank) not in plan.deaths]
    for rank in alive:
        assert results[rank].get("sha256"), f"rank {rank}: {results[rank]}\n{run.output()}"
        assert set(results[rank]["stats"]["left"]) == set(plan.deaths), results[rank]["stats"]
    assert all("died_s" in results[int(rank)] for rank in plan.deaths), "somebody has not died"
    pieces = [Slice(*piece) for piece in results[alive[0]]["pieces"]]
    counted = []
    for index in range(WORKERS):
        own = [piece.number for piece in pieces if piece.server == index]
        counted.append(counted_by(run.folder, index, WORKERS, own))
    for piece in pieces:
        check_sets([counted[piece.server].at(piece.number, s) for s in range(1, plan.steps + 1)])
    expected = by_arithmetic(WORKERS, plan.steps, pieces, counted)
    assert {results[rank]["sha256"] for rank in alive} == {expected}, run.output()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="kill points")
    parser.add_argument("--first", type=int, default=0, help="the first session's seed")
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no session after that")
    given = parser.parse_args(arguments)
    began, found = time.monotonic(), list[Survived]()
    dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # opens torch's own pipes
    adopt_orphans()
    zygote = Zygote()
    seed = given.first
    while len(found) < given.seeds and time.monotonic() < began + given.limit_s:
        with tempfile.TemporaryDirectory() as folder:
            found += run_plan(zygote, Path(folder), plan_of(seed, 1 + seed % (WORKERS - 1)))
        seed += 1
    zygote.close()
    seconds = sorted(each.seconds for each in found)
    print(
        f"{len(found)} nodes killed in {seed - given.first} sessions: all survivors right; until"
        f" the next step's end {statistics.median(seconds):.3f} s in the median,"
        f" {seconds[-1]:.3f} s at most"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

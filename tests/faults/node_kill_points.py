"""Nodes of an elastic session killed at seeded moments, with real processes.

    python -m tests.faults.node_kill_points --seeds 100

Each session has four workers with a server beside each, and up to three deaths, each somewhere in a
backward pass or some milliseconds after. ``buddy_steps`` is 1, so what is left must have the bits
that plain arithmetic has by the servers' logs, optimizer state included.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from tests.faults.kill_points import (
    Survived,
    check,
    run_seeds,
    seeds_parser,
    survived,
    until_the_next_step,
)
from tests.process.elastic_script import PARAMETERS, Plan
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
        check(run, plan, WORKERS, WORKERS)
        run.check_nothing_left()
        return [survived(run, plan, int(rank)) for rank in plan.deaths]


def main(arguments: Sequence[str] | None = None) -> int:
    given = seeds_parser(__doc__, seeds=20).parse_args(arguments)

    def run_seed(zygote: Zygote, folder: Path, seed: int) -> list[Survived]:
        return run_plan(zygote, folder, plan_of(seed, 1 + seed % (WORKERS - 1)))

    found, sessions = run_seeds(given, run_seed)
    print(
        f"{len(found)} nodes killed in {sessions} sessions: all survivors right;"
        f" {until_the_next_step(found)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

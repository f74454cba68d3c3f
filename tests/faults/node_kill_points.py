"""Nodes of an elastic session killed at seeded moments, with real processes.

    python -m tests.faults.node_kill_points --seeds 100

Each session has four workers with a server beside each, and three nodes die, one after the other:
somewhere in a backward pass or some milliseconds after, or when a part of a push or a reply has
left. What is left must have the bits that plain arithmetic has by the servers' logs, optimizer
state included.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from tests.faults.kill_points import (
    Cut,
    Survived,
    check,
    moment,
    run_command,
    seeds_parser,
    share_of,
    survived,
)
from tests.process.elastic_script import Plan
from tests.process.harness import ROOT, Run, Zygote, running, torchruns_variables
from tests.process.train_script import Scenario

SCRIPT = ROOT / "tests" / "process" / "node_script.py"
WORKERS = 4
_APART_STEPS = 5
"""Four at least: a server may count the dead one until the next step, and writes down what it has
counted two steps later."""


def plan_of(seed: int, deaths: int = WORKERS - 1) -> Plan:
    rng = random.Random(seed)
    order = rng.sample(range(WORKERS), WORKERS)
    moments, cuts, reply_cuts = dict[str, tuple[int, int, float]](), {}, dict[str, Cut]()
    for place, rank in enumerate(order[:deaths]):
        step = 3 + _APART_STEPS * place + rng.randrange(2)
        other = rng.choice(order[place + 1 :])
        cut = (step, other, rng.randrange(2), share_of(rng))
        way = rng.randrange(3)
        if way == 0:
            moments[str(rank)] = moment(rng, step)
        elif way == 1:
            cuts[str(rank)] = cut
        else:
            reply_cuts[str(rank)] = cut
    return Plan(
        steps=4 + _APART_STEPS * (deaths + 1),
        deaths=moments,
        cuts=cuts,
        reply_cuts=reply_cuts,
    )


def start(
    run: Run,
    zygote: Zygote,
    plan: Plan,
    port: int,
    *,
    own_store: bool = False,
    forked: bool = False,
) -> None:
    """As torchrun does, but ended by nobody.

    ``own_store``: it is in rank 0's process. ``forked``: servers are.
    """
    settings = {
        "FOREPROP_ARCHITECTURE": "p2p",
        "FOREPROP_ELASTIC": "1",
        "FOREPROP_COUNTED_LOG": str(run.folder),
        "FORK_SERVERS": "1" if forked else "0",
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
        start(run, zygote, plan, store.port, forked=True)
        run.wait(60)
        check(run, plan, WORKERS, WORKERS)
        run.check_nothing_left()
        return [survived(run, rank) for rank in plan.victims]


def run_seed(zygote: Zygote, folder: Path, seed: int) -> list[Survived]:
    return run_plan(zygote, folder, plan_of(seed))


def main(arguments: Sequence[str] | None = None) -> int:
    given = seeds_parser(__doc__, seeds=20).parse_args(arguments)
    run_command(given, run_seed, "tests.faults.node_kill_points")
    return 0


if __name__ == "__main__":
    sys.exit(main())

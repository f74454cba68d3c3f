"""Workers of an elastic session killed at seeded moments, with real processes.

    python -m tests.faults.kill_points --seeds 500

In each session all workers but one die, one after the other, somewhere in a backward pass or some
milliseconds after. What is left must have the bits that plain arithmetic has by the servers' logs.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from foreprop.core.slicing import Slice
from tests.countedlogs import counted_by
from tests.leaks import adopt_orphans
from tests.process.elastic_script import PARAMETERS, Plan, by_arithmetic
from tests.process.harness import ROOT, Run, Zygote, running, torchruns_variables
from tests.process.train_script import Scenario

SCRIPT = ROOT / "tests" / "process" / "elastic_script.py"
SERVERS = 2
_APART_STEPS = 4


@dataclass(frozen=True)
class Survived:
    """Of one death: until the last survivor has ended its next step, and where it was."""

    seconds: float
    step: int
    counted_slices: int
    slices: int


def plan_of(seed: int, workers: int) -> Plan:
    rng = random.Random(seed)
    victims = rng.sample(range(workers), workers - 1)
    moments = {
        str(rank): (
            3 + _APART_STEPS * place + rng.randrange(2),
            rng.randrange(PARAMETERS),
            rng.choice([0.0, 0.001, 0.01]) * rng.random(),
        )
        for place, rank in enumerate(victims)
    }
    return Plan(steps=3 + _APART_STEPS * workers, deaths=moments)


def start(run: Run, zygote: Zygote, plan: Plan, port: int, workers: int) -> None:
    """``foreprop server`` and the workers, started as torchrun does, but ended by nobody."""
    variables = run.environment(Scenario(), PLAN=plan.encode())
    logs = {"FOREPROP_COUNTED_LOG": str(run.folder)}
    count = ("--count", str(SERVERS))
    arguments = ("server", "--rendezvous", f"127.0.0.1:{port}", *count)
    run.foreprop(zygote, {**variables, **logs}, *arguments)
    settings = {"FOREPROP_DEDICATED_SERVERS": str(SERVERS), "FOREPROP_ARCHITECTURE": "ps"}
    for rank in range(workers):
        told = torchruns_variables(rank, port, workers, 1)
        told["FOREPROP_SERVERS_FILE"] = str(servers_file(run, rank))
        run.start(zygote, {**variables, **settings, **told}, script=SCRIPT)


def servers_file(run: Run, rank: int) -> Path:
    return run.folder / f"servers-{rank}"


def start_again(run: Run, zygote: Zygote, plan: Plan, rank: int, workers: int) -> None:
    """In the lost one's place. The rendezvous that it is told is nobody's."""
    variables = run.environment(Scenario(), PLAN=plan.encode())
    settings = {"FOREPROP_DEDICATED_SERVERS": str(SERVERS), "FOREPROP_ARCHITECTURE": "ps"}
    other = (rank + 1) % workers
    settings["FOREPROP_JOIN"] = ",".join(servers_file(run, other).read_text().split())
    told = torchruns_variables(rank, 9, workers, 1)
    run.start(zygote, {**variables, **settings, **told}, script=SCRIPT)


def run_plan(zygote: Zygote, folder: Path, plan: Plan) -> list[Survived]:
    """One session; raises `AssertionError` where something does not hold."""
    workers = len(plan.deaths) + 1
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with running(folder) as run:
        start(run, zygote, plan, store.port, workers)
        command = run.started[0]
        run.wait(90, but=[command])
        del store
        run.wait(30)
        assert len([*run.folder.glob("*.counted")]) == SERVERS
        check(run, plan, workers, SERVERS)
        run.check_nothing_left()
        return [survived(run, plan, int(rank)) for rank in plan.deaths]


def check(run: Run, plan: Plan, workers: int, servers: int) -> None:
    """What is left has the bits that the servers' logs say."""
    results = run.results()
    alive = [rank for rank in range(workers) if str(rank) not in plan.deaths]
    for rank in alive:
        assert results[rank].get("sha256"), f"rank {rank}: {results[rank]}\n{run.output()}"
        assert set(results[rank]["stats"]["left"]) == set(plan.deaths), results[rank]["stats"]
    assert all("died_s" in results[int(rank)] for rank in plan.deaths), "somebody has not died"
    pieces = [Slice(*piece) for piece in results[alive[0]]["pieces"]]
    counted = []
    for index in range(servers):
        own = [piece.number for piece in pieces if piece.server == index]
        counted.append(counted_by(run.folder, index, workers, own))
    for piece in pieces:
        check_sets([counted[piece.server].at(piece.number, s) for s in range(1, plan.steps + 1)])
    expected = by_arithmetic(workers, plan.steps, pieces, counted)
    assert {results[rank]["sha256"] for rank in alive} == {expected}, run.output()


def check_sets(sets: Sequence[tuple[int, ...]]) -> None:
    """Nobody comes back."""
    for one, following in itertools.pairwise(sets):
        assert set(following) <= set(one), (one, following)


def survived(run: Run, plan: Plan, victim: int) -> Survived:
    results = run.results()
    died_s = results[victim]["died_s"]
    ended = [[at for at in found["ended_s"] if at > died_s] for found in results.values()]
    later = [min(after) - died_s for after in ended if after]
    alive = next(rank for rank in results if "sha256" in results[rank])
    left = results[alive]["stats"]["left"][str(victim)]
    return Survived(max(later), left["step"], left["counted_slices"], left["slices"])


def run_seeds(
    given: argparse.Namespace, run_seed: Callable[[Zygote, Path, int], list[Survived]]
) -> tuple[list[Survived], int]:
    """What has died, and in how many sessions."""
    began, found = time.monotonic(), list[Survived]()
    dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # opens torch's own pipes
    adopt_orphans()
    zygote = Zygote()
    seed = given.first
    while len(found) < given.seeds and time.monotonic() < began + given.limit_s:
        with tempfile.TemporaryDirectory() as folder:
            found += run_seed(zygote, Path(folder), seed)
        seed += 1
    zygote.close()
    return found, seed - given.first


def seeds_parser(text: str | None, *, seeds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--seeds", type=int, default=seeds, help="kill points")
    parser.add_argument("--first", type=int, default=0, help="the first session's seed")
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no session after that")
    return parser


def until_the_next_step(found: Sequence[Survived]) -> str:
    seconds = sorted(each.seconds for each in found)
    return (
        f"until the next step's end {statistics.median(seconds):.3f} s in the median,"
        f" {seconds[-1]:.3f} s at most"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = seeds_parser(__doc__, seeds=50)
    parser.add_argument("--workers", type=int, default=10, help="of each session")
    given = parser.parse_args(arguments)

    def run_seed(zygote: Zygote, folder: Path, seed: int) -> list[Survived]:
        return run_plan(zygote, folder, plan_of(seed, given.workers))

    found, sessions = run_seeds(given, run_seed)
    within = sum(0 < each.counted_slices < each.slices for each in found)
    print(
        f"{len(found)} kill points in {sessions} sessions: all survivors right;"
        f" {within} deaths within a step; {until_the_next_step(found)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

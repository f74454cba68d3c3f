"""Workers of an elastic session killed at seeded moments, with real processes.

    python -m tests.faults.kill_points --seeds 500

In each session all workers but one die, one after the other, up to two steps apart: somewhere in a
backward pass or some milliseconds after, or when a part of a push has left. What is left must have
the bits that plain arithmetic has by the servers' logs. Servers are forked, like the workers
(`tests.process.forked`).
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from foreprop.core.membership import CountedReplay
from foreprop.core.slicing import Slice
from foreprop.core.takeover import owner_of
from foreprop.core.wire import HEADER_BYTES
from tests.countedlogs import counted_by
from tests.leaks import adopt_orphans
from tests.process.elastic_script import PARAMETERS, SLICE_ELEMS, Plan, by_arithmetic
from tests.process.harness import ROOT, Run, Zygote, running, torchruns_variables
from tests.process.train_script import Scenario

SCRIPT = ROOT / "tests" / "process" / "elastic_script.py"
SERVERS = 2
WORKERS = 10
_DEDICATED = ROOT / "tests" / "process" / "dedicated_script.py"
_IN_HEADER = HEADER_BYTES / (HEADER_BYTES + 4 * SLICE_ELEMS)
"""The share of the largest push's bytes."""

Cut = tuple[int, int, int, float]
RunSeed = Callable[[Zygote, Path, int], list["Survived"]]


@dataclass(frozen=True)
class Survived:
    """Of one death: until the last survivor has ended its next step, and where it was."""

    seconds: float
    step: int
    counted_slices: int
    slices: int

    @property
    def is_within_a_step(self) -> bool:
        return 0 < self.counted_slices < self.slices


def plan_of(seed: int, workers: int = WORKERS) -> Plan:
    rng = random.Random(seed)
    step, deaths, cuts = 2, dict[str, tuple[int, int, float]](), dict[str, Cut]()
    for rank in rng.sample(range(workers), workers - 1):
        step += rng.randrange(3)
        if rng.randrange(2):
            deaths[str(rank)] = moment(rng, step)
        else:
            cuts[str(rank)] = (step, rng.randrange(SERVERS), rng.randrange(4), share_of(rng))
    return Plan(steps=step + 3, deaths=deaths, cuts=cuts)


def moment(rng: random.Random, step: int) -> tuple[int, int, float]:
    """In the backward pass, or after."""
    return step, rng.randrange(PARAMETERS), rng.choice([0.0, 0.001, 0.01]) * rng.random()


def share_of(rng: random.Random) -> float:
    """Of a frame: none of it, a part of its header, or more."""
    return rng.choice([0.0, _IN_HEADER, 1.0, 1.0, 1.0]) * rng.random()


def start(
    run: Run, zygote: Zygote, plan: Plan, port: int, workers: int, *, forked: bool = False
) -> None:
    """``foreprop server`` and the workers, started as torchrun does, but ended by nobody.

    ``forked``: so are the servers.
    """
    variables = run.environment(Scenario(), PLAN=plan.encode())
    logs = {"FOREPROP_COUNTED_LOG": str(run.folder)}
    arguments = ("server", "--rendezvous", f"127.0.0.1:{port}", "--count", str(SERVERS))
    if forked:
        run.start(zygote, {**variables, **logs}, script=_DEDICATED, arguments=arguments)
    else:
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


def run_plan(
    zygote: Zygote, folder: Path, plan: Plan, workers: int, *, forked: bool = True
) -> list[Survived]:
    """One session; raises `AssertionError` where something does not hold."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with running(folder) as run:
        start(run, zygote, plan, store.port, workers, forked=forked)
        command = run.started[0]
        run.wait(90, but=[command])
        del store
        run.wait(30)
        assert len([*run.folder.glob("*.counted")]) == SERVERS
        assert run.exit_codes[command.pid] == 0, run.output()
        check(run, plan, workers, SERVERS)
        run.check_nothing_left()
        return [survived(run, rank) for rank in plan.victims]


def check(run: Run, plan: Plan, workers: int, servers: int) -> None:
    """What is left has the bits that the servers' logs say."""
    results = run.results()
    alive = [rank for rank in range(workers) if rank not in plan.victims]
    for rank in alive:
        assert results[rank].get("sha256"), f"rank {rank}: {results[rank]}\n{run.output()}"
        left = results[rank]["stats"]["left"]
        assert sorted(map(int, left)) == plan.victims, f"{left}\n{run.output()}"
    for rank in plan.victims:
        assert "died_s" in results.get(rank, {}), f"rank {rank} has not died\n{run.output()}"
    pieces = [Slice(*piece) for piece in results[alive[0]]["pieces"]]
    counted = []
    for index in range(servers):
        own = [piece.number for piece in pieces if piece.server == index]
        counted.append(counted_by(run.folder, index, workers, own))
    for piece in pieces:
        check_sets([counted[piece.server].at(piece.number, s) for s in range(1, plan.steps + 1)])
    check_cuts(plan, pieces, counted, beside=workers == servers)
    expected = by_arithmetic(workers, plan.steps, pieces, counted)
    assert {results[rank]["sha256"] for rank in alive} == {expected}, run.output()


def check_sets(sets: Sequence[tuple[int, ...]]) -> None:
    """Nobody comes back."""
    for one, following in itertools.pairwise(sets):
        assert set(following) <= set(one), (one, following)


def check_cuts(
    plan: Plan, pieces: Sequence[Slice], counted: Sequence[CountedReplay], *, beside: bool
) -> None:
    """Of who died within a push, that server counts the whole pushes before it, and no more.

    ``beside``: it has slices of nodes that were lost before, too.
    """
    deaths = {**plan.deaths, **plan.cuts, **plan.reply_cuts}
    for rank, (step, server, whole, share) in plan.cuts.items():
        lost = {int(other) for other, (at, *_) in deaths.items() if beside and at < step}
        sets = [
            counted[piece.server].at(piece.number, step)
            for piece in pieces
            if owner_of(piece.number, piece.server, len(counted), lost) == server
        ]
        counting = sum(int(rank) in ranks for ranks in sets)
        assert counting == whole, f"rank {rank} sent {whole + share} pushes, {counting} count"


def survived(run: Run, victim: int) -> Survived:
    results = run.results()
    died_s = results[victim]["died_s"]
    ended = [[at for at in found["ended_s"] if at > died_s] for found in results.values()]
    later = [min(after) - died_s for after in ended if after]
    alive = next(rank for rank in results if "sha256" in results[rank])
    left = results[alive]["stats"]["left"][str(victim)]
    return Survived(max(later), left["step"], left["counted_slices"], left["slices"])


def run_seeds(
    zygote: Zygote, folder: Path, seeds: Iterable[int], run_seed: RunSeed, module: str
) -> list[Survived]:
    """A session for each; the error of one says how to run it alone."""
    found = list[Survived]()
    for seed in seeds:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            try:
                found += run_seed(zygote, Path(own), seed)
            except BaseException as error:
                error.add_note(f"alone: python -m {module} --first {seed} --seeds 1")
                raise
    return found


def run_command(given: argparse.Namespace, run_seed: RunSeed, module: str) -> None:
    """Until enough have died; prints in how many sessions."""
    until, found = time.monotonic() + given.limit_s, list[Survived]()
    dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # opens torch's own pipes
    adopt_orphans()
    zygote = Zygote()
    for seed in itertools.count(given.first):
        if len(found) >= given.seeds or time.monotonic() > until:
            break
        with tempfile.TemporaryDirectory() as folder:
            found += run_seeds(zygote, Path(folder), [seed], run_seed, module)
    zygote.close()
    seconds = sorted(each.seconds for each in found)
    print(
        f"{len(found)} kill points in {seed - given.first} sessions: all survivors right;"
        f" {sum(each.is_within_a_step for each in found)} deaths within a step; until the next"
        f" step's end {statistics.median(seconds):.3f} s in the median, {seconds[-1]:.3f} s at most"
    )


def seeds_parser(text: str | None, *, seeds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--seeds", type=int, default=seeds, help="kill points")
    parser.add_argument("--first", type=int, default=0, help="the first session's seed")
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no session after that")
    return parser


def run_seed(zygote: Zygote, folder: Path, seed: int) -> list[Survived]:
    return run_plan(zygote, folder, plan_of(seed), WORKERS)


def main(arguments: Sequence[str] | None = None) -> int:
    given = seeds_parser(__doc__, seeds=50).parse_args(arguments)
    run_command(given, run_seed, "tests.faults.kill_points")
    return 0


if __name__ == "__main__":
    sys.exit(main())

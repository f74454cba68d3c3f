"""Nodes of an elastic session that fall silent, drawn at random, with real processes and cables.

    python -m tests.faults.silent_nodes --tries 40

Each try has workers with a server beside each, in network namespaces of their own. At a drawn
moment one node, rank 0's or another, is cut off, loses its power, or is stopped: its worker, its
server, or both. Nothing closes a connection. The others must go on, and end with the same values.
A try is drawn by its seed; a line of JSON says what came of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import torch.distributed as dist

from foreprop.tools.run.host import free_port
from tests.faults.cables import Cables, cables
from tests.faults.node_kill_points import SCRIPT
from tests.leaks import adopt_orphans
from tests.process.elastic_script import Plan
from tests.process.harness import Run, Zygote, running, torchruns_variables, wait_for
from tests.process.train_script import Scenario

Kind = Literal["cable", "power", "worker", "server", "node"]
KINDS: tuple[Kind, ...] = ("cable", "power", "worker", "server", "node")
"""Unplugged; unplugged, and then nothing runs there; or stopped by SIGSTOP."""
_LIMIT_S = 120.0
TOLD = "has heard nothing of|hears of"


@dataclass(frozen=True, kw_only=True)
class Try:
    kind: Kind
    victim: int
    workers: int = 4
    after_s: float = 1.0
    """When all have begun."""
    settings: dict[str, Any]

    @classmethod
    def drawn(cls, seed: int, **settings: Any) -> Try:
        """Of seeds in a row each five have each kind once, and each four each victim."""
        rng = random.Random(seed)
        return cls(
            kind=KINDS[seed % len(KINDS)],
            victim=seed % 4,
            after_s=0.5 + 2 * rng.random(),
            settings=settings,
        )


@dataclass(frozen=True)
class Outcome:
    silent_s: float
    """Until the last survivor has ended a step after it."""
    messages: list[str]
    """What has been told of silence."""


def start(run: Run, zygote: Zygote, net: Cables, given: Try) -> None:
    plane = {"plane": "python"} if given.kind == "server" else {}  # a process, then
    plan = Plan(steps=150, pause_s=0.03, settings=given.settings | plane)
    settings = {
        "FOREPROP_ARCHITECTURE": "p2p",
        "FOREPROP_ELASTIC": "1",
        "FORK_SERVERS": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "MASTER_ADDR": net.address(0),
    }
    variables = run.environment(Scenario(), PLAN=plan.encode())
    port = free_port()
    for rank, node in enumerate(net.nodes):
        told = {**torchruns_variables(rank, port, given.workers, 1), **settings}
        run.start(zygote, {**variables, **told}, script=SCRIPT, netns=f"/run/netns/{node}")


def all_have_begun(run: Run, workers: int) -> bool:
    try:
        results = run.results()
    except json.JSONDecodeError:  # it is being written
        return False
    assert not any("error" in each for each in results.values()), run.output()
    return sum("began_s" in each for each in results.values()) == workers


def fall_silent(run: Run, net: Cables, given: Try) -> None:
    worker = run.started[given.victim]
    beside = worker.children(recursive=True)
    servers = [each for each in beside if "pulsing.py" not in " ".join(each.cmdline())]
    if given.kind in ("cable", "power"):
        net.unplug(given.victim)
    stopped: Sequence[psutil.Process] = {
        "cable": [],
        "power": [worker, *beside],
        "worker": [worker],
        "server": servers,
        "node": [worker, *beside],
    }[given.kind]
    for process in stopped:
        process.send_signal(signal.SIGKILL if given.kind == "power" else signal.SIGSTOP)


def run_try(
    zygote: Zygote, folder: Path, given: Try, plugged_in_after_s: float | None = None
) -> Outcome:
    """Raises `AssertionError` if a survivor does not go on.

    ``plugged_in_after_s``: who was cut off is there again so soon that it is one of them.
    """
    with cables(given.workers) as net, running(folder) as run:
        start(run, zygote, net, given)
        wait_for(lambda: all_have_begun(run, given.workers), run)
        time.sleep(given.after_s)
        silent_at_s = time.monotonic()
        fall_silent(run, net, given)
        survivors = [*range(given.workers)]
        if plugged_in_after_s is None:
            survivors.remove(given.victim)
        else:
            time.sleep(plugged_in_after_s)
            net.plug_in(given.victim)
        run.wait(_LIMIT_S, but=[each for n, each in enumerate(run.started) if n not in survivors])
        results = run.results()
        for rank in survivors:
            assert "sha256" in results[rank], f"{given}\n{results[rank]}\n{run.output()}"
        assert len({results[rank]["sha256"] for rank in survivors}) == 1, given
        ended = [results[rank]["ended_s"] for rank in survivors]
        gaps = [max(b - a for a, b in itertools.pairwise(each)) for each in ended]
        assert min(each[-1] for each in ended) > silent_at_s, "it fell silent too late"
        lines = run.output().splitlines()
        return Outcome(max(gaps), [each for each in lines if re.search(TOLD, each)])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="the first try's seed")
    parser.add_argument("--workers", type=int, default=4)
    given = parser.parse_args(arguments)
    dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # opens torch's own pipes
    adopt_orphans()
    zygote, found, failed = Zygote(), list[float](), 0
    for seed in range(given.first, given.first + given.tries):
        drawn = replace(Try.drawn(seed), workers=given.workers)
        line = {"seed": seed, **asdict(drawn)}
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = run_try(zygote, Path(folder), drawn)
            except (AssertionError, TimeoutError) as error:
                failed += 1
                print(
                    json.dumps({**line, "survived": False, "why": str(error)[-6000:]}), flush=True
                )
            else:
                found.append(outcome.silent_s)
                silent_s = round(outcome.silent_s, 2)
                print(json.dumps({**line, "survived": True, "silent_s": silent_s}), flush=True)
    zygote.close()
    longest = max(found, default=0.0)
    middle = statistics.median(found) if found else 0.0
    print(
        f"survivors went on in {len(found)} of {given.tries} tries; nobody ended a step for"
        f" {middle:.1f} s in the median, {longest:.1f} s at most"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

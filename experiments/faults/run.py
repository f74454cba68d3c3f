"""Faults at known moments of a training, and what they cost."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import msgspec

from experiments.faults import worker
from experiments.faults.node import LinkFactor, Signal, Start, Stopped, serve_node
from experiments.faults.worker import Task
from foreprop.errors import ConfigError, StepTimeout
from foreprop.lab.cluster import Cluster
from foreprop.workload.network import Network

SYSTEM = "p3-elastic"
_START_S = 180.0
_WARM_STEPS = 4
_LOOK_S = 0.1
_TAIL = 400


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Something that begins ``at_s`` after the start and is over ``for_s`` later, or never: 0."""

    name: str
    at_s: float
    for_s: float
    node: int


def usual_faults(nodes: int, pause_s: float) -> list[Fault]:
    """``pause_s`` between one and the next; node 0, which has the rendezvous, is spared."""
    last = nodes - 1
    return [
        Fault(name="slow link", at_s=pause_s, for_s=pause_s, node=last),
        Fault(name="stop", at_s=3 * pause_s, for_s=pause_s / 3, node=last - 1),
        Fault(name="cut", at_s=4 * pause_s, for_s=pause_s / 3, node=1),
        Fault(name="kill", at_s=5 * pause_s, for_s=0.0, node=last),
    ]


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """When a worker ended its steps, seconds after the start."""

    rank: int
    ends_s: list[float]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    version: str
    workers: list[Steps]
    faults: list[Fault]
    length_s: float

    def pace(self, since_s: float, until_s: float) -> float:
        """Steps per second of all workers together."""
        ends = [end for each in self.workers for end in each.ends_s]
        return sum(since_s <= end < until_s for end in ends) / (until_s - since_s)

    def down_s(self, fault: Fault, until_s: float) -> float:
        """The longest time in which no worker but the fault's ended a step, from its beginning."""
        others = [each for each in self.workers if each.rank != fault.node]
        ends = sorted(end for each in others for end in each.ends_s)
        before = [end for end in ends if end < fault.at_s][-1:]
        inside = [end for end in ends if fault.at_s <= end < until_s]
        moments = [*before, *inside, until_s]
        return max(b - a for a, b in pairwise(moments))

    def windows(self) -> list[tuple[Fault, float]]:
        """Each fault, and when the next one begins."""
        begins = [fault.at_s for fault in self.faults[1:]]
        return list(zip(self.faults, [*begins, self.length_s], strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSetting:
    """``silent_s``: after which a worker that answers nothing is taken for dead."""

    model: str = "resnet50"
    scale: int = 16
    nodes: int = 4
    rate_bits_per_s: float = 200e6
    compute_s: float = 0.5
    pause_s: float = 12.0
    silent_s: float = 8.0

    def __post_init__(self) -> None:
        if self.nodes < 3:
            raise ConfigError(f"--nodes is {self.nodes}; a fault needs 3 at least")
        if self.silent_s <= self.pause_s / 3:
            raise ConfigError(
                f"--silent is {self.silent_s:g} s; stops and cuts take {self.pause_s / 3:g} s, a"
                " third of --pause, and are to be outlived: more than that"
            )


def run_faults(setting: FaultSetting, folder: Path, say: Callable[[str], None]) -> Trial:
    """Raises `StepTimeout` with the end of a log if the training does not begin."""
    network = Network(
        nodes=setting.nodes,
        rate_bits_per_s=setting.rate_bits_per_s,
        buffer_scale=setting.scale,
    )
    faults = usual_faults(setting.nodes, setting.pause_s)
    length_s = faults[-1].at_s + 1.5 * setting.pause_s
    for old in (*folder.glob("steps-*"), *folder.glob("worker-*.log")):
        old.unlink()
    with Cluster(serve_node, network, nodes=setting.nodes, network=network) as cluster:
        lab = _Lab(cluster, setting, folder)
        lab.start()
        say("starting")
        began = lab.wait_for_steps()
        moments = _moments(lab, faults)
        for at_s, act in [*moments, (length_s, lambda: None)]:
            while (left_s := began + at_s - time.monotonic()) > 0:
                say(f"{time.monotonic() - began:.0f} of {length_s:.0f} s")
                time.sleep(min(left_s, 1.0))
            act()
        cluster.ask_all(Stopped())
    workers = [
        Steps(rank=rank, ends_s=[end - began for end in lab.ends(rank)])
        for rank in range(setting.nodes)
    ]
    return Trial(
        version=version("foreprop"),
        workers=workers,
        faults=faults,
        length_s=length_s,
    )


def _moments(lab: _Lab, faults: Sequence[Fault]) -> list[tuple[float, Callable[[], None]]]:
    acts: list[tuple[float, Callable[[], None]]] = []
    for fault in faults:
        begin, end = lab.acts(fault)
        acts.append((fault.at_s, begin))
        if end is not None:
            acts.append((fault.at_s + fault.for_s, end))
    return sorted(acts, key=lambda each: each[0])


class _Lab:
    """The processes on all nodes."""

    def __init__(self, cluster: Cluster, setting: FaultSetting, folder: Path) -> None:
        self._cluster = cluster
        self._setting = setting
        self._folder = folder

    def start(self) -> None:
        for node in range(self._setting.nodes):
            self._start_worker(node)

    def _start_worker(self, node: int) -> None:
        setting = self._setting
        task = Task(
            model=setting.model,
            scale=setting.scale,
            nodes=setting.nodes,
            compute_s=setting.compute_s,
            silent_s=setting.silent_s,
            steps=str(self._steps(node)),
        )
        environment = {
            "TASK": msgspec.json.encode(task).decode(),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, "-m", worker.__name__]
        log = self._folder / f"worker-{node}.log"
        self._ask(node, Start(command=command, environment=environment, log=log))

    def _steps(self, rank: int) -> Path:
        return self._folder / f"steps-{rank}"

    def ends(self, rank: int) -> list[float]:
        path = self._steps(rank)
        lines = path.read_text().splitlines() if path.exists() else []
        return [float(line.split()[1]) for line in lines if len(line.split()) == 2]

    def wait_for_steps(self) -> float:
        """Return the moment when all workers have made a few."""
        deadline = time.monotonic() + _START_S
        ranks = range(self._setting.nodes)
        while min(len(self.ends(rank)) for rank in ranks) < _WARM_STEPS:
            if time.monotonic() > deadline:
                late = min(ranks, key=lambda rank: len(self.ends(rank)))
                log = (self._folder / f"worker-{late}.log").read_text()
                raise StepTimeout(
                    f"rank {late} made {len(self.ends(late))} steps in"
                    f" {_START_S:.0f} s; {self._folder} has the logs: ...{log[-_TAIL:]}"
                )
            time.sleep(_LOOK_S)
        return time.monotonic()

    def _ask(self, node: int, order: object) -> None:
        connection = self._cluster.connections[node]
        connection.send(order)
        answer = connection.recv()
        if isinstance(answer, BaseException):
            raise answer

    def acts(self, fault: Fault) -> tuple[Callable[[], None], Callable[[], None] | None]:
        """What begins and what ends it."""
        orders: dict[str, tuple[object, object | None]] = {
            "slow link": (LinkFactor(0.25), LinkFactor(1.0)),
            "cut": (LinkFactor(0.0), LinkFactor(1.0)),
            "stop": (Signal(signal.SIGSTOP), Signal(signal.SIGCONT)),
            "kill": (Signal(signal.SIGKILL), None),
        }
        begin, end = orders[fault.name]
        ask = partial(self._ask, fault.node)
        return partial(ask, begin), None if end is None else partial(ask, end)

"""Cause faults at known moments of a training, and record when steps end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from foreprop.errors import PeerLost, StepTimeout
from foreprop_lab.experiments.faults.node import (
    EndWorker,
    ExitCodeRequest,
    LinkFactor,
    Signal,
    Start,
    serve_node,
)
from foreprop_lab.experiments.faults.systems import FaultSystem, system_of
from foreprop_lab.experiments.faults.trial import (
    KILL,
    REJOIN,
    Fault,
    FaultSetting,
    Steps,
    Trial,
    usual_faults,
)
from foreprop_lab.lab.cluster import Cluster

_START_S = 180.0
_WARM_STEPS = 4
_POLL_S = 0.1
_TAIL = 400
_REJOIN_S = 60.0
"""The longest wait for a rejoined worker's first step; to start takes longer than a step."""


def run_faults(setting: FaultSetting, folder: Path, say: Callable[[str], None]) -> list[Trial]:
    """Run one system after the other, each in a cluster of its own.

    Raises `StepTimeout` with the end of a log if a training does not begin, `PeerLost` if a worker
    ends, and `ConfigError` for a system that is not installed.
    """
    systems = [system_of(name, setting, folder / name) for name in setting.systems]
    return [_run_system(system, setting, say) for system in systems]


def _run_system(system: FaultSystem, setting: FaultSetting, say: Callable[[str], None]) -> Trial:
    network = setting.network
    faults = usual_faults(setting.nodes, setting.pause_s)
    system.clear()
    with Cluster(serve_node, network, nodes=setting.nodes, network=network) as cluster:
        lab = _Lab(cluster, system, setting.nodes)
        lab.start()
        say(f"{system.name}: starting")
        started_s = lab.wait_for_steps()
        for at_s, act in _moments(lab, faults):
            _sleep_until(
                started_s + at_s, lambda now_s: say(f"{system.name}: {now_s - started_s:.0f} s")
            )
            act()
        say(f"{system.name}: waiting for the worker that rejoins")
        lab.wait_for_rejoin(faults[-1].node)
        time.sleep(setting.pause_s)
        length_s = time.monotonic() - started_s
        cluster.ask_all(EndWorker())
    workers = [
        Steps(rank=rank, ends_s=[end - started_s for end in lab.ends(rank)])
        for rank in range(setting.nodes)
    ]
    return Trial(
        system=system.name,
        version=system.version,
        workers=workers,
        faults=faults,
        length_s=length_s,
    )


def _sleep_until(moment_s: float, look: Callable[[float], None]) -> None:
    while (left_s := moment_s - time.monotonic()) > 0:
        look(time.monotonic())
        time.sleep(min(left_s, 1.0))


def _moments(lab: _Lab, faults: Sequence[Fault]) -> list[tuple[float, Callable[[], object]]]:
    acts: list[tuple[float, Callable[[], object]]] = []
    for fault in faults:
        begin, end = lab.acts(fault)
        acts.append((fault.at_s, begin))
        if end is not None:
            acts.append((fault.at_s + fault.for_s, end))
    return sorted(acts, key=lambda each: each[0])


class _Lab:
    """The worker processes on all nodes."""

    def __init__(self, cluster: Cluster, system: FaultSystem, nodes: int) -> None:
        self._cluster = cluster
        self._system = system
        self._nodes = nodes
        self._rejoined_s: float | None = None

    def start(self) -> None:
        for node in range(self._nodes):
            self._start_worker(node)

    def _start_worker(self, node: int, *, again: bool = False) -> None:
        request = Start(
            command=self._system.command,
            environment=self._system.environment(node, again=again),
            log=self._log(node),
        )
        self._ask(node, request)

    def _rejoin(self, node: int) -> None:
        """Start a worker again, if the others have said where to join.

        Otherwise the study goes on without it, and the table says that it has not rejoined.
        """
        try:
            self._start_worker(node, again=True)
            self._rejoined_s = time.monotonic()
        except PeerLost as error:
            with self._log(node).open("a") as log:
                log.write(f"{error}\n")

    def _log(self, node: int) -> Path:
        return self._system.folder / f"worker-{node}.log"

    def ends(self, rank: int) -> list[float]:
        path = self._system.steps_of(rank)
        lines = path.read_text().splitlines() if path.exists() else []
        return [float(line.split()[1]) for line in lines if len(line.split()) == 2]

    def wait_for_steps(self) -> float:
        """Wait for a few steps of all workers; return the time. Raises `PeerLost` if one ends."""
        deadline = time.monotonic() + _START_S
        ranks = range(self._nodes)
        while min(len(self.ends(rank)) for rank in ranks) < _WARM_STEPS:
            for rank in ranks:
                self._check_running(rank)
            if time.monotonic() > deadline:
                late = min(ranks, key=lambda rank: len(self.ends(rank)))
                log = self._log(late).read_text()
                raise StepTimeout(
                    f"rank {late} of {self._system.name} made {len(self.ends(late))} steps in"
                    f" {_START_S:.0f} s; {self._system.folder} has the logs: ...{log[-_TAIL:]}"
                )
            time.sleep(_POLL_S)
        return time.monotonic()

    def _check_running(self, rank: int) -> None:
        code = self._ask(rank, ExitCodeRequest())
        if code is not None:
            log = self._log(rank).read_text()
            raise PeerLost(
                f"rank {rank} of {self._system.name} ended with exit code {code} after"
                f" {len(self.ends(rank))} steps; {self._system.folder} has the logs:"
                f" ...{log[-_TAIL:]}"
            )

    def wait_for_rejoin(self, node: int) -> None:
        """Wait at most a minute until the restarted worker has made a step, or has ended."""
        since_s = self._rejoined_s
        while since_s is not None and time.monotonic() < since_s + _REJOIN_S:
            if any(end >= since_s for end in self.ends(node)):
                return
            if self._ask(node, ExitCodeRequest()) is not None:
                return  # its log says why
            time.sleep(_POLL_S)

    def _ask(self, node: int, request: object) -> object:
        connection = self._cluster.connections[node]
        connection.send(request)
        answer = connection.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def acts(self, fault: Fault) -> tuple[Callable[[], object], Callable[[], object] | None]:
        """The calls that begin and end a fault."""
        if fault.name == REJOIN:
            return partial(self._rejoin, fault.node), None
        requests: dict[str, tuple[object, object | None]] = {
            "slow link": (LinkFactor(0.25), LinkFactor(1.0)),
            "cut": (LinkFactor(0.0), LinkFactor(1.0)),
            "stop": (Signal(signal.SIGSTOP), Signal(signal.SIGCONT)),
            KILL: (Signal(signal.SIGKILL), None),
        }
        begin, end = requests[fault.name]
        ask = partial(self._ask, fault.node)
        return partial(ask, begin), None if end is None else partial(ask, end)

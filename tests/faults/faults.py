"""Faults on purpose: planned in the test, carried out in the worker, and counted.

    injector = EventInjector(tmp_path)
    injector.at(rank=1, step=3, phase="backward").kill()
    ...                                # run workers with `injector.plan`
    fault = injector.only_fault(run)   # who, when (time.monotonic), what

A worker carries a fault out on itself, on its server or on its network cable, at an exact point
of its own program, and writes it down first.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from foreprop.backends.processes import ProcessServer

if TYPE_CHECKING:
    from tests.process.harness import Run

Phase = Literal["forward", "backward", "between"]
ACTIONS = (
    "note kill stop stop_node hold interrupt kill_server stop_server kill_relay stop_relay"
    " stop_server_and_die unplug"
).split()


@dataclass(frozen=True, kw_only=True)
class Fault:
    rank: int
    step: int
    phase: str
    action: str
    log: str
    cable: str = ""
    seconds: int = 0


class EventInjector:
    def __init__(self, folder: Path) -> None:
        self._log = folder / "faults.log"
        self.plan: list[dict[str, Any]] = []

    def at(self, *, rank: int, step: int, phase: Phase = "between") -> _Point:
        return _Point(self, {"rank": rank, "step": step, "phase": phase, "log": str(self._log)})

    def fired(self) -> list[dict[str, Any]]:
        """What has been done, in order; empty if nothing was, and then the test proves nothing."""
        if not self._log.exists():
            return []
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def only_fault(self, run: Run) -> dict[str, Any]:
        """The one that has been carried out; else what the run said."""
        fired = self.fired()
        assert len(fired) == 1, f"fired {fired}, codes {run.exit_codes}:\n{run.output()}"
        return fired[0]


@dataclass(frozen=True)
class _Point:
    injector: EventInjector
    where: dict[str, Any]

    def __getattr__(self, action: str) -> Any:
        if action not in ACTIONS:
            raise AttributeError(action)

        def plan(**more: Any) -> EventInjector:
            self.injector.plan.append({**self.where, "action": action, **more})
            return self.injector

        return plan


class Faults:
    """The worker's side: looks at every point whether something is planned for it."""

    def __init__(self, plan: Sequence[dict[str, Any]], rank: int, model: Any, session: Any) -> None:
        self.step = 0
        self._mine = [Fault(**fault) for fault in plan if fault["rank"] == rank]
        self._session = session
        if self._mine:
            middle = model[-1]
            middle.register_forward_pre_hook(lambda *_: self._maybe_fire("forward"))
            middle.register_full_backward_hook(lambda *_: self._maybe_fire("backward"))

    def between(self) -> None:
        self._maybe_fire("between")

    def _maybe_fire(self, phase: str) -> None:
        for fault in self._mine:
            if (fault.step, fault.phase) == (self.step, phase):
                self._mine.remove(fault)
                self._fire(fault)
                return

    def _fire(self, fault: Fault) -> None:
        backend = self._session._training.backends.all[-1]
        connections = getattr(backend, "connections", None)  # a ring has none
        handles = [] if connections is None else connections.handles
        pids = [handle.pid for handle in handles if isinstance(handle, ProcessServer)]
        done: dict[str, Any] = {"action": fault.action, "rank": fault.rank, "step": fault.step}
        done |= {"phase": fault.phase, "at_s": time.monotonic(), "servers": pids}
        _append(fault.log, done)
        if fault.action == "unplug":
            switch, device = fault.cable.split()
            command = ["nsenter", f"--net={switch}", "ip", "link", "set", device, "down"]
            subprocess.run(command, check=True)
        elif fault.action.endswith("_server"):
            signals = {"kill_server": signal.SIGKILL, "stop_server": signal.SIGSTOP}
            os.kill(pids[0], signals[fault.action])
        elif fault.action.endswith("_relay"):  # started after the server
            signals = {"kill_relay": signal.SIGKILL, "stop_relay": signal.SIGSTOP}
            os.kill(pids[1], signals[fault.action])
        elif fault.action == "note":
            pass  # the test does the rest
        elif fault.action == "stop_node":
            for child in psutil.Process().children(recursive=True):
                child.send_signal(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.action == "hold":  # as C code does that never lets others run
            ctypes.PyDLL(None).sleep(fault.seconds)
        elif fault.action == "stop_server_and_die":
            os.kill(pids[0], signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            own = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}
            os.kill(os.getpid(), own[fault.action])


def _append(path: str, entry: dict[str, Any]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, json.dumps(entry).encode() + b"\n")
    os.fsync(descriptor)
    os.close(descriptor)

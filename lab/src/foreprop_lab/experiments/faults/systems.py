"""The systems of the faults study: each one's worker program and its environment."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec

from foreprop.config.launchers import ELASTIC, JOIN, SERVERS_FILE
from foreprop.errors import ConfigError, PeerLost
from foreprop_lab.experiments.faults import worker
from foreprop_lab.experiments.faults.trial import P3, FaultSetting
from foreprop_lab.experiments.faults.worker import Task

_TORCHFT_WORKER = "foreprop_lab.experiments.faults.torchft_worker"
"""A name and no import, as the module imports what only torchft's environment has."""
_VERSION_TIMEOUT_S = 60.0
_PRINT_VERSION = "import torch, torchft, importlib.metadata as m; print(m.version('torchft'))"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSystem:
    """One system; ``folder`` has its steps and logs, and the addresses of its servers."""

    name: str
    version: str
    command: tuple[str, ...]
    folder: Path
    setting: FaultSetting

    def environment(self, node: int, *, again: bool) -> dict[str, str]:
        """A worker's environment variables; ``again`` if it was killed and rejoins the others.

        Raises `PeerLost` if rank 0 has not said where to join.
        """
        setting = self.setting
        task = Task(
            model=setting.model,
            scale=setting.scale,
            nodes=setting.nodes,
            compute_s=setting.compute_s,
            silent_s=setting.silent_s,
            steps=str(self.steps_of(node)),
        )
        found = {
            "TASK": msgspec.json.encode(task).decode(),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "ADDRESS": setting.network.address(node),
        }
        if self.name == P3:
            found |= {ELASTIC: str(True), SERVERS_FILE: str(self._servers_of(node))}
            if again:
                found[JOIN] = self._addresses()
        return found

    def steps_of(self, node: int) -> Path:
        return self.folder / f"steps-{node}"

    def clear(self) -> None:
        """Remove an earlier run's files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for pattern in ("steps-*", "worker-*.log", "servers-*"):
            for old in self.folder.glob(pattern):
                old.unlink()

    def _servers_of(self, node: int) -> Path:
        return self.folder / f"servers-{node}"

    def _addresses(self) -> str:
        """The servers' addresses as node 0 wrote them, which never fails."""
        file = self._servers_of(0)
        lines = file.read_text().split() if file.exists() else []
        if not lines:
            raise PeerLost(f"rank 0 has not said where its servers are: {file} has no line")
        return ",".join(lines)


def system_of(name: str, setting: FaultSetting, folder: Path) -> FaultSystem:
    """The system of that name; raises `ConfigError` if it is not installed."""
    if name == P3:
        command = (sys.executable, "-m", worker.__name__)
        return FaultSystem(
            name=name,
            version=version("foreprop"),
            command=command,
            folder=folder,
            setting=setting,
        )
    python = str(setting.torchft_python)
    return FaultSystem(
        name=name,
        version=_version_of(python),
        command=(python, "-m", _TORCHFT_WORKER),
        folder=folder,
        setting=setting,
    )


def _version_of(python: str) -> str:
    """The version of torchft that its workers import, with our torch."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    advice = "make one of the same Python version with pip install --no-deps torchft==0.2.0"
    try:
        done = subprocess.run(
            [python, "-c", _PRINT_VERSION],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        raise ConfigError(
            f"--torchft-python is {python}, which cannot be run: {error.strerror}; {advice}"
        ) from error
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2]
        raise ConfigError(
            f"--torchft-python is {python}, which has no torchft that works ({said}); {advice}"
        )
    return done.stdout.strip()

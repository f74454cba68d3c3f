"""Runs of `foreprop run`'s launcher in a test's own process."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from foreprop.config.launchers import environment_for_hosts
from foreprop.tools.run.plan import Plan, hosts_here
from foreprop.tools.run.resources import parse_resources
from foreprop.tools.run.run import Launcher, Outcome
from tests.process.harness import PATH, ROOT

SCRIPT = ROOT / "tests" / "process" / "run_script.py"
FAKE_SSH = ROOT / "tests" / "process" / "fake_ssh.py"
LOCAL = "127.0.0.1\n127.0.0.2\n"
"""Hosts that are this machine."""
REMOTE = "198.51.100.1\n198.51.100.2\n"
"""Hosts that nobody has: `fake_ssh` runs here what is for them."""


@dataclass
class Launch:
    """One run by a `Launcher` of this process."""

    folder: Path
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)

    def plan(self, hosts: str, *script: str, **settings: Any) -> Plan:
        parsed = parse_resources(hosts, source="hosts", workers_per_node=1)
        changes: dict[str, Any] = {
            "hosts": parsed,
            "here": hosts_here(parsed),
            "script": (str(SCRIPT), *script),
            "directory": str(self.folder),
            "python": sys.executable,
            "ssh": (sys.executable, str(FAKE_SSH)),
            "environment": environment_for_hosts(),
            "master_address": "127.0.0.1",
            "grace_s": 5.0,
        }
        return Plan(**changes | settings)

    def run(self, hosts: str, *script: str, **settings: Any) -> Outcome:
        out, err = io.BytesIO(), io.BytesIO()
        outcome = Launcher(self.plan(hosts, *script, **settings), out, err).run()
        self.out = out.getvalue().decode().splitlines()
        self.err = err.getvalue().decode().splitlines()
        return outcome

    def logins(self) -> list[str]:
        """What the injected runner was asked for."""
        log = self.folder / "logins"
        return sorted(log.read_text().split()) if log.exists() else []

    def tell_ssh(self, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
        told = {"log": str(self.folder / "logins"), **more}
        monkeypatch.setenv("FAKE_SSH", json.dumps(told))


def prepared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    monkeypatch.setenv("PYTHONPATH", PATH)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launch = Launch(folder)
    launch.tell_ssh(monkeypatch)
    return launch

"""The machine and the code that a measurement was made with."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import psutil

_GIT_S = 10.0


def machine_facts() -> dict[str, str]:
    """Facts that belong beside a figure: processor, cores, memory, kernel, the commit if known."""
    facts = {
        "processor": _processor(),
        "cores": str(psutil.cpu_count() or "unknown"),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    commit = _maybe_commit()
    return facts | ({"commit": commit} if commit else {})


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def _maybe_commit() -> str | None:
    """The commit of the git checkout that this code lies in, and whether it was changed since."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    if not commit or _git("ls-files", Path(__file__).name) is None:
        return None
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return f"{commit}, with uncommitted changes" if changed else commit


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=_GIT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

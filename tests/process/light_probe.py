"""The doctor's probe without torch, whose import takes seconds."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

LIGHT_TORCH = "2"
"""The version that it says it has."""

LIGHT = (
    "import sys, types; sys.modules['torch'] = torch = types.ModuleType('torch');"
    f" torch.__version__ = '{LIGHT_TORCH}'; import foreprop.tools.doctor.probe as probe"
)
"""A probe that does not spend seconds on loading torch."""


def instead(change: str) -> str:
    """A command that is a probe but for one thing."""
    return "exec " + shlex.join([sys.executable, "-c", f"{LIGHT}; {change}; probe.main()"])


def light_python(folder: Path) -> str:
    """A program that is such a probe, whatever its arguments."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{instead('pass')}\n")
    program.chmod(0o755)
    return str(program)

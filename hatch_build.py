"""Compiles the native data plane (src/foreprop/engine/native) for a wheel, or for a clone.

`python hatch_build.py` compiles it in place if a source of it has changed. Without a compiler
foreprop runs its Python engine; FOREPROP_REQUIRE_PLANE=1 makes that an error.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

NATIVE = Path(__file__).parent / "src" / "foreprop" / "engine" / "native"
LIBRARY = NATIVE / "plane.so"
# with -march=native compilers contract a * m + b, which changes bits; loops are multiversioned,
# and -O2 alone leaves those as they are
FLAGS = (
    "-std=c++20 -O2 -ftree-vectorize -shared -fPIC -pthread -ffp-contract=off -fvisibility=default"
    " -static-libstdc++ -static-libgcc"
).split()
BASELINE = {"x86_64": ["-march=x86-64-v2"]}


def compiler() -> str | None:
    named = os.environ.get("CXX")
    return named or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


def sources_hash() -> str:
    """What the library was compiled from, and how."""
    told = hashlib.sha256(" ".join(FLAGS).encode())
    for each in sorted([*NATIVE.glob("*.hpp"), *NATIVE.glob("*.cpp")]):
        told.update(each.name.encode() + each.read_bytes())
    return told.hexdigest()


def build() -> str:
    """Compile it if its sources have changed; returns why it is not there, or nothing."""
    stamp, now = LIBRARY.with_suffix(".sha256"), sources_hash()
    if LIBRARY.exists() and stamp.exists() and stamp.read_text() == now:
        return ""
    with_what = compiler()
    if with_what is None:
        return "there is no C++ compiler (g++, c++ or clang++, or CXX)"
    beside = LIBRARY.with_name(f"plane-{os.getpid()}.so")
    command = [with_what, *FLAGS, *BASELINE.get(platform.machine(), [])]
    command += ["-o", str(beside), str(NATIVE / "interface.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"{' '.join(command)} failed:\n{done.stderr}"
    beside.replace(LIBRARY)  # a process may have the old one
    stamp.write_text(now)
    return ""


def build_or_warn() -> bool:
    """Whether it is there; says why not, and raises if it is required."""
    why_not = build()
    if why_not and os.environ.get("FOREPROP_REQUIRE_PLANE"):
        raise RuntimeError(f"FOREPROP_REQUIRE_PLANE is set: {why_not}")
    if why_not:
        print(
            f"foreprop's native plane is not built, Python carries all: {why_not}", file=sys.stderr
        )
    return not why_not


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # as a program
    pass
else:

    class PlaneBuildHook(BuildHookInterface[Any]):
        """Puts the library into wheels, whose names then say for which machines it is."""

        PLUGIN_NAME = "custom"

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            if self.target_name != "wheel" or not build_or_warn() or version == "editable":
                return
            machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{machine}"
            build_data["force_include"][str(LIBRARY)] = "foreprop/engine/native/plane.so"


if __name__ == "__main__":
    sys.exit(0 if build_or_warn() else 1)

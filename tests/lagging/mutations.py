"""Removes each wait, event, pin and recorded stream of the device path, one at a time.

    python -m tests.lagging.mutations            # all; prints the table of docs/devices.md
    python -m tests.lagging.mutations --list

A copy of the package with one of them removed runs the tests of the device; a test must fail for
each. What can be removed without one should be deleted, or a test is missing.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "foreprop"
DEVICE_WAITS = frozenset("keep await_staged finish".split())
OWN_WORDS = frozenset(["await_staged"])
FILES = (
    "path/asyncdevice.py",
    "path/gpumemory.py",
    "path/parameter.py",
    "collectives/gpu.py",
    "collectives/engine.py",
    "collectives/local_update.py",
    "gradients/roundpart.py",
)
"""Where devices are told something, or waited for."""
ABOUT_DEVICES = FILES[:2] + FILES[3:4]
"""Of which each wait is a device's; in the others those are that only devices know."""
WAITS = frozenset(
    "join wait_stream record synchronize keep record_stream finish wait await_staged".split()
)
"""Calls that are removed; what they are called with is not."""
TESTS = (
    "lagging/test_device_path.py",
    "unit/test_passes.py",
    "unit/test_memory.py",
    "lagging/test_ring_on_device.py",
    "lagging/test_training.py",
)
"""In the order in which they are likely to notice."""
LIMIT_S = 600
"""For all tests: a single one that does not end is ended by its own limit."""


class Mutation(NamedTuple):
    """Source between two places, and what comes there instead."""

    file: str
    line: int
    what: str
    start: int
    stop: int
    instead: str


def find_mutations(file: str) -> list[Mutation]:
    source = (PACKAGE / file).read_text()
    waits = WAITS if file in ABOUT_DEVICES else DEVICE_WAITS
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found = []
    for node, instead in _removable(ast.parse(source), waits):
        start = lines[node.lineno - 1] + node.col_offset
        stop = lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        what = " ".join(source[start:stop].split())
        found.append(Mutation(file, node.lineno, what, start, stop, instead))
    return found


def _removable(tree: ast.AST, waits: Collection[str]) -> Iterator[tuple[ast.expr, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            if isinstance(called, ast.Attribute) and _is_of_device(called, waits):
                yield node.value, "None"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            match node.func.attr:
                case "pin_memory":
                    yield node, ast.unparse(node.func.value)
                case "mark":  # an event that waits for nothing
                    yield node, "type('E', (), {'synchronize': lambda self: None})()"
                case "start":
                    if len(node.args) == 3:  # of a copy, not of a thread
                        event = "type('E', (), {'synchronize': lambda self: None})()"
                        yield node, f"({ast.unparse(node)}, {event})[1]"
                case "stream" | "own_stream":
                    yield node, "__import__('contextlib').nullcontext()"
                case "pass_by" if len(node.args) == 1:
                    yield node, f"({ast.unparse(node.args[0])})()"


def _is_of_device(called: ast.Attribute, waits: Collection[str]) -> bool:
    is_known = waits is WAITS or "device" in ast.unparse(called) or called.attr in OWN_WORDS
    return called.attr in waits and is_known and "_thread" not in ast.unparse(called)


def first_failure(mutation: Mutation) -> str | None:
    """The first test that fails; None if the mutation is not noticed."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "foreprop"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        source = (PACKAGE / mutation.file).read_text()
        changed = source[: mutation.start] + mutation.instead + source[mutation.stop :]
        compile(changed, mutation.file, "exec")
        (copy / mutation.file).write_text(changed)
        return _run_tests(folder)


def _run_tests(folder: str) -> str | None:
    """In a child that has torch already, and imports the package that lies in ``folder``."""
    report = Path(folder) / "report"
    child = os.fork()
    if not child:
        with report.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            signal.alarm(LIMIT_S)
            os._exit(_run_here(folder))
    _, status = os.waitpid(child, 0)
    if status == 0:
        return None
    told = report.read_text()
    for line in told.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split()[1].rpartition("::")[2]
    return "(does not end)" if os.WIFSIGNALED(status) or "Timeout" in told else told[-300:]


def _run_here(folder: str) -> int:
    sys.path.insert(0, folder)
    import foreprop

    assert str(foreprop.__file__).startswith(folder)
    tests = [str(ROOT / "tests" / name) for name in TESTS]
    options = ["-q", "-x", "-p", "no:cacheprovider", "-n", "0", "-m", "not long", "--timeout", "20"]
    return int(pytest.main([*options, "-o", "leak_grace_s=0.1", *tests]))


def all_mutations() -> list[Mutation]:
    return [mutation for file in FILES for mutation in find_mutations(file)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="only say what would be removed")
    parser.add_argument("--only", default="", help="of files whose name has this")
    asked = parser.parse_args()
    os.chdir(ROOT)
    torch.set_num_threads(1)
    assert "foreprop" not in sys.modules, "children import their own"
    chosen = [m for m in all_mutations() if asked.only in m.file]
    print("| where | removed | the first test that fails |\n| --- | --- | --- |")
    survivors = 0
    for mutation in chosen:
        failed = "-" if asked.list else first_failure(mutation)
        survivors += failed is None
        what = mutation.what.replace("|", r"\|")
        print(f"| `{mutation.file}` | `{what}` | {failed or '**none**'} |", flush=True)
    if not asked.list:
        print(f"\n{len(chosen) - survivors} of {len(chosen)} noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())

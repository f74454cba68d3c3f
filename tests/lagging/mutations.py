"""Removes each wait, event, pin and recorded stream of the device path, one at a time.

    python -m tests.lagging.mutations            # all; prints the table of lab/docs/devices.md
    python -m tests.lagging.mutations --list

A copy of the package with one of them removed runs the tests of the device; a test must fail for
each. What can be removed without one should be deleted, or a test is missing.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Collection, Iterator

from tests.mutations import PACKAGE, ROOT, Mutation, Runner, try_all

DEVICE_WAITS = frozenset("keep await_staged finish".split())
OWN_WORDS = frozenset(["await_staged"])
FILES = (
    "engine/asyncdevice.py",
    "engine/gpumemory.py",
    "params/servedparameter.py",
    "features/collectives/gpu.py",
    "features/collectives/engine.py",
    "features/collectives/gradientsums.py",
    "params/averaged.py",
)
"""Where devices are told something, or waited for."""
ABOUT_DEVICES = FILES[:2] + FILES[3:4]
"""Of which each wait is a device's; in the others those are that only devices know."""
WAITS = frozenset(
    "join wait_stream record synchronize keep record_stream finish wait await_staged".split()
)
"""Calls that are removed; what they are called with is not."""
TESTS = (
    "tests/lagging/test_device_path.py",
    "tests/lagging/test_training_counted.py",
    "tests/unit/plan/test_passes.py",
    "tests/unit/engine/test_memory.py",
    "tests/lagging/test_ring_on_device.py",
    "tests/lagging/test_training.py",
)
"""In the order in which they are likely to notice."""


def find_mutations(file: str) -> list[Mutation]:
    source = (ROOT / PACKAGE / file).read_text()
    waits = WAITS if file in ABOUT_DEVICES else DEVICE_WAITS
    found = _removable(ast.parse(source), waits)
    return [Mutation.of(file, source, node, instead) for node, instead in found]


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="only say what would be removed")
    parser.add_argument("--only", default="", help="of files whose name has this")
    asked = parser.parse_args()
    os.chdir(ROOT)
    chosen = [m for file in FILES if asked.only in file for m in find_mutations(file)]
    if asked.list:
        for mutation in chosen:
            print(f"{mutation.file}:{mutation.line}: {mutation.what}")
        return 0
    return 1 if try_all(chosen, Runner(TESTS, "not long"), jobs=2) else 0


if __name__ == "__main__":
    sys.exit(main())

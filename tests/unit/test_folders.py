"""Folders form an order, and imports only go down it: no circle, no arrow up, for ever.

Imports inside functions and for types only count as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"
ORDER = (
    "cli",
    "demo",
    "lab",
    "doctor",
    "run",
    "report",
    "training",
    "engine",
    "simulate",
    "model",
    "workload",
    "net",
    "config",
    "observe",
    "datasets",
    "core",
    "quantities",
    "errors",
)
"""From above; each may import what stands below it, and itself."""
ANYWHERE = {"version"}
BESIDE = {"experiments", "benchmarks", "tests"}
TOP = {"__init__", "__main__"}


def arrows() -> Iterator[tuple[str, int, str, str]]:
    """Every import between folders: its file and line, from which, into which."""
    for path in sorted((SRC / "foreprop").rglob("*.py")):
        where = path.relative_to(SRC / "foreprop")
        for node in ast.walk(ast.parse(path.read_text())):
            for name in _imported(node):
                parts = name.split(".")
                assert parts[0] not in BESIDE, f"{where} imports {name}, which is in no wheel"
                if parts[0] == "foreprop" and len(parts) > 1:
                    yield where.as_posix(), getattr(node, "lineno", 0), where.parts[0], parts[1]


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module == "foreprop":
        yield from (f"foreprop.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module


def test_imports_only_go_down_the_order_of_folders() -> None:
    place = {name: number for number, name in enumerate(ORDER)}
    found = []
    for file, line, source, target in arrows():
        source = source.removesuffix(".py")
        if source in TOP or target in ANYWHERE or source == target:
            continue
        if source not in place or target not in place:
            found.append(f"{file}:{line}: {source} or {target} has no place in the order")
        elif place[target] < place[source]:
            found.append(f"{file}:{line}: {source} imports {target}, which is above it")
    assert not found, "\n".join(found)

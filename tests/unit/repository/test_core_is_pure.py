"""The core has no sockets, threads, clocks, files, environment, logging, torch or chance.

Its imports are walked, transitively through foreprop's own modules, against a list of what is
allowed: a module that nobody thought of is refused too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parents[3] / "src"
PURE_MODULES = frozenset(
    (
        "__future__ abc array bisect collections dataclasses enum fnmatch fractions functools "
        "hashlib heapq hmac itertools math msgspec numbers operator random re statistics struct "
        "types typing zlib"
    ).split()
)
OWN_PREFIXES = ("foreprop.core", "foreprop.errors")
IMPURE_CALLS = frozenset(
    {"print", "open", "input", "exec", "eval", "compile", "breakpoint", "__import__"}
)


def find_impurities(src: Path) -> list[str]:
    """One line for each thing that the modules under src/foreprop/core must not do."""
    waiting = sorted((src / "foreprop" / "core").rglob("*.py"))
    seen: set[Path] = set()
    found: list[str] = []
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        tree = ast.parse(path.read_text(), str(path))
        where = path.relative_to(src).as_posix()
        found += [f"{where}:{line}: {what}" for line, what in _impurities_of(tree, path, src)]
        names = [name for _, name in _imported(tree, path, src)]
        waiting += [file for name in names if (file := _file_of(name, src)) and _is_own(name)]
    return sorted(found)


def _impurities_of(tree: ast.Module, path: Path, src: Path) -> Iterator[tuple[int, str]]:
    for line, name in _imported(tree, path, src):
        if not (_is_own(name) or name.split(".")[0] in PURE_MODULES):
            yield line, f"imports {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in IMPURE_CALLS:
            yield node.lineno, f"uses {node.id}"
        yield from _uses_of_chance(node)


def _imported(tree: ast.Module, path: Path, src: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every module (or name in a module of ours) that is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, path, src)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if base.split(".")[0] == "foreprop" else base


def _absolute(node: ast.ImportFrom, path: Path, src: Path) -> str:
    if not node.level:
        return node.module or ""
    package = path.relative_to(src).parent.parts
    parts = package[: len(package) - (node.level - 1)]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _is_own(name: str) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in OWN_PREFIXES)


def _file_of(name: str, src: Path) -> Path | None:
    """The file of a module, or of the module that holds the imported name."""
    for dotted in (name, name.rpartition(".")[0]):
        base = src.joinpath(*dotted.split("."))
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if dotted and file.is_file():
                return file
    return None


def _uses_of_chance(node: ast.AST) -> Iterator[tuple[int, str]]:
    """`random` is for random.Random(seed) only: no shared generator, no seed from the system."""
    match node:
        case ast.Import(names=names) if any(a.name == "random" and a.asname for a in names):
            yield node.lineno, "renames random"
        case ast.ImportFrom(module="random"):
            yield node.lineno, "imports from random: write random.Random(seed)"
        case ast.Attribute(value=ast.Name(id="random"), attr=attr) if attr != "Random":
            yield node.lineno, f"uses random.{attr}"
        case ast.Call(func=ast.Attribute(value=ast.Name(id="random")), args=[], keywords=[]):
            yield node.lineno, "uses random.Random without a seed"


def _make_source(root: Path, code: str, *, file: str = "core/bad.py") -> Path:
    files = {"__init__.py": "", "core/__init__.py": "", "errors.py": "", "net.py": "", file: code}
    for name, text in files.items():
        path = root / "foreprop" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_core_is_pure() -> None:
    assert len(list((SRC / "foreprop" / "core").rglob("*.py"))) > 1
    assert find_impurities(SRC) == []


IMPURE = [
    ("import socket", "imports socket"),
    ("import os.path", "imports os.path"),
    ("from time import monotonic", "imports time"),
    ("from threading import Lock as L", "imports threading"),
    ("def f():\n    import torch.distributed", "imports torch.distributed"),
    ("try:\n    import numpy\nexcept ImportError:\n    pass", "imports numpy"),
    ("import logging, math", "imports logging"),
    ("import foreprop", "imports foreprop"),
    ("from foreprop import net", "imports foreprop.net"),
    ("from foreprop.net import Stream", "imports foreprop.net.Stream"),
    ("from .. import net", "imports foreprop.net"),
    ("from ..net import Stream", "imports foreprop.net.Stream"),
    ("import foreprop.core_extra", "imports foreprop.core_extra"),
    ("print('here')", "uses print"),
    ("def f(p):\n    return open(p)", "uses open"),
    ("say = print", "uses print"),
    ("__import__('socket')", "uses __import__"),
    ("import importlib", "imports importlib"),
    ("import random\nrandom.shuffle([])", "uses random.shuffle"),
    ("import random\nrandom.Random()", "uses random.Random without a seed"),
    ("import random as r", "renames random"),
    ("from random import Random", "imports from random: write random.Random(seed)"),
]


def test_each_impurity_is_found(tmp_path: Path) -> None:
    for code, what in IMPURE:
        line = 2 if "\n" in code else 1
        source = _make_source(tmp_path, code)
        assert find_impurities(source) == [f"foreprop/core/bad.py:{line}: {what}"]


def test_modules_that_the_core_imports_are_walked(tmp_path: Path) -> None:
    source = _make_source(tmp_path, "from foreprop.errors import Failed")
    _make_source(tmp_path, "import time\nclass Failed(Exception): ...", file="errors.py")
    (tmp_path / "foreprop" / "core" / "bad.py").write_text("from foreprop.errors import Failed")
    assert find_impurities(source) == ["foreprop/errors.py:1: imports time"]


def test_what_the_core_needs_is_allowed(tmp_path: Path) -> None:
    code = """
from __future__ import annotations
import heapq, random, struct
from collections.abc import Sequence
from foreprop.core import other
from foreprop.errors import ConfigError
from .other import thing
from . import other as another
chance = random.Random(7)
number = chance.random()
"""
    assert find_impurities(_make_source(tmp_path, code)) == []

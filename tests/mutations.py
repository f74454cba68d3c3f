"""Changes the package a little, in one place at a time, and sees which test notices.

    python -m tests.mutations                                    # ten drawn of each of six folders
    python -m tests.mutations --folders core link --each 20 --seed 3
    python -m tests.mutations --lines .coverage                  # only tests that reach the line

Each change is made in a copy of the tree, whose tests of the default tier run until one fails; so
it also reaches processes that tests start. What survives is a change that means nothing, or a test
that is missing. With `--lines`, a file that `pytest --cov=foreprop --cov-context=test` has
left, a change costs seconds instead of minutes: tests that never reach its line are left out.
"""

from __future__ import annotations

import argparse
import ast
import copy
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.costs import read_record

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src", "foreprop")
FOLDERS = "core engine params session backends features/compression".split()
TESTS = "tests/unit tests/conformance tests/faults".split()
"""In the order in which they are likely to notice."""
CHANGED = ["src", "tests", "lab", "pyproject.toml"]
"""What a copy has of its own; links lead to the rest."""
LIMIT_S = 900
"""For all tests of a change; `TEST_LIMIT_S` ends a single one that hangs."""
TEST_LIMIT_S = 30

_SWAPPED: Mapping[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
}
_TOLD = frozenset("debug info warning warn describe log write_line".split())
"""Calls that only tell somebody something."""


class Mutation(NamedTuple):
    """Source of a file of the package between two places, and what comes there instead."""

    file: str
    line: int
    what: str
    start: int
    stop: int
    instead: str

    @classmethod
    def of(cls, file: str, source: str, node: ast.expr | ast.stmt, instead: str) -> Mutation:
        # an offset of ast's counts bytes of UTF-8
        lines = source.encode().splitlines(keepends=True)
        begins = [len(b"".join(lines[: at - 1])) for at in (node.lineno, node.end_lineno or 0)]
        start, stop = begins[0] + node.col_offset, begins[1] + (node.end_col_offset or 0)
        what = " ".join(source.encode()[start:stop].decode().split())
        return cls(file, node.lineno, what, start, stop, instead)

    def apply(self, package: Path) -> None:
        source = (package / self.file).read_bytes()
        changed = source[: self.start] + self.instead.encode() + source[self.stop :]
        compile(changed, self.file, "exec")
        (package / self.file).write_bytes(changed)


class _Sites(ast.NodeVisitor):
    """Finds what may be changed in functions, and what may come instead."""

    def __init__(self) -> None:
        self.found: list[tuple[ast.expr | ast.stmt, str]] = []
        self._depth = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name not in ("__repr__", "__str__"):
            self._depth += 1
            for statement in node.body:
                self.visit(statement)
            self._depth -= 1

    def _leave_out(self, node: ast.AST) -> None:
        """A message's text, or what only a mistake of ours would reach."""

    visit_Raise = visit_JoinedStr = visit_Assert = _leave_out

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            called = node.value.func
            name = getattr(called, "attr", getattr(called, "id", ""))
            if name in _TOLD or "super()" in ast.unparse(called):
                return
            self._note(node, "None")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            self._note_changed(node, ops=[_SWAPPED[type(node.ops[0])]()])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._note_changed(node, op=_SWAPPED[type(node.op)]())
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = ast.Constant | ast.JoinedStr | ast.List | ast.Tuple
        sides = [side for side in (node.left, node.right) if isinstance(side, texts)]
        if type(node.op) in _SWAPPED and all(_is_number(side) for side in sides):
            self._note_changed(node, op=_SWAPPED[type(node.op)]())
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in (ast.Add, ast.Sub):
            self._note_changed(node, op=_SWAPPED[type(node.op)]())
        self.visit(node.value)

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self._note(node.test, f"(not ({ast.unparse(node.test)}))")
        self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._note(node, f"bool({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._note(node, str(not node.value))
        elif isinstance(node.value, int):
            self._note(node, f"({node.value} + 1)")

    def _note_changed(self, node: ast.expr | ast.stmt, **fields: Any) -> None:
        changed = copy.copy(node)
        for name, value in fields.items():
            setattr(changed, name, value)
        text = ast.unparse(changed)
        self._note(node, f"({text})" if isinstance(node, ast.expr) else text)

    def _note(self, node: ast.expr | ast.stmt, instead: str) -> None:
        if self._depth:
            self.found.append((node, instead))


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def find_mutations(source: str, file: str) -> list[Mutation]:
    sites = _Sites()
    sites.visit(ast.parse(source))
    return [Mutation.of(file, source, node, instead) for node, instead in sites.found]


def draw_mutations(folders: Sequence[str], each: int, seed: int) -> Iterator[Mutation]:
    """As many of each folder, the same for the same seed and source."""
    package = ROOT / PACKAGE
    for folder in folders:
        paths = sorted((package / folder).rglob("*.py"))
        found = [
            mutation
            for path in paths
            for mutation in find_mutations(path.read_text(), str(path.relative_to(package)))
        ]
        drawn = random.Random(f"{seed} {folder}").sample(found, min(each, len(found)))
        yield from sorted(drawn)


class Runner(NamedTuple):
    """How a change is tried: which tests, in which order."""

    tests: Sequence[str]
    tier: str = "not long and not alone and not process"
    lines: str = ""

    def first_failure(self, mutation: Mutation) -> str | None:
        """The first test that fails; None if the change is not noticed."""
        with tempfile.TemporaryDirectory(prefix="mutated-") as folder:
            tree = Path(folder, "tree")
            tree.mkdir()
            _copy_tree(tree)
            mutation.apply(tree / PACKAGE)
            (tree / "chosen").write_text("\n".join(self._chosen(mutation)))
            return self._run_tests(tree, Path(folder, "report"))

    def _chosen(self, mutation: Mutation) -> Sequence[str]:
        if not self.lines:
            return self.tests
        from coverage import CoverageData

        data = CoverageData(self.lines)
        data.read()
        measured = [file for file in data.measured_files() if file.endswith(mutation.file)]
        reached = data.contexts_by_lineno(measured[0]) if measured else {}
        tests = {name.partition("|")[0] for name in reached.get(mutation.line, [])}
        costs_s = recorded_costs_s()
        found = sorted(test for test in tests if (ROOT / test.partition("::")[0]).exists())
        return sorted(found, key=lambda test: costs_s.get(test.partition("[")[0], 1.0))

    def _run_tests(self, tree: Path, report: Path) -> str | None:
        """In a child that has torch already, and imports the package of its own tree."""
        child = os.fork()
        if not child:
            with report.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                os.setpgid(0, 0)
                signal.alarm(LIMIT_S)
                os._exit(self._run_here(tree))
        _, status = os.waitpid(child, 0)
        if status == 0 or os.waitstatus_to_exitcode(status) == pytest.ExitCode.NO_TESTS_COLLECTED:
            return None
        told = report.read_text()
        for line in told.rpartition("short test summary info")[2].splitlines():
            if line.startswith(("FAILED ", "ERROR ")):
                return line.split(" - ")[0].split()[1].rpartition("::")[2]
        return "(does not end)" if os.WIFSIGNALED(status) or "Timeout" in told else told[-300:]

    def _run_here(self, tree: Path) -> int:
        os.chdir(tree)
        source = str(tree / "src")
        sys.path.insert(0, source)
        os.environ["PYTHONPATH"] = os.pathsep.join([source, str(tree / "lab" / "src")])
        import foreprop

        assert str(foreprop.__file__).startswith(source)
        options = f"-q -x -p no:cacheprovider -n 0 --timeout {TEST_LIMIT_S} -o leak_grace_s=0.1"
        return int(pytest.main([*options.split(), "-m", self.tier, "@chosen"]))


def _copy_tree(tree: Path) -> None:
    for path in ROOT.iterdir():
        if path.name not in CHANGED:
            (tree / path.name).symlink_to(path)
        elif path.is_dir():
            shutil.copytree(path, tree / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, tree)


def recorded_costs_s() -> dict[str, float]:
    """Seconds of a processor for one case of each test, as last recorded (tests/costs.py)."""
    return {cost.test: cost.cpu_s / cost.cases for cost in read_record()}


def try_all(mutations: Sequence[Mutation], runner: Runner, jobs: int) -> int:
    """Prints a table; returns how many were not noticed."""
    assert "foreprop" not in sys.modules, "children import their own"
    torch.set_num_threads(1)
    print("| where | what | instead | the first test that fails |\n| --- | --- | --- | --- |")
    survivors = 0
    # whose processes, unlike those of a multiprocessing.Pool, may have children: loaders' workers
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        found = pool.map(runner.first_failure, mutations)
        for mutation, failed in zip(mutations, found, strict=True):
            survivors += failed is None
            what, instead = (text.replace("|", r"\|") for text in (mutation.what, mutation.instead))
            where = f"{mutation.file}:{mutation.line}"
            print(f"| `{where}` | `{what}` | `{instead}` | {failed or '**none**'} |", flush=True)
    print(f"\n{len(mutations) - survivors} of {len(mutations)} noticed")
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folders", nargs="+", default=FOLDERS, help="of src/foreprop")
    parser.add_argument("--each", type=int, default=10, help="changes of each folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lines", default="", help="tests that reach each line: a .coverage file")
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument("--tier", default=Runner._field_defaults["tier"], help="pytest's -m")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="of these places: FILE or FILE:LINE"
    )
    parser.add_argument("--list", action="store_true", help="only say what would be changed")
    asked = parser.parse_args()
    os.chdir(ROOT)
    drawn = draw_mutations(asked.folders, asked.each, asked.seed)
    mutations = [m for m in drawn if any(place in f"{m.file}:{m.line}" for place in asked.only)]
    if asked.list:
        for mutation in mutations:
            print(f"{mutation.file}:{mutation.line}: {mutation.what}  ->  {mutation.instead}")
        return 0
    lines = asked.lines and str(Path(asked.lines).resolve())
    return 1 if try_all(mutations, Runner(asked.tests, asked.tier, lines), asked.jobs) else 0


if __name__ == "__main__":
    sys.exit(main())

"""The tests' own order: what is shared, what runs together, what it costs, what it notices."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import parts
from tests.costs import Cost, processor_s, read_costs
from tests.mutations import find_mutations
from tests.parts import Part, deselect_others
from tests.tiers import long_cases

TESTS = Path(__file__).parents[2]


def imported(path: Path) -> Iterator[str]:
    """The last parts of the modules that a file imports, and of the names from them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            yield from (name.rpartition(".")[2] for name in names)


def test_no_test_file_is_imported() -> None:
    files = sorted(TESTS.rglob("*.py"))
    tests = {path.stem for path in files if path.stem.startswith("test_")}
    assert len(tests) > 100
    # only those that name one are parsed, which takes longer
    naming = [path for path in files if tests.intersection(re.findall(r"\w+", path.read_text()))]
    found = {path.name: tests.intersection(imported(path)) for path in naming}
    assert {name: names for name, names in found.items() if names} == {}


def test_long_cases_are_marked() -> None:
    ((value,), marks, _) = long_cases(3)[0]
    assert (value, [mark.name for mark in marks]) == (3, ["long"])


def test_make_runs_every_test_that_is_to_run_alone() -> None:
    (folders,) = re.findall(r"^ALONE := (.*)$", (TESTS.parent / "Makefile").read_text(), re.M)
    files = set(TESTS.rglob("test_*.py")) - {Path(__file__)}
    found = {path.parent.name for path in files if "mark.alone" in path.read_text()}
    assert found <= {Path(folder).name for folder in folders.split()} | {"lagging"}


@given(st.dictionaries(st.text("abc"), st.floats(0, 100)), st.integers(1, 5))
def test_parts_have_every_test_once_and_take_as_long(costs_s: dict[str, float], count: int) -> None:
    parts = [Part(number, count).names(costs_s) for number in range(1, count + 1)]
    assert sorted(name for names in parts for name in names) == sorted(costs_s)
    sums_s = [sum(costs_s[name] for name in names) for names in parts]
    assert max(sums_s) - min(sums_s) <= max(costs_s.values(), default=0.0) + 1e-9
    assert parts[0] == Part.parse(f"1/{count}").names(dict(reversed(costs_s.items())))


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/2/3", "one/two"])
def test_a_part_that_is_none_is_named(text: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"--part {text}: give two numbers"):
        Part.parse(text)


def test_a_part_leaves_a_test_s_cases_together() -> None:
    items: list[Any] = [
        SimpleNamespace(nodeid=f"{test}[{case}]") for case in range(3) for test in ("x", "y", "z")
    ]
    others = deselect_others(Part(1, 2), items, {"x": 5.0, "y": 2.0, "z": 2.0})
    assert [item.nodeid for item in items] == ["x[0]", "x[1]", "x[2]"]
    assert {item.nodeid[0] for item in others} == {"y", "z"}


@pytest.mark.parametrize(
    ("default_s", "left_s", "count"), [(50, 300, 1), (100, 300, 2), (50, -10, 5), (0, 300, 1)]
)
def test_a_slower_machine_runs_a_smaller_part(
    default_s: float, left_s: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded_s = {"all": 350.0, "ring": 50.0, "alone": 50.0, "lab": 1000.0, "default": 100.0}
    record = [Cost(tier, tier, 1, cpu_s, cpu_s) for tier, cpu_s in recorded_s.items()]
    monkeypatch.setattr(parts, "read_record", lambda: record)
    chosen = {parts.part_that_fits(default_s, left_s, f"{commit:x}") for commit in range(20)}
    assert chosen == {Part(number, count) for number in range(1, count + 1)}


def test_costs_are_a_child_s_too_while_it_runs_and_when_it_has_ended() -> None:
    before_s = processor_s()
    child = os.fork()
    if not child:
        while time.process_time() < 0.3:
            pass
        signal.pause()
    try:
        while processor_s() - before_s < 0.25:
            time.sleep(0.01)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert processor_s() - before_s >= 0.25


def test_the_cases_of_a_test_are_one_row_in_each_tier(tmp_path: Path) -> None:
    cases = [("default", "t[a]", 1, 1.0, 2.0), ("default", "t[b]", 1, 2.0, 3.0)]
    file = tmp_path / "costs.jsonl"
    file.write_text("\n".join(map(json.dumps, [*cases, ("all", "t[c]", 1, 4.0, 4.0)])))
    assert read_costs(file) == [Cost("all", "t", 1, 4.0, 4.0), Cost("default", "t", 2, 3.0, 5.0)]


SOURCE = '''
def f(x: int = 3) -> int:
    """Of é."""
    log("told")
    if not x == 1 and x in {2}:
        g(x + 1)
        raise ValueError(f"{x + 1}")
    return -1 if x < 2 else True
'''


def test_a_mutation_is_one_small_change_of_what_a_function_does(tmp_path: Path) -> None:
    found = {(mutation.what, mutation.instead) for mutation in find_mutations(SOURCE, "f.py")}
    assert {
        ("x == 1", "(x != 1)"),
        ("not x == 1", "bool(x == 1)"),
        ("not x == 1 and x in {2}", "(not x == 1 or x in {2})"),
        ("x in {2}", "(x not in {2})"),
        ("g(x + 1)", "None"),
        ("x + 1", "(x - 1)"),
        ("x < 2", "(x <= 2)"),
        ("x < 2", "(not (x < 2))"),
        ("True", "False"),
    } <= found
    assert not [what for what, _ in found if "told" in what or "Value" in what or what == "3"]
    for mutation in find_mutations(SOURCE, "f.py"):
        (tmp_path / "f.py").write_text(SOURCE)
        mutation.apply(tmp_path)
        changed = (tmp_path / "f.py").read_text()
        assert changed.count("é") == 1
        assert ast.unparse(ast.parse(changed)) != ast.unparse(ast.parse(SOURCE))

"""The house rules of src/foreprop: arrows only go down, a name means one thing, nothing is long.

Rooms (a package, or a folder of ``features`` or ``tools``) form an order, and imports only go down
it, those inside functions and for types too. In the rooms of a training no file name and no class
name occurs twice. Files have at most 600 lines, if they are one idea, and functions 60. What does
not hold yet is listed with today's state, and the lists only get shorter: a test fails when
something new is wrong, and when an exception is no longer needed.
"""

from __future__ import annotations

import ast
import functools
import gc
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
SRC = ROOT / "src"
FEATURES = "compiled compression tables nodes members uneven collectives".split()
RUNTIME = [
    *"core config engine params".split(),
    *(f"features/{name}" for name in FEATURES),
    *"backends plan session integrations".split(),
]
"""What a training loads, from below; each may import what stands before it."""
ORDER = [
    *"errors quantities version durable".split(),
    *RUNTIME,
    *"conformance tools/report tools/run tools/doctor tools/compare tools/cli".split(),
]
LAB = "datasets setting simulate lab demo commands".split()
"""foreprop-lab's folders, from below: they may import all of foreprop."""
PROGRAMS = ["benchmarks", "experiments"]
"""They stand beside each other, above `LAB`."""
BESIDE = {"foreprop_lab", "tests"}
"""What is not in foreprop's wheel."""
TOP = {"__init__", "__main__"}
"""They stand above all."""
MOST_FILE_LINES = 600
MOST_FUNCTION_LINES = 60

UP: set[str] = set()
"""Imports that go up, by file and folder."""
TWICE: set[str] = set()
"""Names of files and classes that occur more than once in `RUNTIME`."""
ONE_THREAD = {
    "params/averaging.py:stepper",  # the training thread
    "engine/asyncdevice.py:_new_event",  # either makes the same events
    "engine/gpumemory.py:_gradient",  # the training thread, or else the one that stages
    "engine/gpumemory.py:_gradient_is_pinned",  # the same whoever asks
    "engine/gpumemory.py:_gradients_bytes",  # the thread that stages
    "engine/gpumemory.py:_values_are_pinned",
    "engine/gpumemory.py:values",  # a view, of the one tensor that there is
    "backends/composedworker.py:state",  # the user's thread
}
"""Cached properties without a guard."""
LONG: dict[str, int] = {}
"""Lines of files and functions that are too long; they must not grow."""


COMPOSITION = ("composed", "composedworker", "composition")
"""Files that know which features exist, and import each when it is there."""
KNOW_FEATURES = {
    "backends -> features/collectives",
    "backends -> features/compression",
    "backends -> features/members",
    "conformance -> features/compression",
    "plan -> features/collectives",
    "plan -> features/compression",
    "plan -> features/tables",
    "session -> features/collectives",
    "session -> features/compression",
    "session -> features/members",
    "session -> features/tables",
    "session -> features/uneven",
}
"""Rooms in which others know one, too; how many files do is measured."""


class Measure(NamedTuple):
    """What may be at most, now and in the end."""

    bound: int
    aim: int


MEASURES = {
    "lines": Measure(62_749, 50_000),
    "packages": Measure(10, 11),
    "Protocols": Measure(14, 15),
    "functions per 1,000 lines": Measure(73, 60),
    # features that a session loads when it has them, and the command line's
    "imports inside functions": Measure(60, 60),
    "files with TYPE_CHECKING": Measure(21, 20),
    "features that a file knows, and is no composition": Measure(23, 10),
}
"""Each has an aim, and until it is reached a bound that only falls."""


def find_arrows_up(
    src: Path, order: Iterable[str] = ORDER, package: str = "foreprop", beside: set[str] = BESIDE
) -> set[str]:
    """``file -> room`` for each import of a room that does not stand below the file's own."""
    place = {name: number for number, name in enumerate(order)}
    found = set()
    for path in _files(src, package):
        where = path.relative_to(src / package)
        own = _room(where.with_suffix("").parts)
        for target in _imported_rooms(path, src, package, beside):
            if own in TOP or target == own:
                continue
            if own not in place or target not in place or place[target] > place[own]:
                found.add(f"{where.as_posix()} -> {target}")
    return found


def find_names_twice(src: Path, folders: Iterable[str] = RUNTIME) -> set[str]:
    """File names, and names of classes, that occur more than once in these folders."""
    files: Counter[str] = Counter()
    classes: Counter[str] = Counter()
    wanted = set(folders)
    for path in _files(src):
        if _room(path.relative_to(src / "foreprop").with_suffix("").parts) not in wanted:
            continue
        if path.name != "__init__.py":
            files[path.name] += 1
        nodes = _nodes(path)
        classes.update({node.name for node in nodes if isinstance(node, ast.ClassDef)})
    return {name for name, count in (files + classes).items() if count > 1}


def find_long(src: Path) -> dict[str, int]:
    """Files, and functions as ``file:name``, with more lines than they may have."""
    found = {}
    for path in _files(src):
        where = path.relative_to(src / "foreprop").as_posix()
        lines = len(path.read_text().splitlines())
        if lines > MOST_FILE_LINES:
            found[where] = lines
        for node in _nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MOST_FUNCTION_LINES:
                    found[f"{where}:{node.name}"] = lines
    return found


def find_who_knows_features(src: Path) -> set[str]:
    """``file -> feature`` for each import of a feature by what is none, and no composition."""
    found = set()
    for path in _files(src):
        where = path.relative_to(src / "foreprop")
        if where.parts[0] != "features" and not path.stem.startswith((*COMPOSITION, *TOP)):
            rooms = set(_imported_rooms(path, src, "foreprop", BESIDE))
            found |= {f"{where.as_posix()} -> {room}" for room in rooms if "features/" in room}
    return found


def measure(src: Path) -> dict[str, int]:
    """What `MEASURES` bounds."""
    texts = {path: path.read_text() for path in _files(src)}
    nodes = [(path, node) for path in texts for node in _nodes(path)]
    functions = [
        (path, node)
        for path, node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    protocols = [
        node
        for _, node in nodes
        if isinstance(node, ast.ClassDef)
        if any(ast.unparse(base).partition("[")[0] == "Protocol" for base in node.bases)
    ]
    deferred = {
        id(inner)
        for path, function in functions
        if path.stem not in COMPOSITION
        for inner in ast.walk(function)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    }
    lines = sum(text.count("\n") for text in texts.values())
    return {
        "lines": lines,
        "packages": len(list((src / "foreprop").glob("*/__init__.py"))),
        "Protocols": len(protocols),
        "functions per 1,000 lines": round(1000 * len(functions) / max(lines, 1)),
        "imports inside functions": len(deferred),
        "files with TYPE_CHECKING": sum("TYPE_CHECKING" in text for text in texts.values()),
        "features that a file knows, and is no composition": len(find_who_knows_features(src)),
    }


def _files(src: Path, package: str = "foreprop") -> list[Path]:
    return sorted((src / package).rglob("*.py"))


def _room(parts: tuple[str, ...]) -> str:
    """The folder that a module is in, or it itself; a feature's and a tool's is one further in."""
    inner = len(parts) > 1 and parts[0] in ("features", "tools") and parts[1] != "__init__"
    return "/".join(parts[: 1 + inner])


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    """Of classes, functions and imports."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Import, ast.ImportFrom)
    tree = ast.parse(path.read_text(), str(path))
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def _imported_rooms(path: Path, src: Path, package: str, beside: set[str]) -> Iterator[str]:
    """The package's own, and what is not in its wheel."""
    for node in _nodes(path):
        for name in _imported(node, path, src):
            first, *rest = name.split(".")
            if first in beside:
                yield first
            elif first == package:
                base = src.joinpath(package, *rest[:1])
                is_module = base.with_suffix(".py").is_file() or base.is_dir()
                # otherwise it is what users import: above all folders
                yield _room(tuple(rest)) if rest and is_module else package


def _imported(node: ast.AST, path: Path, src: Path) -> Iterator[str]:
    """The modules that are imported, or names in them, in full."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        package = path.relative_to(src).parent.parts
        above = package[: len(package) - (node.level - 1)] if node.level else ()
        base = ".".join([*above, *([node.module] if node.module else [])])
        yield from (f"{base}.{alias.name}" for alias in node.names)


@pytest.fixture(autouse=True, scope="module")
def _no_collections() -> Iterator[None]:
    """Of garbage: to look at all that was parsed takes twice as long as to parse it."""
    gc.disable()
    yield
    _nodes.cache_clear()
    gc.enable()


def test_imports_only_go_down_the_order_of_folders() -> None:
    found = find_arrows_up(SRC)
    assert found - UP == set(), "a folder imports what does not stand below it"
    assert UP - found == set(), "no exception is needed any more"


def test_the_lab_s_imports_go_down_too() -> None:
    found = find_arrows_up(ROOT / "lab" / "src", LAB + PROGRAMS, "foreprop_lab", {"tests"})
    assert {arrow for arrow in found if not arrow.startswith(tuple(PROGRAMS))} == set()


def test_every_folder_has_a_place_in_the_order() -> None:
    files = [path.relative_to(SRC / "foreprop").with_suffix("") for path in _files(SRC)]
    rooms = {_room(path.parts) for path in files if path.name != "__init__"}
    assert rooms - TOP == set(ORDER)
    assert len(ORDER) == len(set(ORDER))
    assert [name for name in ORDER if name in RUNTIME] == RUNTIME


def test_no_file_and_no_class_name_occurs_twice_in_a_training() -> None:
    found = find_names_twice(SRC)
    assert found - TWICE == set(), "a name means two things"
    assert TWICE - found == set(), "no exception is needed any more"


def test_no_file_and_no_function_is_long() -> None:
    found = find_long(SRC)
    grown = {name: lines for name, lines in found.items() if lines > LONG.get(name, 0)}
    assert grown == {}, "shorten them"
    assert LONG.keys() - found.keys() == set(), "no exception is needed any more"


def test_composition_alone_knows_which_features_exist() -> None:
    found = {re.sub(r"(/|\.py).* -> ", " -> ", each) for each in find_who_knows_features(SRC)}
    assert found - KNOW_FEATURES == set(), "let composition pass what is needed"
    assert KNOW_FEATURES - found == set(), "no exception is needed any more"


def find_caches_of_one_thread(src: Path) -> set[str]:
    """``file:name`` of each cached property of which two threads could make two.

    Since Python 3.12 `functools.cached_property` has no lock; ``setdefault`` keeps what came first.
    """
    return {
        f"{path.relative_to(src / 'foreprop').as_posix()}:{node.name}"
        for path in _files(src)
        for node in _nodes(path)
        if isinstance(node, ast.FunctionDef)
        if any("cached_property" in ast.unparse(found) for found in node.decorator_list)
        if "setdefault" not in ast.unparse(node)
    }


def test_what_several_threads_make_is_kept_once() -> None:
    """The others are asked for by one thread only, or make no difference."""
    assert find_caches_of_one_thread(SRC) == ONE_THREAD


def _make(root: Path, **files: str) -> Path:
    """A source tree; ``path__worker`` stands for engine/worker.py."""
    for name, text in files.items():
        path = root / "foreprop" / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    return root


def test_arrows_up_are_found_wherever_they_stand(tmp_path: Path) -> None:
    src = _make(
        tmp_path,
        errors="",
        core__wire="from foreprop.errors import Failed\nfrom foreprop.core import frames",
        core__frames="def f():\n    from foreprop.engine import tcp",
        core__slices="if TYPE_CHECKING:\n    import foreprop.features.tables.rows",
        engine__tcp="from ..backends.ring import Ring\nfrom foreprop.core.wire import Kind",
        backends__ring="from foreprop import engine\nfrom . import other\nimport tests.simulator",
        backends__other="from foreprop import parallelize\nimport foreprop_lab.demo",
        features__tables__rows="import foreprop.features.nodes.relay, foreprop.core.wire",
        features__nodes__relay="from foreprop.features.tables import rows",
    )
    order = ["errors", "core", "engine", "features/tables", "features/nodes", "backends"]
    assert find_arrows_up(src, order) == {
        "core/frames.py -> engine",
        "core/slices.py -> features/tables",
        "engine/tcp.py -> backends",
        "features/tables/rows.py -> features/nodes",
        "backends/ring.py -> tests",
        "backends/other.py -> foreprop",
        "backends/other.py -> foreprop_lab",
    }


def test_who_knows_features_is_found(tmp_path: Path) -> None:
    src = _make(
        tmp_path,
        features__tables__rows="from foreprop.features.nodes import relay",
        features__nodes__relay="",
        backends__composed="from foreprop.features.tables import rows",
        backends__ring="def f():\n    from foreprop.features.tables.rows import Row",
        session__shard="if TYPE_CHECKING:\n    import foreprop.features.nodes.relay",
    )
    assert find_who_knows_features(src) == {
        "backends/ring.py -> features/tables",
        "session/shard.py -> features/nodes",
    }


def test_a_folder_without_a_place_is_found(tmp_path: Path) -> None:
    src = _make(tmp_path, core__wire="", extras__fast="from foreprop.core import wire")
    assert find_arrows_up(src, ["core"]) == {"extras/fast.py -> core"}


def test_names_that_occur_twice_are_found(tmp_path: Path) -> None:
    src = _make(
        tmp_path,
        path__session="class Session: ...",
        session__session="class Session:\n    class Inner: ...",
        core__ring="class Inner: ...",
        lab__ring="class Session: ...",
    )
    found = find_names_twice(src, ["path", "session", "core"])
    assert found == {"session.py", "Session", "Inner"}


def test_what_is_too_long_is_found(tmp_path: Path) -> None:
    body = "    x = 1\n"
    src = _make(
        tmp_path,
        path__long="# a line\n" * 601,
        path__right="# a line\n" * 600,
        core__functions=f"def right():\n{body * 59}\nasync def long():\n{body * 60}",
    )
    assert find_long(src) == {"path/long.py": 601, "core/functions.py:long": 61}


def test_caches_without_a_guard_are_found(tmp_path: Path) -> None:
    cached = "class A:\n    @functools.cached_property\n    def {}(self):\n        return {}\n"
    src = _make(
        tmp_path,
        path__bare=cached.format("made", "object()"),
        path__kept=cached.format("made", "vars(self).setdefault('_only', object())"),
    )
    assert find_caches_of_one_thread(src) == {"path/bare.py:made"}


def test_no_measure_grows() -> None:
    grown = {name: n for name, n in measure(SRC).items() if n > MEASURES[name].bound}
    assert grown == {}


@pytest.mark.parametrize("name", MEASURES)
def test_what_is_measured_is_counted(name: str, tmp_path: Path) -> None:
    (tmp_path / "foreprop" / "one").mkdir(parents=True)
    (tmp_path / "foreprop" / "features").mkdir()
    (tmp_path / "foreprop" / "one" / "__init__.py").touch()
    (tmp_path / "foreprop" / "one" / "a.py").write_text(
        "from typing import TYPE_CHECKING, Protocol\n"
        "import foreprop.features.tables\n"
        "class A(Protocol): ...\n"
        "def f():\n"
        "    import os\n"
    )
    wanted = {"lines": 5, "functions per 1,000 lines": 200}
    assert measure(tmp_path)[name] == wanted.get(name, 1)

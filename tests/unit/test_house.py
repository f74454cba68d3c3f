"""The house rules of src/foreprop: arrows only go down, a name means one thing, nothing is long.

Folders form an order, and imports only go down it, those inside functions and for types too. In the
folders of a training no file name and no class name occurs twice. Files have at most 600 lines, if
they are one idea, and functions 60. What does not hold yet is listed with today's state, and the
lists only get shorter: a test fails when something new is wrong, and when an exception is no longer
needed.
"""

from __future__ import annotations

import ast
import functools
import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
RUNTIME = (
    "core config observe link cluster path hooks compiled numerics compression gradients"
    " tables relays staleness elastic stragglers servers collectives data auto checkpoints"
    " session integrations"
).split()
"""What a training loads, from below; each may import what stands before it."""
ORDER = (
    "errors quantities version datasets durable core config workload model simulate"
    " observe link cluster path hooks compiled numerics compression gradients tables relays"
    " staleness elastic stragglers servers collectives data auto checkpoints session"
    " integrations conformance callbacks report run doctor compare lab demo cli"
).split()
BESIDE = {"experiments", "benchmarks", "tests"}
"""Folders that are in no wheel."""
TOP = {"__init__", "__main__"}
"""They stand above all."""
MOST_FILE_LINES = 600
MOST_FUNCTION_LINES = 60

UP: set[str] = set()
"""Imports that go up, by file and folder."""
TWICE: set[str] = set()
"""Names of files and classes that occur more than once in `RUNTIME`."""
ONE_THREAD = {
    "gradients/averaging.py:_stepper",  # the training thread
    "path/asyncdevice.py:_new_event",  # either makes the same events
    "path/gpumemory.py:_gradient",  # the training thread, or else the one that stages
    "path/gpumemory.py:_gradient_is_pinned",  # the same whoever asks
    "path/gpumemory.py:_gradients_bytes",  # the thread that stages
    "path/gpumemory.py:_values_are_pinned",
    "path/gpumemory.py:values",  # a view, of the one tensor that there is
    "servers/served.py:state",  # the user's thread
}
"""Cached properties without a guard."""
LONG: dict[str, int] = {}
"""Lines of files and functions that are too long; they must not grow."""


def find_arrows_up(src: Path, order: Iterable[str] = ORDER) -> set[str]:
    """``file -> folder`` for each import of a folder that does not stand below the file's own."""
    place = {name: number for number, name in enumerate(order)}
    found = set()
    for path in _files(src):
        where = path.relative_to(src / "foreprop")
        own = where.parts[0].removesuffix(".py")
        for target in _imported_folders(path, src):
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
        if path.relative_to(src / "foreprop").parts[0].removesuffix(".py") not in wanted:
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


def _files(src: Path) -> list[Path]:
    return sorted((src / "foreprop").rglob("*.py"))


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    """Of classes, functions and imports."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Import, ast.ImportFrom)
    tree = ast.parse(path.read_text(), str(path))
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def _imported_folders(path: Path, src: Path) -> Iterator[str]:
    """Of foreprop, and of what is in no wheel."""
    for node in _nodes(path):
        for name in _imported(node, path, src):
            first, *rest = name.split(".")
            if first in BESIDE:
                yield first
            elif first == "foreprop":
                base = src.joinpath("foreprop", *rest[:1])
                is_module = base.with_suffix(".py").is_file() or base.is_dir()
                # otherwise it is what users import: above all folders
                yield rest[0] if rest and is_module else "foreprop"


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


def test_every_folder_has_a_place_in_the_order() -> None:
    folders = {path.relative_to(SRC / "foreprop").parts[0] for path in _files(SRC)}
    assert {name.removesuffix(".py") for name in folders} - TOP == set(ORDER)
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
    """A source tree; ``path__worker`` stands for path/worker.py."""
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
        core__frames="def f():\n    from foreprop.link import tcp",
        core__slices="if TYPE_CHECKING:\n    import foreprop.path.worker",
        link__tcp="from ..path.worker import Worker\nfrom foreprop.core.wire import Kind",
        path__worker="from foreprop import link\nfrom . import other\nimport tests.simulator",
        path__other="from foreprop import parallelize",
    )
    assert find_arrows_up(src, ["errors", "core", "link", "path"]) == {
        "core/frames.py -> link",
        "core/slices.py -> path",
        "link/tcp.py -> path",
        "path/worker.py -> tests",
        "path/other.py -> foreprop",
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

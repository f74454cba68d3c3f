"""Examples: what several ranks print stays in lines of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


def prints(tree: ast.AST, *, first_only: bool = False) -> Iterator[tuple[ast.Call, bool]]:
    """Calls of `print`, and whether an ``if`` lets one process come there."""
    for node in ast.iter_child_nodes(tree):
        asks = isinstance(node, ast.If) and any(
            word in ast.unparse(node.test)
            for word in ("rank == 0", "rank() == 0", "_zero", "options.profile")
        )
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            yield node, first_only
        yield from prints(node, first_only=first_only or asks)


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_what_all_ranks_print_is_written_with_its_end(example: Path) -> None:
    """Otherwise one's text and another's come before either's end of line."""
    for call, first_only in prints(ast.parse(example.read_text())):
        named = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if not first_only:
            assert named == {"end": "''", "flush": "True"}, ast.unparse(call)
            assert ast.unparse(call.args[0]).endswith("\\n'")

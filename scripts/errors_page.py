"""docs/errors.md, every error's text, read out of src: run this after changing a message.

python scripts/errors_page.py

What a message fills in stands as an ellipsis. A test compares the page with `page()`, and checks
that messages which were really raised are among them.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from foreprop import errors
from foreprop.config import combinations

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"
SOURCE = ROOT / "src" / "foreprop"
VALUE = "…"
PART = "part of a ConfigError"

SECTIONS = {
    "Settings": ("config quantities", "settings.md"),
    "The training loop": ("path gradients numerics hooks session", "semantics.md"),
    "Data": ("data datasets", "data.md"),
    "Tables": ("tables", "tables.md"),
    "Who dies, and who is late": ("elastic", "elastic.md"),
    "Processes and connections": ("cluster servers link relays errors", "cluster.md"),
    "All-reduce": ("collectives", "collectives.md"),
    "The choice of an architecture": ("auto", "auto.md"),
    "The protocol": ("core", "path.md"),
    "Traces and reports": ("observe report", "troubleshooting.md"),
    "`foreprop run`": ("run", "run.md"),
    "`foreprop doctor`": ("doctor", "doctor.md"),
    "`foreprop plan`": ("model workload", "plan.md"),
    "`foreprop lab`": ("lab demo", "lab.md"),
    "The simulator": ("simulate", "simulator.md"),
    "The command line": ("cli", "commands.md"),
}
"""By heading: the folders of src/foreprop, and the page that explains what they do."""
OTHERS = ("Everything else", "troubleshooting.md")

HEAD = """\
# Every error's text

<!-- Made by scripts/errors_page.py from src: edit the messages, not this page. -->

Search this page for the words of a message. `…` stands for what a message fills in: a name, a
number, what to do. [Troubleshooting](troubleshooting.md) says what each kind of error means and
what to do first. Each heading names the page that explains the subject. `InternalError`,
`LocalProtocolError` and `RemoteProtocolError` are defects, or strangers on the network: report
them with the whole text.
"""


@dataclass(frozen=True, slots=True)
class Message:
    """An error that src makes: its class and text, and the folder or file that makes it."""

    where: str
    kind: str
    text: str

    @property
    def pattern(self) -> re.Pattern[str]:
        """Fits every text that this message can have."""
        return re.compile(".*".join(map(re.escape, self.text.split(VALUE))), re.DOTALL)


@dataclass(slots=True)
class Module:
    """A file: what its names stand for, as far as texts go."""

    tree: ast.Module
    constants: dict[str, ast.expr] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.constants[node.targets[0].id] = node.value
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name] = node

    def texts(self, value: ast.expr) -> list[str]:
        """What an expression can be, with `VALUE` for what is not known before it runs."""
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return [value.value]
        if isinstance(value, ast.JoinedStr):
            return ["".join(self._part(part) for part in value.values)]
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            return [a + b for a in self.texts(value.left) for b in self.texts(value.right)]
        if isinstance(value, ast.IfExp):
            return [*self.texts(value.body), *self.texts(value.orelse)]
        if isinstance(value, ast.Name) and value.id in self.constants:
            return self.texts(self.constants[value.id])
        if isinstance(value, ast.Call):
            return self._returned(_name(value.func))
        return [VALUE]

    def _part(self, part: ast.expr) -> str:
        """A piece of an f-string: its text, that of a constant of this file, or an extra's."""
        call = part.value if isinstance(part, ast.FormattedValue) else None
        if isinstance(call, ast.Call) and _name(call.func) == errors.how_to_install.__name__:
            extra = call.args[0]
            return errors.how_to_install(extra.value if isinstance(extra, ast.Constant) else VALUE)
        if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name):
            constant = self.constants.get(part.value.id)
            return VALUE if constant is None else self.texts(constant)[0]
        return str(part.value) if isinstance(part, ast.Constant) else VALUE

    def _returned(self, name: str) -> list[str]:
        """The texts that a function of this file returns."""
        if name not in self.functions:
            return [VALUE]
        nodes = ast.walk(self.functions[name])
        values = [node.value for node in nodes if isinstance(node, ast.Return) and node.value]
        return [text for value in values for text in self.texts(value)] or [VALUE]


@functools.cache
def messages(source: Path = SOURCE) -> tuple[Message, ...]:
    """All of them, in the order of files and lines, each text once in its folder."""
    modules = {path: Module(ast.parse(path.read_text())) for path in sorted(source.rglob("*.py"))}
    kinds = error_classes(module.tree for module in modules.values())
    found: dict[Message, None] = {}
    for path, module in modules.items():
        where = path.relative_to(source).parts[0].removesuffix(".py")
        for call in _made(module.tree, kinds):
            for text in module.texts(call.args[0]):
                if re.search(r"\w", text):  # what is passed on stands where it is made
                    kind = kinds[_name(call.func)]
                    found[Message(where, kind, _squeezed(text))] = None
    if source == SOURCE:
        pair = f"{VALUE} is {VALUE}"
        texts = (_squeezed(row.text(pair, pair)) for row in combinations.REFUSED)
        found |= {Message("config", "ConfigError", text): None for text in texts}
    return tuple(found)


def error_classes(trees: Iterable[ast.Module]) -> dict[str, str]:
    """Our classes of errors and Python's, by name, and what to call them.

    The text of a private class becomes part of another error's.
    """
    known = {name: name for name in vars(errors) if _is_error(getattr(errors, name))}
    known |= {name: name for name in dir(builtins) if _is_error(getattr(builtins, name))}
    known["ValidationError"] = "ValidationError"  # msgspec's
    defined = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in defined:
        base = next((_name(base) for base in node.bases if _name(base) in known), None)
        if base is not None:
            known[node.name] = PART if node.name.startswith("_") else node.name
    return known


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def _made(tree: ast.Module, kinds: dict[str, str]) -> Iterator[ast.Call]:
    """Where an error of ours is made, raised there or not; one of Python's, only if raised."""
    raised = {id(node.exc) for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and _name(node.func) in kinds:
            name = _name(node.func)
            if id(node) in raised or not (hasattr(builtins, name) or name == "ValidationError"):
                yield node


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _squeezed(text: str) -> str:
    return re.sub(rf"{VALUE}(?:\s*{VALUE})+", VALUE, " ".join(text.split()))


def section(where: str) -> tuple[str, str]:
    """Heading and page for a folder; one that is new here has a place, too."""
    for heading, (folders, target) in SECTIONS.items():
        if where in folders.split():
            return heading, target
    return OTHERS


def page() -> str:
    """The page's whole text."""
    rows: dict[tuple[str, str], list[str]] = {}
    for message in messages():
        rows.setdefault(section(message.where), []).append(_row(message))
    order = [*((heading, target) for heading, (_, target) in SECTIONS.items()), OTHERS]
    parts = [HEAD]
    for heading, target in order:
        if (heading, target) in rows:
            table = "\n".join(rows[heading, target])
            parts.append(
                f"## {heading}\n\nExplained in [{target}]({target}).\n\n"
                f"| message | error |\n| --- | --- |\n{table}\n"
            )
    return "\n".join(parts)


def _row(message: Message) -> str:
    text = message.text.replace("|", "/")
    kind = message.kind if message.kind == PART else f"`{message.kind}`"
    return f"| `` {text} `` | {kind} |"


if __name__ == "__main__":
    PAGE.write_text(page())

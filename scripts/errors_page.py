"""Read every error's text out of src, as a page of the site, which site_hooks.py adds to it.

python scripts/errors_page.py    # prints it

An ellipsis stands for what a message fills in. A test checks that all texts are on the page, and
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
SOURCE = ROOT / "src" / "foreprop"
LAB = ROOT / "lab" / "src" / "foreprop_lab"
VALUE = "…"
PART = "part of a ConfigError"

SECTIONS = {
    "Settings": ("config quantities", "settings.md"),
    "The training loop": ("params", "semantics.md"),
    "Sessions, data and checkpoints": ("session", "semantics.md"),
    "Trainers": ("integrations", "trainers.md"),
    "Processes and connections": ("engine backends features/nodes errors", "troubleshooting.md"),
    "Who dies, and who is late": ("features/members features/uneven", "elastic.md"),
    "Tables": ("features/tables", "tables.md"),
    "Compression": ("features/compression conformance", "compression.md"),
    "Compiled code": ("features/compiled", "compile.md"),
    "All-reduce": ("features/collectives", "tuning.md"),
    "The protocol": ("core", "path.md"),
    "Plans, and the choice of an architecture": ("plan", "plan.md"),
    "Traces and reports": ("tools/report", "troubleshooting.md"),
    "`foreprop run`": ("tools/run", "run.md"),
    "`foreprop doctor`": ("tools/doctor", "run.md"),
    "`foreprop compare`": ("tools/compare", "compare.md"),
    "The command line": ("tools/cli", "commands.md"),
    "The lab, the demo and the simulator": ("lab", "../lab/docs/lab.md"),
}
"""The headings, each with packages of src/foreprop, and the page that explains what they do."""
OTHERS = ("Everything else", "troubleshooting.md")

HEAD = """\
# Every error's text

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
        """A pattern that fits every text that this message can have."""
        return re.compile(".*".join(map(re.escape, self.text.split(VALUE))), re.DOTALL)


@dataclass(slots=True)
class Module:
    """A file, with the constants and functions that its texts may use."""

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
        """The texts that an expression can have, with `VALUE` for what is unknown until it runs."""
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
            name = part.value.id
            if name.isupper() and isinstance(shared := getattr(errors, name, None), str):
                return shared
            constant = self.constants.get(name)
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
    """All messages in the order of files and lines, each text once per package."""
    files = sorted(source.rglob("*.py"))
    if source == SOURCE:  # experiments and benchmarks fail in their own words
        parts = ("*.py", "commands/*.py", "demo/*.py", "lab/*.py", "simulate/*.py")
        files += sorted(path for part in parts for path in LAB.glob(part))
    modules = {path: Module(ast.parse(path.read_text())) for path in files}
    kinds = error_classes(module.tree for module in modules.values())
    found: dict[Message, None] = {}
    for path, module in modules.items():
        where = package_of(path, source) if path.is_relative_to(source) else "lab"
        for call in _made(module.tree, kinds):
            for text in module.texts(call.args[0]):
                if re.search(r"\w", text):  # a text that is only passed on is found at its origin
                    kind = kinds[_name(call.func)]
                    found[Message(where, kind, _squeezed(text))] = None
    if source == SOURCE:
        pair = f"{VALUE} is {VALUE}"
        texts = (_squeezed(row.text(pair, pair)) for row in combinations.REFUSED)
        found |= {Message("config", "ConfigError", text): None for text in texts}
    return tuple(found)


def package_of(path: Path, source: Path) -> str:
    """The package that a file is in: its folder, below ``features`` and ``tools`` the next one."""
    parts = path.relative_to(source).with_suffix("").parts
    return "/".join(parts[: 2 if parts[0] in ("features", "tools") else 1])


def error_classes(trees: Iterable[ast.Module]) -> dict[str, str]:
    """The classes of errors, foreprop's and Python's, with the name that the page gives them.

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
    """The calls that make an error of foreprop's, and of Python's those that are raised there."""
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
    """The heading and the page for a package; a new one gets those of all others."""
    for heading, (folders, target) in SECTIONS.items():
        if where in folders.split():
            return heading, target
    return OTHERS


def page() -> str:
    """The page's whole text; rows are sorted by their texts, whichever file has them."""
    rows: dict[tuple[str, str], list[str]] = {}
    for message in messages():
        rows.setdefault(section(message.where), []).append(_row(message))
    order = [*((heading, target) for heading, (_, target) in SECTIONS.items()), OTHERS]
    parts = [HEAD]
    for heading, target in order:
        if (heading, target) in rows:
            table = "\n".join(sorted(rows[heading, target], key=str.lower))
            parts.append(
                f"## {heading}\n\nExplained in [{Path(target).name}]({target}).\n\n"
                f"| message | error |\n| --- | --- |\n{table}\n"
            )
    return "\n".join(parts)


def _row(message: Message) -> str:
    text = message.text.replace("|", "/")
    kind = message.kind if message.kind == PART else f"`{message.kind}`"
    return f"| `` {text} `` | {kind} |"


if __name__ == "__main__":
    print(page(), end="")

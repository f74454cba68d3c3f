"""One program of somebody else: where it is from, and what is changed in it before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

FOREPROP, DDP, REBUCKETED = "foreprop", "ddp", "rebucketed"
VARIANTS = (DDP, FOREPROP, REBUCKETED)
IMPORT = "import foreprop"
CLIPPED = "the norm of all gradients is a sum, which servers add up in another order"
PASSES = "DDP sums each backward pass over the ranks, foreprop the sum of the passes"


class EditError(Exception):
    """An edit that does not fit the program's text: another version of it, or a wrong edit."""


@dataclass(frozen=True)
class Edit:
    """``find`` is in exactly ``count`` lines; new lines go around it, at its indentation."""

    find: str
    before: Sequence[str] = ()
    after: Sequence[str] = ()
    replacement: str | None = None
    file: str = ""
    count: int = 1

    @property
    def lines(self) -> int:
        """How many lines of the program are new or different."""
        return len(self.before) + len(self.after) + (self.replacement is not None) * self.count

    def apply(self, text: str, name: str) -> str:
        lines = text.split("\n")
        places = [number for number, line in enumerate(lines) if self.find in line]
        if len(places) != self.count:
            raise EditError(f"{name}: {self.find!r} is in {len(places)} lines, not in {self.count}")
        for number in reversed(places):
            line = lines[number]
            indentation = line[: len(line) - len(line.lstrip())]
            if self.replacement is not None:
                line = line.replace(self.find, self.replacement)
            lines[number : number + 1] = [
                *(indentation + new for new in self.before),
                line,
                *(indentation + new for new in self.after),
            ]
        return "\n".join(lines)


def after(find: str, *lines: str, file: str = "") -> Edit:
    return Edit(find, after=lines, file=file)


def before(find: str, *lines: str, file: str = "") -> Edit:
    return Edit(find, before=lines, file=file)


def replace(find: str, replacement: str, *, file: str = "", count: int = 1) -> Edit:
    return Edit(find, replacement=replacement, file=file, count=count)


@dataclass(frozen=True, kw_only=True)
class Program:
    """``common`` edits make it short, on synthetic data, and recorded; the others train it.

    ``path`` is the script, in the repository; ``paths`` all that is taken out of it.
    ``group``: the program itself makes torch.distributed's process group.
    ``rounding``: why its last bits may be other ones with two ranks; empty if they may not.
    ``tolerance``: for the largest relative difference of a parameter to DDP's with three ranks,
    whose sums are added up in another order; with two ranks the bits are the same.
    """

    name: str
    repository: str
    commit: str
    licence: str
    path: str
    about: str
    paths: Sequence[str] = ()
    arguments: Sequence[str] = ()
    packages: Sequence[str] = ()
    stand_ins: Sequence[str] = ()
    common: Sequence[Edit] = ()
    foreprop: Sequence[Edit] = ()
    ddp: Sequence[Edit] = ()
    group: bool = False
    steps: int = 0  # ends the program after so many; 0: it ends by itself
    rounding: str = ""
    tolerance: float = 1e-3
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def taken(self) -> Sequence[str]:
        return self.paths or (self.path,)

    @property
    def lines_changed(self) -> int:
        """Lines that foreprop needs, without its import."""
        return sum(edit.lines for edit in self.foreprop)

    def edits(self, variant: str) -> Sequence[Edit]:
        return [*self.common, *(self.foreprop if variant == FOREPROP else self.ddp)]

    def patch(self, folder: Path, variant: str) -> None:
        """Edit the program's files in ``folder``."""
        for edit in self.edits(variant):
            path = folder / (edit.file or self.path)
            path.write_text(edit.apply(path.read_text(), f"{self.name}, {path.name}"))
        if variant == FOREPROP:
            for file in {edit.file or self.path for edit in self.foreprop}:
                path = folder / file
                path.write_text(_with_import(path.read_text()))


def _with_import(text: str) -> str:
    """``import foreprop`` before the first import that is not from the future."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if line.startswith(("import ", "from ")) and "__future__" not in line:
            return "\n".join([*lines[:number], IMPORT, *lines[number:]])
    return f"{IMPORT}\n{text}"

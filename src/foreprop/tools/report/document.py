"""What all pages are made of: templates, numbers with units, layers' colours, and writing.

A page is one file that needs no network. Templates escape values; styles and scripts are ours and
are put in as they are. Layers have one sequential ramp of colours by forward position, from dark to
bright, so that they also read without colour vision and in grey; red is left to waiting.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from foreprop.quantities import rate_text, short

TIMES = "\N{MULTIPLICATION SIGN}"
ABSENT = "\N{EN DASH}"
"""Shown for a value that is not known."""

_NBSP = "\N{NO-BREAK SPACE}"


def milliseconds(seconds: float) -> str:
    """A duration in ms with three significant digits: 1.24 ms, 93.1 ms, 1,204 ms."""
    if not math.isfinite(seconds):
        return ABSENT
    value = seconds * 1e3
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f}{_NBSP}ms"


def size(size_bytes: float) -> str:
    """A size in decimal units, as network rates are: 812 B, 3.2 KB, 1.64 MB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size_bytes >= factor:
            return f"{short(size_bytes / factor)}{_NBSP}{unit}"
    return f"{size_bytes:.0f}{_NBSP}B"


def rate(bits_per_s: float) -> str:
    return rate_text(bits_per_s).replace(" ", _NBSP)


def percent(share: float, digits: int | None = None) -> str:
    """A share of 1 as a percentage; by default whole, below 10% with one decimal."""
    if not math.isfinite(share):
        return ABSENT
    decimals = (1 if 0 < share < 0.0995 else 0) if digits is None else digits
    return f"{share * 100:.{decimals}f}%"


def render(template: str, *, package: str = __package__, styles: str, **values: Any) -> str:
    """A page from a template of ``package`` that extends document.html.

    Its own ``styles`` follow report.css; report.js stands at the end.
    """
    loader = ChoiceLoader([PackageLoader(package), PackageLoader(__package__)])
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "milliseconds": milliseconds,
        "percent": percent,
        "rate": rate,
        "size": size,
        "count": lambda value: f"{value:,.0f}" if math.isfinite(value) else ABSENT,
        "pixels": lambda px: f"{px:.2f}".rstrip("0").rstrip("."),
    }
    return environment.get_template(template).render(
        values, styles=Markup(asset("report.css") + styles), script=Markup(asset("report.js"))
    )


def asset(name: str, *, package: str = __package__) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def write_document(path: Path, page: str) -> None:
    """Write the page to `path`, which either keeps its old content or has the whole new one."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        partial = Path(folder) / path.name
        partial.write_text(page, encoding="utf-8")
        partial.replace(path)


LIGHT_RAMP = ("#33267d", "#2a5cab", "#1a84a2", "#2a9a77", "#76a83c", "#cda425")
DARK_RAMP = ("#7f76e8", "#5a97ee", "#43b4d6", "#4dcda6", "#a5da62", "#f3d469")
_INKS = ("#14161a", "#ffffff")


def palette_css(layer_indices: Iterable[int]) -> str:
    """Rules that fill the classes `c<index>` and, readable on them, the texts `t<index>`."""
    indices = sorted(layer_indices)
    rules = "".join(
        f".c{i}{{fill:var(--l{i});color:var(--l{i})}}.t{i}{{fill:var(--t{i});stroke:var(--l{i})}}\n"
        for i in indices
    )
    light, dark = _variables(indices, LIGHT_RAMP), _variables(indices, DARK_RAMP)
    return f":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{rules}"


def _variables(indices: Sequence[int], ramp: Sequence[str]) -> str:
    parts = []
    for position, index in enumerate(indices):
        colour = ramp_colour(ramp, position / max(len(indices) - 1, 1))
        parts.append(f"--l{index}:{colour};--t{index}:{_ink_on(colour)};")
    return "".join(parts)


def ramp_colour(ramp: Sequence[str], place: float) -> str:
    """The colour at `place` (0 to 1) of a ramp of equally spaced hex colours."""
    scaled = min(max(place, 0.0), 1.0) * (len(ramp) - 1)
    left = min(int(scaled), len(ramp) - 2)
    share = scaled - left
    mixed = (
        round((1 - share) * a + share * b)
        for a, b in zip(_rgb(ramp[left]), _rgb(ramp[left + 1]), strict=True)
    )
    return f"#{bytes(mixed).hex()}"


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio of two hex colours, 1 to 21."""
    dark, bright = sorted((_luminance(one), _luminance(other)))
    return (bright + 0.05) / (dark + 0.05)


def _ink_on(colour: str) -> str:
    return max(_INKS, key=lambda ink: contrast(ink, colour))


def _rgb(colour: str) -> bytes:
    return bytes.fromhex(colour.removeprefix("#"))


def _luminance(colour: str) -> float:
    channels = (channel / 255 for channel in _rgb(colour))
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue

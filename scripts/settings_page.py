"""Write docs/settings.md from `foreprop.config`: run this after changing a setting.

python scripts/settings_page.py

A test compares the page with `page()`.
"""

from __future__ import annotations

import typing
from dataclasses import Field
from pathlib import Path
from typing import Any, Literal, get_args

from foreprop.config import PRESETS, Config
from foreprop.config.settings import TIERS, settings_in
from foreprop.tools.cli.config import value_text

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"

REPRODUCES = {
    "p3": "P3, the default",
    "slicing": 'P3\'s "slicing only" curve',
    "kvstore": "MXNet KVStore, P3's baseline",
    "wfbp": "Poseidon's wait-free backpropagation",
    "tensorflow": "TensorFlow's parameter server",
    "p3-2019": "P3 as published, with slices of 50,000 elements whatever the number of servers",
}

KNOBS = ("granularity", "order", "reply", "placement", "lanes")

HEAD = """\
# Settings

<!-- Made by scripts/settings_page.py from foreprop.config: edit that, not this page. -->

A setting is an argument of `parallelize`, or a variable of the environment:

    session = foreprop.parallelize(model, optimizer, preset="p3", slice_elems=20_000)

    FOREPROP_PRESET=p3 FOREPROP_SLICE_ELEMS=20000 torchrun --nproc-per-node 4 train.py

The variable is `FOREPROP_` and the setting's name in capitals; `none` stands for "not set". An
argument beats the environment, which beats the preset, which beats the default. `foreprop config`
prints those of the first table and what differs from the defaults, `foreprop config --all` every
one and where it came from. Units are in the names: `_elems`, `_bytes`, `_bits_per_s`, `_s`.
"""

PRESETS_HEAD = """\
## Presets

A preset sets some settings at once. Each is named after the system whose protocol it reproduces.
All presets give the same bits; they differ in what is sent when. [What `p3` adds to P3 as
published](../lab/docs/presets.md).
"""


def page() -> str:
    """The page's whole text."""
    presets = [
        [f"`{name}`", *(knobs[knob] for knob in KNOBS), REPRODUCES[name]]
        for name, knobs in PRESETS.items()
    ]
    hints = typing.get_type_hints(Config)
    parts = [HEAD]
    for tier, heading in TIERS.items():
        rows = [
            [
                f"`{spec.name}`",
                value_text(spec.name, spec.default),
                allowed(spec, hints[spec.name]),
                spec.metadata["help"],
            ]
            for spec in settings_in(tier, Config)
        ]
        parts += [f"## {heading}\n", table(["setting", "default", "values", "meaning"], rows)]
    parts += [PRESETS_HEAD, table(["preset", *KNOBS, "reproduces"], presets)]
    return "\n".join(parts)


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [
        heads,
        ["---"] * len(heads),
        *([cell.replace("|", "/") for cell in row] for row in rows),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def allowed(spec: Field[Any], hint: Any) -> str:
    """The values that a setting can have, without "not set"."""
    least = spec.metadata["minimum"]
    bound = f" >= {least:g}" if least is not None else ""
    texts = {int: f"whole number{bound}", float: f"number{bound}", str: "text", bool: "True, False"}
    found: list[str] = []
    for part in get_args(hint) if typing.get_origin(hint) is not Literal else (hint,):
        found += get_args(part) if typing.get_origin(part) is Literal else [texts.get(part, "")]
    return ", ".join(filter(None, found)) or texts[hint]


if __name__ == "__main__":
    PAGE.write_text(page())

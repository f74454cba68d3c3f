"""Options that the lab's commands have in common, and their reading."""

from __future__ import annotations

from functools import partial

from foreprop.config import PRESETS
from foreprop.errors import ConfigError
from foreprop.quantities import parse_rate, parse_time
from foreprop.tools.cli.options import Shown, names_in
from foreprop_lab.setting.labsetting import LAUNCH_SHARE


def rate(default: str | None = None, *, help: str | None = None) -> Shown:
    kind = str if default is not None else str | None
    return Shown(
        name="rate", kind=kind, default=default, help=help, read=partial(parse_rate, "rate")
    )


def compute(default: str | None = None, *, help: str | None = None) -> Shown:
    kind = str if default is not None else str | None
    return Shown(
        name="compute", kind=kind, default=default, help=help, read=partial(parse_time, "compute")
    )


LAUNCH = Shown(
    name="launch",
    kind=str | None,
    default=None,
    help="Let layers launch kernels in Python, each for this long, as 8us, for at most"
    f" {LAUNCH_SHARE:.0%} of their time.",
    read=partial(parse_time, "launch"),
)
STEPS = Shown(name="steps")
"""The option for a field that counts steps by another name."""


def presets_from(text: str) -> tuple[str, ...]:
    """The presets that a text names, each once; raises `ConfigError` for a name that is none."""
    names = tuple(dict.fromkeys(names_in(text)))
    for name in names or ("",):
        if name not in PRESETS:
            raise ConfigError(f"presets has {name!r}; it must be one of {list(PRESETS)}")
    return names

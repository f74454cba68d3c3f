"""Fields of settings that a command has options for: `foreprop.cli.options` makes them."""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any


def option(
    text: str, default: Any = MISSING, *, least: float | None = None, most: float | None = None
) -> Any:
    """A dataclass's field; ``text`` is what the option's help says."""
    metadata = {"help": text, "min": least, "max": most}
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)

"""What a system's name says: a preset or a peer, its slices, its codec."""

from __future__ import annotations

from collections.abc import Sequence

from foreprop.config import PRESETS
from foreprop.core.staleness import Staleness, most_steps_apart
from foreprop.errors import ConfigError

SIZE_MARK = "@"
"""``p3@200000`` is p3 with slices of 200,000 elements of the unscaled model."""
CODEC_MARK = "+"
"""``p3+int8`` is p3 with that codec, ``p3+none`` without; ``ddp+fp16`` has a hook of torch's."""
STALE_SYSTEMS = tuple(name for name, knobs in PRESETS.items() if knobs["reply"] == "broadcast")
"""In which a worker may be ahead of others: it is answered about its own push."""


def split_codec(system: str) -> tuple[str, str | None]:
    """``p3@200000`` and ``int8`` of ``p3@200000+int8``; a mark at the start is part of a name."""
    whole, mark, codec = system.partition(CODEC_MARK)
    return (whole, codec) if whole and mark else (system, None)


def base_of(system: str) -> str:
    """``p3`` of ``p3@200000+int8``."""
    return split_codec(system)[0].partition(SIZE_MARK)[0]


def check_staleness(staleness: Staleness, systems: Sequence[str]) -> None:
    """Raises `ConfigError` for systems whose workers are always in the same step."""
    if not most_steps_apart(staleness):
        return
    for system in systems:
        if base_of(system) not in STALE_SYSTEMS:
            raise ConfigError(
                f"systems has {system!r}, which makes its steps together; with a staleness"
                f" ({staleness!r}) there are {', '.join(STALE_SYSTEMS)}"
            )

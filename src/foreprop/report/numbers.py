"""Numbers with units as pages show them."""

from __future__ import annotations

import math

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
            return f"{_three_digits(size_bytes / factor)}{_NBSP}{unit}"
    return f"{size_bytes:.0f}{_NBSP}B"


def rate(bits_per_s: float) -> str:
    """A network rate: 500 Mbit/s, 1.5 Gbit/s."""
    for unit, factor in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_s >= factor:
            return f"{_three_digits(bits_per_s / factor)}{_NBSP}{unit}"
    return f"{bits_per_s:.0f}{_NBSP}bit/s"


def percent(share: float, digits: int | None = None) -> str:
    """A share of 1 as a percentage; by default whole, below 10% with one decimal."""
    if not math.isfinite(share):
        return ABSENT
    decimals = (1 if 0 < share < 0.0995 else 0) if digits is None else digits
    return f"{share * 100:.{decimals}f}%"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"

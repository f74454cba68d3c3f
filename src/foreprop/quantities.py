"""Rates, times and ranges as people write them in options, 10Gbit, 50us or 0..8, and read them.

What cannot be read raises a `ConfigError`, which begins with the option's ``name``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field
from typing import Any

from foreprop.errors import ConfigError

_PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_RATES = dict(_PREFIXES) | {
    f"{prefix}{unit}": factor
    for prefix, factor in {"": 1.0, **_PREFIXES}.items()
    for unit in ("bit", "bit/s", "bps", "b/s")
}
_BYTES = re.compile(r"B(?!it|PS)")
_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER_AND_UNIT = re.compile(r"(\d+\.?\d*|\.\d+)\s*([a-zµ/]*)", re.ASCII)
_MOST_VALUES = 64

Parse = Callable[[str, str], float]
"""Takes an option's name, for the error, and a text."""


def parse_rate(name: str, text: str) -> float:
    """The bit/s in ``10Gbit``, ``800 Mbit/s``, ``10Gbps`` or ``10G``, whose G is 1000 M as in `tc`.

    ``10GB/s`` is no rate: B is for bytes.
    """
    plain = "bytes" if _BYTES.search(text) else text.casefold()
    return _parse(name, text, plain, _RATES, "10Gbit or 800Mbit")


def parse_time(name: str, text: str) -> float:
    """The seconds in ``50us``, ``180ms`` or ``1.5s``."""
    return _parse(name, text, text.casefold(), _TIMES, "50us, 180ms or 1.5s")


def parse_count(name: str, text: str) -> int:
    if not re.fullmatch(r"\d+", text.strip(), re.ASCII):
        raise ConfigError(f"{name} is {text!r}; it must be a whole number, as 8")
    return int(text)


def _parse(name: str, text: str, plain: str, factors: Mapping[str, float], examples: str) -> float:
    # people write the micro sign or the Greek letter mu, and casefold() makes mu of both
    found = _NUMBER_AND_UNIT.fullmatch(plain.strip().replace("μ", "µ"))
    if found is None or found[2] not in factors:
        raise ConfigError(f"{name} is {text!r}; it must be a number with its unit, as {examples}")
    return float(found[1]) * factors[found[2]]


def parse_counts(name: str, text: str) -> tuple[int, ...]:
    """The numbers in ``2``, ``0,2,4`` or ``0..8``, which are all from 0 to 8."""
    if (ends := maybe_ends(name, text, parse_count)) is None:
        values = [parse_count(name, part) for part in text.split(",")]
    else:
        first, last = map(int, ends)
        if last - first >= _MOST_VALUES:
            raise ConfigError(f"{name} is {text!r}; at most {_MOST_VALUES} values are considered")
        values = list(range(first, last + 1))
    return tuple(sorted(set(values)))


def maybe_ends(name: str, text: str, parse: Parse) -> tuple[float, float] | None:
    """Both ends of ``1Gbit..100Gbit``; None if it is no range."""
    left, dots, right = text.partition("..")
    if not dots:
        return None
    first, last = parse(name, left), parse(name, right)
    if not first < last:
        raise ConfigError(f"{name} is {text!r}; a range goes from the smaller to the larger value")
    return first, last


def rate_text(bits_per_s: float) -> str:
    """A rate to three digits, as ``10 Gbit/s``."""
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if bits_per_s >= factor:
            return f"{short(bits_per_s / factor)} {unit}bit/s"
    return f"{short(bits_per_s)} bit/s"


def time_text(seconds: float) -> str:
    """A time to three digits, as ``180 ms``."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= factor * 0.9995:
            return f"{short(seconds / factor)} {unit}"
    return f"{short(seconds * 1e9)} ns" if seconds else "0 s"


def counted(count: int, noun: str) -> str:
    """``1 server``, ``2 servers``, ``10,000 batches``."""
    plural = f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def short(value: float) -> str:
    """`three_digits` without zeros at the end."""
    text = three_digits(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def three_digits(value: float) -> str:
    """A number to three digits, or all digits before its point; never with an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def option(
    text: str, default: Any = MISSING, *, least: float | None = None, most: float | None = None
) -> Any:
    """A dataclass's field for an option with this help ``text``, and the bounds of its value."""
    metadata = {"help": text, "min": least, "max": most}
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)

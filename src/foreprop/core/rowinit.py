"""How servers make the rows of a remote table, which no worker ever has as a whole.

A row's values depend on the table's key and the row's number alone. So they are the same for any
number of servers, and a row that no step has touched can be made again whenever it is wanted.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from foreprop.core.manifest import Distribution, RowInit
from foreprop.errors import ConfigError

DEFAULT = "normal(0, 1)"  # that of ``nn.Embedding.reset_parameters``
_ENTRY = re.compile(r"\s*(?:([^=]+?)\s*=\s*)?(normal|uniform|constant)\s*\(([^()]*)\)\s*")
_ARGUMENTS = {"normal": 2, "uniform": 2, "constant": 1}


def row_init_of(
    name: str, text: str | None, *, seed: int = 0, padding_row: int | None = None
) -> RowInit:
    """How to make the table of this name by ``text``, the setting ``table_init``.

    The setting has entries like ``uniform(-0.1, 0.1)`` or ``words.*=normal(0, 0.01)``, with
    semicolons between them; the first one whose pattern matches counts. Raises `ConfigError`.
    """
    entries = (each for each in _entries(text) if each[0] is None or fnmatchcase(name, each[0]))
    _, distribution, arguments = next(entries, _parsed(DEFAULT))
    return RowInit(
        distribution=distribution,
        first=arguments[0],
        second=arguments[-1],
        key=key_of(name, seed),
        padding_row=padding_row,
    )


def check_table_init(text: str) -> None:
    """Raise `ConfigError` for a setting that `row_init_of` could not read."""
    for _ in _entries(text):
        pass


def key_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _entries(text: str | None) -> Iterator[tuple[str | None, Distribution, list[float]]]:
    return (_parsed(entry) for entry in (text or "").split(";") if entry.strip())


def _parsed(entry: str) -> tuple[str | None, Distribution, list[float]]:
    found = _ENTRY.fullmatch(entry)
    if found is None:
        raise _unreadable(entry)
    pattern, distribution, inside = found.groups()
    try:
        numbers = [float(number) for number in inside.split(",")]
    except ValueError:
        raise _unreadable(entry) from None
    if len(numbers) != _ARGUMENTS[distribution] or not all(map(math.isfinite, numbers)):
        raise _unreadable(entry)
    return pattern, distribution, numbers  # type: ignore[return-value]  # the pattern's three


def _unreadable(entry: str) -> ConfigError:
    return ConfigError(
        f"table_init has {entry.strip()!r}; it must be normal(mean, std), uniform(from, to) or"
        " constant(value), with a pattern of names and = before it if it is for some tables only,"
        " and ; between several"
    )

"""What the store's entries say, read: each has a type and a bound, or is an error that names it.

Whoever can write to the store may have written them, if no secret is set (docs/strangers.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from foreprop.errors import HandshakeError, RemoteProtocolError

T = TypeVar("T")
MOST_PARTS = 4096
"""Of one value: 16 GiB."""
_SHOWN = 100
_ID = re.compile("[0-9A-Za-z][0-9A-Za-z-]{0,63}")


def decode_entry(text: str | bytes, kind: type[T] | Any, what: str) -> T:
    """JSON of this type; raises `RemoteProtocolError` that says for ``what`` it was read."""
    try:
        found: T = msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"the store has {text[:_SHOWN]!r} for {what}: {error}") from error
    return found


def decode_order(text: str, count: int, what: str) -> list[int]:
    """Each number below ``count`` once, in some order."""
    order: list[int] = decode_entry(text, list[int], what)
    if sorted(order) != list(range(count)):
        raise RemoteProtocolError(
            f"the store has {text[:_SHOWN]!r} for {what}, which is no order of {count} numbers"
        )
    return order


def agreed_session(text: str, shape: Mapping[str, object], rank: int) -> str:
    """Rank 0's session id; raises `HandshakeError` where its cluster is not this ``shape``."""
    session_id, theirs = _parse_shape(text)
    differing = [
        f"{name}: rank 0 has {theirs.get(name)}, rank {rank} has {ours}"
        for name, ours in shape.items()
        if theirs.get(name) != ours
    ]
    if differing:
        raise HandshakeError(f"rank 0 and rank {rank} do not agree: {'; '.join(differing)}")
    return session_id


def _parse_shape(text: str) -> tuple[str, Mapping[str, object]]:
    """A session's id, which is in files' names, and what rank 0 has in mind of the cluster."""
    try:
        session_id, shape = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise RemoteProtocolError(
            f"the store has {text[:_SHOWN]!r} for a session: {error}"
        ) from error
    named = isinstance(session_id, str) and _ID.fullmatch(session_id) is not None
    if not named or not isinstance(shape, dict):
        raise RemoteProtocolError(f"the store has {text[:_SHOWN]!r} for a session")
    return session_id, shape


def decode_parts(text: str, what: str) -> range:
    """The numbers of a value's parts."""
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) > MOST_PARTS:
        raise RemoteProtocolError(
            f"the store has {text[:_SHOWN]!r} for the number of parts of {what}; it must be"
            f" {MOST_PARTS} at most"
        )
    return range(int(text))

"""What peers send as JSON, read strictly."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from foreprop.errors import RemoteProtocolError

T = TypeVar("T")


def decoded(decoder: msgspec.json.Decoder[T], data: bytes | memoryview, what: str) -> T:
    """Raises `RemoteProtocolError` that it is not ``what``."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not {what}: {error}") from error

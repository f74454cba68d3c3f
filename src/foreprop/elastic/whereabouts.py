"""Where a session's servers are: told by its members to all servers, and by these to newcomers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from foreprop.core.decoding import decoded
from foreprop.core.manifest import MOST_PROCESSES

LIMIT_BYTES = 1 << 23
_Name = Annotated[str, msgspec.Meta(max_length=120)]
_Number = Annotated[int, msgspec.Meta(ge=-1, lt=2**16)]


class ServerPlace(msgspec.Struct, frozen=True, array_like=True):
    """Of one server."""

    host: _Name
    port: Annotated[int, msgspec.Meta(gt=0, lt=2**16)]
    session: _Name
    """The id by which it is greeted."""
    node: _Number = -1
    """Whose server process it is in; -1: a dedicated one's own."""
    is_lost: bool = False
    """Others have its slices (`core.takeover`)."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Whereabouts(msgspec.Struct, frozen=True):
    """``places`` are by server; ``free``: the ranks that have been lost at the one that tells."""

    session: _Name
    places: Annotated[tuple[ServerPlace, ...], msgspec.Meta(max_length=MOST_PROCESSES)]
    free: tuple[_Number, ...] = ()
    workers_per_node: Annotated[int, msgspec.Meta(gt=0, lt=2**16)] = 1

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


_DECODER = msgspec.json.Decoder(Whereabouts)


def decode_whereabouts(payload: bytes | memoryview) -> Whereabouts:
    """Raises `RemoteProtocolError`."""
    return decoded(_DECODER, payload, "where servers are")

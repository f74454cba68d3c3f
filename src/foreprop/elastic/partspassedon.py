"""What members give to newcomers passes a server: see `elastic.givenmodel`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreprop.core.membership import Members
from foreprop.core.wire import MAX_PAYLOAD_BYTES, Header, Kind
from foreprop.link.connection import Connection, bounded

if TYPE_CHECKING:
    from foreprop.path.executor import Executor


class PartsPassedOn:
    """Owns parts, on a server: they go on to the newcomers that count from the next step on."""

    kinds = frozenset({Kind.GIVEN})

    def __init__(self, members: Members, executor: Executor) -> None:
        self._members = members
        self._executor = executor

    def room(self, peer: Connection, header: Header) -> memoryview:
        return bounded(header, MAX_PAYLOAD_BYTES)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        first, part = header.step + 1, header.slice
        with self._executor.lock:
            if not self._members.had_values_before(peer.number, first):
                return
            for rank in self._members.coming_at(first):
                about = (Kind.GIVEN, header.step, header.priority, part)
                self._executor.send(rank, *about, payload)

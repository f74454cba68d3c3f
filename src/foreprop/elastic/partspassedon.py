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
            members = self._members
            if members.since.get(peer.number, 0) >= first or peer.number not in members.here:
                return  # it has no values of that step
            for rank, since in members.since.items():
                if since == first and rank not in members.promised:
                    about = (Kind.GIVEN, header.step, header.priority, part)
                    self._executor.send(rank, *about, payload)

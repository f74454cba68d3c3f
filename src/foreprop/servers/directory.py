"""What a member of an elastic session knows of where its servers are, and whom it tells."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from foreprop.config import LOGGER
from foreprop.config.otherhosts import servers_file
from foreprop.core.frames import CONTROL_PRIORITY
from foreprop.core.wire import Kind
from foreprop.elastic.whereabouts import ServerPlace, Whereabouts
from foreprop.errors import ForepropError

if TYPE_CHECKING:
    from foreprop.path.worker import WorkerEngine
    from foreprop.servers.launch import Connections


class Directory:
    """One worker's. Newcomers ask a server, which knows only where it is itself."""

    def __init__(self, engine: WorkerEngine, connections: Connections) -> None:
        self._engine = engine
        self._session = connections.session_id
        self._workers_per_node = connections.workers_per_node
        self.places = list(connections.places)
        if not self.places:
            direct = [sock for sock in connections.sockets if type(sock) is socket.socket]
            for server, sock in enumerate(direct):
                host, port = sock.getpeername()[:2]
                self.places.append(
                    ServerPlace(host, port, self._session, connections.node_of(server))
                )

    def tell(self) -> None:
        """All servers, and the file that a launcher may look at. Any thread."""
        with self._engine.lock:
            places = tuple(self.places)
        told = Whereabouts(self._session, places, workers_per_node=self._workers_per_node)
        self._write(told)
        with contextlib.suppress(ForepropError):  # the session is over; others say so
            self._engine.send_to_all(Kind.SERVERS, 0, CONTROL_PRIORITY, told.encode())

    def lost(self, server: int) -> None:
        """It is no more: others have its slices."""
        with self._engine.lock:
            self.places[server] = msgspec.structs.replace(self.places[server], is_lost=True)
        self.tell()

    def _write(self, told: Whereabouts) -> None:
        path = servers_file()
        if path is None:
            return
        beside = Path(f"{path}.{os.getpid()}")
        here = [place for place in told.places if not place.is_lost]
        try:
            beside.write_text("".join(f"{place}\n" for place in here))
            beside.replace(path)
        except OSError as error:
            LOGGER.warning("FOREPROP_SERVERS_FILE: %s cannot be written: %s", path, error)

    def stats(self) -> dict[str, Any]:
        """For `Session.stats`: where a newcomer may ask."""
        with self._engine.lock:
            return {"servers": [str(place) for place in self.places if not place.is_lost]}

"""A relay: local aggregation for the workers of one node and one server (Parallax, section 5.3.2).

To the workers it is a server (`path.server.Server` with a `RelaySession`), to the server it is
one worker (`relays.serverlink.ServerLink`).
"""

from __future__ import annotations

import socket

from foreprop.config import Config
from foreprop.core.manifest import Manifest
from foreprop.core.peers import Peers, workers_of_node
from foreprop.core.wire import MAX_CONTROL_BYTES, Header, Kind
from foreprop.errors import RemoteProtocolError
from foreprop.link.failure import Failure, decode_failure, failure_of
from foreprop.link.stream import Stream
from foreprop.path.peer import SessionHost, bounded
from foreprop.path.server import Server
from foreprop.relays.relaysession import RelaySession
from foreprop.relays.serverlink import ServerLink

_FIRST_PROCESS, _MOST_SERVERS = 1_000_000, 1_000
"""For numbers in traces that no worker or server has."""
_CAUSE_S = 1.0
"""How long after the connection's end another process may still tell the reason."""


class Relay:
    """A relay's life: a `Server` for the workers of ``node``, and the way to one server.

    ``upstream`` is connected to the server with this index, which messages call ``server_name``.
    """

    def __init__(
        self,
        *,
        server: int,
        server_name: str,
        node: int,
        first_rank: int,
        session_id: str,
        config: Config,
        upstream: Stream,
        world_size: int | None = None,
    ) -> None:
        self.index = server
        self.link = ServerLink(upstream, server=server, rank=first_rank)
        self._server_name = server_name
        self._name = f"the relay of node {node}"
        self._session: RelaySession | None = None
        self._node = node
        self._host = Server(
            index=server,
            session_id=session_id,
            config=config,
            world_size=world_size,
            make_session=self._make_session,
            peers_of=self._peers_of,
            name=self._name,
            process=f"relay {node} to server {server}",
            process_id=_FIRST_PROCESS + node * _MOST_SERVERS + server,
        )

    def _peers_of(self, manifest: Manifest) -> Peers:
        return workers_of_node(self._node, manifest.world_size, manifest.workers_per_push)

    def _make_session(self, manifest: Manifest, host: SessionHost) -> RelaySession:
        self._session = RelaySession(manifest, host, self._peers_of(manifest), self.link)
        return self._session

    def run(self, listener: socket.socket) -> Failure | None:
        """Serve until every worker has left or the session has failed; returns the failure."""
        self.link.start(self)
        try:
            return self._host.run(listener)
        finally:
            self.link.close(None)

    def cancel(self) -> None:
        """End now, without telling anybody."""
        self._host.cancel()

    # In the link's thread.
    def destination_above(self, header: Header) -> memoryview:
        if header.kind == Kind.FAILURE or self._session is None:
            return bounded(header, MAX_CONTROL_BYTES if header.kind == Kind.FAILURE else 0)
        return self._session.destination_above(header)

    def on_frame_above(self, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.FAILURE:
            self._host.fail(decode_failure(payload))
        elif self._session is None:
            raise RemoteProtocolError(f"server {self.index} spoke before the session has started")
        else:
            self._session.on_frame_above(header, payload)

    def on_lost(self, why: str) -> None:
        """The server has gone; if it went with its worker, another process names that."""
        if self._session is not None and self._session.has_left:
            self._host.end()
            return
        if self._host.wait_for_end(_CAUSE_S):
            return
        what = self._session.describe_awaited() if self._session is not None else "its welcome"
        message = f"{self._server_name} is gone: {why}; {self._name} was waiting for {what}"
        self._host.fail(
            Failure(kind="PeerLost", message=message, peer=f"server {self.index}", step=-1)
        )

    def on_error(self, error: BaseException) -> None:
        if isinstance(error, RemoteProtocolError):
            self._host.fail(failure_of(error))
        else:
            self._host.broke(error)

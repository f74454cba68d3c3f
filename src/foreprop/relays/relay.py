"""A relay: local aggregation for the workers of one node and one server (Parallax, section 5.3.2).

To the workers it is a server (`path.server.Server` with `relays.work.RelayWork`), to the server it
is one worker: one more connection of the same work.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping

import torch

from foreprop.config import Config
from foreprop.core.manifest import Manifest
from foreprop.core.peers import SERVER, Peers, workers_of_node
from foreprop.core.wire import Header, Kind
from foreprop.errors import RemoteProtocolError
from foreprop.link.connection import Connection, FrameOwner
from foreprop.link.failure import Failure, failure_of
from foreprop.link.stream import Stream
from foreprop.path.executor import Host
from foreprop.path.partoptimizer import unknown_optimizer
from foreprop.path.server import Server
from foreprop.path.services import FailureReports
from foreprop.relays.work import RelayWork
from foreprop.tables.rowupdates import SPARSE_OPTIMIZERS

_GOODBYE_S = 1.0
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
        reports = FailureReports(lambda _, failure: self._host.fail(failure))
        self._reports: dict[int, FrameOwner] = dict.fromkeys(reports.kinds, reports)
        self.link = Connection(
            upstream,
            self._reports,
            sender=first_rank,
            whose="server",
            give_up_s=_GOODBYE_S,
            rank=server,
            number=SERVER,
        )
        self._link_thread = threading.Thread(
            target=self._receive, name="foreprop-relay-receive", daemon=True
        )
        self._server_name = server_name
        self._name = f"the relay of node {node}"
        self._work: RelayWork | None = None
        self._node = node
        self._host = Server(
            index=server,
            session_id=session_id,
            config=config,
            world_size=world_size,
            composer=self,
            name=self._name,
            process=f"relay {node} to server {server}",
            process_id=_FIRST_PROCESS + node * _MOST_SERVERS + server,
        )

    # What it is to its `Server`.
    def peers(self, manifest: Manifest) -> Peers:
        return workers_of_node(self._node, manifest.world_size, manifest.workers_per_push)

    def why_not(self, manifest: Manifest) -> str | None:
        return unknown_optimizer(manifest, SPARSE_OPTIMIZERS)

    def compose(
        self, manifest: Manifest, host: Host, connections: Mapping[int, Connection]
    ) -> RelayWork:
        peers = self.peers(manifest)
        work = RelayWork(manifest, host, peers, connections, self.link, self._close_link)
        self.link.owners = {**self._reports, **work.owners_above}
        self._work = work
        return work

    # Life.
    def run(self, listener: socket.socket) -> Failure | None:
        """Serve until every worker has left or the session has failed; returns the failure."""
        self._link_thread.start()
        try:
            return self._host.run(listener)
        finally:
            self._close_link(None)

    def cancel(self) -> None:
        """End now, without telling anybody."""
        self._host.cancel()

    def _close_link(self, failure: Failure | None) -> None:
        """End the connection to the server, saying why if there is a reason."""
        if failure is not None:
            name, data = "foreprop-relay-goodbye", failure.encode()
            self.link.start_sending_past_queue(name, Kind.FAILURE, data).join(_GOODBYE_S)
        self.link.stream.close()
        if self._link_thread is not threading.current_thread():
            self._link_thread.join()

    # What becomes of the link. In its thread.
    def _receive(self) -> None:
        torch.set_grad_enabled(False)
        self.link.receive(self)

    def refusal(self, peer: Connection, header: Header) -> RemoteProtocolError:
        kind = Kind(header.kind).name
        if header.payload_bytes:
            return RemoteProtocolError(f"{kind} of {header.payload_bytes} bytes; at most 0")
        if self._work is None:
            return RemoteProtocolError(f"server {self.index} spoke before the session has started")
        return RemoteProtocolError(f"server {self.index} sent {kind}")

    def on_lost(self, peer: Connection, why: str) -> None:
        """The server has gone; if it went with its worker, another process names that."""
        if self._work is not None and self._work.has_left:
            self._host.end()
            return
        if self._host.wait_for_end(_CAUSE_S):
            return
        what = self._work.describe_awaited() if self._work is not None else "its welcome"
        why = why or "its connection closed"
        message = f"{self._server_name} is gone: {why}; {self._name} was waiting for {what}"
        self._host.fail(
            Failure(kind="PeerLost", message=message, peer=f"server {self.index}", step=-1)
        )

    def on_refused(self, peer: Connection, error: RemoteProtocolError) -> None:
        self._host.fail(failure_of(error))

    def on_error(self, peer: Connection, error: BaseException) -> None:
        self._host.broke(error)

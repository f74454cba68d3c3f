"""A relay: local aggregation for the workers of one node and one server (Parallax, section 5.3.2).

To the workers it is a server (`engine.server.Server` with `RelayWork`), to the server it is one
worker: one more connection of the same work, the *link*. The relay welcomes its workers when the
server has welcomed all relays.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping

import torch

from foreprop.config import Config
from foreprop.core.frames import CONTROL_PRIORITY, SERVER, Peers, Stage
from foreprop.core.manifest import Manifest
from foreprop.core.relay_machine import relay_machine, workers_of_node
from foreprop.core.wire import Header, Kind
from foreprop.engine.calls import Goodbyes, TrainableNotices, Waits
from foreprop.engine.connection import Connection, FailureReports, Receivers, Service
from foreprop.engine.executor import Executor, Host
from foreprop.engine.hyperparameters import AnnouncedNumbers
from foreprop.engine.joining import Work
from foreprop.engine.server import Server
from foreprop.engine.slices import Slices
from foreprop.engine.stream import Stream
from foreprop.errors import Failure, RemoteProtocolError, failure_of
from foreprop.features.nodes.nodesums import NodeSums, RelayStore
from foreprop.features.nodes.passing import (
    PassedBlobs,
    PassedNorms,
    PassedStates,
    PassedStatuses,
    Uplink,
)
from foreprop.features.nodes.rows import RelayRows
from foreprop.features.nodes.sumcodecs import SumCodecs
from foreprop.params.finite import check_finite

_GOODBYE_S = 1.0
_FIRST_PROCESS, _MOST_SERVERS = 1_000_000, 1_000  # numbers in traces that nobody else has
_CAUSE_S = 1.0
"""How long after the link's end another process may still tell the reason."""
_ANSWERS = frozenset(kind for kind in Kind if kind.name.endswith("REPLY"))
_FROM_SERVERS = _ANSWERS | {Kind.WELCOME, Kind.NOTIFY, Kind.NORM_PART, Kind.NORM}
_FROM_WORKERS = frozenset(Kind) - _FROM_SERVERS | {Kind.NORM}


class RelayWork(Work):
    """One relay's part in a session: it sums, passes on, and hands out the answers.

    ``close_link`` ends the link, saying why if there is a reason.
    """

    def __init__(
        self,
        manifest: Manifest,
        host: Host,
        peers: Peers,
        connections: Mapping[int, Connection],
        link: Connection,
        close_link: Callable[[Failure | None], None],
    ) -> None:
        names = manifest.slice_names()
        self._close_link = close_link
        self._manifest = manifest
        self._link = link
        self._connections = connections
        self._parameter_names = [info.name for info in manifest.parameters]
        slices = manifest.slices()
        self._machine = relay_machine(
            slices,
            server=host.index,
            peers=peers,
            order=manifest.knobs.order,
            reply=manifest.knobs.reply,
            names=self._parameter_names,
        )
        self._executor = executor = Executor(
            self._machine.handle,
            host,
            peers,
            {SERVER: link, **connections},
            f"foreprop-relay{host.index}-send",
        )
        self._uplink = Uplink(self._executor)
        self._settings = AnnouncedNumbers(manifest, self._executor, pass_on=self._uplink.pass_on)
        shards = manifest.shards(len(slices))
        self._rows = RelayRows(manifest, shards, self._executor, self._settings.at)
        store = RelayStore(manifest, slices, host.index)
        check = check_finite if manifest.knobs.aggregation.reports_nonfinite else None
        self._slices = Slices(self._machine, self._executor, store, names, check=check)
        self._sums = NodeSums(self._machine, executor, store, self._settings.at, names, link)
        self._waits = Waits([self._rows, self._slices])
        owners, encode = Receivers(), None
        owners.add(*self._services(len(names)))
        if manifest.knobs.compression:
            encode = SumCodecs(manifest, executor, owners, self._settings.scale_at).encode
        self._executor.use(self._sums.pipeline(self._slices, encode))
        below: dict[int, Service] = {kind: owners[kind] for kind in _FROM_WORKERS & owners.keys()}
        super().__init__(below, names, executor, self._waits)
        self.owners_above: dict[int, Service] = {kind: owners[kind] for kind in _FROM_SERVERS}

    def _services(self, parts: int) -> Iterator[Service]:
        uplink, manifest = self._uplink, self._manifest
        yield self._slices
        yield self._sums
        yield self._settings
        yield self._rows
        yield TrainableNotices(
            self._parameter_names,
            self._executor,
            self._connections,
            self._slices.watch,
            pass_on=uplink.pass_on,
        )
        yield PassedStates(manifest, uplink, self._rows)
        yield PassedBlobs(manifest, uplink)
        yield PassedNorms(self._machine.closing, uplink, parts=parts)

        def has_pushed(number: int, step: int) -> bool:
            closing, rows = self._machine.closing, self._rows
            return closing.has_pushed(number, step) or rows.has_pushed(number, step)

        needs_norm = manifest.needs_norm
        yield PassedStatuses(uplink, self._waits, self._link, has_pushed, needs_norm=needs_norm)
        goodbyes = Goodbyes(self._executor)
        goodbyes.others.append(self._rows.rank_left)
        yield goodbyes

    def start(self) -> None:
        manifest = self._manifest.encode()
        self._executor.send(SERVER, Kind.MANIFEST, 0, CONTROL_PRIORITY, 0, manifest)

    def close(self, failure: Failure | None) -> None:
        self._close_link(failure)

    @property
    def has_left(self) -> bool:
        return self._sums.has_left

    def describe_awaited(self) -> str:
        """What has been passed on and not answered, or else what the workers have not pushed."""
        with self._executor.lock:
            for slice_, step in self._machine.closing.awaited():
                return f"stage {Stage.REPLY_RECEIVED.value}, step {step}: {self.names[slice_]}"
            for _, step, text in self.incomplete():
                return f"stage {Stage.PUSH_RECEIVED.value}, step {step}: {text}"
        return "nothing"


class Relay:
    """A relay's life: a `Server` for the workers of ``node``, and the link to one server.

    ``upstream`` is connected to the server with this index, which messages call ``server_name``.
    ``why_not`` says what a manifest asks for that there is not.
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
        why_not: Callable[[Manifest], str | None],
        world_size: int | None = None,
    ) -> None:
        self.index = server
        reports = FailureReports(lambda _, failure: self._host.fail(failure))
        self._reports: dict[int, Service] = dict.fromkeys(reports.kinds, reports)
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
        self.why_not = why_not
        self._work: RelayWork | None = None
        self._silent = ""
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
        self.pulses = self._host.pulses

    def watch(self, pulse: socket.socket) -> None:
        """Send the server signs of life, and lose it if it sends none."""
        name = f"{self._server_name} at {pulse.getpeername()[0]}"

        def lose(_: int, why: str) -> None:
            self._silent = why
            self.link.stream.close()

        self.pulses.add(SERVER, pulse, name, lose)

    # The composer of its `Server`.
    def peers(self, manifest: Manifest) -> Peers:
        return workers_of_node(self._node, manifest.world_size, manifest.workers_per_push)

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

    def end(self) -> None:
        """End now, without telling anybody."""
        self._host.end()

    def _close_link(self, failure: Failure | None) -> None:
        if failure is not None:
            name, data = "foreprop-relay-goodbye", failure.encode()
            self.link.start_sending_past_queue(name, Kind.FAILURE, data).join(_GOODBYE_S)
        self.link.stream.close()
        if self._link_thread is not threading.current_thread():
            self._link_thread.join()

    # The link, in its thread.
    def _receive(self) -> None:
        torch.set_grad_enabled(False)
        self.link.receive(self)

    def refusal(self, peer: Connection, header: Header) -> RemoteProtocolError:
        kind = Kind(header.kind).name
        if header.kind == Kind.DAMAGED:  # a sum does not change while it is sent
            what = f"the node's sum of slice {header.slice}, step {header.step}"
            return RemoteProtocolError(f"{what} has come damaged at server {self.index}")
        if header.payload_bytes:
            return RemoteProtocolError(f"{kind} of {header.payload_bytes} bytes; at most 0")
        if self._work is None:
            return RemoteProtocolError(f"server {self.index} spoke before the session has started")
        return RemoteProtocolError(f"server {self.index} sent {kind}")

    def on_lost(self, peer: Connection, why: str) -> None:
        """Fail with the reason that another process tells; or else say that the server is gone."""
        if self._work is not None and self._work.has_left:
            self._host.end()
            return
        if self._host.wait_for_end(_CAUSE_S):
            return
        what = self._work.describe_awaited() if self._work is not None else "its welcome"
        why = f"{self._server_name} is gone: {why or 'its connection closed'}"
        message = f"{self._silent or why}; {self._name} was waiting for {what}"
        self._host.fail(
            Failure(kind="PeerLost", message=message, peer=f"server {self.index}", step=-1)
        )

    def on_refused(self, peer: Connection, error: RemoteProtocolError) -> None:
        text = f"{self._server_name} broke the protocol towards {self._name}: {error}"
        self._host.fail(failure_of(RemoteProtocolError(text)))

    def on_error(self, peer: Connection, error: BaseException) -> None:
        self._host.broke(error)

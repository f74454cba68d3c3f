"""A relay: local aggregation for the workers of one node and one server (Parallax, section 5.3.2).

To the workers it is a server (`path.server.Server` with `RelayWork`), to the server it is one
worker: one more connection of the same work.
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
from foreprop.core.shards import slice_names
from foreprop.core.wire import Header, Kind
from foreprop.errors import Failure, RemoteProtocolError, failure_of
from foreprop.link.connection import Connection, FailureReports, FrameOwner, Service
from foreprop.link.stream import Stream
from foreprop.numerics.finite import check_finite
from foreprop.path.calls import Goodbyes, Waits
from foreprop.path.executor import Executor, Host
from foreprop.path.hyperparameters import AnnouncedNumbers
from foreprop.path.joining import unknown_optimizer
from foreprop.path.pipeline import Encode, Receivers
from foreprop.path.server import Server
from foreprop.path.slices import Slices
from foreprop.path.trainable import TrainableNotices
from foreprop.relays.nodesums import RelayStore, Sums
from foreprop.relays.passing import (
    PassedBlobs,
    PassedNorms,
    PassedStates,
    PassedStatuses,
    Upward,
)
from foreprop.relays.rows import RelayRows
from foreprop.tables.rowupdates import SPARSE_OPTIMIZERS

_GOODBYE_S = 1.0
_FIRST_PROCESS, _MOST_SERVERS = 1_000_000, 1_000
"""For numbers in traces that no worker or server has."""
_CAUSE_S = 1.0
"""How long after the connection's end another process may still tell the reason."""
_ANSWERS = frozenset(kind for kind in Kind if kind.name.endswith("REPLY"))
_FROM_SERVERS = _ANSWERS | {Kind.WELCOME, Kind.NOTIFY, Kind.NORM_PART, Kind.NORM}
_FROM_WORKERS = frozenset(Kind) - _FROM_SERVERS | {Kind.NORM}


class RelayWork:
    """One relay's part in a session: it sums, passes on, and hands out the answers.

    ``close_link`` ends the connection to the server, saying why if there is a reason.
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
        self.names = slice_names(manifest)
        self.close = close_link
        self._manifest = manifest
        self._link = link
        self._connections = connections
        self._words = [info.name for info in manifest.parameters]
        slices = manifest.slices()
        self._machine = relay_machine(
            slices,
            server=host.index,
            peers=peers,
            order=manifest.knobs.order,
            reply=manifest.knobs.reply,
            names=[info.name for info in manifest.parameters],
        )
        self._executor = Executor(
            self._machine,
            host,
            peers,
            {SERVER: link, **connections},
            f"foreprop-relay{host.index}-send",
        )
        self.stop = self._executor.stop
        self._upward = Upward(self._executor)
        self._settings = AnnouncedNumbers(manifest, self._executor, pass_on=self._upward.pass_on)
        shards = manifest.shards(len(slices))
        self._rows = RelayRows(manifest, shards, self._executor, self._settings.at)
        store = RelayStore(manifest, slices, host.index)
        check = check_finite if manifest.knobs.aggregation.reports_nonfinite else None
        self._slices = Slices(self._machine, self._executor, store, self.names, check=check)
        about = (self._settings.at, self.names, link)
        self._sums = Sums(self._machine, self._executor, store, *about)
        self._waits = Waits([self._rows, self._slices])
        owners, encode = Receivers(), None
        owners.add(*self._services())
        if manifest.knobs.compression:
            encode = self._use_codecs(owners)
        self._executor.use(self._sums.pipeline(self._slices, encode))
        self.owners: dict[int, FrameOwner] = {
            kind: owners[kind] for kind in _FROM_WORKERS & owners.keys()
        }
        self.owners_above: dict[int, FrameOwner] = {kind: owners[kind] for kind in _FROM_SERVERS}

    def _services(self) -> Iterator[Service]:
        upward, manifest = self._upward, self._manifest
        yield self._slices
        yield self._sums
        yield self._settings
        yield self._rows
        about = (self._words, self._executor, self._connections, self._slices.watch)
        yield TrainableNotices(*about, pass_on=upward.pass_on)
        yield PassedStates(manifest, upward, self._rows)
        yield PassedBlobs(manifest, upward)
        yield PassedNorms(self._machine.closing, upward, parts=len(self.names))
        needs_norm = manifest.needs_norm
        asked = (self._waits, self._link, self._has_pushed)
        yield PassedStatuses(upward, *asked, needs_norm=needs_norm)
        goodbyes = Goodbyes(self._executor)
        goodbyes.others.append(self._rows.rank_left)
        yield goodbyes

    def _use_codecs(self, owners: Receivers) -> Encode:
        from foreprop.compression.keptresiduals import KeptResiduals
        from foreprop.relays.sumcodecs import SumCodecs

        scale_at = self._settings.scale_at
        codecs = SumCodecs(self._manifest, self._executor, owners[Kind.REPLY], scale_at)
        kept = KeptResiduals(codecs.residuals, self._executor, owners[Kind.STATE])
        owners.put_before(codecs)
        owners.put_before(kept)
        return codecs.encode

    def _has_pushed(self, number: int, step: int) -> bool:
        return self._machine.closing.has_pushed(number, step) or self._rows.has_pushed(number, step)

    def start(self) -> None:
        """Ask the server; when it welcomes all relays, this one welcomes its workers."""
        manifest = self._manifest.encode()
        self._executor.send(SERVER, Kind.MANIFEST, 0, CONTROL_PRIORITY, 0, manifest)

    @property
    def newcomers(self) -> None:
        """Likewise."""

    def lose(self, peer: Connection, failure: Failure) -> bool:
        """A node's sum needs all its workers."""
        return False

    def look(self) -> None:
        """Nothing is to be seen that the server does not see."""

    @property
    def has_left(self) -> bool:
        return self._sums.has_left

    def incomplete(self) -> Iterator[tuple[int, int, str]]:
        return self._waits.incomplete()

    def describe_awaited(self) -> str:
        """What has been passed on and not answered, or else what the workers have not pushed."""
        with self._executor.lock:
            for slice_, step in self._machine.closing.awaited():
                return f"stage {Stage.REPLY_RECEIVED.value}, step {step}: {self.names[slice_]}"
            for _, step, text in self.incomplete():
                return f"stage {Stage.PUSH_RECEIVED.value}, step {step}: {text}"
        return "nothing"


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
        self._plugins = config.plugins
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

    def watch(self, pulse: socket.socket) -> None:
        """The server is to hear that this relay is there, and the other way round."""
        name = f"{self._server_name} at {pulse.getpeername()[0]}"
        self._host.pulses.add(SERVER, pulse, name, self._lose_silent)

    def _lose_silent(self, _: int, why: str) -> None:
        self._silent = why
        self.link.stream.close()

    # What it is to its `Server`.
    def peers(self, manifest: Manifest) -> Peers:
        return workers_of_node(self._node, manifest.world_size, manifest.workers_per_push)

    def why_not(self, manifest: Manifest) -> str | None:
        if self._plugins is not None:
            from foreprop.config.plugins import maybe_missing

            if (missing := maybe_missing(self._plugins)) is not None:
                return missing
        if manifest.knobs.compression:
            from foreprop.compression.choosing import why_not

            if (missing := why_not(manifest)) is not None:
                return missing
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
        if header.kind == Kind.DAMAGED:  # a sum does not change while it is sent
            what = f"the node's sum of slice {header.slice}, step {header.step}"
            return RemoteProtocolError(f"{what} has come damaged at server {self.index}")
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

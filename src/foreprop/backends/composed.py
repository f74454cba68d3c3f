"""Where a server is put together: slices and calls, and the features of the session.

The manifest says which features those are; others are imported only if somebody sends their frames.
A node's relays, which are made here too, are one of them.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from foreprop.backends.processes import RelayTask, ServerTask
from foreprop.config import Config
from foreprop.core.barrier import StepBarrier, Tellers
from foreprop.core.closing import AllMembers, ClosingRule
from foreprop.core.collect import DropPush
from foreprop.core.frames import Peers
from foreprop.core.manifest import Manifest
from foreprop.core.sendqueue import turns_of
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Slice
from foreprop.core.wire import Header, Kind
from foreprop.engine.calls import Blobs, Goodbyes, States, Statuses, TrainableNotices, Waits
from foreprop.engine.connection import Collecting, Connection, Later, Receivers, Service
from foreprop.engine.executor import Executor, Host, Payload, Pipeline
from foreprop.engine.hyperparameters import AnnouncedNumbers
from foreprop.engine.joining import Work, unknown_optimizer
from foreprop.engine.plane import Plane
from foreprop.engine.planeserver import PlaneServer, PlaneSlices, SameBatchLook
from foreprop.engine.server import Server
from foreprop.engine.slices import CheckGradient, Slices, Updates
from foreprop.engine.slicestore import SliceStore
from foreprop.engine.stream import SocketStream, Stream
from foreprop.errors import Failure

if TYPE_CHECKING:
    from foreprop.engine.pacing import NodeLinks
    from foreprop.features.compression.images import CodedSlices
    from foreprop.features.compression.replycodecs import ReplyCodecs
    from foreprop.features.members.admission import Admission
    from foreprop.features.members.counting import Counting, MovesPassedOn, StalenessServer
    from foreprop.features.nodes.relay import Relay
    from foreprop.features.tables.service import RowServer
    from foreprop.features.tables.store import RowStore
    from foreprop.features.uneven.arrivals import ArrivalReports
    from foreprop.params.normgate import NormGate

_ROW_FRAMES = frozenset(
    {Kind.ROWS_VALUE, Kind.ROWS_PUSH, Kind.ROWS_PULL, Kind.TABLE, Kind.TABLE_PULL}
)


class ServerWork(Work):
    """A server's part in a session.

    It has ``counting`` if not all workers always count, and ``admission`` if some may come later.
    """

    def __init__(
        self,
        *about: Any,
        counting: Counting | None,
        admission: Admission | None,
        look_at_plane: Callable[[], None] | None,
    ) -> None:
        super().__init__(*about)
        self._look_at_plane = look_at_plane
        self._counting = counting
        self._admission = admission

    @property
    def newcomers(self) -> Admission | None:
        return self._admission

    def start(self) -> None:
        """Welcome all workers."""
        self._executor.answer_all(Kind.WELCOME, Header(Kind.MANIFEST, 0, 0, 0, 0, 0, 0))

    def lose(self, peer: Connection, failure: Failure) -> bool:
        return self._counting is not None and self._counting.lose(peer, failure)

    def look(self) -> None:
        if self._look_at_plane is not None:
            self._look_at_plane()
        if self._counting is not None:
            self._counting.look()

    def close(self, failure: Failure | None) -> None:
        if self._look_at_plane is not None:
            self._look_at_plane()
        if self._counting is not None:
            self._counting.close(failed=failure is not None)


class ServerComposer:
    """Composes a server of the workers, or of their relays."""

    def __init__(
        self,
        store_class: type[SliceStore] = SliceStore,
        config: Config | None = None,
        plane: Plane | None = None,
    ) -> None:
        self._store_class = store_class
        self._config = config or Config()
        self._plane = plane

    def peers(self, manifest: Manifest) -> Peers:
        return manifest.peers()

    def why_not(self, manifest: Manifest) -> str | None:
        if self._config.plugins is not None:
            from foreprop.config.plugins import maybe_missing

            if (missing := maybe_missing(self._config.plugins)) is not None:
                return missing
        if manifest.knobs.compression:
            from foreprop.features.compression.choosing import why_not

            if (missing := why_not(manifest)) is not None:
                return missing
        if not any(info.rows for info in manifest.parameters):
            return unknown_optimizer(manifest)
        from foreprop.features.tables.rowtable import SPARSE_OPTIMIZERS

        return unknown_optimizer(manifest, SPARSE_OPTIMIZERS)

    def compose(
        self, manifest: Manifest, host: Host, connections: Mapping[int, Connection]
    ) -> ServerWork:
        about = (self._store_class, self._config, self._plane)
        work = _Composition(manifest, self.peers(manifest), host, connections, *about).work
        if self._plane is not None:
            self._plane.carry(connections)
            if host.trace is not None:
                names = [info.name for info in manifest.parameters]
                self._plane.record(host.index, host.trace, names)
        return work


class _Composition:
    """The services of one server, while they are put together."""

    def __init__(
        self,
        manifest: Manifest,
        peers: Peers,
        host: Host,
        connections: Mapping[int, Connection],
        store_class: type[SliceStore],
        config: Config,
        plane: Plane | None,
    ) -> None:
        self._manifest, self._plane = manifest, plane
        self._connections = connections
        self._store_class = store_class
        self._config = config
        self._rows = Later(_ROW_FRAMES, self._make_rows)
        self._norm = Later({Kind.NORM}, self._make_norm)
        slices = manifest.slices()
        self._shards = manifest.shards(len(slices))
        names = manifest.slice_names()
        self._barrier = self._maybe_barrier(slices, host.index)
        self._counting = counting = self._maybe_counting(slices, host.index)
        counting_rule = counting or self._maybe_staleness(slices, host.index)
        closing = AllMembers if counting_rule is None else counting_rule.closing
        self._machine = self._make_machine(slices, host.index, closing)
        about_sending = (connections, f"foreprop-server{host.index}-send")
        carry = partial(plane.message, index=host.index) if plane and counting else None
        self._executor = Executor(self._machine.handle, host, peers, *about_sending, carry=carry)
        newcomers = None if counting is None else counting.newcomers
        numbers = partial(AnnouncedNumbers, newcomers=newcomers, pass_on=self._tell_scale)
        self._settings = numbers(manifest, self._executor)
        codes = self._maybe_codes(slices, host.index)
        if counting_rule is not None:
            self._store = counting_rule.make_store(codes)
        else:
            about_store = (manifest, slices, host.index)
            self._store = store_class(*about_store, codes=codes, readers=peers.count)
        about = (self._executor, self._store)
        self._updates = Updates(*about, self._settings.at, names)
        self._slices = self._make_slices(names, host.index)
        self._frames: Service = self._slices
        self._codecs: ReplyCodecs | None = None
        if codes is not None and plane is None:
            from foreprop.features.compression.replycodecs import ReplyCodecs

            about_codecs = (self._slices, self._executor, self._store, codes)
            self._frames = self._codecs = ReplyCodecs(manifest, *about_codecs)
        taken_over = None if counting is None else counting.taken_over
        others: list[Collecting] = [] if taken_over is None else [taken_over]
        self._waits = Waits([*others, self._slices])
        self._goodbyes = Goodbyes(self._executor)
        self._admission = None if counting is None else self._begin_counting(counting)
        self.work = ServerWork(
            *(self._receivers(codes), names, self._executor, self._waits),
            counting=counting,
            admission=self._admission,
            look_at_plane=self._maybe_look(host.index),
        )
        replies = self._updates.payload_of if counting_rule is None else counting_rule.payload_of
        self._executor.use(self._pipeline(replies))

    def _tell_scale(self, header: Header, _: memoryview) -> None:
        """Tell the plane of the loss's scale, as it has come from rank 0."""
        if self._plane is not None:
            step, scale = header.step, self._settings.scale_at(header.step)
            self._plane.tell_scale(self._executor.host.index, step, scale)

    def _make_slices(self, names: Sequence[str], index: int) -> Slices:
        about = (self._machine, self._executor, self._store, names)
        if self._plane is None:
            return Slices(*about, check=self._finite_check())
        told = {} if self._counting is None else {"on_told": self._counting.catch_up}
        return PlaneSlices(self._plane, index, *about, **told)

    def _maybe_look(self, index: int) -> Callable[[], None] | None:
        ranks = self._manifest.most_workers
        if self._plane is None or index or ranks == 1:  # one server: all would say the same
            return None
        return SameBatchLook(self._plane, index, ranks).look

    def _pipeline(self, replies: Payload) -> Pipeline:
        """How frames leave; ``replies`` gives the values of replies."""
        return Pipeline(
            payload={Kind.REPLY: replies},
            encode={} if self._codecs is None else {Kind.REPLY: self._codecs.encode},
            sent=self._updates.told,
        )

    def _make_machine(
        self, slices: Sequence[Slice], index: int, closing: Callable[..., ClosingRule]
    ) -> ServerMachine[Any]:
        knobs, peers = self._manifest.knobs, self._manifest.peers()
        about: dict[str, Any] = {
            "index": index,
            "workers": peers.count,
            "order": knobs.order,
            "reply": knobs.reply,
            "names": [info.name for info in self._manifest.parameters],
            "barrier": self._barrier,
            "peers": peers,
            "turns": turns_of(knobs.lanes, index, len(peers.present)),
            "closing": closing,
        }
        if self._plane is not None and self._counting is not None:
            from foreprop.features.members.planemembers import MembersPlaneServer

            return MembersPlaneServer(self._plane, slices, **about)
        if self._plane is not None:
            return PlaneServer(self._plane, slices, **about)
        if not self._shards:
            return ServerMachine(slices, **about)
        from foreprop.core.rows_machine import RowsMachine

        return RowsMachine(slices, self._shards, **about)

    def _receivers(self, codes: CodedSlices | None) -> Receivers:
        receivers = Receivers()
        receivers.add(*self._services())
        if codes is not None:
            from foreprop.features.compression.remoteresiduals import KeptResiduals

            about = (codes.averages.residuals, self._executor, receivers[Kind.STATE])
            receivers.put_before(KeptResiduals(*about, averages=True))
        return receivers

    def _services(self) -> Iterator[Service]:
        executor, manifest = self._executor, self._manifest
        yield self._frames
        yield self._settings
        blobs = Blobs(manifest, executor, readers=executor.peers.count - 1)
        yield blobs if self._admission is None else self._newcomers_blobs(blobs)
        yield States(executor, self._store_of, self._export_gradient)
        yield Statuses(executor, self._waits)
        names = [info.name for info in manifest.parameters]
        about = (names, executor, self._connections, self._slices.watch)
        yield TrainableNotices(*about, compares=self._have_all_been_here)
        yield self._goodbyes
        if self._admission is not None:
            yield self._admission
        if self._counting is not None and self._counting.taken_over is not None:
            yield self._counting.taken_over
            yield Later({Kind.MOVES}, self._make_moves)
            yield Later({Kind.GIVEN}, self._make_parts)
        yield self._rows.service if self._shards else self._rows
        yield self._norm.service if manifest.needs_norm else self._norm
        if not executor.peers.are_nodes:
            yield Later({Kind.PACE}, self._make_arrivals)

    def _finite_check(self) -> CheckGradient | None:
        if not self._manifest.knobs.aggregation.reports_nonfinite:
            return None
        from foreprop.params.finite import check_finite

        return check_finite

    def _maybe_barrier(self, slices: Sequence[Slice], index: int) -> StepBarrier | None:
        manifest = self._manifest
        if not manifest.needs_norm:
            return None
        owners = [piece.server for piece in slices if manifest.is_served(piece)]
        owners += [shard.server for shard in self._shards]
        told_by: Tellers = "any" if manifest.knobs.counts_some else "rank 0"
        if manifest.knobs.staleness:
            told_by = "own"
        return StepBarrier(owners.count(index), told_by=told_by)

    def _maybe_codes(self, slices: Sequence[Slice], index: int) -> CodedSlices | None:
        if not self._manifest.knobs.compression:
            return None
        from foreprop.features.compression.images import CodedSlices

        scale_at = self._settings.scale_at
        return CodedSlices(self._manifest, slices, index, scale_at, self._plane)

    def _maybe_counting(self, slices: Sequence[Slice], index: int) -> Counting | None:
        if not self._manifest.knobs.counts_some:
            return None
        from foreprop.features.members.counting import Counting

        return Counting(self._manifest, slices, self._shards, index, self._config)

    def _begin_counting(self, counting: Counting) -> Admission | None:
        """Begin to count members; returns what takes in newcomers, in an elastic session."""
        admission, index, connections = None, self._executor.host.index, self._connections
        last_push = partial(self._plane.last_push, index) if self._plane else None
        if self._manifest.knobs.elastic:
            from foreprop.features.members.admission import Admission

            admission = Admission(self._manifest, index, counting)
            admission.begin(self._executor)
        counting.begin(
            self._machine,
            self._executor,
            self._connections,
            unlike=self._settings.history.unlike,
            last_push=last_push or (lambda rank: connections[rank].last_push),
            draw_counted=getattr(self._machine, "draw_counted", tuple),
            place_of=(lambda rank: None) if admission is None else admission.place_of,
        )
        self._executor.doers[DropPush] = self._drop
        if self._plane is not None:
            from foreprop.features.members.planemembers import going_on

            self._executor.doers.update(going_on(self._executor, self._plane))
        return admission

    def _drop(self, push: DropPush) -> None:
        number, rank, step = push
        with self._executor.lock:
            self._store_of(number).drop(number, rank, step)

    def _maybe_staleness(self, slices: Sequence[Slice], index: int) -> StalenessServer | None:
        if not self._manifest.knobs.staleness:
            return None
        from foreprop.features.members.counting import StalenessServer

        return StalenessServer(self._manifest, slices, index)

    def _make_rows(self) -> RowServer:
        from foreprop.features.tables.service import RowServer

        counted = None if self._counting is None else self._counting.note
        about = (self._manifest, self._shards, self._executor, self._updates)
        return RowServer(*about, self._settings.at, counted)

    def _have_all_been_here(self) -> bool:
        """Whether all peers have heard all notices, which newcomers have not."""
        return not (self._counting and self._counting.newcomers)

    def _make_moves(self) -> MovesPassedOn:
        from foreprop.features.members.counting import MovesPassedOn

        members = self._machine.closing.members
        return MovesPassedOn(len(self._manifest.slices()), members, self._executor)

    def _newcomers_blobs(self, blobs: Blobs) -> Service:
        from foreprop.features.members.admission import NewcomersBlobs

        return NewcomersBlobs(blobs, self._machine.closing.members)

    def _make_parts(self) -> Service:
        from foreprop.features.members.admission import PartsPassedOn

        return PartsPassedOn(self._machine.closing.members, self._executor)

    def _make_arrivals(self) -> ArrivalReports:
        from foreprop.features.uneven.arrivals import ArrivalReports  # after some steps

        about = (self._executor, self._slices, self._updates)
        return ArrivalReports(*about, self._manifest.knobs.steps_apart)

    def _make_norm(self) -> NormGate:
        from foreprop.params.normgate import NormGate

        counting = self._counting
        adding = None if counting is None else lambda: counting.members.settled
        about = (self._manifest, self._barrier, adding, self._executor, self._store)
        return NormGate(*about, self._settings.at, self._updates)

    def _store_of(self, number: int) -> SliceStore | RowStore:
        """The store that has a number; raises `RemoteProtocolError` for another server's."""
        rows = self._rows.made
        if rows is not None and number in rows:
            return rows.store
        self._machine.owned(number)
        return self._store

    def _export_gradient(self, number: int) -> bytes:
        self._machine.owned(number)
        return self._store.export_gradient(number)


# A server or relays, of what their process (or a worker's thread) is told.
def build_server(
    task: ServerTask,
    config: Config,
    plane: Plane | None = None,
    answers: Callable[[socket.socket], None] | None = None,
) -> Server:
    """Make the server of a task; for ``plane`` and ``answers`` see `engine.server.Server`."""
    links = _node_links(task, config)
    if links is not None and not task.shares_node:
        links.unlink()
    wrap = links.wrap if links is not None else None
    server = Server(
        index=task.index,
        session_id=task.session_id,
        config=config,
        composer=ServerComposer(config=config, plane=plane),
        world_size=task.world_size,
        wrap=wrap,
        plane=plane,
        answers=answers,
    )
    if links is not None:
        weakref.finalize(server, links.close)  # in this process; another one's end closes them
    return server


def build_relays(
    task: RelayTask, config: Config, upstreams: Sequence[socket.socket]
) -> list[Relay]:
    """Make a node's relays, one to each server; ``upstreams`` are the connections to those."""
    from foreprop.features.nodes.relay import Relay

    links = _node_links(task, config)
    relays = []
    for server, sock in enumerate(upstreams):
        name = task.server_names[server]
        stream = _upstream(task, config, server, sock)
        if links is not None:
            stream = links.wrap_to_node(stream, task.server_nodes[server])
        relay = Relay(
            server=server,
            server_name=name,
            node=task.node,
            first_rank=task.node * task.workers_per_node,
            session_id=task.session_id,
            config=config,
            world_size=task.world_size,
            upstream=stream,
            why_not=ServerComposer(config=config).why_not,
        )
        relays.append(relay)
    if links is not None:
        close_with_the_last(links, relays)
    return relays


def close_with_the_last(links: NodeLinks, relays: Sequence[Relay]) -> None:
    """Close the links when the last relay that shares them ends, as descriptors are reused."""
    ends = iter([*([False] * (len(relays) - 1)), True])

    def end() -> None:
        if next(ends):
            links.close()

    for relay in relays:
        weakref.finalize(relay, end)


def _upstream(task: RelayTask, config: Config, server: int, sock: socket.socket) -> Stream:
    """A stream to a server, over the connection that the node's first worker has made."""
    name = task.server_names[server]
    if config.encryption is None:
        return SocketStream(sock, name)
    from foreprop.core.authentication import Channel, Subject
    from foreprop.engine.encrypted import connect_encrypted

    subject = Subject(task.session_id, f"server {server}", True)
    rank, nonces = task.node * task.workers_per_node, bytes.fromhex(task.nonces[server])
    return connect_encrypted(sock, name, Channel(subject, rank, nonces), config)


def _node_links(task: ServerTask | RelayTask, config: Config) -> NodeLinks | None:
    """The node's emulated links, for trying things out on one machine; None without."""
    if config.link_rate_bits_per_s is None or task.node is None:
        return None
    from foreprop.engine.pacing import NodeLinks

    rate = config.link_rate_bits_per_s
    return NodeLinks(task.session_id, task.node, task.workers_per_node, rate)

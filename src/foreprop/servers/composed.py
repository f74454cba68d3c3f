"""Where a server is put together: slices and calls, and the features of the session.

The manifest says which those are; others are imported only if somebody sends their frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foreprop.config import Config
from foreprop.core.barrier import StepBarrier
from foreprop.core.closing import AllMembers
from foreprop.core.frames import Peers
from foreprop.core.manifest import Manifest
from foreprop.core.sendqueue import turns_of
from foreprop.core.server_machine import ServerMachine
from foreprop.core.shards import slice_names
from foreprop.core.slicing import Slice
from foreprop.core.wire import Header, Kind
from foreprop.errors import Failure
from foreprop.link.connection import Collecting, Connection, FrameOwner, Later, Service
from foreprop.path.calls import (
    Blobs,
    Goodbyes,
    States,
    StateStore,
    Statuses,
    Waits,
)
from foreprop.path.executor import Executor, Host
from foreprop.path.hyperparameters import AnnouncedNumbers
from foreprop.path.joining import unknown_optimizer
from foreprop.path.pipeline import Payload, Pipeline, Receivers
from foreprop.path.slices import CheckGradient, Slices, Updates
from foreprop.path.slicestore import SliceStore

if TYPE_CHECKING:
    from foreprop.compression.images import CodedSlices
    from foreprop.compression.keptresiduals import KeptResiduals
    from foreprop.compression.replycodecs import ReplyCodecs
    from foreprop.elastic.admission import Admission
    from foreprop.elastic.counting import Counting
    from foreprop.numerics.normgate import NormGate
    from foreprop.path.trainable import TrainableNotices
    from foreprop.staleness.apart import Apart
    from foreprop.stragglers.arrivals import ArrivalReports
    from foreprop.tables.service import RowServer

_ROW_FRAMES = frozenset(
    {Kind.ROWS_VALUE, Kind.ROWS_PUSH, Kind.ROWS_PULL, Kind.TABLE, Kind.TABLE_PULL}
)


@dataclass(frozen=True, slots=True)
class ServerWork:
    """A server's part in a session, as `path.joining` starts and ends it."""

    owners: Mapping[int, FrameOwner]
    names: list[str]
    executor: Executor
    waits: Waits
    counting: Counting | None = None
    """If not all workers always count."""

    @property
    def newcomers(self) -> Admission | None:
        return None if self.counting is None else self.counting.admission

    def start(self) -> None:
        """Welcome everybody."""
        self.executor.answer_all(Kind.WELCOME, Header(Kind.MANIFEST, 0, 0, 0, 0, 0, 0))

    def incomplete(self) -> Iterator[tuple[int, int, str]]:
        return self.waits.incomplete()

    def lose(self, peer: Connection, failure: Failure) -> bool:
        return self.counting is not None and self.counting.lose(peer, failure)

    def look(self) -> None:
        if self.counting is not None:
            self.counting.look()

    def close(self, failure: Failure | None) -> None:
        if self.counting is not None:
            self.counting.close(failed=failure is not None)

    def stop(self) -> None:
        self.executor.stop()


class ServerComposer:
    """Composes a server of the workers, or of their relays."""

    def __init__(
        self,
        store_class: type[SliceStore] = SliceStore,
        config: Config | None = None,
    ) -> None:
        self._store_class = store_class
        self._config = config or Config()

    def peers(self, manifest: Manifest) -> Peers:
        return manifest.peers()

    def why_not(self, manifest: Manifest) -> str | None:
        if self._config.plugins is not None:
            from foreprop.config.plugins import maybe_missing

            if (missing := maybe_missing(self._config.plugins)) is not None:
                return missing
        if manifest.knobs.compression:
            from foreprop.compression.choosing import why_not

            if (missing := why_not(manifest)) is not None:
                return missing
        if not any(info.rows for info in manifest.parameters):
            return unknown_optimizer(manifest)
        from foreprop.tables.rowupdates import SPARSE_OPTIMIZERS

        return unknown_optimizer(manifest, SPARSE_OPTIMIZERS)

    def compose(
        self, manifest: Manifest, host: Host, connections: Mapping[int, Connection]
    ) -> ServerWork:
        about = (self._store_class, self._config)
        return _Composition(manifest, self.peers(manifest), host, connections, *about).work


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
    ) -> None:
        self._manifest = manifest
        self._connections = connections
        self._store_class = store_class
        self._config = config
        self._rows = Later(_ROW_FRAMES, self._make_rows)
        self._norm = Later({Kind.NORM}, self._make_norm)
        slices = manifest.slices()
        self._shards = manifest.shards(len(slices))
        names = slice_names(manifest)
        self._barrier: StepBarrier | None = None
        self._counting: Counting | None = None
        if manifest.needs_norm:
            owners = [piece.server for piece in slices if manifest.is_served(piece)]
            owners += [shard.server for shard in self._shards]
            self._barrier = StepBarrier(owners.count(host.index))
        self._counting = counting = self._maybe_counting(slices, host.index)
        apart = counting or self._maybe_apart(slices, host.index)
        self._is_plain = apart is None
        self._machine = self._make_machine(slices, host.index) if apart is None else apart.machine
        thread_name = f"foreprop-server{host.index}-send"
        self._executor = Executor(self._machine, host, peers, connections, thread_name)
        newcomers = None if counting is None else counting.newcomers
        self._settings = AnnouncedNumbers(manifest, self._executor, newcomers=newcomers)
        codes = self._maybe_codes(slices, host.index)
        self._store: SliceStore
        if counting is not None:
            self._store = counting.make_store(codes)
        elif apart is not None:
            self._store = apart.store
        else:
            about_store = (manifest, slices, host.index)
            self._store = store_class(*about_store, codes=codes, readers=peers.count)
        about = (self._machine, self._executor, self._store)
        self._updates = Updates(*about, self._settings.at, names)
        self._slices = Slices(*about, names, check=self._finite_check())
        self._frames: Service = self._slices
        self._codecs: ReplyCodecs | None = None
        if codes is not None:
            self._frames = self._codecs = self._make_codecs(codes)
        taken_over = None if counting is None else counting.taken_over
        others: list[Collecting] = [] if taken_over is None else [taken_over]
        self._waits = Waits([*others, self._slices], self._barrier)
        self._goodbyes = Goodbyes(self._executor)
        self._admission = None if counting is None else counting.admission
        if counting is not None:
            counting.begin(self._executor, connections, self._settings.history.unlike)
        about_all = (names, self._executor, self._waits, counting)
        self.work = ServerWork(self._receivers(codes), *about_all)
        replies = self._updates.payload_of if apart is None else apart.payload_of
        self._executor.use(self._pipeline(replies))

    def _pipeline(self, replies: Payload) -> Pipeline:
        """``replies``: what has their values."""
        return Pipeline(
            payload={Kind.REPLY: replies},
            encode={} if self._codecs is None else {Kind.REPLY: self._codecs.encode},
            sent=self._updates.told,
        )

    def _make_machine(self, slices: Sequence[Slice], index: int) -> ServerMachine[AllMembers]:
        knobs, peers = self._manifest.knobs, self._manifest.peers()
        return ServerMachine(
            slices,
            index=index,
            workers=peers.count,
            order=knobs.order,
            reply=knobs.reply,
            names=[info.name for info in self._manifest.parameters],
            barrier=self._barrier,
            peers=peers,
            turns=turns_of(knobs.lanes, index, peers.count),
            closing=AllMembers,
        )

    def _receivers(self, codes: CodedSlices | None) -> Receivers:
        receivers = Receivers()
        receivers.add(*self._services())
        if codes is not None:
            receivers.put_before(self._make_kept(codes, receivers[Kind.STATE]))
        return receivers

    def _services(self) -> Iterator[Service]:
        executor, manifest = self._executor, self._manifest
        yield self._frames
        yield self._settings
        yield self._make_blobs(manifest, executor)
        yield States(executor, self._store_of, self._export_gradient)
        yield Statuses(executor, self._waits)
        yield Later({Kind.TRAINABLE}, self._make_trainable)
        yield self._goodbyes
        if self._admission is not None:
            yield self._admission
        if self._counting is not None and self._counting.taken_over is not None:
            yield self._counting.taken_over
            if self._admission is not None:
                yield self._admission.parts_passed_on(executor)
        yield self._rows.service if self._shards else self._rows
        if self._is_plain:  # others close slices one by one
            yield self._norm.service if manifest.needs_norm else self._norm
        if not executor.peers.are_nodes:
            yield Later({Kind.PACE}, self._make_arrivals)

    def _make_blobs(self, manifest: Manifest, executor: Executor) -> Service:
        blobs = Blobs(manifest, executor, readers=executor.peers.count - 1)
        return blobs if self._admission is None else self._admission.passing_on(blobs)

    def _finite_check(self) -> CheckGradient | None:
        if not self._manifest.knobs.aggregation.reports_nonfinite:
            return None
        from foreprop.numerics.finite import check_finite

        return check_finite

    def _maybe_codes(self, slices: Sequence[Slice], index: int) -> CodedSlices | None:
        if not self._manifest.knobs.compression:
            return None
        from foreprop.compression.images import CodedSlices

        return CodedSlices(self._manifest, slices, index, self._settings.scale_at)

    def _maybe_counting(self, slices: Sequence[Slice], index: int) -> Counting | None:
        knobs = self._manifest.knobs
        if not (knobs.elastic or knobs.backup_workers or knobs.counted_replay):
            return None
        from foreprop.elastic.counting import Counting

        return Counting(self._manifest, slices, index, self._config)

    def _maybe_apart(self, slices: Sequence[Slice], index: int) -> Apart | None:
        if not self._manifest.knobs.staleness:
            return None
        from foreprop.staleness.apart import Apart

        return Apart(self._manifest, slices, index)

    def _make_codecs(self, codes: CodedSlices) -> ReplyCodecs:
        from foreprop.compression.replycodecs import ReplyCodecs

        return ReplyCodecs(self._manifest, self._slices, self._executor, self._store, codes)

    def _make_kept(self, codes: CodedSlices, states: FrameOwner) -> KeptResiduals:
        from foreprop.compression.keptresiduals import KeptResiduals

        return KeptResiduals(codes.averages.residuals, self._executor, states, averages=True)

    def _make_rows(self) -> RowServer:
        from foreprop.tables.service import RowServer

        about = (self._manifest, self._shards, self._executor, self._settings.at)
        rows = RowServer(*about, self._barrier)
        self._waits.collectors.insert(0, rows)
        self._goodbyes.others.append(rows.rank_left)
        return rows

    def _make_trainable(self) -> TrainableNotices:
        from foreprop.path.trainable import TrainableNotices

        names = [info.name for info in self._manifest.parameters]
        about = (names, self._executor, self._connections, self._slices.watch)
        return TrainableNotices(*about, compares=self._have_all_been_here)

    def _have_all_been_here(self) -> bool:
        """Who comes later has not heard all words."""
        return not (self._counting and self._counting.newcomers)

    def _make_arrivals(self) -> ArrivalReports:
        from foreprop.stragglers.arrivals import ArrivalReports  # after some steps

        return ArrivalReports(self._executor, self._slices, self._updates)

    def _make_norm(self) -> NormGate:
        from foreprop.numerics.normgate import NormGate

        about = (self._manifest, self._machine, self._executor, self._store)
        gate = NormGate(*about, self._settings.at, self._updates)
        if self._shards:
            gate.others.append(self._rows.service.use_norm)
        return gate

    def _store_of(self, number: int) -> StateStore:
        """Which of the stores has the optimizer state that a frame is about."""
        rows = self._rows.made
        if rows is not None and number in rows:
            return rows.store
        self._machine.owned(number)
        return self._store

    def _export_gradient(self, number: int) -> bytes:
        self._machine.owned(number)
        return self._store.export_gradient(number)

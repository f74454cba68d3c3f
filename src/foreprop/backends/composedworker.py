"""Where a worker's side of servers is put together: its connections, engine and features.

Servers hold the optimizer's state and apply the updates, or average for workers that do. A feature
is imported if the settings or the manifest ask for it, or when somebody first needs it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from foreprop.backends.launch import Connections
from foreprop.core.frames import CONTROL_PRIORITY
from foreprop.core.manifest import FROZEN_BLOB, NO_GROUP, Hyperparameters, Manifest
from foreprop.core.slicing import Packs
from foreprop.core.wire import Kind
from foreprop.engine.connection import Later
from foreprop.engine.optimizer import check_elementwise, check_groups, hyperparameters, with_scale
from foreprop.engine.worker import Features, WorkerEngine
from foreprop.params.modelhooks import pack, unpack_into
from foreprop.params.setup import MemoryFactory, Setup, check_frames

if TYPE_CHECKING:
    from foreprop.backends.elastic import Membership
    from foreprop.backends.servedstate import ServedState
    from foreprop.core.freezing import Turned
    from foreprop.core.lateness import Straggler
    from foreprop.features.compression.pushcodecs import PushCodecs
    from foreprop.features.members.messages import ServerDirectory
    from foreprop.features.tables.exchange import RowExchange
    from foreprop.features.uneven.pace import PaceKeeper
    from foreprop.params.parameter import Parameter
    from foreprop.params.workernorm import WorkerNorm


class ServedBackend:
    """The backend of servers, which sum gradients and apply the optimizer, or average."""

    def __init__(self, setup: Setup) -> None:
        served = [info for info in setup.infos if info.group != NO_GROUP]
        self._serves = bool(served)
        """Whether servers apply the optimizer to anything."""
        if not all(info.rows for info in served):
            check_elementwise(setup.optimizer)
        if self._serves:
            check_groups(setup.optimizer)
        self._setup, self.frozen, self.buffers = setup, setup.frozen, setup.buffers
        self.joined_at: int | None = None
        """The first step of a newcomer; None for those of the start."""
        self._optimizer = setup.optimizer
        self._memory_factory = MemoryFactory(setup.config)
        self.memory_of = self._memory_factory.memory_of
        self.connections = Connections(setup.world, setup.config, setup.part)
        manifest = self._manifest()
        check_frames(manifest)
        if shards := manifest.shards(len(manifest.slices())):
            from foreprop.engine.tensors import check_shards

            check_shards(manifest, shards)
        if manifest.knobs.compression:
            from foreprop.features.compression.choosing import check_setting

            check_setting(setup.config, manifest)
        if setup.config.staleness == "late":
            from foreprop.engine.gpumemory import StagedMemory

            self.memory_of = StagedMemory
        self.told: ServerDirectory | None = None
        """Where the servers are, as this newcomer was told."""
        self.why_python = self.connections.use_plane(manifest)
        """Why the Python engine carries the slices, if it does."""
        if self.connections.plane is not None and manifest.knobs.elastic:
            from foreprop.features.members.planemembers import MembersPlaneWorker

            self.connections.plane.worker_class = MembersPlaneWorker
        self.connections.open(None if setup.config.join is None else self._join)
        self.session_id = self.connections.session_id
        self.engine = WorkerEngine(
            msgspec.structs.replace(manifest, session=self.session_id),
            setup.memory,
            self.connections.streams,
            rank=setup.world.rank,
            config=setup.config,
            trace=setup.make_trace(self.session_id),
            servers=self.connections.server_names(),
            look=setup.look,
            plane=self.connections.plane,
        )
        self._rows, self._norm = add_features(self.engine)
        self._pace = Later({Kind.PACE_REPORT}, self._make_pace)
        self._tells_pace = self._has_equal_steps()
        self.codecs: PushCodecs | None = None
        self.members: Membership | None = None
        self.engine.compose(self._features())

    def _join(self) -> None:
        from foreprop.backends.elastic import connect_to_all

        self.told = connect_to_all(self._setup.world, self._setup.config, self.connections)

    def _features(self) -> Features:
        """What this session has its engine do; each receiver is put before those made before."""
        setup, receivers, features = self._setup, self.engine.receivers, features_of(self._norm)
        if self.engine.manifest.knobs.compression:
            from foreprop.features.compression.pushcodecs import PushCodecs

            self.codecs = PushCodecs(self.engine)
            features = replace(features, encode=self.codecs.encode)
            receivers.put_before(self.codecs)
        if setup.config.counts_some:
            from foreprop.backends.elastic import make_members

            self.members = make_members(self.engine, self.connections, setup, self.told)
            features = self.members.features(features)
        if self._tells_pace:  # all ranks of a step do
            receivers.add(self._pace)
            features = replace(
                features, end_window=lambda step: self._pace.service.end_window(step)
            )
        return features

    def _has_equal_steps(self) -> bool:
        """Whether servers hear from every worker, and all make the same steps.

        Where ranks may be steps apart, or values late, pace is told only for what needs it, as it
        is waited for.
        """
        config, together = self._setup.config, self.connections.workers_per_push == 1
        moves = config.rebalance_s is not None
        return (
            self._setup.world.size > 1
            and together
            and not config.counts_some
            and (not config.staleness or moves)
        )

    def _manifest(self) -> Manifest:
        """What all processes agree on, but for the session's id."""
        knobs, packs = self._setup.config.knobs(self.connections.servers), Packs()
        if knobs.granularity == "slice":
            packs = self._setup.packs(knobs.slice_elems, servers=knobs.servers)
        return self._setup.manifest(
            msgspec.structs.replace(knobs, aggregation=self._setup.aggregation, packs=packs),
            groups=self._hyperparameters(),
            workers_per_push=self.connections.workers_per_push,
        )

    def _make_pace(self) -> PaceKeeper:
        from foreprop.features.uneven.pace import PaceKeeper  # after some steps

        ranks, before = self.connections.server_ranks(), self._setup.steps_before
        links = self.connections.pass_links
        return PaceKeeper(self.engine, ranks, steps_before=before, links=links)

    @property
    def straggler(self) -> Straggler | None:
        return None if self.pace is None else self.pace.straggler

    @property
    def pace(self) -> PaceKeeper | None:
        """The keeper of this rank's pace, once some steps are made; None with local aggregation."""
        return self._pace.made

    def ask_for_norm(self) -> None:
        """Have this rank's wish for the norm told with its pace, so that all ranks agree.

        Within one machine averages are as fast as word of them: there each rank makes the norm.
        """
        world = self._setup.world
        if self._tells_pace and world.local_size < world.size:
            self._pace.service.asks_norm = True

    @property
    def measures_norm(self) -> bool:
        """Whether all ranks have asked, so that servers tell `WorkerNorm.square_sums`."""
        return self.pace is not None and self.pace.measures_norm

    @property
    def packs(self) -> Packs:
        """The parameters that share a slice, by number."""
        return self.engine.manifest.knobs.packs

    @property
    def rows(self) -> RowExchange:
        return self._rows.service

    @property
    def norm(self) -> WorkerNorm:
        return self._norm.service

    @functools.cached_property
    def state(self) -> ServedState:
        from foreprop.backends.servedstate import ServedState  # for checkpoints

        lossy: set[int] = set()
        if self.engine.manifest.knobs.compression:
            from foreprop.features.compression.choosing import lossy_parameters

            lossy = lossy_parameters(self.engine.manifest)

        def settle_rows() -> None:
            if self.engine.shards:
                self.rows.settle_rows()

        return ServedState(self._setup, self.engine, lossy, settle_rows)

    # The start.
    def start(self, parameters: Sequence[Parameter]) -> None:
        rank_zero = self._setup.world.rank == 0
        self.connections.pulses.tell(self.engine.ending.lose_silent)
        if self.told is not None:
            from foreprop.backends.elastic import enter

            self.joined_at = enter(self.engine, self.members, self.told, self._setup, parameters)
            return
        if not rank_zero:
            self.engine.await_values()  # before the servers know us: values may come at once
        self.engine.join(self.connections.board.check_failed)
        self.connections.settled()
        shared = [[frozen] for frozen in self.frozen]
        if rank_zero:
            for parameter in parameters:
                parameter.arrival.before_offering()
            if self._serves and self._optimizer.state:
                self.state.send(0)  # first: who has the values may ask for it
            self.engine.offer_values()
            for number, info in enumerate(self._setup.infos):
                if info.rows and info.init is None:
                    table = self._setup.parameters[number].detach()
                    self.rows.send_row_values(number, 0, table)
            if self.engine.manifest.most_workers > 1:
                for number, tensors in enumerate(shared, FROZEN_BLOB):
                    self.engine.publish_blob(number, 0, pack(tensors))
        else:
            for parameter in parameters:
                parameter.arrival.receive_initial_value()
            for number, tensors in enumerate(shared, FROZEN_BLOB):
                unpack_into(tensors, self.engine.fetch_blob(number, 0))
        if self._serves and self._optimizer.state:
            self.state.drop()
        members = self.members
        if members is not None and members.survival is not None and members.notices is not None:
            # Nobody gives the values of the start twice: so nobody trains before all have them.
            view, raise_if_failed = members.notices.view, self.engine.progress.raise_if_failed
            self.connections.board.meet("begun", raise_if_failed, lambda: view.members)

    # The optimizer's numbers.
    def numbers(self) -> tuple[Hyperparameters, ...]:
        return with_scale(self._hyperparameters(), self._setup.scale)

    def _hyperparameters(self) -> tuple[Hyperparameters, ...]:
        return hyperparameters(self._optimizer) if self._serves else ()

    def announce(self, step: int) -> None:
        if self.codecs is not None and self._setup.scale is not None:
            self.codecs.residuals.announce(step, self._setup.scale)
        self.engine.announce_hyperparameters(step, msgspec.json.encode(self.numbers()))

    def tell_trainable(self, step: int, turned: Turned) -> None:
        data = msgspec.json.encode(turned)
        self.engine.send_to_all(Kind.TRAINABLE, step, CONTROL_PRIORITY, data)

    # The end.
    def refuse(self, error: BaseException) -> None:
        self.connections.board.publish_failure(error)

    def close(self, *, failed: bool) -> None:
        self._memory_factory.stop()

    def part(self, failure: BaseException | None) -> None:
        """Leave the session, and end the processes that this rank has started. Any thread."""
        failed = failure is not None or self.engine.progress.error is not None
        try:
            survival = None if self.members is None else self.members.survival
            (self.engine if survival is None else survival).close(failure=failure)
        except BaseException:
            failed = True
            raise
        finally:
            self.connections.close(kill=failed)

    def forget_in_child(self) -> None:
        self.connections.forget_in_child()

    def describe(self) -> str:
        from foreprop.backends.describing import describe_served

        codecs = "" if self.codecs is None else self.codecs.describe()
        return describe_served(self._setup, self.connections, codecs, self.why_python)


def add_features(engine: WorkerEngine) -> tuple[Later[RowExchange], Later[WorkerNorm]]:
    """Give the engine rows and the norm: now if the manifest asks for them, or when needed."""

    def make_rows() -> RowExchange:
        from foreprop.features.tables.exchange import RowExchange

        return RowExchange(engine)

    def make_norm() -> WorkerNorm:
        from foreprop.params.workernorm import WorkerNorm

        return WorkerNorm(engine)

    manifest = engine.manifest
    rows = Later({Kind.ROWS_REPLY, Kind.TABLE_REPLY}, make_rows)
    norm = Later({Kind.NORM, Kind.NORM_PART}, make_norm)
    engine.receivers.add(
        rows.service if engine.shards else rows,
        norm.service if manifest.needs_norm else norm,
    )
    return rows, norm


def features_of(norm: Later[WorkerNorm]) -> Features:
    return Features(norm_of=lambda step: norm.service.of(step))

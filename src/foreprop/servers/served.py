"""The backend of parameter servers: they hold the optimizer's state and apply the updates."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from foreprop.core.frames import CONTROL_PRIORITY
from foreprop.core.manifest import FROZEN_BLOB, NO_GROUP, Hyperparameters, Manifest
from foreprop.core.wire import Kind
from foreprop.hooks.modelhooks import pack, unpack_into
from foreprop.link.connection import Later
from foreprop.path.memory import MemoryFactory
from foreprop.path.optimizer import check_elementwise, check_groups, hyperparameters, with_scale
from foreprop.path.pipeline import Features
from foreprop.path.worker import WorkerEngine
from foreprop.servers.launch import Connections
from foreprop.servers.setup import Setup, check_frames

if TYPE_CHECKING:
    from foreprop.compression.pushcodecs import PushCodecs
    from foreprop.core.freezing import Turned
    from foreprop.core.lateness import Straggler
    from foreprop.numerics.norms import WorkerNorm
    from foreprop.path.managedparameter import ManagedParameter
    from foreprop.servers.servedstate import ServedState
    from foreprop.servers.surviving import Membership
    from foreprop.stragglers.pace import PaceKeeper
    from foreprop.tables.exchange import RowExchange


class ServedBackend:
    """Servers sum the gradients, apply the optimizer and send the parameters back."""

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
        """Of a newcomer: its first step."""
        self._optimizer = setup.optimizer
        self._memory_factory = MemoryFactory(setup.config)
        self.memory_of = self._memory_factory.memory_of
        self.connections = Connections(setup.world, setup.config, setup.part)
        manifest = self._manifest()
        check_frames(manifest)
        if manifest.knobs.compression:
            from foreprop.compression.choosing import check_setting

            check_setting(setup.config, manifest)
        if setup.config.staleness == "late":
            from foreprop.path.gpumemory import StagedMemory

            self.memory_of = StagedMemory
        self.connections.open()
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
        )
        self._rows, self._norm = add_features(self.engine)
        self._pace = Later({Kind.PACE_REPORT}, self._make_pace)
        self._tells_pace = self._are_in_step()
        self.codecs: PushCodecs | None = None
        self.members: Membership | None = None
        self.engine.compose(self._features())

    def _features(self) -> Features:
        """What this session has its engine do; each receiver is put before those made before."""
        setup, receivers, features = self._setup, self.engine.receivers, features_of(self._norm)
        if self.engine.manifest.knobs.compression:
            from foreprop.compression.pushcodecs import PushCodecs

            self.codecs = PushCodecs(self.engine)
            features = replace(features, encode=self.codecs.encode)
            receivers.put_before(self.codecs)
        if setup.config.counts_some:
            from foreprop.servers.surviving import make_members

            self.members = make_members(self.engine, self.connections, setup)
            features = self.members.features(features)
        if self._tells_pace:  # all ranks of a step do
            receivers.add(self._pace)
            features = replace(features, end_window=self._end_window)
        return features

    def _end_window(self, step: int) -> None:
        self._pace.service.end_window(step)

    def _are_in_step(self) -> bool:
        """Whether servers hear from every worker, and all are in the same step.

        Where values may be late the pace, which is waited for, is told for what needs it only.
        """
        config, together = self._setup.config, self.connections.workers_per_push == 1
        moves = config.rebalance_s is not None
        return (
            self._setup.world.size > 1
            and together
            and not config.counts_some
            and (not config.staleness or (config.staleness == "late" and moves))
        )

    def _manifest(self) -> Manifest:
        """Without the session's id."""
        knobs = self._setup.config.knobs(self.connections.servers)
        return self._setup.manifest(
            msgspec.structs.replace(
                knobs,
                aggregation=self._setup.aggregation,
                packs=self._setup.packs(knobs),
            ),
            groups=self._hyperparameters(),
            workers_per_push=self.connections.workers_per_push,
        )

    def _make_pace(self) -> PaceKeeper:
        from foreprop.stragglers.pace import PaceKeeper  # after some steps

        ranks, before = self.connections.server_ranks(), self._setup.steps_before
        links = self.connections.pass_links
        return PaceKeeper(self.engine, ranks, steps_before=before, links=links)

    @property
    def straggler(self) -> Straggler | None:
        return None if self.pace is None else self.pace.straggler

    @property
    def pace(self) -> PaceKeeper | None:
        """Once some steps are made; never with local aggregation."""
        return self._pace.made

    def ask_for_norm(self) -> None:
        """This rank's loop has: told with its pace, so that all ranks agree."""
        if self._tells_pace:
            self._pace.service.asks_norm = True

    @property
    def measures_norm(self) -> bool:
        """Whether all ranks have asked, so that servers tell `WorkerNorm.square_sums`."""
        return self.pace is not None and self.pace.measures_norm

    @property
    def rows(self) -> RowExchange:
        return self._rows.service

    @property
    def norm(self) -> WorkerNorm:
        return self._norm.service

    @functools.cached_property
    def state(self) -> ServedState:
        from foreprop.servers.servedstate import ServedState  # for checkpoints

        return ServedState(self._setup, self.engine, self._rows)

    # The start.
    def start(self, parameters: Sequence[ManagedParameter]) -> None:
        rank_zero = self._setup.world.rank == 0
        self.connections.pulses.tell(self.engine.ending.lose_silent)
        if self._setup.config.join is not None:
            from foreprop.servers.entering import enter

            self.joined_at = enter(self, parameters)
            return
        if not rank_zero:
            self.engine.await_values()  # before the servers know us: values may come at once
        self.engine.join(self.connections.board.check_failed)
        self.connections.settled()
        shared = [[frozen] for frozen in self.frozen]
        if rank_zero:
            for parameter in parameters:
                parameter.before_offering()
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
                parameter.receive_initial_value()
            for number, tensors in enumerate(shared, FROZEN_BLOB):
                unpack_into(tensors, self.engine.fetch_blob(number, 0))
        if self._serves and self._optimizer.state:
            self.state.drop()

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
        """Any thread. Also ends the processes that this rank has started."""
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
        from foreprop.servers.describing import describe_served

        return describe_served(self._setup, self.connections, self.codecs)


def add_features(engine: WorkerEngine) -> tuple[Later[RowExchange], Later[WorkerNorm]]:
    """Rows, the norm and casts, as the manifest asks for them; others when somebody needs them."""

    def make_rows() -> RowExchange:
        from foreprop.tables.exchange import RowExchange

        return RowExchange(engine)

    def make_norm() -> WorkerNorm:
        from foreprop.numerics.norms import WorkerNorm

        return WorkerNorm(engine)

    manifest = engine.manifest
    rows = Later({Kind.ROWS_REPLY, Kind.TABLE_REPLY}, make_rows)
    norm = Later({Kind.NORM, Kind.NORM_PART}, make_norm)
    engine.receivers.add(
        rows.service if engine.shards else rows,
        norm.service if manifest.needs_norm else norm,
    )
    if manifest.wire_dtypes() != [info.dtype for info in manifest.parameters]:
        from foreprop.numerics.wirecasts import WireCasts

        engine.memory.use_casts(WireCasts(manifest, engine.slices))
    return rows, norm


def features_of(norm: Later[WorkerNorm]) -> Features:
    """What every session's engine does."""
    return Features(norm_of=lambda step: norm.service.of(step))

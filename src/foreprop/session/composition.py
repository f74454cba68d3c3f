"""What a session is made of: the one place that knows which features and backends there are.

`parallelize` chooses among kinds of sessions. `begin` makes a session of several processes, and
`Composition` connects it and has its features. What a session does not have is not imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch

from foreprop.config import LOGGER, Config, Preset
from foreprop.core.codec import is_automatic
from foreprop.core.frames import PACE_STEPS
from foreprop.core.manifest import NO_GROUP, ParameterInfo
from foreprop.engine.world import World, current_world, is_alone
from foreprop.errors import ConfigError
from foreprop.params.interception import claim_parameter
from foreprop.params.modelhooks import bare_model, bare_optimizer
from foreprop.params.parameter import Parameter, ParameterArrival
from foreprop.params.setup import Setup, SharedBuffers
from foreprop.session.additions import Additions
from foreprop.session.adopting import UserModel, adopt
from foreprop.session.backends import (
    Backends,
    has_remote_tables,
    is_served,
    needs_servers,
    place_updates,
)
from foreprop.session.lifetime import Lifetime
from foreprop.session.session import ConnectedSession, Session, report_idle
from foreprop.session.training import Training
from foreprop.session.useorder import FirstStep, look_at_order

if TYPE_CHECKING:  # what only some sessions have
    from foreprop.config.typed import Settings
    from foreprop.engine.trace import TraceRecorder
    from foreprop.features.compiled.tracing import CompiledEntry
    from foreprop.features.tables.rowparameter import RowArrival
    from foreprop.params.averaged import Averages
    from foreprop.params.averaging import Averaging
    from foreprop.session.automatic import Automatic
    from foreprop.session.checkpoints import Checkpoints
    from foreprop.session.figures import Follower
    from foreprop.session.rebalancing import ElasticMoves, Rebalancing
    from foreprop.session.useorder import UseWatch

_KINDS = (
    ("model", torch.nn.Module, "torch.nn.Module"),
    ("optimizer", torch.optim.Optimizer | None, "torch.optim.Optimizer"),
    ("scaler", torch.amp.GradScaler | None, "torch.amp.GradScaler"),
)


def parallelize(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    preset: Preset | None = None,
    config: Config | None = None,
    world: World | None = None,
    scaler: torch.amp.GradScaler | None = None,
    resume: str | os.PathLike[str] | None = None,
    **settings: Unpack[Settings],
) -> Session:
    """Train ``model`` with ``optimizer`` on all ranks in step; both are changed in place.

    Call it on every rank, after the model is on its device and all parameter groups are there,
    before the first forward pass. Rank 0's parameters, buffers and optimizer state become
    everybody's. Ranks and addresses come from torchrun; started plainly the world is this process,
    and this is plain PyTorch, without servers, unless the model has remote tables.

    Args:
        model: any module; its parameters keep their identity, names and class. Embeddings with
            sparse gradients may be on the meta device: their rows are on the servers only.
        optimizer: any; over (some of) its parameters. Without one gradients are averaged when
            they are read.
        preset: ``p3`` (default), ``slicing``, ``kvstore``, ``wfbp``, ``tensorflow``, ``p3-2019``.
        config: all settings at once, instead of ``preset`` and ``settings``.
        world: who takes part, as with several processes; by default the environment says it.
        scaler: the ``GradScaler`` that scales this optimizer's loss; changed in place, too.
        resume: the folder of `foreprop.checkpoint`, to go on from the newest; it may be empty.
        **settings: single fields of `Config`, over preset and environment.

    Raises:
        ConfigError: what cannot be used; nothing is changed.
        HandshakeError: the ranks do not agree; both sides' values are in the message.
        StepTimeout, PeerLost: another process did not come, or went away.
    """
    given = {"preset": preset, "config": config, "world": world, "scaler": scaler, "resume": resume}
    asked = settings | {name: value for name, value in given.items() if value is not None}
    return _makers[-1](model, optimizer, **asked)


def make_session(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    preset: Preset | None = None,
    config: Config | None = None,
    world: World | None = None,
    scaler: torch.amp.GradScaler | None = None,
    resume: str | os.PathLike[str] | None = None,
    **settings: Unpack[Settings],
) -> Session:
    """Do what `parallelize` does, whoever stands in for it."""
    if config is not None and (preset is not None or settings):
        raise ConfigError("give either config, or preset and single settings, not both")
    for (name, kind, called), value in zip(_KINDS, (model, optimizer, scaler), strict=True):
        if not isinstance(value, kind):
            raise ConfigError(f"{name} is a {type(value).__name__}; it must be a {called}")
    config = config or Config.resolve(preset, **settings)
    if config.plugins is not None:
        from foreprop.config.plugins import load_plugins

        load_plugins(config.plugins)
    alone = config.max_workers is None and (is_alone() if world is None else world.size == 1)
    model = bare_model(model, alone=alone)
    optimizer = bare_optimizer(optimizer)
    lone = world is None and alone and not needs_servers(model, optimizer, config)

    def make(world: World | None) -> Session:
        if not lone:
            return connect(model, optimizer, config, world=world, scaler=scaler)
        from foreprop.session.alone import LoneSession

        return LoneSession(model, optimizer, config, scaler)

    if resume is None or config.join is not None:  # a newcomer has the others' values and progress
        return make(world)
    from foreprop.session.saving import resumed

    world = None if lone else world or current_world(config.join_timeout_s)
    return resumed(resume, model, optimizer, config, make, world=world)


_makers: list[Callable[..., Session]] = [make_session]


def stand_in(maker: Callable[..., Session]) -> None:
    """Have ``maker`` make this process's sessions from now on, wherever `parallelize` is called.

    It gets model and optimizer, and the rest by name. `foreprop compare` uses this.
    """
    _makers.append(maker)


def connect(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    *,
    world: World | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> ConnectedSession:
    """A session with servers or collectives, in a world of one, too, for what measures them."""
    if config.join is not None:
        from foreprop.config.checks import check_elastic

        check_elastic(config)
    world = world or current_world(config.join_timeout_s, joins=config.join)
    if has_remote_tables(model):
        from foreprop.config.combinations import settled

        config = config.replace(**settled(config, ["remote tables"]))
    if config.join is not None and is_automatic(config.compression):
        from foreprop.backends.elastic import with_chosen_codecs

        config = with_chosen_codecs(world.rank, config)
    if world.rank == 0:
        report_idle(model, optimizer)
    session = ConnectedSession(begin(model, optimizer, world, config, scaler))
    if session.rank == 0 and (session.world_size > 1 or config.max_workers):
        LOGGER.info("%s", session.describe())
    return session


def begin(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    world: World,
    config: Config,
    scaler: torch.amp.GradScaler | None = None,
) -> Training:
    """A session of several processes, connected, with model and optimizer adopted.

    Where it raises a `ForepropError` model and optimizer are as they were.
    """
    user = UserModel(model, optimizer, config)
    scaler = scaler if scaler is not None and scaler.is_enabled() else None
    rows = bool(user.row_wise or user.candidates)
    found: Mapping[str, str] = {}
    because: str | None = None
    if not config.is_usual or optimizer is None or scaler is not None or user.row_wise:
        from foreprop.session.features import asked_of_servers, checked_features

        found = checked_features(user, config, world.size, has_scaler=scaler is not None)
        because = asked_of_servers(config, found, rows=rows)
    place = place_updates(
        config, optimizer, because, dense=user.has_dense, collectives=not is_served(config)
    )
    if place.by_workers and because is not None:
        from foreprop.session.features import check_by_workers

        check_by_workers(config, found, place.why, rows=rows)
    training = Training(
        user, world, config, has_scaler=scaler is not None, by_workers=place.by_workers
    )
    training.life = Lifetime(training, world)
    training.additions = Additions(training)
    training.composition = composition = Composition(training)
    training.life.add_undo(user.restore)
    if config.check_stale:
        from foreprop.params.stalereaders import StaleReaders

        training.stale_readers = StaleReaders()
    if scaler is not None and not training.by_workers:
        from foreprop.params.loss_scale import LossScale

        training.loss_scale = LossScale(scaler, user.optimizer)
    user.take()
    try:
        composition.connect(user.row_wise)
        if world.rank != 0:
            training.buffers.fetch(0)
        adopt(training)
        if training.by_workers and optimizer is not None:
            _add_to_steps(training, optimizer, scaler)
        training.life.begin()
    except BaseException as error:
        training.life.release(failure=error)
        raise
    training.report(place.text)
    composition.begin_planning()
    if config.log_steps is not None or config.watch is not None:
        composition.followed()
    return training


def _add_to_steps(
    training: Training, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None
) -> None:
    # clip, and keep norm and averages as the settings say, in steps that the workers make
    config = training.config
    clips = config.clip_grad_norm is not None or config.clip_grad_value is not None
    if scaler is None and not clips and config.ema is None:
        return
    from foreprop.params.addedsteps import AddedSteps

    alive = training.reference()
    training.added = AddedSteps(
        training.user.model,
        optimizer,
        config,
        scaler,
        checks_finite=False,
        before=lambda: alive().complete_gradients(),
        made_later=True,
    )
    if training.given_model is not None:
        training.given_model.keeps_averages(training.added)
    training.life.add_undo(training.added.remove)


class Composition:
    """One session's backends and features. Training thread."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.uses: UseWatch | None = None
        self.compiled: CompiledEntry | None = None
        self.follower: Follower | None = None
        self.rebalancing: Rebalancing | None = None
        self.elastic_moves: ElasticMoves | None = None
        self._automatic: Automatic | None = None
        self._checkpoints: Checkpoints | None = None

    def connect(self, row_wise: Collection[str]) -> None:
        """Synchronise the parameters of these names row by row, the others in slices or chunks."""
        training, user = self._training, self._training.user
        training.completed = 0
        training.parameters, training.arrivals, training.tables = [], [], []
        training.remote = None
        if training.averaging is not None:
            training.averaging.connect(counts_rounds=self._counts_rounds)
        training.first = FirstStep(training)
        if training.world.local_size < training.world.size:
            from foreprop.session.slicesize import choose_slice_size

            choose_slice_size(training)
        setup = self._setup(row_wise)
        training.backends = backends = _connect_backends(setup)
        training.first_session_id = training.first_session_id or backends.session_id
        training.infos, training.every_parameter = setup.infos, backends.every_parameter
        training.settings = None
        if not training.by_workers or any(info.rows for info in setup.infos):
            from foreprop.session.settingswatch import SettingsWatch

            training.settings = SettingsWatch(
                user.optimizer,
                backends.numbers,
                backends.announce,
                parameters=user.optimized,
                is_scaled=training.loss_scale is not None,
            )
        said = setup.config.join is None  # what the others did before it came is no newcomer's word
        training.trained = [info.requires_grad if said else None for info in setup.infos]
        training.buffers = SharedBuffers(user.buffers, backends.engines[0], training.world)
        grows = training.world.rank == 0 and setup.config.max_workers is not None
        training.publishes_buffers = bool(user.buffers) and (training.buffers.publishes or grows)
        training.life.connected = True
        try:
            self._take_in_parameters()
            backends.start(training.parameters)
            if training.publishes_buffers:
                training.buffers.publish(0)
            if training.config.staleness or training.config.counts_some:
                from foreprop.session.meeting import begin

                begin(training)
        except BaseException as error:
            backends.refuse(error)
            raise
        if not training.first.is_over:
            training.first.begin(user.model)
        config, training.replicas = training.config, None
        if training.world.size > 1 and config.check_replicas and not config.steps_may_differ:
            from foreprop.session.replicas import ReplicaCheck

            training.replicas = ReplicaCheck(training)
        for synchronised in training.parameters:
            claim_parameter(synchronised.name, synchronised.parameter, training.give_away)

    def _take_in_parameters(self) -> None:
        training = self._training
        for index, (name, parameter, _) in enumerate(training.user.named):
            arrival = self._arrival_of(index, parameter)
            made = Parameter(index, name, parameter, training, arrival=arrival)
            training.parameters.append(made)
            training.arrivals.append(made.arrival)
        if training.averaging is not None:
            training.averaging.forget_others()
            for pack in training.backends.packs:
                from foreprop.params.pack import Pack

                parts = [cast("Averages", training.arrivals[number]) for number in pack]
                training.averaging.packs.append(Pack(parts, training, training.averaging))
        by_rows = (made.arrival for made in training.parameters if training.infos[made.index].rows)
        training.tables = [cast("RowArrival", arrival) for arrival in by_rows]
        if any(info.init is not None for info in training.infos):
            from foreprop.session.checkpoints import remote_tables

            training.remote = remote_tables(training)

    def _arrival_of(
        self, index: int, parameter: torch.nn.Parameter
    ) -> Callable[[Parameter], ParameterArrival]:
        # makes what lands in the parameter of this number
        training = self._training
        info = training.infos[index]
        if info.rows:
            from foreprop.features.tables.rowparameter import RemoteRows, TableRows

            exchange, number = training.backends.rows_of(index)
            rows = TableRows if info.init is None else RemoteRows
            return partial(rows, exchange=exchange, number=number)
        wanted = index < training.user.optimized
        if wanted and not training.by_workers:
            if training.config.staleness == "late":
                from foreprop.features.members.lateparameter import LateValues

                return LateValues
            from foreprop.params.servedparameter import ServedValues

            return ServedValues
        from foreprop.params.averaged import AveragedGradient, Averages

        averaging = self.averaging()
        gradient = averaging.known.pop(id(parameter), None)
        if gradient is None:
            gradient = AveragedGradient(parameter, training, averaging)
        gradient.wanted |= wanted
        gradient.place = len(averaging.gradients)
        averaging.gradients.append(gradient)
        return partial(Averages, gradient=gradient, averaging=averaging)

    def averaging(self) -> Averaging:
        """What the session's averaged parameters have in common; made for the first of them."""
        training = self._training
        if training.averaging is None:
            from foreprop.params.averaging import Averaging

            training.averaging = Averaging(
                training.user.optimizer, training.fixed_passes, counts_rounds=self._counts_rounds
            )
        return training.averaging

    @property
    def _counts_rounds(self) -> bool:
        # collectives know no rounds of a step, and no codec is told which of them count
        config, has_optimizer = self._training.config, self._training.user.has_optimizer
        return not is_served(config) or (bool(config.codecs) and not has_optimizer)

    def _setup(self, row_wise: Collection[str]) -> Setup:
        training, user = self._training, self._training.user

        def make_trace(session_id: str) -> TraceRecorder | None:
            if training.config.trace is not None and training.trace is None:
                from foreprop.session.figures import begin_trace

                training.trace = begin_trace(training, training.config.trace, session_id)
            return training.trace

        return Setup(
            world=training.world,
            config=training.config,
            optimizer=user.optimizer,
            parameters=[parameter for _, parameter, _ in user.named],
            infos=list(user.infos(row_wise, by_workers=training.by_workers)),
            frozen=user.frozen,
            buffers=user.buffers,
            memory=training.arrivals,
            make_trace=make_trace,
            loss_scale=training.loss_scale,
            has_scaler=training.has_scaler,
            steps_before=training.completed_before,
            look=training.additions.look,
            by_workers=training.by_workers,
        )

    def reconnect_with(self, names: Sequence[str]) -> None:
        """Go on with the parameters that there are now, of which these are new; on all ranks."""
        from foreprop.session.reconnecting import reconnect_with

        reconnect_with(self._training, names)

    def raise_if_others_join(self) -> None:
        from foreprop.session.reconnecting import raise_if_others_join

        raise_if_others_join(self._training)

    # Features, which are loaded when they are asked for.
    @property
    def checkpoints(self) -> Checkpoints:
        if self._checkpoints is None:
            from foreprop.session.checkpoints import Checkpoints

            self._checkpoints = Checkpoints(self._training)
        return self._checkpoints

    def followed(self) -> Follower:
        if self.follower is None:
            from foreprop.session.figures import follow

            self.follower = follow(self._training)
        return self.follower

    def stats(self) -> dict[str, Any]:
        from foreprop.session.figures import stats_of

        return stats_of(self._training)

    def begin_planning(self) -> None:
        """Plan what is ``"auto"``: from the parameters as they are now."""
        training, config = self._training, self._training.config
        codecs = str(config.compression).partition(":")[0]
        if training.world.size > 1 and "auto" in {config.architecture, config.slice_elems, codecs}:
            from foreprop.session.automatic import Automatic

            self._automatic = Automatic(training)
        elif codecs == "auto" and config.max_workers is not None:
            training.report(
                "compression: none, for one worker alone has no links to measure; name a codec for"
                " those that come"
            )

    @property
    def planning(self) -> bool:
        return self._automatic is not None and self._automatic.planning is not None

    def meet(self, where: str) -> bool:
        """Have ranks that may be in different steps meet; whether all have come for the same."""
        if not self._training.config.steps_may_differ:
            return True
        from foreprop.session.meeting import meet

        return meet(self._training, where)

    @property
    def first_step(self) -> int | None:
        """A newcomer's first step, as its servers count; None for all others."""
        if self._training.config.join is None:
            return None
        from foreprop.session.meeting import backend_of

        return backend_of(self._training).joined_at

    def check_layout(self, info: ParameterInfo, layout: torch.layout) -> None:
        from foreprop.features.tables.embeddings import check_kind

        training, sparse = self._training, layout != torch.strided
        if sparse and info.group != NO_GROUP and not training.by_workers:
            from foreprop.features.tables.rowtable import check_row_wise

            check_row_wise(training.user.optimizer, {info.name: info.group})
        check_kind(info, training.config.aggregation, sparse=sparse)

    def compiled_code_entered(self, everything: bool) -> None:
        """Settle parameters before compiled code; all of them before what needs ordinary ones."""
        if self.compiled is None:
            from foreprop.features.compiled.tracing import CompiledEntry

            self.compiled = CompiledEntry(self._training, self._training.tables)
        self.compiled.entered(everything=everything)

    def tell_turned(self, step: int) -> None:
        """Tell the others which parameters have been frozen or unfrozen since the last step.

        They wait once more for what has just been frozen.
        """
        from foreprop.core.freezing import NOTHING_TURNED, what_turned

        training = self._training
        trained = [each.parameter.requires_grad for each in training.parameters]
        changes = what_turned(training.trained, trained)
        training.trained, training.just_frozen = trained, frozenset(changes.frozen)
        if changes != NOTHING_TURNED:
            averaging = training.averaging
            counted = step if averaging is None else averaging.rounds.step
            training.backends.tell_trainable(counted, changes)

    def end_step(self) -> None:
        """Call whatever measures, moves or tells something after a step."""
        training, step = self._training, self._training.completed
        if training.config.rebalance_s is not None:
            from foreprop.session.rebalancing import rebalance

            rebalance(training, training.config.rebalance_s)
        if training.world.rank == 0 and step >= PACE_STEPS and step % PACE_STEPS <= 1:
            look_at_order(training)
        if self._automatic is not None:
            self._automatic.end_step()
        if self.follower is not None:
            self.follower.end_step(training.completed_before + training.completed)


def _connect_backends(setup: Setup) -> Backends:
    rows = [info.rows for info in setup.infos]
    numbers = range(len(rows))
    if is_served(setup.config) or all(rows):
        from foreprop.backends.composedworker import ServedBackend

        return Backends([(ServedBackend(setup), numbers)])
    if any(rows):
        from foreprop.backends.hybrid import connect_both

        return Backends(connect_both(setup))
    from foreprop.backends.ring import RingBackend

    return Backends([(RingBackend(setup), numbers)])

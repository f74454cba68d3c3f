"""The machinery of a session: what its parameters, its hooks and the optimizer's `step()` call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from foreprop.cluster.rendezvous import Board, step_board
from foreprop.cluster.world import World
from foreprop.config import LOGGER, Config
from foreprop.core.frames import PACE_STEPS
from foreprop.core.manifest import NO_GROUP, ParameterInfo
from foreprop.errors import TrainingLoopError
from foreprop.gradients.optimizerstate import ShownState
from foreprop.hooks.modelhooks import SharedBuffers
from foreprop.path.memory import Memory
from foreprop.session.additions import Additions
from foreprop.session.adopting import Belongings, SettingsWatch, adopt
from foreprop.session.backends import Backends, connect, is_served, stale_readers_for
from foreprop.session.firststep import FirstStep
from foreprop.session.lifetime import Lifetime
from foreprop.session.updateplace import place_updates

if TYPE_CHECKING:  # what only some sessions need
    from foreprop.auto.stepprobe import StepProbe
    from foreprop.compiled.entry import CompiledEntry
    from foreprop.core.norm import SquareSum
    from foreprop.elastic.givenmodel import GivenModel
    from foreprop.gradients.averaging import Averaging
    from foreprop.hooks.compute_trace import ComputeTrace
    from foreprop.numerics.loss_scale import LossScale
    from foreprop.observe.trace import TraceRecorder
    from foreprop.path.managedparameter import Engine, ManagedParameter, Watched
    from foreprop.session.addedsteps import AddedSteps
    from foreprop.session.automatic import Automatic
    from foreprop.session.checkpoints import Checkpoints
    from foreprop.session.figures import Follower
    from foreprop.session.rebalancing import Rebalancing
    from foreprop.session.relearning import UseWatch
    from foreprop.session.replicas import ReplicaCheck
    from foreprop.tables.remote import RemoteTable
    from foreprop.tables.rowparameter import RowParameter
    from foreprop.tables.tables import RemoteTables


class Training:
    """One session. The model's hooks and parameters keep it alive, whoever drops the `Session`."""

    backends: Backends
    infos: Sequence[ParameterInfo]
    every_parameter: bool
    settings: SettingsWatch
    first: FirstStep
    trained: Sequence[bool | None]
    """By parameter, whether it required gradients at the end of the last step; None: not said."""
    buffers: SharedBuffers
    publishes_buffers: bool
    """Of the present connection, as `session.backends` makes them."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        world: World,
        config: Config,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.config = config
        self.world = world
        self.life = Lifetime(self, world)
        self.completed = 0  # steps since the backend was connected
        self.completed_before = 0
        self.fixed_passes = config.backward_passes
        self.reduces_by_kind = config.sparse_reduction not in (None, config.reduction)
        self.keeps_averages = config.elastic
        self.given_model: GivenModel | None = None
        """To newcomers; told of a step's first gradient, before it leaves."""
        self.leaves_rows = False
        self.watches_buffers = False
        self.stepped = optimizer is None  # or there is nothing to step
        self.averaging: Averaging | None = None
        self.remote: RemoteTables | None = None
        self.probe: StepProbe | None = None
        self.compute_trace: ComputeTrace | None = None
        self.loss_scale: LossScale | None = None
        self.stale_readers = stale_readers_for(config)
        self.parameters: list[ManagedParameter] = []
        self.just_frozen: frozenset[int] = frozenset()
        self.tables: list[RowParameter | RemoteTable] = []
        self._automatic: Automatic | None = None
        self._checkpoints: Checkpoints | None = None
        self._compiled: CompiledEntry | None = None
        self.uses: UseWatch | None = None
        self.rebalancing: Rebalancing | None = None
        self.norm_before: float | None = None  # of the last step before the backend was connected
        self.trace: TraceRecorder | None = None
        self.follower: Follower | None = None
        self.added: AddedSteps | None = None
        self.additions = Additions(self)
        self.replicas: ReplicaCheck | None = None
        self._begin(model, optimizer, scaler)

    # The start.
    def _begin(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        config = self.config
        self.user = Belongings(model, optimizer, config)
        self.life.add_undo(self.user.restore)
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.has_scaler = scaler is not None
        found: Mapping[str, str] = {}
        if not config.is_usual or optimizer is None or self.has_scaler or self.user.row_wise:
            from foreprop.session.features import checked_features

            found = checked_features(self, optimizer)
        place = place_updates(
            config,
            optimizer,
            found,
            dense=self.user.has_dense,
            rows=bool(self.user.row_wise or self.user.candidates),
            collectives=self.has_collectives,
        )
        self.by_workers = place.by_workers
        """Whether workers update all but tables by rows."""
        if scaler is not None and not self.by_workers:
            from foreprop.numerics.loss_scale import LossScale

            self.loss_scale = LossScale(scaler, self.user.optimizer)
        self.user.take()
        self.state = self._shown_state()
        try:
            connect(self, self.user.row_wise)
            if self.world.rank != 0:
                self.buffers.fetch(0)
            adopt(self)
            if self.by_workers and optimizer is not None:
                self._add_to_steps(optimizer, scaler)
            self.life.begin()
        except BaseException as error:
            self.life.release(failure=error)
            raise
        self.report(place.text)
        self.begin_planning()
        if config.log_steps is not None or config.watch is not None:
            self.followed()

    def followed(self) -> Follower:
        """Who tells about steps; from the first call on."""
        if self.follower is None:
            from foreprop.session.figures import follow

            self.follower = follow(self)
        return self.follower

    def _add_to_steps(
        self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None
    ) -> None:
        """Clip, and keep norm and averages as the settings say, in steps that the workers make."""
        config = self.config
        clips = config.clip_grad_norm is not None or config.clip_grad_value is not None
        if scaler is None and not clips and config.ema is None:
            return
        from foreprop.session.addedsteps import AddedSteps

        alive = self.reference()
        self.added = AddedSteps(
            self.user.model,
            optimizer,
            config,
            scaler,
            checks_finite=False,
            before=lambda: alive().complete_gradients(),
            made_later=True,
        )
        if self.given_model is not None:
            self.given_model.keeps_averages(self.added)
        self.life.add_undo(self.added.remove)

    def _shown_state(self) -> ShownState:
        alive = self.reference()
        return ShownState(
            self.user.optimizer,
            fetch=lambda: alive().checkpoints.pull_state(),
            forget=lambda: alive().backends.drop_state(),
            replace=lambda: alive().checkpoints.replace_state(),
        )

    @property
    def checkpoints(self) -> Checkpoints:
        if self._checkpoints is None:
            from foreprop.session.checkpoints import Checkpoints

            self._checkpoints = Checkpoints(self)
        return self._checkpoints

    def begin_planning(self) -> None:
        """What is ``"auto"``: from the parameters as they are now."""
        chosen = {self.config.architecture, self.config.slice_elems}
        codecs = str(self.config.compression).partition(":")[0]
        if self.world.size > 1 and "auto" in chosen | {codecs}:
            from foreprop.session.automatic import Automatic

            self._automatic = Automatic(self)

    @property
    def grad_norm(self) -> float | None:
        if self.added is not None:
            return None if self.added.norm is None else float(self.added.norm)
        return self.backends.grad_norm(self.completed) if self.completed else self.norm_before

    @property
    def has_collectives(self) -> bool:
        """Whether they have the dense parameters, and not servers."""
        return not is_served(self.config)

    def forget_backend(self) -> None:
        """What has been learned of the present parameters and their backend."""
        if self.uses is not None:
            self.uses.look_away()
        self.uses = self._compiled = None

    @property
    def planning(self) -> bool:
        return self._automatic is not None and self._automatic.is_planning

    def reference(self) -> Callable[[], Training]:
        """For what must not keep the session alive; raises when it is over."""
        weak = weakref.ref(self)

        def alive() -> Training:
            found = weak()
            if found is None or found.life.closed:
                raise TrainingLoopError("this optimizer's foreprop session has been closed")
            return found

        return alive

    def board(self, key: str) -> Board:
        about = f"{key}/{self.backends.session_id}"
        return step_board(self.world, self.config, about, self.backends.raise_if_failed)

    def report(self, text: str | None) -> None:
        if text and self.world.rank == 0:
            LOGGER.info("%s", text)

    # What a parameter asks on its gradient's way and at its use: see `SessionState`.
    @property
    def learning(self) -> bool:
        """With several models in one process (a GAN) the first step shows only half the loop."""
        return self.completed < (1 if self.world.sessions < 2 else 2)

    @property
    def eager(self) -> bool:
        """Whether gradients may leave before the step is made.

        A backward pass before the first forward pass says nothing about priorities.
        """
        if self.by_workers:
            shown = self.first.is_over or self.first.in_forward
            return shown and not self.additions.hold(self.averaging)
        return not self.learning

    def gradient_ready(self, parameter: Watched) -> None:
        if self.compute_trace is not None:
            self.compute_trace.gradient_ready(parameter.name)
        if self.probe is not None:
            self.probe.ready(parameter)

    def begin_pushing(self) -> None:
        """Announce the optimizer's numbers before a step's first push, if they have changed."""
        step = self.completed + 1
        if self.given_model is not None:
            self.given_model.begin_step(step, self.settle_updates)
        if self.replicas is not None:
            averaging = self.averaging
            self.replicas.look(step if averaging is None else averaging.rounds.serial)
        if self.settings.announced_step == step:
            return
        if self._state_is_touched:
            self.state.take()
        if not self.first.is_over:
            self.first.end()
        if self.by_workers and not self.tables:
            return
        self.settings.announce(step)

    @property
    def _state_is_touched(self) -> bool:
        """Whether ``optimizer.state`` has been shown since the last step, or replaced."""
        state = self.state
        return state.seen is not None or self.user.optimizer.state is not state.installed

    def check_layout(self, parameter: int, layout: torch.layout) -> None:
        from foreprop.tables.embeddings import check_kind

        info = self.infos[parameter]
        sparse = layout != torch.strided
        if sparse and info.group != NO_GROUP and not self.by_workers:
            from foreprop.tables.rowupdates import check_row_wise

            check_row_wise(self.user.optimizer, {info.name: info.group})
        check_kind(info, self.config.aggregation, sparse=sparse)

    def engine_of(self, parameter: int) -> tuple[Engine, int]:
        return self.backends.engine_of(parameter)

    def memory_of(self, parameter: torch.Tensor) -> Memory:
        return self.backends.memory_of(parameter)

    def first_use_begins(self, parameter: Watched) -> None:
        if self.probe is not None:
            self.probe.asked(parameter)

    def is_first_use(self, parameter: Watched, result: Any) -> bool:
        return self.first.is_use(parameter, result)

    def aggregated_gradient(self, parameter: int) -> torch.Tensor:
        """What the last update of the parameter was made with, flat, from who made it."""
        return self.backends.pull_gradient(parameter, self.completed)

    def square_sums(self, round_: int) -> Sequence[SquareSum]:
        return self.backends.square_sums(round_, self.completed + 1)

    def gradients_read(self) -> None:
        """Somebody reads or edits this rank's own gradient: have it averaged, and the others'."""
        self.additions.join()
        self.first.end()
        if self.averaging is not None:
            # collectives average all or nothing
            self.averaging.average_all(every=self.every_parameter)

    # What the model's hooks call.
    def forward_started(self) -> None:
        self.first.forward_started()

    def synchronise_buffers(self) -> None:
        self.buffers.show(self.completed)

    def saving(self, begins: bool) -> None:
        """What is read until it ends is a checkpoint's: see `Config.whole_tables`."""
        self.leaves_rows = begins and not self.config.keeps_whole_tables(self.world.rank)

    def compiled_code_entered(self, everything: bool) -> None:
        """Compiled code is entered, or (``everything``) code that needs ordinary parameters."""
        if self._compiled is None:
            from foreprop.compiled.entry import CompiledEntry

            self._compiled = CompiledEntry(self, self.tables)
        self._compiled.entered(everything=everything)

    def flush(self) -> None:
        self.settle_all()
        self.settle_tables()

    def meet(self, where: str) -> None:
        """Ranks that may be apart come together."""
        if self.config.staleness or self.config.backup_workers:
            from foreprop.session.meeting import meet

            meet(self, where)

    def settle_all(self) -> None:
        """Wait for what the servers send by themselves."""
        self.backends.raise_if_failed()
        self.backends.start_step()
        for parameter in self.parameters:
            parameter.check_stepped()
            parameter.settle()

    def settle_updates(self) -> None:
        """Make the updates of the last step that wait for their parameters' first use."""
        if self.averaging is not None:
            self.averaging.settle()

    def settle_tables(self) -> None:
        for parameter in self.parameters:
            parameter.settle_whole()

    # What the optimizer's methods call.
    def discard_gradients(self, set_to_none: bool) -> None:
        for parameter in self.parameters:
            parameter.gradient_discarded(dropped=set_to_none)
            if not set_to_none:
                parameter.replace_busy_gradient()

    def makes_whole_steps(self) -> bool:
        """Whether the user's own step is called, when all gradients are here."""
        return self.by_workers and not (self.averaging is not None and self.averaging.defers())

    def step_whole(self, own_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The user's own `step()`, on averaged gradients; it may have a closure that makes them."""
        self.backends.raise_if_failed()
        if not (args or kwargs):
            self.additions.join()
            self._finish_rounds()
            if self.averaging is not None:
                self.averaging.receive_all()
        result = own_step(*args, **kwargs)
        if args or kwargs:
            self.additions.join()
            self._finish_rounds()
        self._end_step()
        return result

    def step(self) -> None:
        if self.backends.progress.failed:
            self.backends.raise_if_failed()
        self.leaves_rows = False  # if a state_dict() was broken off
        self.additions.join()
        if self.loss_scale is not None:
            self.loss_scale.check_stepping()
        if self.tables or not self.by_workers:
            self.settings.check_unchanged(self.completed + 1)
        if self.settings.announced_step > self.completed and self._state_is_touched:
            self.state.check_unedited()
        self._finish_rounds()
        if self.by_workers and self.averaging is not None:
            self.averaging.defer_step()
        self._end_step()

    def complete_gradients(self) -> None:
        """Before a step is clipped: averages of what only other ranks had gradients of, too."""
        self.additions.join()
        self._finish_rounds()
        if self.averaging is not None:
            self.averaging.receive_others()

    def _finish_rounds(self) -> None:
        """All gradients of the step leave that have not left."""
        if self.probe is not None:
            self.probe.end()
        if not self.first.is_over:
            self.first.end()
        step = self.completed + 1
        if self.settings.announced_step != step:
            self.begin_pushing()
        with torch._C.DisableTorchFunctionSubclass():
            turned = bool(self.just_frozen)
            for parameter, before in zip(self.parameters, self.trained, strict=True):
                turned |= parameter.parameter.requires_grad is not before
            if turned:
                self._tell_turned(step)
            for parameter in self.parameters:
                parameter.finish_step(step)
            if self.averaging is not None:
                self.averaging.leave()

    def _tell_turned(self, step: int) -> None:
        """The others wait once more for what has just been frozen."""
        from foreprop.core.freezing import NOTHING_TURNED  # loops that never freeze do without
        from foreprop.path.trainable import what_turned

        trained = [each.parameter.requires_grad for each in self.parameters]
        turned = what_turned(self.trained, trained)
        self.trained, self.just_frozen = trained, frozenset(turned.frozen)
        if turned != NOTHING_TURNED:
            counted = step if self.averaging is None else self.averaging.rounds.step
            self.backends.tell_trainable(counted, turned)

    def _end_step(self) -> None:
        step = rounds = self.completed + 1
        if self.averaging is not None:
            self.averaging.end_step(learning=self.learning)
            rounds = self.averaging.rounds.step - 1
            if (inverse := self.averaging.unscaled_by) is not None:
                self.backends.tell_scale(rounds + 1, inverse)
        self.completed = step
        for table in self.tables:
            table.prefetch()
        if self.publishes_buffers:
            self.buffers.publish(step)
        averaging = self.averaging
        if averaging is not None and averaging.asks_norm:
            self.backends.ask_for_norm()
            averaging.asks_norm = False
        for engine in self.backends.engines:
            engine.end_step(rounds)
        if averaging is not None:
            averaging.measure(on=self.backends.measures_norm)
        if self.config.rebalance_s is not None and step % PACE_STEPS == 0:
            from foreprop.session.rebalancing import rebalance

            rebalance(self, self.config.rebalance_s)
        if self.world.rank == 0 and step >= PACE_STEPS and step % PACE_STEPS <= 1:
            from foreprop.session.relearning import look_at_order

            look_at_order(self)
        if self._automatic is not None:
            self._automatic.end_step()
        if self.follower is not None:
            self.follower.end_step(self.completed_before + self.completed)

    # The end.
    def give_away(self, parameter: torch.Tensor) -> bool:
        """Another session's optimizer has it; False if this one's has it too."""
        from foreprop.session.handover import hand_over

        return hand_over(self, parameter)

"""The machinery of a session: what its parameters, its hooks and the optimizer's `step()` call.

`session.composition` makes a `Training`, with its parts. The hooks on gradients keep it alive,
whoever drops the `Session`; the optimizer's methods have a weak `reference`, and raise when the
session is over.

Steps are counted anew by each connection: ``completed`` are those since the last one, and
``completed_before`` those before that, with what a checkpoint had.

A step goes so: ``gradient_ready`` and ``begin_pushing`` are called in the backward pass, or where
gradients are read (``gradients_read``). `step` or `step_whole` is called by the optimizer; in it
all gradients leave that have not (``_finish_rounds``), and everything is told that counts steps
(``_end_step``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from foreprop.config import LOGGER, Config
from foreprop.core.manifest import ParameterInfo
from foreprop.engine.memory import Memory
from foreprop.engine.rendezvous import Board, step_board
from foreprop.engine.world import World
from foreprop.errors import TrainingLoopError
from foreprop.params.interception import release_parameter
from foreprop.params.optimizerstate import ShownState
from foreprop.params.setup import Engine, SharedBuffers
from foreprop.session.backends import Backends

if TYPE_CHECKING:  # its parts, which know it, and what only some sessions have
    from foreprop.core.norm import SquareSum
    from foreprop.engine.trace import TraceRecorder
    from foreprop.features.members.statetransfer import GivenModel
    from foreprop.features.tables.remotetables import RemoteTables
    from foreprop.features.tables.rowparameter import RowArrival
    from foreprop.params.addedsteps import AddedSteps
    from foreprop.params.averaging import Averaging
    from foreprop.params.compute_trace import ComputeTrace
    from foreprop.params.loss_scale import LossScale
    from foreprop.params.parameter import Parameter, ParameterArrival
    from foreprop.params.stalereaders import StaleReaders
    from foreprop.plan.stepprobe import StepProbe
    from foreprop.session.additions import Additions
    from foreprop.session.adopting import UserModel
    from foreprop.session.composition import Composition
    from foreprop.session.lifetime import Lifetime
    from foreprop.session.replicas import ReplicaCheck
    from foreprop.session.settingswatch import SettingsWatch
    from foreprop.session.useorder import FirstStep


class Training:
    """One session: the state that its parts share."""

    life: Lifetime
    additions: Additions
    composition: Composition
    # from here on of the present connection, as `Composition.connect` makes them
    backends: Backends
    infos: Sequence[ParameterInfo]
    every_parameter: bool
    settings: SettingsWatch | None  # None where servers update nothing
    first: FirstStep
    trained: Sequence[bool | None]
    """Whether each parameter required gradients at the last step's end; None: not said."""
    buffers: SharedBuffers
    publishes_buffers: bool

    def __init__(
        self,
        user: UserModel,
        world: World,
        config: Config,
        *,
        has_scaler: bool,
        by_workers: bool,
    ) -> None:
        self.config = config
        self.world = world
        self.user = user
        self.has_scaler = has_scaler
        self.by_workers = by_workers  # workers update all but tables by rows
        self.completed = 0
        self.completed_before = 0
        self.resumed_at = 0  # the step of the checkpoint that the session has gone on from
        self.first_session_id = ""  # of the first connection
        self.fixed_passes = config.backward_passes
        self.reduces_by_kind = config.sparse_reduction not in (None, config.reduction)
        self.keeps_averages = config.elastic
        self.given_model: GivenModel | None = None
        """What newcomers begin with; called before a step's first gradient leaves."""
        self.leaves_rows = False
        self.watches_buffers = False
        self.stepped = not user.has_optimizer  # or there is nothing to step
        self.averaging: Averaging | None = None
        self.remote: RemoteTables | None = None
        self.probe: StepProbe | None = None
        self.compute_trace: ComputeTrace | None = None
        self.loss_scale: LossScale | None = None
        self.stale_readers: StaleReaders | None = None
        self.parameters: list[Parameter] = []
        self.arrivals: list[ParameterArrival] = []
        self.just_frozen: frozenset[int] = frozenset()
        self.tables: list[RowArrival] = []
        self.note_use: Callable[[int], None] | None = None
        self.norm_before: float | None = None  # of the last step before the backend was connected
        self.trace: TraceRecorder | None = None
        self.added: AddedSteps | None = None
        self.replicas: ReplicaCheck | None = None
        alive = self.reference()
        self.state = ShownState(
            user.optimizer,
            fetch=lambda: alive().composition.checkpoints.pull_state(),
            forget=lambda: alive().backends.drop_state(),
            replace=lambda: alive().composition.checkpoints.replace_state(),
        )

    @property
    def grad_norm(self) -> float | None:
        if self.added is not None:
            return None if self.added.norm is None else float(self.added.norm)
        return self.backends.grad_norm(self.completed) if self.completed else self.norm_before

    @property
    def steps_before(self) -> int:
        """The steps that the session had made when its present servers began."""
        return self.completed_before - self.resumed_at

    def reference(self) -> Callable[[], Training]:
        """A reference that does not keep the session alive; raises when it is over."""
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

    # What parameters ask, see `SessionState`.
    @property
    def learning(self) -> bool:
        # with several models in one process (a GAN) the first step shows only half the loop
        return self.completed < (1 if self.world.sessions < 2 else 2)

    @property
    def eager(self) -> bool:
        """Whether gradients may leave before the step is made."""
        if self.by_workers:
            # a backward pass before the first forward pass says nothing about priorities
            shown = self.first.is_over or self.first.in_forward
            return shown and not self.additions.hold(self.averaging)
        return not self.learning

    def gradient_ready(self, parameter: Parameter) -> None:
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
        if self.settings is not None and self.settings.announced_step == step:
            return
        if self._state_is_touched:
            self.state.take()
        if not self.first.is_over:
            self.first.end()
        if self.settings is not None:
            self.settings.announce(step)

    @property
    def _state_is_touched(self) -> bool:
        """Whether ``optimizer.state`` has been shown since the last step, or replaced."""
        state = self.state
        return state.seen is not None or self.user.optimizer.state is not state.installed

    def check_layout(self, parameter: int, layout: torch.layout) -> None:
        self.composition.check_layout(self.infos[parameter], layout)

    def engine_of(self, parameter: int) -> tuple[Engine, int]:
        return self.backends.engine_of(parameter)

    def memory_of(self, parameter: torch.Tensor) -> Memory:
        return self.backends.memory_of(parameter)

    def first_use_begins(self, parameter: Parameter) -> None:
        if self.probe is not None:
            self.probe.asked(parameter)

    def is_first_use(self, parameter: Parameter, result: Any) -> bool:
        return self.first.is_use(parameter, result)

    def aggregated_gradient(self, parameter: int) -> torch.Tensor:
        return self.backends.pull_gradient(parameter, self.completed)

    def square_sums(self, round_: int) -> Sequence[SquareSum]:
        return self.backends.square_sums(round_, self.completed + 1)

    def gradients_read(self) -> None:
        """Have this rank's gradients averaged: somebody reads or edits one."""
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
        """Note that a checkpoint is made until it ends, see `Config.whole_tables`."""
        self.leaves_rows = begins and not self.config.keeps_whole_tables(self.world.rank)

    def flush(self) -> None:
        self.settle_all()
        self.settle_tables()

    def settle_all(self) -> None:
        self.backends.raise_if_failed()
        self.backends.start_step()
        for parameter in self.parameters:
            parameter.gradient.check_stepped()
            parameter.arrival.settle()

    def settle_updates(self) -> None:
        """Make the updates of the last step that wait for their parameters' first use."""
        if self.averaging is not None:
            self.averaging.settle()

    def settle_tables(self) -> None:
        for arrival in self.arrivals:
            arrival.settle_whole()

    # What the optimizer's methods call.
    def discard_gradients(self, set_to_none: bool) -> None:
        for parameter in self.parameters:
            parameter.gradient.discarded(dropped=set_to_none)
            if not set_to_none:
                parameter.arrival.replace_busy_gradient()

    def makes_whole_steps(self) -> bool:
        """Whether the user's own step is called, when all gradients are here."""
        return self.by_workers and not (
            self.averaging is not None and self.averaging.stepper.can_defer()
        )

    def step_whole(self, own_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the user's own `step()` on averaged gradients, which its closure may make."""
        self.backends.raise_if_failed()
        if not (args or kwargs):
            self.additions.join()
            self._finish_rounds()
            if self.averaging is not None:
                self.averaging.receive()
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
        if self.settings is not None:
            self.settings.check_unchanged(self.completed + 1)
            if self.settings.announced_step > self.completed and self._state_is_touched:
                self.state.check_unedited()
        self._finish_rounds()
        if self.by_workers and self.averaging is not None:
            self.averaging.defer_step()
        self._end_step()

    def complete_gradients(self) -> None:
        """Receive averages of what only others had gradients of, before a step is clipped."""
        self.additions.join()
        self._finish_rounds()
        if self.averaging is not None:
            self.averaging.receive(only_missing=True)

    def _finish_rounds(self) -> None:
        """Have all gradients of the step leave that have not left."""
        if self.probe is not None:
            self.probe.end()
        if not self.first.is_over:
            self.first.end()
        step = self.completed + 1
        if self.settings is None or self.settings.announced_step != step:
            self.begin_pushing()
        with torch._C.DisableTorchFunctionSubclass():
            turned = bool(self.just_frozen)
            for parameter, before in zip(self.parameters, self.trained, strict=True):
                turned |= parameter.parameter.requires_grad is not before
            if turned:
                self.composition.tell_turned(step)
            for parameter in self.parameters:
                parameter.gradient.finish_step(step)
            if self.averaging is not None:
                self.averaging.leave()

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
        self.composition.end_step()

    def give_away(self, parameter: torch.Tensor) -> bool:
        """Let another session's optimizer have the parameter; False if this one's has it, too."""
        for gradient in () if self.averaging is None else self.averaging.gradients:
            index = gradient.arrival.owner.index
            if gradient.leaf is parameter and index >= self.user.optimized:
                gradient.give_away()  # and stays, for rounds that need word of every parameter
                release_parameter(parameter, self.give_away)
                return True
        return False

"""The one or two backends of a session: what is done once for all of them, and their connection.

Servers have all parameters, or collectives have; or collectives have the dense ones and servers the
row-wise ones (``hybrid``, as in Parallax). Each knows its own parameters only, by numbers of its
own; a parameter talks to the engine that has it. They are connected anew when a plan asks for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, cast

import torch

from foreprop.config import Config
from foreprop.hooks.interception import claim_parameter
from foreprop.hooks.modelhooks import SharedBuffers
from foreprop.path.parameter import SynchronisedParameter
from foreprop.path.progress import Counters
from foreprop.servers.setup import Setup
from foreprop.session.adopting import SettingsWatch
from foreprop.session.firststep import FirstStep

if TYPE_CHECKING:
    from foreprop.collectives.ring import RingBackend
    from foreprop.core.freezing import Turned
    from foreprop.core.lateness import Straggler
    from foreprop.core.norm import SquareSum
    from foreprop.gradients.averaged import AveragedParameter
    from foreprop.gradients.averaging import Averaging
    from foreprop.observe.trace import TraceRecorder
    from foreprop.path.managedparameter import Engine, ManagedParameter
    from foreprop.path.stalereaders import StaleReaders
    from foreprop.servers.served import ServedBackend
    from foreprop.session.replicas import ReplicaCheck
    from foreprop.session.training import Training
    from foreprop.tables.exchange import RowExchange
    from foreprop.tables.remote import RemoteTable
    from foreprop.tables.rowparameter import RowParameter

    Backend = ServedBackend | RingBackend

_TOTALS = [spec.name for spec in fields(Counters) if spec.name != "waited_s_by_parameter"]


class Backends:
    """Connections, engines and the optimizer's state. Training thread, if nothing else is said."""

    def __init__(self, parts: Sequence[tuple[Backend, Sequence[int]]]) -> None:
        """``parts``: each with the session's numbers of its parameters, by its own.

        The first one has the buffers, and the last one the rows.
        """
        self.all = [backend for backend, _ in parts]
        self.engines = [backend.engine for backend in self.all]
        self._first, self._last = self.all[0], self.all[-1]
        self.parts = parts
        self._places = {
            whole: (backend, own) for backend, numbers in parts for own, whole in enumerate(numbers)
        }
        self.session_id = self._first.session_id
        self.memory_of = self._first.memory_of
        """Where a parameter's bytes are for its engine."""
        self.numbers = self._first.numbers
        """The optimizer's numbers (lr, ...) as they are now, to be compared."""
        self.every_parameter = any(engine.every_parameter for engine in self.engines)
        """Whether each step needs word of every parameter, also of one without gradients."""
        self.progress = self._first.engine.progress
        self.raise_if_failed = self.progress.raise_if_failed
        """Also what has gone wrong with the other one."""

    # One parameter, by the session's number.
    def engine_of(self, parameter: int) -> tuple[Engine, int]:
        """Who synchronises it, and its number there."""
        backend, number = self._places[parameter]
        return backend.engine, number

    def rows_of(self, parameter: int) -> tuple[RowExchange, int]:
        """Where a row-wise parameter's rows come from, and its number there."""
        backend, number = self._places[parameter]
        return cast("ServedBackend", backend).rows, number

    def pull_gradient(self, parameter: int, step: int) -> torch.Tensor:
        """The aggregated gradient of the parameter's last update, flat."""
        backend, number = self._places[parameter]
        return backend.state.pull_gradient(number, step)

    # The start, and the steps.
    def start(self, parameters: Sequence[ManagedParameter]) -> None:
        """Make everybody's parameters, buffers and optimizer state rank 0's."""
        for backend, numbers in self.parts:
            backend.start([parameters[number] for number in numbers])

    def learn_priorities(self, order: Sequence[int]) -> None:
        """The parameters in the order of their first use in the forward pass."""
        for backend in self.all:
            places = (self._places[parameter] for parameter in order)
            backend.engine.learn_priorities([own for other, own in places if other is backend])

    def tell_trainable(self, step: int, turned: Turned) -> None:
        """This rank has frozen or unfrozen parameters, by the session's numbers."""
        for backend, numbers in self.parts:
            backend.tell_trainable(step, turned.of(numbers))

    def start_step(self) -> None:
        """The next forward pass begins."""
        for engine in self.engines:
            engine.start_step()

    def grad_norm(self, step: int) -> float | None:
        """The global gradient norm before clipping, of all parameters; None if it is not needed.

        Blocks until it is known.
        """
        return self._last.engine.grad_norm(step)

    @property
    def measures_norm(self) -> bool:
        """Whether servers tell `square_sums` of every round."""
        return self._first.measures_norm

    def ask_for_norm(self) -> None:
        """This rank's loop has taken the norm of gradients."""
        self._first.ask_for_norm()

    def square_sums(self, round_: int, step: int) -> Sequence[SquareSum]:
        """By parameter, of the averaged gradients of a round that was measured; blocks."""
        return cast("ServedBackend", self._first).norm.square_sums(round_, step)

    # The optimizer's numbers and state.
    def announce(self, step: int) -> None:
        """From ``step`` on the optimizer's numbers count as they are now."""
        for backend in self.all:
            backend.announce(step)

    def tell_scale(self, step: int, inverse: torch.Tensor) -> None:
        """Before this step: by what the loop's scaler has multiplied the last averages."""
        for backend in self.all:
            if backend.codecs is not None:
                backend.codecs.tell_scale(step, inverse)

    def drop_state(self) -> None:
        """After ``optimizer.state_dict()``: what servers have leaves the user's optimizer."""
        for backend in self.all:
            backend.state.drop()

    # What is reported.
    @property
    def counters(self) -> Counters:
        """All added up."""
        total = Counters()
        for backend, numbers in self.parts:
            counters = backend.engine.counters
            for name in _TOTALS:
                setattr(total, name, getattr(total, name) + getattr(counters, name))
            for own, seconds in counters.waited_s_by_parameter.items():
                total.waited_s_by_parameter[numbers[own]] = seconds
        return total

    @property
    def queue_depth(self) -> int:
        return sum(engine.queue_depth for engine in self.engines)

    @property
    def straggler(self) -> Straggler | None:
        """Who holds up the others, as servers have seen it."""
        return next(filter(None, (backend.straggler for backend in self.all)), None)

    def describe(self) -> str:
        """Who synchronises, and how, for the line that is printed at the start."""
        text = self._first.describe()
        for backend in self.all[1:]:
            names = ", ".join(info.name for info in backend.engine.parameters)
            text += f"; the rows of {names}: {backend.describe()}"
        return text

    # The end.
    @property
    def failed(self) -> bool:
        return any(engine.progress.error is not None for engine in self.engines)

    def refuse(self, error: BaseException) -> None:
        """Tell the others that this rank does not take part."""
        for backend in self.all:
            backend.refuse(error)

    def give_up(self, error: BaseException) -> None:
        """Tell all ranks that this one goes on no more, and why."""
        for engine in reversed(self.engines):
            engine.give_up(error)

    def close(self, *, failed: bool) -> None:
        """The training thread's part of the end: nothing is under way, and nothing follows."""
        for backend in reversed(self.all):
            backend.close(failed=failed)

    def part(self, failure: BaseException | None = None) -> None:
        """Leave the session together with the other ranks, or tell them why not. Any thread."""
        failure = failure or self._last.engine.progress.error
        try:
            self._first.part(failure)
        except BaseException as error:
            failure = error
            raise
        finally:
            for backend in self.all[1:]:
                backend.part(failure or self._first.engine.progress.error)

    def forget_in_child(self) -> None:
        """In a forked child: let go of what only the parent may keep alive."""
        for backend in self.all:
            backend.forget_in_child()


# Which ones there are.
def connect_backends(setup: Setup) -> Backends:
    """Those for the architecture that is asked for and the parameters that there are."""
    rows = [info.rows for info in setup.infos]
    numbers = range(len(rows))
    if is_served(setup.config) or all(rows):
        from foreprop.servers.served import ServedBackend

        return Backends([(ServedBackend(setup), numbers)])
    if any(rows):
        from foreprop.collectives.hybrid import connect_both

        return Backends(connect_both(setup))
    from foreprop.collectives.ring import RingBackend

    return Backends([(RingBackend(setup), numbers)])


def is_served(config: Config) -> bool:
    """Whether servers have the dense parameters, too, and not collectives."""
    return config.architecture not in ("ring", "hybrid", "auto")


def needs_servers(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, config: Config
) -> bool:
    """Whether a world of one has to have servers: for remote tables, or as they are there."""
    groups = [] if optimizer is None else optimizer.param_groups
    own = (parameter for group in groups for parameter in group["params"])
    tensors = itertools.chain(model.parameters(), own, model.buffers())
    served = config.dedicated_servers > 0 or config.join is not None
    return served or any(tensor.is_meta for tensor in tensors)


# Their connection.
def connect(training: Training, row_wise: Collection[str]) -> None:
    """Synchronise the parameters of these names row by row, the others in slices or chunks."""
    user = training.user
    training.completed = 0
    training.parameters, training.tables = [], []
    training.remote = None
    if training.averaging is not None:
        training.averaging.connect(counts_rounds=_counts_rounds(training))
    training.first = FirstStep(training)
    if training.world.local_size < training.world.size:
        from foreprop.session.suitedslices import suit_slices

        suit_slices(training)
    setup = _setup(training, row_wise)
    training.backends = backends = connect_backends(setup)
    training.infos, training.every_parameter = setup.infos, backends.every_parameter
    scaled = training.loss_scale is not None
    training.settings = SettingsWatch(
        user.optimizer,
        backends.numbers,
        backends.announce,
        parameters=user.optimized,
        is_scaled=scaled,
    )
    said = setup.config.join is None  # what the others did before it came is no newcomer's word
    training.trained = [info.requires_grad if said else None for info in setup.infos]
    training.buffers = SharedBuffers(user.buffers, backends.engines[0], training.world)
    grows = training.world.rank == 0 and setup.config.max_workers is not None
    training.publishes_buffers = bool(user.buffers) and (training.buffers.publishes or grows)
    training.life.connected = True
    try:
        for index, (name, parameter, _) in enumerate(user.named):
            training.parameters.append(_make_parameter(training, index, name, parameter))
        if training.averaging is not None:
            training.averaging.forget_others()
            make_packs(training, training.averaging)
        by_rows = [p for p in training.parameters if training.infos[p.index].rows]
        training.tables = cast("list[RowParameter | RemoteTable]", by_rows)
        if any(info.init is not None for info in training.infos):
            from foreprop.session.checkpoints import remote_tables

            training.remote = remote_tables(training)
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
    training.replicas = replica_check_for(training)
    for synchronised in training.parameters:
        claim_parameter(synchronised.name, synchronised.parameter, training)


def _make_parameter(
    training: Training, index: int, name: str, parameter: torch.nn.Parameter
) -> ManagedParameter:
    """The parameter of this number."""
    info = training.infos[index]
    if info.init is not None:
        from foreprop.tables.remote import RemoteTable

        return RemoteTable(index, name, parameter, training, *training.backends.rows_of(index))
    if info.rows:
        from foreprop.tables.rowparameter import RowParameter

        return RowParameter(index, name, parameter, training, *training.backends.rows_of(index))
    wanted = index < training.user.optimized
    if wanted and not training.by_workers:
        if training.config.staleness == "late":
            from foreprop.staleness.lateparameter import LateParameter

            return LateParameter(index, name, parameter, training)
        return SynchronisedParameter(index, name, parameter, training)
    averaging = averaging_of(training)
    averaged = averaging.known.pop(id(parameter), None)
    if averaged is None:
        from foreprop.gradients.averaged import AveragedParameter

        averaged = AveragedParameter(parameter, training, averaging)
    averaged.connect(index, name, wanted=wanted)
    averaged.place = len(averaging.parameters)
    averaging.parameters.append(averaged)
    return averaged


def make_packs(training: Training, averaging: Averaging) -> None:
    """Of parameters whose gradients the servers have in one slice."""
    if not is_served(training.config):
        return
    served = cast("ServedBackend", training.backends.all[0])
    for pack in served.engine.manifest.knobs.packs:
        from foreprop.gradients.pack import Pack

        members = [cast("AveragedParameter", training.parameters[number]) for number in pack]
        averaging.packs.append(Pack(members, training, averaging))


def averaging_of(training: Training) -> Averaging:
    """What its averaged parameters have in common; made for the first of them."""
    if training.averaging is None:
        from foreprop.gradients.averaging import Averaging

        training.averaging = Averaging(
            training.user.optimizer,
            training.fixed_passes,
            counts_rounds=_counts_rounds(training),
        )
    return training.averaging


def _counts_rounds(training: Training) -> bool:
    """Whether each round is a step: of collectives, or as nobody tells codecs which ones count."""
    config = training.config
    return not is_served(config) or (bool(config.codecs) and not training.user.has_optimizer)


def replica_check_for(training: Training) -> ReplicaCheck | None:
    if training.world.size == 1 or training.config.check_replicas is None:
        return None
    from foreprop.session.replicas import ReplicaCheck, are_comparable

    return ReplicaCheck(training) if are_comparable(training.config) else None


def stale_readers_for(config: Config) -> StaleReaders | None:
    if not config.check_stale:
        return None
    from foreprop.path.stalereaders import StaleReaders

    return StaleReaders()


def _setup(training: Training, row_wise: Collection[str]) -> Setup:
    user = training.user
    return Setup(
        world=training.world,
        config=training.config,
        optimizer=user.optimizer,
        parameters=[parameter for _, parameter, _ in user.named],
        infos=list(user.infos(row_wise, by_workers=training.by_workers)),
        frozen=user.frozen,
        buffers=user.buffers,
        memory=training.parameters,
        make_trace=lambda session_id: _make_trace(training, session_id),
        loss_scale=training.loss_scale,
        has_scaler=training.has_scaler,
        steps_before=training.completed_before,
        look=training.additions.look,
        by_workers=training.by_workers,
    )


def _make_trace(training: Training, session_id: str) -> TraceRecorder | None:
    if training.config.trace is not None and training.trace is None:
        from foreprop.session.figures import begin_trace

        training.trace = begin_trace(training, training.config.trace, session_id)
    return training.trace

"""The one or two backends of a session, and which ones it has.

Servers have all parameters, or collectives have; or collectives have the dense ones and servers the
row-wise ones (``hybrid``, as in Parallax). Each knows its own parameters only, by numbers of its
own; a parameter talks to the engine that has it. They are connected anew when a plan asks for it.

Who applies the optimizer: the workers, unless something asked for needs servers. Where workers
update, a gradient is DDP's in every step: whatever the loop does with it between `backward()` and
`step()` counts. Servers hold the optimizer's state divided among them, and make what only they can:
updates of ranks in different steps, moving averages, tables held row by row. The presets of
published systems have them, too, where they can apply the optimizer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from foreprop.config import Config
from foreprop.engine.optimizer import check_groups, hyperparameters, why_not_elementwise
from foreprop.params.localstep import why_not_alone
from foreprop.params.parameter import Parameter

if TYPE_CHECKING:
    from foreprop.backends.composedworker import ServedBackend
    from foreprop.backends.ring import RingBackend
    from foreprop.core.freezing import Turned
    from foreprop.core.lateness import Straggler
    from foreprop.core.norm import SquareSum
    from foreprop.features.members.membershipview import MemberNotices, MembershipView
    from foreprop.features.tables.exchange import RowExchange
    from foreprop.params.setup import Engine

    Backend = ServedBackend | RingBackend


class Backends:
    """A session's backends as one. Training thread, if nothing else is said.

    ``parts`` has each with the session's numbers of its parameters, by its own. The first one has
    the buffers, and the last one the rows.
    """

    def __init__(self, parts: Sequence[tuple[Backend, Sequence[int]]]) -> None:
        self.all = [backend for backend, _ in parts]
        self.engines = [backend.engine for backend in self.all]
        self._first, self._last = self.all[0], self.all[-1]
        self.parts = parts
        self._places = {
            whole: (backend, own) for backend, numbers in parts for own, whole in enumerate(numbers)
        }
        self.session_id = self._first.session_id
        self.memory_of = self._first.memory_of
        self.numbers = self._first.numbers
        """The optimizer's numbers (lr, ...) as they are now, to be compared."""
        self.every_parameter = any(engine.every_parameter for engine in self.engines)
        self.progress = self._first.engine.progress
        self.raise_if_failed = self.progress.raise_if_failed  # whichever of them has failed

    @property
    def packs(self) -> list[list[int]]:
        """The parameters that travel as one, by the session's numbers."""
        return [
            [numbers[own] for own in pack]
            for backend, numbers in self.parts
            for pack in backend.packs
        ]

    # One parameter, by the session's number.
    def engine_of(self, parameter: int) -> tuple[Engine, int]:
        """The engine that synchronises the parameter, and its number there."""
        backend, number = self._places[parameter]
        return backend.engine, number

    def rows_of(self, parameter: int) -> tuple[RowExchange, int]:
        backend, number = self._places[parameter]
        return cast("ServedBackend", backend).rows, number

    def pull_gradient(self, parameter: int, step: int) -> torch.Tensor:
        """The aggregated gradient of the parameter's last update, flat."""
        backend, number = self._places[parameter]
        return backend.state.pull_gradient(number, step)

    def start(self, parameters: Sequence[Parameter]) -> None:
        """Make everybody's parameters, buffers and optimizer state rank 0's."""
        for backend, numbers in self.parts:
            backend.start([parameters[number] for number in numbers])

    def learn_priorities(self, order: Sequence[int]) -> None:
        """Take over the order in which the forward pass uses the parameters first."""
        for backend in self.all:
            places = (self._places[parameter] for parameter in order)
            backend.engine.learn_priorities([own for other, own in places if other is backend])

    def tell_trainable(self, step: int, turned: Turned) -> None:
        """Tell the others which parameters this rank has frozen or unfrozen."""
        for backend, numbers in self.parts:
            backend.tell_trainable(step, turned.of(numbers))

    def start_step(self) -> None:
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
        self._first.ask_for_norm()

    def square_sums(self, round_: int, step: int) -> Sequence[SquareSum]:
        return cast("ServedBackend", self._first).norm.square_sums(round_, step)

    def announce(self, step: int) -> None:
        """Have the optimizer's numbers count from ``step`` on as they are now."""
        for backend in self.all:
            backend.announce(step)

    def tell_scale(self, step: int, inverse: torch.Tensor) -> None:
        """Tell by what the loop's scaler has multiplied the last averages, before this step."""
        for backend in self.all:
            if backend.codecs is not None:
                backend.codecs.tell_scale(step, inverse)

    def drop_state(self) -> None:
        """Take the servers' state out of the user's optimizer, after its ``state_dict()``."""
        for backend in self.all:
            backend.state.drop()

    @property
    def straggler(self) -> Straggler | None:
        return next(filter(None, (backend.straggler for backend in self.all)), None)

    @property
    def notices(self) -> MemberNotices | None:
        """What this rank has heard of joining and leaving; None where all ranks always stay."""
        members = (getattr(backend, "members", None) for backend in self.all)
        return next((each.notices for each in members if each is not None), None)

    @property
    def view(self) -> MembershipView | None:
        """The members as this rank sees them; None where all ranks always stay."""
        return None if (notices := self.notices) is None else notices.view

    def describe(self) -> str:
        text = self._first.describe()
        for backend in self.all[1:]:
            names = ", ".join(info.name for info in backend.engine.parameters)
            text += f"; the rows of {names}: {backend.describe()}"
        return text

    @property
    def failed(self) -> bool:
        return any(engine.progress.error is not None for engine in self.engines)

    def refuse(self, error: BaseException) -> None:
        for backend in self.all:
            backend.refuse(error)

    def give_up(self, error: BaseException) -> None:
        for engine in reversed(self.engines):
            engine.give_up(error)

    def close(self, *, failed: bool) -> None:
        """Do the training thread's part of the end. Nothing is under way, and nothing follows."""
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
        """Let go, in a forked child, of what only its parent may keep alive."""
        for backend in self.all:
            backend.forget_in_child()


def is_served(config: Config) -> bool:
    """Whether servers have the dense parameters, too, and not collectives."""
    return config.architecture not in ("ring", "hybrid", "auto")


def has_remote_tables(model: torch.nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def needs_servers(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, config: Config
) -> bool:
    """Whether a world of one has to have servers: for remote tables, or as they are there."""
    groups = [] if optimizer is None else optimizer.param_groups
    own = (parameter for group in groups for parameter in group["params"])
    tensors = itertools.chain(model.parameters(), own, model.buffers())
    served = config.dedicated_servers > 0 or config.join is not None
    return served or any(tensor.is_meta for tensor in tensors)


class UpdatePlace(NamedTuple):
    """Where updates are made, and why, for the line that is logged."""

    by_workers: bool
    why: str = ""

    @property
    def text(self) -> str:
        place = f"update={'workers' if self.by_workers else 'servers'}"
        return f"{place}: {self.why}" if self.why else place


def place_updates(
    config: Config,
    optimizer: torch.optim.Optimizer | None,
    because: str | None,
    *,
    dense: bool,
    collectives: bool,
) -> UpdatePlace:
    """Who updates the dense parameters; servers update tables held row by row.

    ``because``: what is asked for that only servers do. ``dense``: whether the optimizer has such
    parameters. ``collectives``: each rank's engine updates where servers would, but parameter by
    parameter. Raises `ConfigError` for an optimizer that servers are to apply, and cannot.
    """
    if optimizer is None:
        return UpdatePlace(True, "there is no optimizer, gradients are averaged")
    if not dense:
        return UpdatePlace(False, "of tables by rows")
    if config.update == "workers":
        return UpdatePlace(True)
    own = collectives or config.elastic or config.preset == "p3"
    published = None if own else config.preset
    if config.update == "auto" and because is None and published is None:
        return UpdatePlace(True)
    if collectives:
        why_not = why_not_alone(optimizer)
    elif (reason := why_not_elementwise(optimizer)) is not None:
        why_not = f"servers cannot apply {type(optimizer).__name__}: {reason}"
    else:
        check_groups(optimizer)
        hyperparameters(optimizer)
        why_not = None
    if config.update == "servers":
        return UpdatePlace(False)
    if why_not is not None:
        return UpdatePlace(True, why_not)
    return UpdatePlace(False, because or f"as {published} was published")

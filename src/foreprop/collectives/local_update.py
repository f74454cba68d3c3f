"""The user's optimizer, applied to one parameter at a time beside the training thread.

Each parameter has an optimizer of its own: of the user's class, with the user's attributes, and
with one group that holds a stand-in, which shares the parameter's memory but has its own gradient.
So any optimizer works that treats each parameter by itself, and the user's gradients stay what they
were.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from foreprop.collectives.gradientsums import GradientSums
from foreprop.core.manifest import NO_GROUP, Aggregation
from foreprop.core.norm import ZERO, SquareSum
from foreprop.core.wire import Flag
from foreprop.numerics.moving_average import LocalAverages
from foreprop.path.sums import clip, square_sum
from foreprop.servers.setup import Setup

Groups = tuple[Mapping[str, Any], ...]
"""The parameter groups' settings as they were at some time, without the parameters."""

_KEPT = 2  # of a step some updates are pending still when the next one is announced


def settings_of(optimizer: torch.optim.Optimizer) -> Groups:
    """A copy that does not change when the user, or a scheduler, changes the optimizer."""
    return tuple(
        _copied({name: value for name, value in group.items() if name != "params"})
        for group in optimizer.param_groups
    )


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """With tensors of its own."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def comparable(settings: Groups) -> list[dict[str, Any]]:
    """The settings with numbers for tensors: equal if and only if the settings are."""
    return [
        {
            name: [str(value.dtype), value.tolist()] if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
        }
        for group in settings
    ]


class LocalUpdater:
    """Updates parameters by number; the calls for one parameter must follow each other."""

    def __init__(self, setup: Setup) -> None:
        optimizer, parameters, decay = setup.optimizer, setup.parameters, setup.config.ema
        self.averages = LocalAverages(parameters, decay) if decay is not None else None
        self._memory = setup.memory  # for gradients that the training thread applies
        self._optimizer = optimizer
        self._parameters = parameters
        # the bare function: torch's wrappers (profiler, hooks) cost as much as a small update
        self._step: Callable[[torch.optim.Optimizer], object] = inspect.unwrap(type(optimizer).step)
        group_of = {
            id(parameter): number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        # the optimizer need not have all, and those others are never updated
        self._group_of = [group_of.get(id(parameter), NO_GROUP) for parameter in parameters]
        self._announced: list[tuple[int, Groups]] = []
        self._stand_ins: list[torch.nn.Parameter | None] = [None] * len(parameters)
        self._own = [self._optimizer_of_its_own() for _ in parameters]

    def _optimizer_of_its_own(self) -> torch.optim.Optimizer:
        cls = type(self._optimizer)
        own: torch.optim.Optimizer = cls.__new__(cls)
        replaced = ("step", "zero_grad")  # the session's, in the user's object
        own.__dict__.update({k: v for k, v in vars(self._optimizer).items() if k not in replaced})
        own.param_groups = []
        own.state = defaultdict(dict)
        return own

    def announce(self, step: int) -> None:
        """From ``step`` on the user's optimizer's settings count as they are now."""
        self._announced = [*self._announced[1 - _KEPT :], (step, settings_of(self._optimizer))]

    def update(self, parameter: int, step: int, gradient: torch.Tensor) -> None:
        """Apply the aggregated gradient, flat. Any thread, without gradients."""
        stand_in = self._stand_in(parameter)
        own = self._own[parameter]
        settings = next(groups for since, groups in reversed(self._announced) if since <= step)
        group = settings[self._group_of[parameter]]
        own.param_groups = [{**group, "params": [stand_in]}]
        stand_in.grad = gradient.view(stand_in.shape).to(stand_in)
        self._step(own)
        stand_in.grad = None

    def show(self, parameter: int, gradient: torch.Tensor) -> None:
        """The training thread applies it: let it have the aggregated gradient. Any thread."""
        self._memory[parameter].land_average(gradient)

    def end_step(self, parameter: int) -> None:
        """The step is over, with an update or without. Any thread, without gradients."""
        if self.averages is not None:
            self.averages.move(parameter)

    def _stand_in(self, parameter: int) -> torch.nn.Parameter:
        """Of the memory that the parameter has now; its state goes with it."""
        found, real = self._stand_ins[parameter], self._parameters[parameter]
        if found is None or found.data_ptr() != real.data_ptr():
            state = self._own[parameter].state.pop(found, {}) if found is not None else {}
            found = self._stand_ins[parameter] = torch.nn.Parameter(real.detach())
            self._own[parameter].state[found].update(state)
        return found

    # The state, for checkpoints.
    def show_state(self) -> None:
        """Let the user's optimizer have the states, of the parameters that have one."""
        for number, stand_in in enumerate(self._stand_ins):
            if stand_in is not None and (state := self._own[number].state.get(stand_in)):
                self._optimizer.state[self._parameters[number]] = state

    def take_state(self) -> None:
        """Go on from the states that the user's optimizer has, and from none where it has none."""
        for number, parameter in enumerate(self._parameters):
            state = _copied(self._optimizer.state.get(parameter, {}))
            self._own[number].state[self._stand_in(number)] = state


class LocalState:
    """What every rank has beside the values: state, averages, gradients. Training thread."""

    def __init__(self, setup: Setup, updater: LocalUpdater, sums: GradientSums) -> None:
        self._setup = setup
        self._updater = updater
        self._sums = sums
        self._by_workers = setup.by_workers

    def pull(self, step: int) -> None:
        if not self._by_workers:
            self._updater.show_state()

    def drop(self) -> None:
        """It stays where it is."""

    def replace(self, step: int) -> None:
        """Every rank goes on from what it has loaded itself."""
        if not self._by_workers:
            self._updater.take_state()

    def pull_gradient(self, parameter: int, step: int) -> torch.Tensor:
        return self._sums.aggregated(parameter)

    def pull_masters(self, step: int) -> Sequence[torch.Tensor]:
        return self._setup.parameters

    def pull_averages(self, step: int) -> Sequence[torch.Tensor]:
        """Every rank has its own, which are alike."""
        return self._updater.averages.values if self._updater.averages is not None else ()

    def replace_averages(self, step: int, averages: Sequence[torch.Tensor]) -> None:
        if self._updater.averages is not None:
            self._updater.averages.values = list(averages)


class RingUpdates:
    """What becomes of summed gradients: measured for the global norm, clipped, applied or shown.

    The calls for one parameter follow each other, on any threads.
    """

    def __init__(self, sums: GradientSums, updater: LocalUpdater, aggregation: Aggregation) -> None:
        self._sums = sums
        self._updater = updater
        self._aggregation = aggregation
        self._gradients: dict[int, torch.Tensor | None] = {}
        """Measured and not applied yet."""
        self._coefficient = 1.0
        self._skip = False
        """Whether the step whose updates are under way is left out."""

    def use_norm(self, norm: float) -> None:
        """Of all gradients, for the updates that follow."""
        self._coefficient = self._aggregation.coefficient(norm)
        self._skip = self._aggregation.skips(norm)

    def measure(self, parameter: int, step: int) -> SquareSum:
        gradient = self._gradients[parameter] = self._sums.maybe_aggregate(parameter, step)
        return ZERO if gradient is None else square_sum(gradient)

    def update(self, parameter: int, step: int) -> None:
        gradient = self._gradients.pop(parameter, None)
        if not self._aggregation.needs_norm:
            gradient = self._sums.maybe_aggregate(parameter, step)
        elif gradient is not None:
            self._sums.device.keep(gradient)
        if self._sums.flags[parameter] & Flag.GRADIENT:
            if gradient is not None:
                self._updater.show(parameter, gradient)
            return
        if gradient is not None and not self._skip:
            clip(gradient, self._aggregation, self._coefficient)
            self._updater.update(parameter, step, gradient)
        self._updater.end_step(parameter)

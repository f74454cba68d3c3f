"""A real ``torch.optim`` optimizer of a part of a parameter, with numbers that others announce."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from foreprop.core.manifest import Hyperparameters
from foreprop.errors import TrainingLoopError
from foreprop.path.tensors import DTYPES

_MAKE_STATE = ("initial_accumulator_value",)
"""The numbers that the classes themselves make a state of, Adagrad's."""


Step = Callable[[Any], object]
"""What ``step()`` of a class is, without what torch puts around it."""


class PartOptimizer:
    """The optimizer of one slice; made for its first update, with the group of that."""

    __slots__ = ("_cls", "_options", "_parameter", "_received", "group", "made")

    def __init__(
        self, cls: type[torch.optim.Optimizer], parameter: torch.nn.Parameter, **options: Any
    ) -> None:
        self._cls = cls
        self._parameter = parameter
        self._options = options
        self._received: dict[str, Any] | None = None  # a state, to be used from the next update
        self.made: torch.optim.Optimizer | None = None
        self.group: Hyperparameters | None = None
        """What ``made`` can step with as it is; None: with nothing."""

    def update(self, step: Step, group: Hyperparameters, name: str) -> None:
        """By the parameter's gradient, with the numbers of ``group``.

        Raises `TrainingLoopError` if a state that has been received is not for it; ``name`` is the
        parameter's.
        """
        if self.made is None:
            self.made = begin_optimizer(self._cls, self._parameter, group, **self._options)
        else:
            self.made.param_groups[0].update(optimizer_arguments(group))
        self.group = group
        received, self._received = self._received, None
        if received is not None:
            self.made.state[self._parameter] = received
        try:
            step(self.made)
        except Exception as error:  # whatever torch makes of a state that is another optimizer's
            if received is None:
                raise
            raise TrainingLoopError(
                f"parameter {name}: the optimizer state that rank 0 has loaded does not fit"
                f" {self._cls.__name__} ({type(error).__name__}: {error}): load the state of the"
                " same optimizer"
            ) from error

    @property
    def state(self) -> Mapping[str, Any]:
        """As the next update will find it."""
        if self._received is not None:
            return self._received
        return {} if self.made is None else self.made.state.get(self._parameter, {})

    def replace_state(self, state: dict[str, Any]) -> None:
        """From the next update on; an empty one is an optimizer's own at its start."""
        self._received, self.group = state or None, None
        if self._received is None:
            self.made = None


def one_by_one(cls: type[torch.optim.Optimizer]) -> dict[str, bool]:
    """What has an optimizer take its plain loop; a user's may have no other."""
    is_torchs = cls.__module__.startswith("torch.")
    has_choice = is_torchs or "foreach" in inspect.signature(cls.__init__).parameters
    return {"foreach": False} if has_choice else {}


def begin_optimizer(
    cls: type[torch.optim.Optimizer],
    parameter: torch.nn.Parameter,
    group: Hyperparameters,
    **options: Any,
) -> torch.optim.Optimizer:
    """One that has no state but how that begins.

    A schedule may set numbers that the class would refuse: ``lr`` below 0, no momentum yet with
    ``nesterov``. So it gets them as it gets all later ones.
    """
    arguments = optimizer_arguments(group)
    first = {name: arguments[name] for name in _MAKE_STATE if name in arguments}
    made = cls([parameter], **first, **options)
    made.param_groups[0].update(arguments)
    return made


def optimizer_arguments(group: Hyperparameters) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, value in group.items():
        key, _, dtype = name.partition(" ")
        if dtype:  # the user gave a tensor, see `hyperparameters`
            arguments[key] = torch.tensor(value, dtype=DTYPES[dtype])
        else:
            arguments[key] = tuple(value) if isinstance(value, list) else value
    return arguments

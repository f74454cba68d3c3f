"""The user's own optimizer's step, made parameter by parameter as the averaged gradients arrive.

Optimizers of torch.optim treat each parameter by itself, so the order does not matter, and each
parameter is updated when it is next used. The optimizer stays the user's: it updates the real
parameters with its real state, under the settings that its groups had when `step()` was called.
Any other optimizer is called whole, when all gradients are here.

The step is called on a *twin*, an object of the same class with the attributes of then. It is the
class's bare function: torch's wrappers (profiler, hooks) cost as much as a small update.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from foreprop.engine.optimizer import check_groups
from foreprop.params.modelhooks import OWN_ATTRIBUTES
from foreprop.params.optimizerstate import settling_state

_PARAMETER_BY_PARAMETER = frozenset(
    {
        "ASGD",
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
        "SparseAdam",
    }
)
"""Those of torch.optim that keep what they keep for each parameter."""
_ALIKE_AT_ONCE = frozenset({"Adadelta", "Adagrad", "Adam", "AdamW", "RMSprop", "SGD"})
"""Those whose step for many tensors at once (``foreach``) has the bits of each alone."""
_ALIKE_TYPES = frozenset({torch.float32, torch.float64})
"""Types for which that holds; torch takes the other step on CPUs unless it is asked."""
_SCALER_MARKS = frozenset({"grad_scale", "found_inf"})
"""A scaler's word to an optimizer that unscales by itself, for one step."""


def treats_each_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's step for one parameter does not depend on the others."""
    cls = type(optimizer)
    name = cls.__name__
    return name in _PARAMETER_BY_PARAMETER and getattr(torch.optim, name, None) is cls


def why_not_alone(optimizer: torch.optim.Optimizer) -> str | None:
    """Why collectives cannot have each parameter updated as its sum is there; None if they can."""
    if treats_each_alone(optimizer):
        check_groups(optimizer)
        return None
    name = type(optimizer).__name__
    return f"{name} may not treat each parameter by itself, as torch.optim's do"


class LocalStepper:
    """Makes steps of one optimizer for single parameters. Training thread, without gradients.

    ``settle`` makes all steps that are still to be made, before somebody uses the state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settle: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._settle = settle
        cls = type(optimizer)
        self._is_alike_at_once = cls.__name__ in _ALIKE_AT_ONCE
        self._twin: torch.optim.Optimizer = cls.__new__(cls)
        bare: Callable[[torch.optim.Optimizer], object] = inspect.unwrap(cls.step)
        # a parameter may be waited for in a frame that Dynamo has skipped
        disable: Any = torch.compiler.disable
        self._step = disable(bare, reason="foreprop makes the optimizer's step")

    def can_defer(self) -> bool:
        """Whether this step may be made later, one parameter after the other."""
        return treats_each_alone(self._optimizer) and not (
            _SCALER_MARKS & vars(self._optimizer).keys()
        )

    def at_once(
        self, group: dict[str, Any], parameters: Sequence[torch.nn.Parameter]
    ) -> dict[str, Any]:
        """The group's settings that have one call update all of these small parameters."""
        chosen = group.get("foreach") is not None or group.get("fused")
        special = group.get("differentiable") or group.get("capturable")
        if chosen or special or len(parameters) < 2 or not self._is_alike_at_once:
            return group
        numbers = (group.get("lr"), *(group.get("betas") or ()))
        if any(isinstance(number, torch.Tensor) for number in numbers):
            return group  # torch refuses tensors there
        return {**group, "foreach": parameters[0].dtype in _ALIKE_TYPES or None}

    def begin(self) -> DeferredStep:
        """The step that is to be made, with the settings and the state of now."""
        groups = [
            {  # tensors as they are now: a scheduler changes them in place
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in group.items()
                if name != "params"
            }
            for group in self._optimizer.param_groups
        ]
        state = settling_state(self._optimizer, self._settle)
        return DeferredStep(self, groups, {**vars(self._optimizer), "state": state.unsettled})

    def make(self, groups: list[dict[str, Any]], attributes: Mapping[str, Any]) -> None:
        twin = self._twin
        twin.__dict__.update(attributes)
        twin.param_groups = groups
        self._step(twin)


class DeferredStep:
    """One `optimizer.step()`, of which some parameters' updates are still to be made."""

    def __init__(
        self,
        stepper: LocalStepper,
        groups: list[dict[str, Any]],
        attributes: Mapping[str, Any],
    ) -> None:
        self._stepper = stepper
        self._groups = groups
        replaced = (*OWN_ATTRIBUTES, "param_groups")  # the session's, in the user's object
        self._attributes = {k: v for k, v in attributes.items() if k not in replaced}
        self._group_of = {
            id(parameter): number
            for number, group in enumerate(attributes["param_groups"])
            for parameter in group["params"]
        }

    def __contains__(self, parameter: torch.nn.Parameter) -> bool:
        return id(parameter) in self._group_of

    def apply(self, parameters: Sequence[torch.nn.Parameter], *, small: bool = False) -> None:
        """Make the step for these, whose ``grad`` is the averaged gradient.

        ``small``: on the host, and of one type, so that what counts are calls.
        """
        by_group: dict[int, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            by_group.setdefault(self._group_of[id(parameter)], []).append(parameter)
        if by_group:
            groups = [{**self._groups[n], "params": own} for n, own in sorted(by_group.items())]
            if small:
                groups = [self._stepper.at_once(group, group["params"]) for group in groups]
            self._stepper.make(groups, self._attributes)

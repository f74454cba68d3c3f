"""``staleness="late"``: a parameter whose forward pass does not wait (`core.lateuse`).

Replies land in memory beside it (`path.gpumemory.StagedMemory`). From there they are copied at the
first use that waits, or when its next gradient is ready: then nothing of the backward pass needs
the old values any more. Servers and frames are those of synchronous training.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from foreprop.core.lateuse import LateUse
from foreprop.errors import ConfigError
from foreprop.hooks.modelhooks import OwnHook, before_forward
from foreprop.path import looprules
from foreprop.path.gpumemory import StagedMemory
from foreprop.path.parameter import SynchronisedParameter
from foreprop.path.waiting import stop_waiting


def memory_beside(parameter: torch.Tensor) -> StagedMemory:
    """Raises `ConfigError` for a parameter that is not in host memory."""
    if parameter.device.type != "cpu":
        raise ConfigError(
            f"staleness is 'late', which is for parameters in host memory; one is on"
            f" {parameter.device}: give a number of steps instead"
        )
    return StagedMemory(parameter)


class ForwardPass:
    """Whether the model's is under way."""

    def __init__(self, model: Any) -> None:
        self.is_under_way = False
        register: Any = torch.nn.Module.register_forward_hook  # also on script modules
        self._handles = [
            before_forward(model, _Mark(self, begins=True)),
            register(model, _Mark(self, begins=False), always_call=True),
        ]

    def forget(self) -> None:
        for handle in self._handles:
            handle.remove()


class _Mark(OwnHook):
    """A hook at the pass's begin, or end."""

    def __init__(self, forward: ForwardPass, *, begins: bool) -> None:
        self._forward, self._begins = weakref.ref(forward), begins

    def __call__(self, *_: Any) -> None:
        forward = self._forward()
        if forward is not None:
            forward.is_under_way = self._begins


class LateParameter(SynchronisedParameter):
    """Waits where it is shown, and not where it is used in training. Training thread."""

    forward: ForwardPass | None = None
    """Of the session's model, once that has begun."""

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self.use = LateUse()

    def before_use(self, func: Any, args: Any, kwargs: Any, *, in_place: bool) -> bool:
        if self._may_be_late() and not in_place:
            answered = self._engine.is_complete(self._number)
            if self.use.begin(is_answered=answered):
                with torch._C.DisableTorchFunctionSubclass():
                    stop_waiting(self.parameter)
                return False
        return super().before_use(func, args, kwargs, in_place=in_place)

    def _may_be_late(self) -> bool:
        """It waits, and not for what the first step shows, in a forward pass of training."""
        in_training = self.forward is not None and self.forward.is_under_way
        stepped = 0 < self._gradient.pushed_step <= self._session.completed
        return in_training and torch.is_grad_enabled() and stepped and not self._first_use.watched

    def settle(self) -> None:
        self._land()
        super().settle()

    def push(self, gradient: torch.Tensor | None, step: int) -> None:
        self._land()
        super().push(gradient, step)

    def gradient_follows(self, held: torch.Tensor) -> None:
        self._land()
        super().gradient_follows(held)

    def _land(self) -> None:
        """Wait for the answer that the last use has not waited for."""
        if not self.use.end():
            return
        self._engine.wait(self._number, self._gradient.pushed_step)
        with torch._C.DisableTorchFunctionSubclass():
            if self.parameter._version != self._value.mark.version:
                raise looprules.changed_while_pending(self.name)
            self._value.land()

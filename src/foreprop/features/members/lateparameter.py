"""``staleness="late"``: a parameter whose forward pass does not wait (`core.lateuse`).

Replies land in memory beside the parameter (`engine.gpumemory.StagedMemory`). From there they are
copied at the first use that waits, or when the parameter's next gradient is pushed: then no
backward pass of the step needs the old values any more. Servers and frames are those of
synchronous training.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch

from foreprop.core.lateuse import LateUse
from foreprop.params import looprules
from foreprop.params.modelhooks import CallingHook, before_forward
from foreprop.params.parameter import Parameter
from foreprop.params.servedparameter import ServedGradient, ServedValues
from foreprop.params.waiting import make_wait


class ForwardPass:
    """Knows whether a forward pass of the model is under way."""

    def __init__(self, model: Any) -> None:
        self.is_under_way = False
        weak_self = weakref.ref(self)  # the model does not keep it alive

        def mark(is_under_way: bool, *_: Any) -> None:
            if (found := weak_self()) is not None:
                found.is_under_way = is_under_way

        register: Any = torch.nn.Module.register_forward_hook  # also on script modules
        self._handles = [
            before_forward(model, CallingHook(partial(mark, True))),
            register(model, CallingHook(partial(mark, False)), always_call=True),
        ]

    def forget(self) -> None:
        for handle in self._handles:
            handle.remove()


class LateGradient(ServedGradient):
    arrival: LateValues

    def added(self, leaf: torch.Tensor) -> None:
        super().added(leaf)
        # the backward pass may be another model's, as a GAN's: whatever shows this one then waits
        if self.arrival.use.is_owed:
            make_wait(leaf, self.arrival.owner)


class LateValues(ServedValues):
    """Values that wait where they are shown, and not where they are used in training."""

    forward: ForwardPass | None = None  # of the session's model, once that has begun

    def __init__(self, owner: Parameter) -> None:
        super().__init__(owner, LateGradient)
        self.use = LateUse()

    def before_use(self, func: Any, args: Any, kwargs: Any, *, in_place: bool) -> None:
        owner = self.owner
        in_forward = self.forward is not None and self.forward.is_under_way
        in_training = in_forward and torch.is_grad_enabled() and owner.parameter.requires_grad
        stepped = 0 < self.gradient.pushed_step <= owner.session.completed
        # the first step shows in which order parameters are used
        if in_training and stepped and not (owner.watched or in_place):
            answered = self._engine.is_complete(self._number)
            if self.use.is_owed or self.use.begin(is_answered=answered):
                self.late_uses = self.use.count
                return
        super().before_use(func, args, kwargs, in_place=in_place)

    def settle(self) -> None:
        self._land()
        super().settle()

    def push(self, gradient: torch.Tensor | None, step: int) -> None:
        self._land()
        super().push(gradient, step)
        self.gradient.guarded = False  # a copy is being sent

    def gradient_follows(self, held: torch.Tensor) -> None:
        if self.use.is_owed:  # but other passes of the step may need the old values
            self._engine.wait(self._number, self.gradient.pushed_step)
        super().gradient_follows(held)

    def _land(self) -> None:
        """Wait for the answer for which the last use has not waited, and copy it."""
        if not self.use.end():
            return
        self._engine.wait(self._number, self.gradient.pushed_step)
        with torch._C.DisableTorchFunctionSubclass():
            if self.owner.parameter._version != self.value.version:
                raise looprules.changed_while_pending(self.owner.name)
            self.value.land()

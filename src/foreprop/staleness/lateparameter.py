"""``staleness="late"``: a parameter whose forward pass does not wait (`core.lateuse`).

Replies land in memory beside it (`path.gpumemory.StagedMemory`). From there they are copied at the
first use that waits, or when its next gradient is pushed: then no backward pass of the step needs
the old values any more. Servers and frames are those of synchronous training.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from foreprop.core.lateuse import LateUse
from foreprop.hooks.modelhooks import OwnHook, before_forward
from foreprop.path import looprules
from foreprop.path.parameter import SynchronisedParameter
from foreprop.path.servedgradient import ServedGradient
from foreprop.path.waiting import make_wait, stop_waiting


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
        self._gradient.detach()
        self._gradient = ServedGradient(self, self.parameter, self._session, None, self._added)
        self.finish_step = self._gradient.finish_step

    def before_use(self, func: Any, args: Any, kwargs: Any, *, in_place: bool) -> bool:
        if self._may_be_late() and not in_place:
            answered = self._engine.is_complete(self._number)
            if self.use.is_owed or self.use.begin(is_answered=answered):
                with torch._C.DisableTorchFunctionSubclass():
                    stop_waiting(self.parameter)
                return False
        return super().before_use(func, args, kwargs, in_place=in_place)

    def _may_be_late(self) -> bool:
        """It waits, and not for what the first step shows, in a forward pass of training."""
        is_under_way = self.forward is not None and self.forward.is_under_way
        in_training = is_under_way and torch.is_grad_enabled() and self.parameter.requires_grad
        stepped = 0 < self._gradient.pushed_step <= self._session.completed
        return in_training and stepped and not self._first_use.watched

    def settle(self) -> None:
        self._land()
        super().settle()

    def push(self, gradient: torch.Tensor | None, step: int) -> None:
        self._land()
        super().push(gradient, step)
        self._gradient.guarded = False  # a copy is being sent

    def _added(self, leaf: torch.Tensor) -> None:
        """A backward pass has used it, maybe another model's, as a GAN's: what shows it waits."""
        self._gradient.added(leaf)
        if self.use.is_owed:
            make_wait(self.parameter, self)

    def gradient_follows(self, held: torch.Tensor) -> None:
        if self.use.is_owed:  # but other passes of the step may need the old values
            self._engine.wait(self._number, self._gradient.pushed_step)
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

"""One parameter that servers update: its gradient leaves, and new values arrive.

The gradient counts backward passes to know which is the step's last: after that it is pushed. From
its push until the new values are here it belongs to the library. Whatever would silently give other
results than plain PyTorch raises `TrainingLoopError` (`params.looprules`). The parameter waits from
the push on, and shows the new values at its first use.

The user may change a value by hand between `step()` and the next backward pass. Then rank 0 sends
its value with the gradient. Whoever holds ``.data`` can edit it and leave no trace, so rank 0 sends
the value then, too. Whoever saved the old value for a backward pass must not use it: each update
raises the parameter's version, and autograd refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version

from foreprop.core.wire import Flag
from foreprop.engine.memory import HeldGradient
from foreprop.params import looprules
from foreprop.params.parameter import (
    Parameter,
    ParameterArrival,
    ParameterGradient,
    check_same_kind,
)
from foreprop.params.waiting import is_waiting, make_wait, stop_waiting

_LEARNING_STEPS = 2  # later gradients leave before the end of their step
GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class BackwardPasses:
    """How many backward passes a parameter has had in this step, and which will be the last."""

    def __init__(self, fixed: int | None) -> None:
        self.expected = 0  # per step; 0: not known yet
        self.now = 0  # since the gradient was last discarded
        self.discards = 0  # in this step before that
        self._expected_discards = 0  # passes whose gradients are discarded first (a GAN's)
        self._fixed = fixed  # so many per step, as the user says; None: to be learned

    @property
    def is_last(self) -> bool:
        """Whether the gradient is complete, as far as earlier steps tell."""
        return self.now == self.expected and self.discards >= self._expected_discards

    def discard(self) -> None:
        self.discards, self.now = self.discards + self.now, 0

    def learn(self, *, early: bool) -> None:
        """A step has had so many. ``early``: its gradients may have left before its end."""
        self._expected_discards = self.discards
        if not (early and self.expected):
            self.expected = self._fixed or max(self.now, self.expected)


class ServedGradient(ParameterGradient):
    """A gradient that servers are sent.

    Autograd gathers it in ``leaf``: the parameter, or what stands for it.
    """

    def __init__(
        self, arrival: ParameterArrival, leaf: torch.nn.Parameter, usual: torch.layout | None
    ) -> None:
        super().__init__(leaf)
        self.arrival = arrival
        self.guarded = False  # nobody may write to it: it is being sent
        self._owner = arrival.owner
        self._session = arrival.owner.session
        self._usual_layout = usual  # of gradients that need not be checked
        self._passes = BackwardPasses(self._session.fixed_passes)
        self._applied = False  # the gradient in `p.grad` has been used by a step already
        self._attach_hook()

    @property
    def left(self) -> bool:
        return self.pushed_step > self._session.completed

    @property
    def is_new(self) -> bool:
        """Whether there is a gradient that no step has used."""
        return self._passes.now > 0 and not self._applied

    def before_use(self, func: Any, args: Any, kwargs: Any, *, in_place: bool) -> bool:
        self.arrival.read_gradient(in_place=in_place)
        return False

    # In the backward pass.
    def _attach_hook(self) -> None:
        if self._hook is None and self.leaf.requires_grad:
            register: Any = self.leaf.register_post_accumulate_grad_hook
            self._hook = register(self.added)

    def added(self, leaf: torch.Tensor) -> None:
        """Note what autograd has added to ``leaf.grad``; push it after the step's last pass."""
        with torch._C.DisableTorchFunctionSubclass():
            gradient = leaf.grad
            if gradient is None:
                return
            arrival, session, seen = self.arrival, self._session, self.seen
            if gradient.layout != self._usual_layout:
                arrival.check_gradient(gradient)
            session.gradient_ready(self._owner)
            step = session.completed + 1
            before = seen.tensor()
            if self.pushed_step == step:
                if before is gradient:
                    raise looprules.another_pass(self._owner.name, self._passes.expected)
                raise looprules.step_left_out(self._owner, step)
            if before is gradient:
                self.check_unedited()
            self.guarded = False
            if before is not gradient and before is not None:
                arrival.gradient_follows(before)
            if before is not gradient or gradient._version != seen.version + 1:
                if self._passes.now:  # a new gradient, or a zeroed one
                    self._passes.discard()
                self._applied = False
            self._passes.now += 1
            seen.see(gradient)
            seen.wait()
            if self._passes.is_last and not self._applied and session.eager:
                session.begin_pushing()
                arrival.push(gradient, step)

    def check_unedited(self) -> None:
        """Raise if somebody has written to it since its push, before the reply is in."""
        gradient = self.seen.tensor() if self.guarded else None
        if gradient is not None and gradient._version != self.seen.version:
            raise looprules.changed_while_sent(self._owner.name)

    def discarded(self, *, dropped: bool) -> None:
        if not self.left:
            self._passes.discard()
            if not (dropped and self.pushed_step):
                self.seen.release()

    # The end of a step.
    def finish_step(self, step: int) -> None:
        owner, session, seen = self._owner, self._session, self.seen
        gradient = self.leaf.grad
        has_left = self.pushed_step == step
        if gradient is None and not (has_left or owner.is_expected):
            return
        if has_left or (gradient is not None and self.is_new):
            if gradient is None or gradient is not seen.tensor():
                broken = looprules.discarded_after_push if has_left else looprules.replaced
                raise broken(owner.name)
            if gradient._version != seen.version and self.is_new:
                raise looprules.edited(owner.name)
        if not has_left:
            self._attach_hook()
            self.arrival.settle()
            if gradient is not None:
                if gradient.layout != self._usual_layout:
                    self.arrival.check_gradient(gradient)
                seen.see(gradient)
            session.begin_pushing()
            self.arrival.push(gradient, step)
        if owner.counts_rows:
            owner.count_rows(gradient)
        if (step <= _LEARNING_STEPS or not self._passes.expected) and self.is_new:
            self._passes.learn(early=session.eager)
        self._applied = True
        self._passes.now = self._passes.discards = 0

    def check_stepped(self) -> None:
        if self.left:
            raise looprules.used_before_step(self._owner, self._session.completed + 1)


class ParameterValue:
    """The value of a parameter that servers update, and whether somebody changed it by hand."""

    def __init__(self, owner: Parameter) -> None:
        self.memory = owner.session.memory_of(owner.parameter)
        self._owner = owner
        self.note()

    def note(self) -> None:
        """Note that all ranks have the value as it is now."""
        with torch._C.DisableTorchFunctionSubclass():
            self._address = self._owner.parameter.data_ptr()
            self.version = self._owner.parameter._version
        self.exposed = False  # somebody holds `.data`, through which edits leave no trace

    def land(self) -> None:
        """Make the parameter show the new values that are in the memory."""
        self.memory.land()
        self.version = self._owner.parameter._version

    def begin_update(self) -> tuple[int, bool]:
        """The flags for a gradient that leaves, and whether the value is sent with it."""
        owner, parameter, session = self._owner, self._owner.parameter, self._owner.session
        changed, exposed = parameter._version != self.version, self.exposed
        if parameter.data_ptr() != self._address:
            check_same_kind(owner.index, parameter, session)
            self.memory = session.memory_of(parameter)
            self._address, changed = parameter.data_ptr(), True
        sends = (changed or exposed) and session.world.rank == 0
        if sends:
            self.memory.before_sending_values()
        increment_version(parameter)
        self.version, self.exposed = parameter._version, False
        return (Flag.VALUE_CHANGED if changed else Flag.EXPOSED if exposed else 0), sends


class ServedValues(ParameterArrival):
    """The servers' new values, in the parameter itself, or beside it until a use waits for them."""

    gradient: ServedGradient

    def __init__(
        self, owner: Parameter, gradient: Callable[..., ServedGradient] = ServedGradient
    ) -> None:
        super().__init__(owner)
        self._engine, self._number = owner.session.engine_of(owner.index)
        self.value = ParameterValue(owner)
        self.values = self.value.memory.values
        self._held = HeldGradient(owner.name)
        self.take_gradient = self._held.take  # type: ignore[method-assign]
        usual = None if owner.session.reduces_by_kind else torch.strided
        self.gradient = gradient(self, owner.parameter, usual)

    def before_offering(self) -> None:
        self.value.memory.before_sending_values()

    def receive_initial_value(self) -> None:
        self._engine.wait(self._number, 0)
        self.value.land()

    def push(self, gradient: torch.Tensor | None, step: int) -> None:
        owner = self.owner
        flags, with_value = self.value.begin_update()
        memory = self.value.memory
        self.values = memory.values
        self.gradient.pushed_step = step
        owner.watched = False
        if gradient is None or gradient.numel():
            make_wait(owner.parameter, owner)
            if (readers := owner.session.stale_readers) is not None:
                # nobody needs the old values, unless the engine is still to send them
                replaced = step > 1 and not with_value and memory.receives_values
                readers.pending(owner.name, owner.parameter, poisoned=replaced)
        push = partial(self._engine.push, self._number, step, with_value=with_value)
        if gradient is None:
            memory.pass_by(partial(push, flags=flags | Flag.NO_GRADIENT))
            return
        self.gradient.guarded = gradient.numel() > 0
        dense = gradient if gradient.layout == torch.strided else gradient.to_dense()

        def send(its_bytes: Any) -> None:  # from any thread
            self._held.hold(dense, its_bytes)
            push(flags=flags)

        memory.stage_gradient(dense.detach(), send)

    def replace_busy_gradient(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.value.memory.await_staged()
            parameter, own = self.owner.parameter, self.gradient
            busy = own.pushed_step and not self._engine.is_complete(self._number)
            if busy and parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter.grad)
            elif not own.left:
                own.check_unedited()
                own.guarded = False

    def read_gradient(self, *, in_place: bool) -> None:
        own = self.gradient
        if (own.left or own.is_new) and (in_place or not own.left):
            step = self.owner.session.completed + 1
            raise looprules.read_before_step(self.owner, step, in_place=in_place)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self.value.memory.await_staged()
            self._engine.wait(self._number, own.pushed_step)
            gradient = own.seen.tensor()
            if gradient is not None and own.pushed_step and not in_place:
                self._show_aggregated(gradient)
            own.seen.release()

    def gradient_follows(self, held: torch.Tensor) -> None:
        own = self.gradient
        if own.pushed_step and is_waiting(held) and not own.left:
            with torch.no_grad():
                self._show_aggregated(held)
            own.seen.release()

    def _show_aggregated(self, gradient: torch.Tensor) -> None:
        self.gradient.check_unedited()
        if gradient.numel():  # or nobody has sent anything
            aggregated = self.owner.session.aggregated_gradient(self.owner.index)
            gradient.copy_(aggregated.view(gradient.shape))
        self.gradient.seen.see(gradient)

    def before_use(self, func: Any, args: Any, kwargs: Any, *, in_place: bool) -> None:
        if not self.owner.watched:
            if in_place:
                raise looprules.changed_while_pending(self.owner.name)
            self.settle()
        if func == GET_DATA:
            self.value.exposed = True

    def settle(self) -> None:
        owner, memory = self.owner, self.value.memory
        if not is_waiting(owner.parameter) or owner.watched:
            return
        if memory.is_staged:
            memory.await_staged()
        self._engine.wait(self._number, self.gradient.pushed_step)
        with torch._C.DisableTorchFunctionSubclass():
            self.gradient.check_unedited()
        self.gradient.guarded = False
        stop_waiting(owner.parameter)
        if (readers := owner.session.stale_readers) is not None:
            readers.settled(owner.parameter)
        if memory.is_staged:
            self.value.land()

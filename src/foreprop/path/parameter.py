"""One dense parameter that servers update: its gradient leaves, its new value is waited for.

After its push a gradient belongs to the library until the optimizer's step has returned the new
values (`path.servedgradient`). The parameter waits from the push on (`path.waiting`), and is an
ordinary one again at its first use.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from foreprop.core.wire import Flag
from foreprop.errors import ConfigError, InternalError
from foreprop.path.memory import HeldGradient
from foreprop.path.servedgradient import ServedGradient
from foreprop.path.waiting import (
    is_waiting,
    make_wait,
    no_answer,
    refuse_to_be_compiled,
    stop_waiting,
)

if TYPE_CHECKING:
    from foreprop.path.managedparameter import FirstUses, SessionState, Watched

GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
"""Whoever has used it can change the value, and leave no trace."""


class ValueMark:
    """By which it is known whether somebody has changed a parameter's value by hand."""

    __slots__ = ("address", "exposed", "version")

    def __init__(self, parameter: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.address = parameter.data_ptr()
            self.version = parameter._version
        self.exposed = False
        """Somebody holds `.data`, through which edits leave no trace."""


class ParameterValue:
    """Of a parameter that servers update. Training thread."""

    def __init__(self, index: int, parameter: torch.nn.Parameter, session: SessionState) -> None:
        self.memory = session.memory_of(parameter)
        self.mark = ValueMark(parameter)
        self._index = index
        self._parameter = parameter
        self._session = session

    def land(self) -> None:
        """New values are in the memory: make the parameter show them."""
        self.memory.land()
        self.mark.version = self._parameter._version

    def begin_update(self) -> tuple[int, bool]:
        """A gradient leaves, and a new value will come.

        Returns flags, and whether rank 0 must send the values, which were changed by hand.
        """
        parameter, mark = self._parameter, self.mark
        changed = parameter._version != mark.version
        if parameter.data_ptr() != mark.address:
            self._rebind()
            changed = True
        exposed, mark.exposed = mark.exposed, False
        sends = (changed or exposed) and self._session.world.rank == 0
        if sends:
            self.memory.before_sending_values()
        increment_version(parameter)  # whoever saved the old value must not use it
        mark.version = parameter._version
        return (Flag.VALUE_CHANGED if changed else Flag.EXPOSED if exposed else 0), sends

    def _rebind(self) -> None:
        check_same_kind(self._index, self._parameter, self._session)
        self.memory = self._session.memory_of(self._parameter)
        self.mark.address = self._parameter.data_ptr()


def check_same_kind(
    index: int, tensor: torch.Tensor, session: SessionState, now: str = " and is"
) -> None:
    """Raise `ConfigError` unless the tensor is what the parameter was at `parallelize`."""
    info = session.infos[index]
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tuple(tensor.shape) != info.shape or dtype != info.dtype:
        raise ConfigError(
            f"{info.name} was {info.dtype} {info.shape} at parallelize(){now} {dtype}"
            f" {tuple(tensor.shape)} now; change the model before parallelize()"
        )


class FirstUse:
    """Of one parameter: reported to the session while it is ``watched``."""

    def __init__(self, parameter: Watched, session: FirstUses) -> None:
        self.watched = False
        self._parameter = parameter
        self._session = session

    def begins(self) -> None:
        """An operation with the parameter begins."""
        if self.watched:
            self._session.first_use_begins(self._parameter)

    def is_awaited_after(self, result: Any) -> bool:
        """An operation has returned ``result``: whether its first use is still to come."""
        if self.watched and self._session.is_first_use(self._parameter, result):
            self.watched = False
        return self.watched


class SynchronisedParameter:
    """The life of one parameter between `backward()` and its next use."""

    def __init__(
        self, index: int, name: str, parameter: torch.nn.Parameter, session: SessionState
    ) -> None:
        self.index = index
        self.name = name
        self.parameter = parameter
        self.counts_rows = False
        self.touched_rows = 0  # of the last gradient's, if they are counted
        self._session = session
        self._engine, self._number = session.engine_of(index)
        self._value = ParameterValue(index, parameter, session)
        self.values = self._value.memory.values
        self._held = HeldGradient(name)
        self.take_gradient = self._held.take
        self._first_use = FirstUse(self, session)
        usual = None if session.reduces_by_kind else torch.strided
        self._gradient = ServedGradient(self, parameter, session, usual)
        self.finish_step = self._gradient.finish_step
        """`optimizer.step()`: push what has not been pushed; check what has."""

    def sent_gradient(self, start_bytes: int, stop_bytes: int) -> memoryview | None:
        """It belongs to the library until it is answered."""
        return None

    @property
    def landed(self) -> memoryview:
        raise InternalError(f"the workers do not update {self.name}")

    def land_average(self, gradient: torch.Tensor) -> None:
        raise InternalError(f"the workers do not update {self.name}")

    # The start.
    def before_offering(self) -> None:
        """Rank 0: the values are about to be read."""
        self._value.memory.before_sending_values()

    def receive_initial_value(self) -> None:
        """Other ranks: block until rank 0's values are here."""
        self._engine.wait(self._number, 0)
        self._value.land()

    # Its gradient.
    @property
    def left(self) -> bool:
        """Whether the coming step's gradient has been sent."""
        return self._gradient.left

    def check_gradient(self, gradient: torch.Tensor) -> None:
        self._session.check_layout(self.index, gradient.layout)

    def push(self, gradient: torch.Tensor | None, step: int) -> None:
        """Hand the gradient (or word that there is none) to the engine; from now on pending."""
        flags, with_value = self._value.begin_update()
        self.values = self._value.memory.values
        self._gradient.pushed_step = step
        self._first_use.watched = False
        if gradient is None or gradient.numel():
            make_wait(self.parameter, self)
            if (readers := self._session.stale_readers) is not None:
                # nobody needs the old values, unless the engine is still to send them
                replaced = step > 1 and not with_value and self._value.memory.receives_values
                readers.pending(self.name, self.parameter, poisoned=replaced)
        if gradient is None:
            push = partial(self._engine.push, flags=flags | Flag.NO_GRADIENT, with_value=with_value)
            self._value.memory.pass_by(partial(push, self._number, step))
            return
        self._gradient.guarded = gradient.numel() > 0
        dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
        send = partial(self._send, dense, step=step, flags=flags, with_value=with_value)
        self._value.memory.stage_gradient(dense.detach(), send)

    def _send(
        self, gradient: torch.Tensor, its_bytes: Any, *, step: int, flags: int, with_value: bool
    ) -> None:
        """Its bytes are where they can be sent from. Any thread."""
        self._held.hold(gradient, its_bytes)
        self._engine.push(self._number, step, flags=flags, with_value=with_value)

    def gradient_discarded(self, *, dropped: bool) -> None:
        """`optimizer.zero_grad()`: what has been accumulated and not pushed does not count.

        ``dropped``: there is no ``p.grad`` any more; who holds the tensor still waits for it.
        """
        self._gradient.discarded(dropped=dropped)

    def replace_busy_gradient(self) -> None:
        """`zero_grad(set_to_none=False)`: zeros in new memory while the old is being sent."""
        with torch._C.DisableTorchFunctionSubclass():
            self._value.memory.await_staged()
            gradient, own = self.parameter.grad, self._gradient
            busy = own.pushed_step and not self._engine.is_complete(self._number)
            if busy and gradient is not None:
                self.parameter.grad = torch.zeros_like(gradient)
            elif not own.left:
                own.check_unedited()
                own.guarded = False

    # Who reads its gradient.
    def read_gradient(self, *, in_place: bool) -> None:
        """Somebody reads or edits ``p.grad``, which the servers have been sent, or will be."""
        session, own = self._session, self._gradient
        if (own.left or own.is_new) and (in_place or not own.left):
            from foreprop.path import looprules

            raise looprules.read_before_step(self, session.completed + 1, in_place=in_place)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._value.memory.await_staged()
            self._engine.wait(self._number, own.pushed_step)
            gradient = own.seen.tensor()
            if gradient is not None and own.pushed_step and not in_place:
                self._show_aggregated(gradient)
            own.seen.release()

    def gradient_follows(self, held: torch.Tensor) -> None:
        """Another gradient comes: somebody holds the last step's, and may look at it later."""
        own = self._gradient
        if own.pushed_step and is_waiting(held) and not own.left:
            with torch.no_grad():
                self._show_aggregated(held)
            own.seen.release()

    def _show_aggregated(self, gradient: torch.Tensor) -> None:
        self._gradient.check_unedited()
        if gradient.numel():  # or nobody has sent anything
            gradient.copy_(self._session.aggregated_gradient(self.index).view(gradient.shape))
        self._gradient.seen.see(gradient)

    # First use.
    def watch(self) -> None:
        """Report the parameter's next differentiable use to the session, as its first."""
        self._first_use.watched = True
        make_wait(self.parameter, self)

    def unwatch(self) -> None:
        if self._first_use.watched:
            self._first_use.watched = False
            stop_waiting(self.parameter)

    answer = staticmethod(no_answer)
    meets_compiler = staticmethod(refuse_to_be_compiled)

    def before_use(self, func: Any, args: Any, kwargs: Any, *, in_place: bool) -> bool:
        """Called by the waiting parameter: wait, and give the class back."""
        if self._gradient.pushed_step > self._session.completed:
            self.check_stepped()
        if self._first_use.watched:
            self._first_use.begins()
            self._value.mark.exposed |= func == GET_DATA
            with torch._C.DisableTorchFunctionSubclass():
                stop_waiting(self.parameter)
            return True
        if in_place:
            from foreprop.path import looprules

            raise looprules.changed_while_pending(self.name)
        self.settle()
        if func == GET_DATA:
            self._value.mark.exposed = True
        return False

    def after_use(self, result: Any) -> None:
        if self._first_use.is_awaited_after(result) and not is_waiting(self.parameter):
            make_wait(self.parameter, self)

    def check_stepped(self) -> None:
        """Raise if the gradient of a step has been pushed that has not been made."""
        self._gradient.check_stepped()

    def settle(self) -> None:
        """Wait for the pending update, if there is one, and make it visible."""
        if not is_waiting(self.parameter) or self._first_use.watched:
            return
        is_staged = self._value.memory.is_staged
        if is_staged:
            self._value.memory.await_staged()
        self._engine.wait(self._number, self._gradient.pushed_step)
        with torch._C.DisableTorchFunctionSubclass():
            self._gradient.check_unedited()
        self._gradient.guarded = False
        stop_waiting(self.parameter)
        if (readers := self._session.stale_readers) is not None:
            readers.settled(self.parameter)
        if is_staged:
            self._value.land()

    def settle_whole(self) -> None:
        """Make every element show the last step's result."""
        self.settle()

    def settle_if_stepped(self) -> None:
        """Like `settle`, but leaves alone what still belongs to the coming step."""
        if not self._gradient.left:
            self.settle()

    def detach(self) -> None:
        """The session is over: the parameter becomes an ordinary one, whatever is pending."""
        self._first_use.watched = False
        if is_waiting(self.parameter):
            stop_waiting(self.parameter)
        self._gradient.detach()

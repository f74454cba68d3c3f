"""One parameter of a session: its gradient and its arrival.

The *gradient* is how it is taken from autograd, and what its readers find: it is sent to servers
(`params.servedparameter`) or averaged (`params.averaged`). The *arrival* is what lands after that,
and when: new values, late ones (`members.lateparameter`), averages, or rows of a table
(`tables.rowparameter`), which no worker need have. Both are given at the start, and stay. Until the
arrival is in, the parameter waits (`params.waiting`); from its first use on it is an ordinary one
again.

What is called between `backward()` and the next use, in this order: ``added`` by autograd, ``push``
by the gradient, ``finish_step`` by `optimizer.step()`, and ``before_use`` and ``after_use`` by
whatever uses the parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from foreprop.engine.memory import ParameterBytes, dtype_name
from foreprop.errors import ConfigError, InternalError
from foreprop.params.waiting import (
    Pending,
    forget,
    is_waiting,
    make_wait,
    no_answer,
    refuse_to_be_compiled,
    stop_waiting,
)

if TYPE_CHECKING:  # which knows arrivals
    from foreprop.params.setup import SessionState


class Parameter:
    """The parameter of one number, between `backward()`, `step()` and its next use."""

    def __init__(
        self,
        index: int,
        name: str,
        parameter: torch.nn.Parameter,
        session: SessionState,
        *,
        arrival: Callable[[Parameter], ParameterArrival],
    ) -> None:
        self.index = index
        self.name = name
        self.parameter = parameter
        self.session = session
        self.counts_rows = False
        self.touched_rows = 0  # of the last gradient's, if they are counted
        self.watched = False  # the next differentiable use is reported to the session
        self.arrival = arrival(self)
        self.gradient = self.arrival.gradient

    # First use, and any other.
    def watch(self) -> None:
        """Report the next differentiable use to the session, as the first."""
        self.watched = True
        self.wait()

    def unwatch(self) -> None:
        if self.watched:
            self.watched = False
            if self.arrival.update is None:
                stop_waiting(self.parameter)

    def wait(self) -> None:
        if self.arrival.waits and not is_waiting(self.parameter):
            make_wait(self.parameter, self)

    answer = staticmethod(no_answer)
    meets_compiler = staticmethod(refuse_to_be_compiled)

    def before_use(self, func: Any, args: Any, kwargs: Any, *, in_place: bool) -> bool:
        if self.gradient.pushed_step > self.session.completed:
            self.gradient.check_stepped()
        if (note_use := self.session.note_use) is not None:
            note_use(self.index)
        if self.watched:
            self.session.first_use_begins(self)
        self.arrival.before_use(func, args, kwargs, in_place=in_place)
        stop_waiting(self.parameter)
        return self.watched or self.arrival.is_stale

    def after_use(self, result: Any) -> None:
        if self.watched and self.session.is_first_use(self, result):
            self.watched = False
        if self.watched or self.arrival.is_stale:
            self.wait()

    def settle_if_stepped(self) -> None:
        """Make it an ordinary one for compiled code, unless it still belongs to the coming step."""
        if self.gradient.pushed_step <= self.session.completed:
            self.arrival.settle_whole()
            if not self.watched:
                stop_waiting(self.parameter)

    # A step.
    @property
    def is_expected(self) -> bool:
        """Whether the other ranks wait for a gradient, or for word that there is none."""
        session = self.session
        expected = self.parameter.requires_grad or session.every_parameter
        return expected or self.index in session.just_frozen

    def count_rows(self, gradient: torch.Tensor | None) -> None:
        from foreprop.engine.sums import count_rows

        self.touched_rows = count_rows(gradient)

    def detach(self) -> None:
        """Make it an ordinary parameter for good, whatever is pending."""
        self.watched = False
        stop_waiting(self.parameter)
        self.gradient.detach()
        self.arrival.update, self.arrival.is_stale = None, False
        self.arrival.detach()


class ParameterArrival(ParameterBytes):
    """What lands in one parameter, and when; what is here holds for tables. Training thread."""

    gradient: ParameterGradient
    waits = True  # the parameter does, and not only look-ups in it
    update: Any = None  # a step's, that is still to be made here
    is_stale = False  # the next use waits, too
    late_uses = 0
    """Steps that have begun with values of the step before."""

    def __init__(self, owner: Parameter) -> None:
        super().__init__(owner.name)
        self.owner = owner

    def land_average(self, gradient: torch.Tensor) -> None:
        """Take what collectives have aggregated, flat, where the workers update. Any thread."""
        raise InternalError(f"the workers do not update {self.owner.name}")

    # At the start rank 0 prepares its values to be read; the others block until they are here.
    def before_offering(self) -> None: ...
    def receive_initial_value(self) -> None: ...

    def check_gradient(self, gradient: torch.Tensor) -> None:
        self.owner.session.check_layout(self.owner.index, gradient.layout)

    def push(self, gradient: torch.Tensor | None, step: int) -> None:
        """Hand the gradient (or word that there is none) to the engine; from now on pending."""

    def gradient_follows(self, held: torch.Tensor) -> None:
        """Show ``held``, the last step's gradient, as it was used: somebody may look at it."""

    def read_gradient(self, *, in_place: bool) -> None:
        """Show the aggregated ``p.grad`` to a reader; raise for an edit that would be lost."""

    def replace_busy_gradient(self) -> None:
        """Have `zero_grad(set_to_none=False)` write to new memory, if the old is being sent."""

    def before_use(self, func: Any, args: Any, kwargs: Any, *, in_place: bool) -> None:
        """Wait for what the operation needs."""
        self.settle()

    def settle(self) -> None:
        """Wait for the pending update, and make it visible."""

    def settle_whole(self) -> None:
        """Make every element show the last step's result, those that nobody has looked up too."""
        self.settle()

    def detach(self) -> None: ...


class ParameterGradient:
    """What autograd makes of one parameter in ``leaf``; asked before each use of it that waits."""

    is_averaged = False  # over the ranks, for the workers' own update
    pushed_step = 0  # the last of which servers have been sent it, who then replace the value

    def __init__(self, leaf: torch.nn.Parameter) -> None:
        self.leaf = leaf
        self.seen = SeenGradient(self)
        self._hook: RemovableHandle | None = None

    @property
    def left(self) -> bool:
        """Whether the coming step's gradient has been sent."""
        raise NotImplementedError

    def discarded(self, *, dropped: bool) -> None:
        """Note that `zero_grad()` is called: what has been accumulated and not sent does not count.

        ``dropped``: there is no ``p.grad`` any more; who holds the tensor still waits for it.
        """

    def finish_step(self, step: int) -> None:
        """Send what has not been sent when `optimizer.step()` is called; check what has."""

    def check_stepped(self) -> None:
        """Raise if the gradient of a step has been sent that has not been made."""

    def detach(self) -> None:
        self.seen.release()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        return NotImplemented

    def before_use(self, func: Any, args: Any, kwargs: Any, *, in_place: bool) -> bool:
        raise NotImplementedError

    def after_use(self, result: Any) -> None: ...

    def meets_compiler(self) -> None:
        """Let it: Dynamo looks at gradients of parameters that it uses, and does not read them."""


class SeenGradient:
    """The gradient that was seen last, not kept alive; ``reader`` is asked while it waits."""

    def __init__(self, reader: Pending) -> None:
        self._reader = reader
        self.tensor: Callable[[], torch.Tensor | None] = lambda: None
        self._id = 0
        self.version = 0  # the tensor's, when it was last seen

    def see(self, gradient: torch.Tensor) -> bool:
        """Note it, and its version; whether it is another one than before."""
        new = self.tensor() is not gradient
        if new:
            if self._id:
                forget(self._id, self._reader)
            self.tensor, self._id = weakref.ref(gradient), id(gradient)
        self.version = gradient._version
        return new

    def wait(self) -> None:
        if (gradient := self.tensor()) is not None and not is_waiting(gradient):
            make_wait(gradient, self._reader)

    def release(self) -> None:
        if (gradient := self.tensor()) is not None:
            stop_waiting(gradient)

    def forget(self) -> None:
        forget(self._id, self._reader)
        self.tensor, self._id = lambda: None, 0


def check_same_kind(
    index: int, tensor: torch.Tensor, session: SessionState, now: str = " and is"
) -> None:
    """Raise `ConfigError` unless the tensor is what the parameter was at `parallelize`."""
    info = session.infos[index]
    dtype = dtype_name(tensor.dtype)
    if tensor.shape != info.shape or dtype != info.dtype:
        raise ConfigError(
            f"{info.name} was {info.dtype} {info.shape} at parallelize(){now} {dtype}"
            f" {tuple(tensor.shape)} now; change the model before parallelize()"
        )

"""One synchronised parameter: when its gradient is pushed, and what must not happen meanwhile.

After its push a gradient belongs to the library until the optimizer's step has returned the new
values. Everything that would silently give other results than plain PyTorch raises
`TrainingLoopError` with what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from foreprop.core.norm import SquareSum
from foreprop.core.wire import Flag
from foreprop.errors import ConfigError, InternalError, TrainingLoopError
from foreprop.path.engines import Engine
from foreprop.path.heldgradient import HeldGradient
from foreprop.path.memory import Memory
from foreprop.path.seengradient import SeenGradient
from foreprop.path.stalereaders import StaleReaders
from foreprop.path.waiting import is_waiting, make_wait, refuse_to_be_compiled, stop_waiting

_LEARNING_STEPS = 2
_EDIT_HINT = (
    "Set parallelize(..., update='workers'): then every worker applies the optimizer, and gradients"
    " may be read, clipped and edited as with DDP (without clip_grad_norm=, clip_grad_value=, ema="
    " and scaler=, which are for servers)."
)
_ANY_NUMBER_HINT = (
    "Set parallelize(..., update='workers'): then every worker applies the optimizer, and backward"
    " passes may vary, and steps be left out, as with DDP."
)
_CLIP_HINT = f"Servers update it as soon as all ranks have sent theirs. {_EDIT_HINT}"


class Watched(Protocol):
    """A parameter as whoever looks at a step sees it."""

    index: int
    name: str
    parameter: torch.nn.Parameter
    counts_rows: bool
    touched_rows: int

    def watch(self) -> None:
        """Report the next differentiable use as the first."""

    def unwatch(self) -> None:
        """Nobody asks any more."""


class SessionState(Protocol):
    """What a parameter needs to know of its session."""

    engine: Engine
    completed: int
    """Steps that `optimizer.step()` has ended."""

    leaves_rows: bool
    """Whether nobody wants all rows of a table now."""

    reduces_by_kind: bool
    """Whether other things are made of sparse gradients than of dense ones."""

    stale_readers: StaleReaders | None
    """Told about what is pending, with ``check_stale``."""

    fixed_passes: int | None
    """Backward passes per step as configured; None: to be learned."""

    @property
    def eager(self) -> bool:
        """Whether gradients are pushed during the backward pass, not only at step()."""

    def memory_of(self, parameter: torch.Tensor) -> Memory:
        """Where the parameter's bytes are for the engine."""

    def begin_pushing(self) -> None:
        """Called before a step's pushes."""

    def first_use_begins(self, parameter: Watched) -> None:
        """An operation with a watched parameter begins; `is_first_use` follows, with its result."""

    def is_first_use(self, parameter: Watched, result: Any) -> bool:
        """Whether an operation's result makes this the parameter's first use; notes the order."""

    def check_layout(self, parameter: int, layout: torch.layout) -> None:
        """Raise `ConfigError` if a gradient of this layout cannot be taken."""

    def gradient_ready(self, parameter: Watched) -> None:
        """Autograd has just computed a gradient."""

    def aggregated_gradient(self, parameter: int) -> torch.Tensor:
        """What the last update of the parameter was made with, flat, from who made it."""

    def gradients_read(self, parameter: Watched, *, norm: bool = False) -> None:
        """Somebody reads or edits this rank's own gradient: have it averaged.

        ``norm``: no more is asked for than its norm.
        """

    def square_sums(self, round_: int) -> Sequence[SquareSum]:
        """By parameter, of a round's averages; blocks until the servers have told them."""


class ValueMark:
    """By which it is known whether somebody has changed a parameter's value by hand."""

    __slots__ = ("address", "exposed", "version")

    def __init__(self, parameter: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.address = parameter.data_ptr()
            self.version = parameter._version
        self.exposed = False
        """Somebody holds `.data`, through which edits leave no trace."""


class SynchronisedParameter:
    """The life of one parameter between `backward()` and its next use."""

    def __init__(
        self,
        index: int,
        name: str,
        parameter: torch.nn.Parameter,
        session: SessionState,
        leaf: torch.nn.Parameter | None = None,
    ) -> None:
        self.index = index
        self.name = name
        self.parameter = parameter
        self._leaf = parameter if leaf is None else leaf
        """Where autograd gathers the parameter's gradient."""
        self.expected_passes = 0  # backward passes per step; 0: not known yet
        self.counts_rows = False
        self.touched_rows = 0  # of the last gradient's, if they are counted
        self.expected_discards = 0  # passes before them whose gradients are discarded (a GAN's)
        self._session = session
        self._memory: Memory = session.memory_of(parameter)
        self._value = ValueMark(parameter)
        self._watched = False
        self._hook: RemovableHandle | None = None
        self._passes = 0  # since the gradient was last discarded
        self._discards = 0  # passes in this step before that
        self._seen = SeenGradient(_Reader(self))
        self._applied = False  # the gradient in `p.grad` has been used by a step already
        self._pushed_step = 0
        self._held = HeldGradient(name)
        self._guarded = False  # nobody may write to the gradient: it is being sent
        self.attach_hook()

    # The memory that the engine reads and writes.
    @property
    def values(self) -> memoryview:
        return self._memory.values

    def take_gradient(self, start_bytes: int, stop_bytes: int) -> Any:
        return self._held.take(start_bytes, stop_bytes)

    def land_average(self, gradient: torch.Tensor) -> None:
        raise InternalError(f"the workers do not update {self.name}")

    @property
    def left(self) -> bool:
        """Whether the coming step's gradient has been sent."""
        return self._pushed_step > self._session.completed

    def read_gradient(self, *, in_place: bool) -> None:
        """Somebody reads or edits ``p.grad``, which the servers have been sent, or will be."""
        session = self._session
        ahead = self.left or (self._passes > 0 and not self._applied)
        if ahead and (in_place or not self.left):
            what = "edited" if in_place else "read"
            raise TrainingLoopError(
                f"the gradient of {self.name} is {what} between backward() and step(), in step"
                f" {session.completed + 1}, but servers update it as soon as all ranks have sent"
                f" theirs. {_EDIT_HINT}"
            )
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._memory.await_staged()
            session.engine.wait(self.index, self._pushed_step)
            gradient = self._seen.tensor
            if gradient is not None and self._pushed_step and not in_place:
                self._show_aggregated(gradient)
            self._seen.release()

    def _show_aggregated(self, gradient: torch.Tensor) -> None:
        self._check_unedited()
        if gradient.numel():  # or nobody has sent anything
            gradient.copy_(self._session.aggregated_gradient(self.index).view(gradient.shape))
        self._seen.see(gradient)

    def _show_held(self) -> None:
        """Another gradient comes: somebody may hold the last step's, and look at it later."""
        held = self._seen.tensor
        if held is not None and self._pushed_step and is_waiting(held) and not self.left:
            with torch.no_grad():
                self._show_aggregated(held)
            self._seen.release()

    def _check_unedited(self) -> None:
        """Raise if somebody has written to the gradient since its push.

        Asked in the training thread, where nobody writes to it rightfully before its reply is in.
        """
        gradient = self._seen.tensor if self._guarded else None
        if gradient is not None and gradient._version != self._seen.version:
            raise TrainingLoopError(
                f"the gradient of {self.name} was changed while it was being sent. Use"
                " optimizer.zero_grad() (which knows), or zero_grad(set_to_none=True)."
            )

    # Gradients.
    def take_over(
        self, gradient: torch.Tensor | None, mark: ValueMark, *, passes: int, discards: int
    ) -> None:
        """In the middle of the first step: go on from what has been seen of it."""
        self._passes, self._discards = passes, discards
        self._value = mark
        if gradient is not None:
            self._seen.see(gradient)
            self._seen.wait()

    def attach_hook(self) -> None:
        """Watch for gradients, if the parameter can have any."""
        if self._hook is None and self._leaf.requires_grad:
            register: Any = self._leaf.register_post_accumulate_grad_hook
            self._hook = register(self._on_gradient)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Autograd has added to ``parameter.grad``. Runs in the backward pass."""
        with torch._C.DisableTorchFunctionSubclass():
            gradient = parameter.grad
            if gradient is not None:
                self._take_gradient(gradient)

    def _take_gradient(self, gradient: torch.Tensor) -> None:
        self._check_gradient(gradient)
        session = self._session
        session.gradient_ready(self)
        step = session.completed + 1
        kept = self._seen.tensor is gradient
        if self._pushed_step == step:
            self._refuse_another_pass(kept)
        if kept:
            self._check_unedited()
        self._guarded = False
        if not kept:
            self._show_held()
        if not self._seen.is_continued_by(gradient):
            self._discard()  # a new gradient, or a zeroed one: what was there does not count
            self._applied = False
        self._passes += 1
        self._seen.see(gradient)
        self._seen.wait()
        if session.eager and not self._applied and self._is_last_pass():
            session.begin_pushing()
            self._push(gradient, step)

    def _is_last_pass(self) -> bool:
        return self._passes == self.expected_passes and self._discards >= self.expected_discards

    def _discard(self) -> None:
        self._discards += self._passes
        self._passes = 0

    def gradient_discarded(self, *, dropped: bool) -> None:
        """`optimizer.zero_grad()`: what has been accumulated and not pushed does not count.

        ``dropped``: there is no ``p.grad`` any more; who holds the tensor still waits for it.
        """
        if self._pushed_step <= self._session.completed:
            self._discard()
            if not (dropped and self._pushed_step):
                self._seen.release()

    def _check_gradient(self, gradient: torch.Tensor) -> None:
        session = self._session
        if gradient.layout != torch.strided or session.reduces_by_kind:
            session.check_layout(self.index, gradient.layout)

    def _refuse_another_pass(self, kept: bool) -> None:
        if kept:
            raise TrainingLoopError(
                f"{self.name} received another gradient after {self.expected_passes} backward"
                " pass(es), the number of the first steps: servers have been sent those already."
                f" {_ANY_NUMBER_HINT} Or set backward_passes=N to the largest number: fewer are"
                " sent at step()."
            )
        raise TrainingLoopError(
            f"the gradient of {self.name} was pushed in step {self._pushed_step}, then discarded,"
            f" and optimizer.step() was never called. {_ANY_NUMBER_HINT} Or decide before"
            " backward() whether to make the step. If some passes are always discarded (a GAN's"
            " generator's, in its discriminator), they must be so from the first two steps on."
        )

    def _push(self, gradient: torch.Tensor | None, step: int) -> None:
        """Hand the gradient (or word that there is none) to the engine; from now on pending."""
        flags, with_value = self._note_changed_value()
        increment_version(self.parameter)  # whoever saved the old value must not use it
        self._value.version = self.parameter._version
        self._pushed_step = step
        self._watched = False
        if gradient is None or gradient.numel():
            make_wait(self.parameter, self)
            self._note_pending(replaced=step > 1 and not with_value)
        engine = self._session.engine
        if gradient is None:
            engine.push(self.index, step, flags=flags | Flag.NO_GRADIENT, with_value=with_value)
            return

        def enqueue(gradient_bytes: Any) -> None:
            self._held.ready(gradient_bytes)
            engine.push(self.index, step, flags=flags, with_value=with_value)

        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        self._held.hold(gradient)
        self._guarded = gradient.numel() > 0
        self._memory.stage_gradient(gradient.detach(), enqueue)

    def _note_pending(self, *, replaced: bool) -> None:
        """``replaced``: nobody needs the old values, which may be in the engine's hands."""
        readers = self._session.stale_readers
        if readers is not None:
            replaced = replaced and self._memory.receives_values
            readers.pending(self.name, self.parameter, poisoned=replaced)

    def _note_settled(self) -> None:
        readers = self._session.stale_readers
        if readers is not None:
            readers.settled(self.parameter)

    def _note_changed_value(self) -> tuple[int, bool]:
        """Flags and whether rank 0 must send the values, if the parameter was changed by hand."""
        parameter = self.parameter
        changed = parameter._version != self._value.version
        if parameter.data_ptr() != self._value.address:
            self._rebind()
            changed = True
        exposed, self._value.exposed = self._value.exposed, False
        if (changed or exposed) and self._session.engine.is_rank_zero:
            self._memory.before_sending_values()
            return (Flag.VALUE_CHANGED if changed else 0), True
        return (Flag.VALUE_CHANGED if changed else 0), False

    def _rebind(self) -> None:
        info = self._session.engine.parameters[self.index]
        dtype = str(self.parameter.dtype).removeprefix("torch.")
        if tuple(self.parameter.shape) != info.shape or dtype != info.dtype:
            raise ConfigError(
                f"{self.name} was {info.dtype} {info.shape} at parallelize() and is {dtype}"
                f" {tuple(self.parameter.shape)} now; change the model before parallelize()"
            )
        self._memory = self._session.memory_of(self.parameter)
        self._value.address = self.parameter.data_ptr()

    # The end of a step.
    def finish_step(self, step: int) -> None:
        """`optimizer.step()`: push what has not been pushed; check what has."""
        gradient = self._leaf.grad
        if self._pushed_step == step:
            self._check_still_ours(gradient)
        else:
            everyone = self._session.engine.every_parameter
            if gradient is None and not (self.parameter.requires_grad or everyone):
                return
            self._check_not_edited(gradient)
            self.attach_hook()
            self.settle()
            if gradient is not None:
                self._check_gradient(gradient)
                self._seen.see(gradient)
            self._session.begin_pushing()
            self._push(gradient, step)
        if self.counts_rows:
            self.touched_rows = count_rows(gradient)
        if self._passes and not self._applied:
            self._learn(step)
        self._applied, self._passes, self._discards = True, 0, 0

    def _learn(self, step: int) -> None:
        """How many passes make a step, and how many more are discarded before them."""
        new = not self.expected_passes
        if new or step <= _LEARNING_STEPS:
            self.expected_discards = self._discards
        if new or not self._session.eager:
            self.expected_passes = self._session.fixed_passes or max(
                self._passes, self.expected_passes
            )

    def _check_still_ours(self, gradient: torch.Tensor | None) -> None:
        if gradient is None or gradient is not self._seen.tensor:
            raise TrainingLoopError(
                f"the gradient of {self.name} was discarded or replaced between backward() and"
                f" step(), after it had been pushed. {_CLIP_HINT}"
            )
        self._check_not_edited(gradient)

    def _check_not_edited(self, gradient: torch.Tensor | None) -> None:
        if gradient is None or self._applied or self._passes == 0:
            return
        if self._seen.tensor is not gradient:
            raise TrainingLoopError(
                f"the gradient of {self.name} was replaced between backward() and step()."
                f" {_CLIP_HINT}"
            )
        if gradient._version != self._seen.version:
            raise TrainingLoopError(
                f"the gradient of {self.name} was edited in place between backward() and step()."
                f" {_CLIP_HINT}"
            )

    def replace_busy_gradient(self) -> None:
        """`zero_grad(set_to_none=False)`: zeros in new memory while the old is being sent."""
        with torch._C.DisableTorchFunctionSubclass():
            self._memory.await_staged()
            gradient = self.parameter.grad
            busy = self._pushed_step and not self._session.engine.is_complete(self.index)
            if busy and gradient is not None:
                self.parameter.grad = torch.zeros_like(gradient)
            elif self._pushed_step <= self._session.completed:
                self._check_unedited()
                self._guarded = False

    # The start.
    def before_offering(self) -> None:
        """Rank 0: the values are about to be read."""
        self._memory.before_sending_values()

    def receive_initial_value(self) -> None:
        """Other ranks: block until rank 0's values are here."""
        self._session.engine.wait(self.index, 0)
        self._memory.land()
        self._value.version = self.parameter._version

    # First use.
    def watch(self) -> None:
        """Report the parameter's next differentiable use to the session, as its first."""
        self._watched = True
        make_wait(self.parameter, self)

    def unwatch(self) -> None:
        if self._watched:
            self._watched = False
            stop_waiting(self.parameter)

    def answer(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        return NotImplemented

    def before_use(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        in_place: bool,
    ) -> bool:
        """Called by the waiting parameter: wait, and give the class back."""
        self.check_stepped()
        if self._watched:
            self._session.first_use_begins(self)
            self._value.exposed |= func == GET_DATA
            with torch._C.DisableTorchFunctionSubclass():
                stop_waiting(self.parameter)
            return True
        if in_place:
            raise TrainingLoopError(
                f"{self.name} is changed by hand while its update is pending: the update would"
                " overwrite the change. Call session.flush() after optimizer.step(), then change"
                " it, on every rank alike; or set parallelize(..., update='workers'), with which"
                " the update is made first."
            )
        self.settle()
        if func == GET_DATA:
            self._value.exposed = True
        return False

    def meets_compiler(self) -> None:
        """Compiled code waits at its entry, where parameters are settled."""
        refuse_to_be_compiled()

    def check_stepped(self) -> None:
        """Raise if the gradient of a step has been pushed that has not been made."""
        if self._pushed_step > self._session.completed:
            raise TrainingLoopError(
                f"{self.name} is used between backward() and optimizer.step(), in step"
                f" {self._session.completed + 1}: servers have been sent its gradient, and may"
                " replace its value at any moment. Call optimizer.step() first. If there are more"
                " backward passes here than in the first step, or a step was left out:"
                f" {_ANY_NUMBER_HINT}"
            )

    def after_use(self, result: Any) -> None:
        if not self._watched:
            return
        if self._session.is_first_use(self, result):
            self._watched = False
        elif not is_waiting(self.parameter):
            make_wait(self.parameter, self)

    def settle(self) -> None:
        """Wait for the pending update, if there is one, and make it visible."""
        if not is_waiting(self.parameter) or self._watched:
            return
        self._memory.await_staged()
        self._session.engine.wait(self.index, self._pushed_step)
        with torch._C.DisableTorchFunctionSubclass():
            self._check_unedited()
        self._guarded = False
        stop_waiting(self.parameter)
        self._note_settled()
        self._memory.land()
        self._value.version = self.parameter._version

    def settle_whole(self) -> None:
        """Make every element show the last step's result."""
        self.settle()

    def settle_if_stepped(self) -> None:
        """Like `settle`, but leaves alone what still belongs to the coming step."""
        if self._pushed_step <= self._session.completed:
            self.settle()

    def detach(self) -> None:
        """The session is over: the parameter becomes an ordinary one, whatever is pending."""
        self._watched = False
        if is_waiting(self.parameter):
            stop_waiting(self.parameter)
        self._seen.release()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def count_rows(gradient: torch.Tensor | None) -> int:
    """How many rows of a gradient are not zero."""
    if gradient is None:
        return 0
    if gradient.layout == torch.sparse_coo:
        return len(gradient.coalesce().values())
    return int(gradient.reshape(len(gradient), -1).any(1).sum())


GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class _Reader:
    """Whom a waiting gradient asks."""

    def __init__(self, parameter: SynchronisedParameter) -> None:
        self._parameter = parameter

    def answer(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        return NotImplemented

    def before_use(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        in_place: bool,
    ) -> bool:
        self._parameter.read_gradient(in_place=in_place)
        return False

    def after_use(self, result: Any) -> None:
        """Nothing is watched."""

    def meets_compiler(self) -> None:
        """It looks at gradients of parameters that it uses; who reads them was seen before."""

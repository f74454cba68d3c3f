"""One synchronised parameter: when its gradient is pushed, and what must not happen meanwhile.

After its push a gradient belongs to the library until the optimizer's step has returned the new
values. Everything that would silently give other results than plain PyTorch raises
`TrainingLoopError` with what to do instead.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from foreprop.core.wire import Flag
from foreprop.errors import ConfigError, InternalError, TrainingLoopError
from foreprop.training.backend import Engine
from foreprop.training.memory import Memory
from foreprop.training.waiting import is_waiting, make_wait, stop_waiting

_LEARNING_STEPS = 2
_CLIP_HINT = (
    "After backward() a gradient belongs to foreprop, which may have sent it already. Do not edit"
    " gradients between backward() and step() (clip_grad_norm_, GradScaler.unscale_, p.grad.mul_)."
    " To clip, use parallelize(..., clip_grad_norm=...) or clip_grad_value=..., which clip the"
    " aggregated gradients; give a GradScaler to parallelize(..., scaler=scaler); for other factors"
    " scale the loss instead."
)


class SessionState(Protocol):
    """What a parameter needs to know of its session."""

    engine: Engine
    completed: int
    """Steps that `optimizer.step()` has ended."""

    leaves_rows: bool
    """Whether nobody wants all rows of a table now."""

    reduces_by_kind: bool
    """Whether other things are made of sparse gradients than of dense ones."""

    fixed_passes: int | None
    """Backward passes per step as configured; None: to be learned."""

    @property
    def eager(self) -> bool:
        """Whether gradients are pushed during the backward pass, not only at step()."""

    def memory_of(self, parameter: torch.Tensor) -> Memory:
        """Where the parameter's bytes are for the engine."""

    def begin_pushing(self) -> None:
        """Called before a step's pushes."""

    def first_use_begins(self, parameter: SynchronisedParameter) -> None:
        """An operation with a watched parameter begins; `is_first_use` follows, with its result."""

    def is_first_use(self, parameter: SynchronisedParameter, result: Any) -> bool:
        """Whether an operation's result makes this the parameter's first use; notes the order."""

    def check_layout(self, parameter: int, layout: torch.layout) -> None:
        """Raise `ConfigError` if a gradient of this layout cannot be taken."""

    def gradient_ready(self, parameter: SynchronisedParameter) -> None:
        """Autograd has just computed a gradient."""


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
        self._address = parameter.data_ptr()
        self._version = parameter._version
        self._watched = False
        self._exposed = False  # somebody holds `.data`, through which edits leave no trace
        self._hook: RemovableHandle | None = None
        self._passes = 0  # since the gradient was last discarded
        self._discards = 0  # passes in this step before that
        self._seen: weakref.ref[torch.Tensor] | None = None
        self._seen_version = 0
        self._applied = False  # the gradient in `p.grad` has been used by a step already
        self._pushed_step = 0
        self._held: torch.Tensor | None = None  # the gradient while it is being sent
        self._gradient: Any = None  # its bytes
        self._guarded = False  # nobody may write to the gradient: it is being sent
        self._unsent_bytes = 0
        self._taking = threading.Lock()  # one thread per server sends
        self.attach_hook()

    # The memory that the engine reads and writes.
    @property
    def values(self) -> memoryview:
        return self._memory.values

    def take_gradient(self, start_bytes: int, stop_bytes: int) -> Any:
        held, whole = self._held, self._gradient
        if held is None or whole is None:
            raise InternalError(f"no gradient of {self.name} is held")
        with self._taking:
            self._unsent_bytes -= stop_bytes - start_bytes
            if self._unsent_bytes <= 0:
                self._held = self._gradient = None
        return whole[start_bytes:stop_bytes]

    def _check_unedited(self) -> None:
        """Raise if somebody has written to the gradient since its push.

        Asked in the training thread, where nobody writes to it rightfully before its reply is in.
        """
        gradient = self._seen() if self._guarded and self._seen is not None else None
        if gradient is not None and gradient._version != self._seen_version:
            raise TrainingLoopError(
                f"the gradient of {self.name} was changed while it was being sent. Use"
                " optimizer.zero_grad() (which knows), or zero_grad(set_to_none=True)."
            )

    # Gradients.
    def attach_hook(self) -> None:
        """Watch for gradients, if the parameter can have any."""
        if self._hook is None and self._leaf.requires_grad:
            register: Any = self._leaf.register_post_accumulate_grad_hook
            self._hook = register(self._on_gradient)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Autograd has added to ``parameter.grad``. Runs in the backward pass."""
        with torch._C.DisableTorchFunctionSubclass():
            gradient = parameter.grad
        if gradient is None:
            return
        self._check_gradient(gradient)
        session = self._session
        session.gradient_ready(self)
        step = session.completed + 1
        kept = self._seen is not None and self._seen() is gradient
        if self._pushed_step == step:
            self._refuse_another_pass(kept)
        if kept:
            self._check_unedited()
        self._guarded = False
        continued = kept and gradient._version == self._seen_version + 1
        if not continued:  # a new gradient, or a zeroed one: what was there is discarded
            self._discard()
            self._applied = False
        self._passes += 1
        self._seen = weakref.ref(gradient)
        self._seen_version = gradient._version
        if session.eager and not self._applied and self._is_last_pass():
            session.begin_pushing()
            self._push(gradient, step)

    def _is_last_pass(self) -> bool:
        return self._passes == self.expected_passes and self._discards >= self.expected_discards

    def _discard(self) -> None:
        self._discards += self._passes
        self._passes = 0

    def gradient_discarded(self) -> None:
        """`optimizer.zero_grad()`: what has been accumulated and not pushed does not count."""
        if self._pushed_step <= self._session.completed:
            self._discard()

    def _check_gradient(self, gradient: torch.Tensor) -> None:
        session = self._session
        if gradient.layout != torch.strided or session.reduces_by_kind:
            session.check_layout(self.index, gradient.layout)

    def _refuse_another_pass(self, kept: bool) -> None:
        if kept:
            raise TrainingLoopError(
                f"{self.name} received another gradient after {self.expected_passes} backward"
                " pass(es), the number learned in the first step, had been pushed. If the number"
                " varies, set backward_passes to the largest one: parallelize(...,"
                " backward_passes=N); fewer are sent at step()."
            )
        raise TrainingLoopError(
            f"the gradient of {self.name} was pushed in step {self._pushed_step}, then discarded,"
            " and optimizer.step() was never called. Call optimizer.step() after every backward"
            " pass, or decide before backward() whether to make the step. If some passes are always"
            " discarded (a GAN's generator's, in its discriminator), they must be so from the first"
            " two steps on."
        )

    def _push(self, gradient: torch.Tensor | None, step: int) -> None:
        """Hand the gradient (or word that there is none) to the engine; from now on pending."""
        flags, with_value = self._note_changed_value()
        increment_version(self.parameter)  # whoever saved the old value must not use it
        self._version = self.parameter._version
        self._pushed_step = step
        self._watched = False
        if gradient is None or gradient.numel():
            make_wait(self.parameter, self)
        engine = self._session.engine
        if gradient is None:
            engine.push(self.index, step, flags=flags | Flag.NO_GRADIENT, with_value=with_value)
            return

        def enqueue(gradient_bytes: Any) -> None:
            self._gradient = gradient_bytes
            engine.push(self.index, step, flags=flags, with_value=with_value)

        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        self._held, self._guarded = gradient, gradient.numel() > 0
        self._unsent_bytes = gradient.numel() * gradient.element_size()
        self._memory.stage_gradient(gradient.detach(), enqueue)

    def _note_changed_value(self) -> tuple[int, bool]:
        """Flags and whether rank 0 must send the values, if the parameter was changed by hand."""
        parameter = self.parameter
        changed = parameter._version != self._version
        if parameter.data_ptr() != self._address:
            self._rebind()
            changed = True
        exposed, self._exposed = self._exposed, False
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
        self._address = self.parameter.data_ptr()

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
                self._seen = weakref.ref(gradient)
                self._seen_version = gradient._version
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
        seen = self._seen() if self._seen is not None else None
        if gradient is None or gradient is not seen:
            raise TrainingLoopError(
                f"the gradient of {self.name} was discarded or replaced between backward() and"
                f" step(), after it had been pushed. {_CLIP_HINT}"
            )
        self._check_not_edited(gradient)

    def _check_not_edited(self, gradient: torch.Tensor | None) -> None:
        if gradient is None or self._applied or self._seen is None or self._passes == 0:
            return
        if self._seen() is not gradient:
            raise TrainingLoopError(
                f"the gradient of {self.name} was replaced between backward() and step()."
                f" {_CLIP_HINT}"
            )
        if gradient._version != self._seen_version:
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
        self._version = self.parameter._version

    # First use.
    def watch(self) -> None:
        """Report the parameter's next differentiable use to the session, as its first."""
        self._watched = True
        make_wait(self.parameter, self)

    def unwatch(self) -> None:
        if self._watched:
            self._watched = False
            stop_waiting(self.parameter)

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
            self._exposed |= func == GET_DATA
            with torch._C.DisableTorchFunctionSubclass():
                stop_waiting(self.parameter)
            return True
        if in_place:
            raise TrainingLoopError(
                f"{self.name} is changed by hand while its update is pending: the update would"
                " overwrite the change. Call session.flush() after optimizer.step(), then change"
                " it, on every rank alike."
            )
        self.settle()
        if func == GET_DATA:
            self._exposed = True
        return False

    def check_stepped(self) -> None:
        """Raise if the gradient of a step has been pushed that has not been made."""
        if self._pushed_step > self._session.completed:
            raise TrainingLoopError(
                f"{self.name} is used between its backward pass and optimizer.step(): its gradient"
                f" is pushed and its value may be replaced at any moment. Call optimizer.step()"
                " first. If several backward passes belong to one step, their number was learned"
                " in the first step; set it with parallelize(..., backward_passes=N)."
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
        self._check_unedited()
        self._guarded = False
        stop_waiting(self.parameter)
        self._memory.land()
        self._version = self.parameter._version

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

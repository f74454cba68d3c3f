"""One parameter whose gradient is averaged, and which the workers update: ``update="workers"``.

Theory of operation. After its backward pass a gradient waits (`path.waiting`): whoever reads
or edits ``p.grad`` finds the average over the ranks, as with DDP. What autograd has computed leaves
as early as with ``update="servers"``, in the same slices; the answers land beside the gradient,
never in it. So a gradient that is accumulated into after it has left, because a step had another
backward pass or was skipped, is still this rank's own: it is averaged again, in another *round*
(`core.rounds`), and nothing is lost but the overlap.

After `optimizer.step()` the parameter waits instead, until its average is here and the user's own
optimizer has been applied to it (`gradients.localstep`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from foreprop.core.norm import SquareSum
from foreprop.core.rounds import Rounds
from foreprop.core.wire import Flag
from foreprop.errors import ConfigError, TrainingLoopError
from foreprop.gradients.gradientmath import Scalable, Scaling, answer, is_scaling, needs_squares
from foreprop.path.heldgradient import HeldGradient
from foreprop.path.memory import Memory
from foreprop.path.parameter import GET_DATA, SessionState, ValueMark
from foreprop.path.seengradient import SeenGradient
from foreprop.path.tensors import bytes_of
from foreprop.path.waiting import (
    is_waiting,
    make_wait,
    refuse_to_be_compiled,
    stop_waiting,
    waits_for,
)


class Update(Protocol):
    """What `optimizer.step()` has left to be done."""

    def apply(self, parameter: torch.nn.Parameter) -> None:
        """Make the step for this parameter, whose ``grad`` is the averaged gradient."""


class Together(Protocol):
    """What the averaged parameters of a session have in common."""

    rounds: Rounds
    settling: threading.RLock
    measures: bool
    """Whether servers tell every round's sums of squares."""

    def close_round(self) -> None:
        """Some gradients have changed since they left."""

    def gradient_added(self) -> None:
        """There is one that has not been averaged."""


class AveragedParameter:
    """The life of one parameter between `backward()`, `step()` and its next use."""

    def __init__(
        self,
        index: int,
        name: str,
        parameter: torch.nn.Parameter,
        session: SessionState,
        together: Together,
        *,
        wanted: bool,
    ) -> None:
        """``wanted``: in every step, because the optimizer has it; others are averaged if read."""
        self.index = index
        self.name = name
        self.parameter = parameter
        self.wanted = wanted
        self.counts_rows = False
        self.touched_rows = 0
        self.start = ValueMark(parameter)
        """As it was when all ranks had the same value."""
        self._session = session
        self._memory: Memory = session.memory_of(parameter)
        self._held = HeldGradient(name)
        self._room: torch.Tensor | None = None
        """Where the answers land: of the parameter's shape, in host memory."""
        self._making_room = threading.Lock()
        self._answered = False  # something has landed there: a rank had a gradient
        self._together = together
        self._rounds = together.rounds
        self._serial = 0  # of the last round that it had a part in
        self._under_way = False  # and its average has not been shown yet
        self._gave = False  # this rank had a gradient in it
        self._kept = False  # or it kept an earlier average, as all ranks must
        self._own = False  # ``p.grad`` is this rank's own, to be averaged
        self._fresh = False  # and was made by autograd since the last round
        self.scalings: list[Scaling] = []  # of this round's average, in order
        self._scaled = 0  # so many of them have been applied
        self.passes = 0  # since the last step
        self.discards = 0  # of these, those whose gradients have been discarded
        self._seen = SeenGradient(_AverageReader(self))
        self._update: Update | None = None
        self._watched = False
        self._hook: RemovableHandle | None = None
        self._given_away = False
        self.attach_hook()

    # What the engine reads and writes.
    @property
    def values(self) -> memoryview:
        """The parameter's values at the start; from then on room for the averaged gradient."""
        if not self._serial:
            return self._memory.values
        self._answered = True
        return bytes_of(self._landing())

    def land_average(self, gradient: torch.Tensor) -> None:
        """Collectives have averaged it: flat, where the engine computes. Any thread."""
        self._answered = True
        self._landing().view(-1).copy_(gradient)

    def take_gradient(self, start_bytes: int, stop_bytes: int) -> Any:
        return self._held.take(start_bytes, stop_bytes)

    def _landing(self) -> torch.Tensor:
        if self._room is None:
            parameter = self.parameter
            with self._making_room, torch._C.DisableTorchFunctionSubclass():
                if self._room is None:  # several servers' answers may come at once
                    self._room = torch.empty(
                        parameter.shape, dtype=parameter.dtype, pin_memory=parameter.is_cuda
                    )
        return self._room

    # Gradients.
    @property
    def gradient(self) -> torch.Tensor | None:
        """This rank's own, if it has not left."""
        return self._seen.tensor if self._own else None

    @property
    def is_replaced(self) -> bool:
        """Whether ``p.grad`` is not what autograd has put there, or is there no more."""
        gradient = self.parameter.grad
        return self._own and (gradient is None or gradient is not self._seen.tensor)

    def attach_hook(self) -> None:
        """Watch for gradients, if the parameter can have any."""
        if self._hook is None and self.parameter.requires_grad and not self._given_away:
            register: Any = self.parameter.register_post_accumulate_grad_hook
            self._hook = register(self._on_gradient)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Autograd has added to ``parameter.grad``. Runs in the backward pass."""
        with torch._C.DisableTorchFunctionSubclass():
            gradient = parameter.grad
            if gradient is None:
                return
            session = self._session
            if gradient.layout != torch.strided or session.reduces_by_kind:
                session.check_layout(self.index, gradient.layout)
            session.gradient_ready(self)
            if self._serial == self._rounds.serial:  # it has left already
                self._together.close_round()
            if not self._seen.is_continued_by(gradient):  # a new gradient, or a zeroed one
                self.discards = self.passes
            self.passes += 1
            self._rounds.note_pass(self.passes)
            self._note_own(gradient)
            if session.eager and self.wanted and self._rounds.is_last_pass:
                self._begin_round(gradient)

    def _note_own(self, gradient: torch.Tensor) -> None:
        """What is in ``p.grad`` is this rank's own: who reads it waits for the average."""
        self._own = True
        self._together.gradient_added()
        self._fresh |= self._seen.see(gradient)
        self._seen.wait()

    def gradient_discarded(self, *, dropped: bool) -> None:
        """`optimizer.zero_grad()`: what has been accumulated does not count, and is not shown.

        ``dropped``: there is no ``p.grad`` any more; who holds the tensor still waits for it.
        """
        self.discards = self.passes
        self._own = False
        if not (dropped and self._under_way):
            self._seen.release()
            self._seen.forget()

    def replace_busy_gradient(self) -> None:
        """`zero_grad(set_to_none=False)`: zeros in new memory while the old is being sent."""
        with torch._C.DisableTorchFunctionSubclass():
            gradient = self.parameter.grad
            if self._under_way and gradient is not None:
                self._memory.await_staged()
                self.parameter.grad = torch.zeros_like(gradient)

    # A round.
    @property
    def left(self) -> bool:
        """Whether it has had its part in this round."""
        return self._serial == self._rounds.serial

    def _begin_round(self, gradient: torch.Tensor | None) -> None:
        """Have the gradient averaged; None: this rank has none."""
        session = self._session
        session.begin_pushing()
        self._end_round()  # of an earlier gradient, which has changed since
        self._serial = self._rounds.serial
        self._under_way, self._answered, self._own = True, False, False
        self._gave, self._kept = gradient is not None, False
        self.scalings, self._scaled = [], 0
        if gradient is None:
            self._push(Flag.GRADIENT | Flag.NO_GRADIENT)
            return
        self._check_unchanged_kind(gradient)
        dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
        self._held.hold(dense)
        self._memory.stage_gradient(dense.detach(), self._send)

    def _send(self, gradient_bytes: Any) -> None:
        self._held.ready(gradient_bytes)
        self._push(Flag.GRADIENT)

    def _push(self, flags: int) -> None:
        flags |= Flag.MEASURE if self._together.measures else 0
        self._session.engine.push(self.index, self._rounds.step, flags=flags | self._rounds.flags)

    def leave_out(self) -> None:
        """The round is closed before its gradient has left: it is averaged in the next one."""
        own = self._own or (self._under_way and self.left)
        if not self.left and self._takes_part:
            self._begin_round(None)
        self._own = own and self._seen.tensor is not None

    def average(self) -> None:
        """Have ``p.grad`` averaged, if it is this rank's own."""
        gradient = self.gradient
        if gradient is not None:
            self._begin_round(gradient)

    def _check_unchanged_kind(self, gradient: torch.Tensor) -> None:
        info = self._session.engine.parameters[self.index]
        dtype = str(gradient.dtype).removeprefix("torch.")
        if tuple(gradient.shape) != info.shape or dtype != info.dtype:
            raise ConfigError(
                f"{self.name} was {info.dtype} {info.shape} at parallelize(), and its gradient is"
                f" {dtype} {tuple(gradient.shape)} now; change the model before parallelize()"
            )

    def _end_round(self) -> bool:
        """Wait for the average; whether one has landed that is still wanted."""
        if not self._under_way:
            return False
        self._memory.await_staged()
        self._session.engine.wait(self.index, self._rounds.step)
        self._under_way = False
        if self._answered and self._kept:
            raise TrainingLoopError(
                f"the gradient of {self.name} was read or edited on this rank between two backward"
                " passes of a step, but not on another: do it on every rank alike, or after the"
                " last pass"
            )
        return self._answered

    def averaged(self) -> None:
        """Make ``p.grad`` the average over the ranks. For whoever reads or edits it."""
        if self._update is not None:  # the step comes first: it was called before
            self.settle()
            return
        with self._together.settling, torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            gradient = self._seen.tensor
            if self._needs_round and gradient is not None:
                self.wanted = True  # from now on in every step
                self._session.gradients_read(self)
            if self._end_round() and gradient is not None:
                self._show(gradient)

    @property
    def _needs_round(self) -> bool:
        """Whether its average may wait for gradients that are here and have not left."""
        return self._own or (self._under_way and self.left and self._is_counted)

    def edited(self) -> None:
        """From now on ``p.grad`` is the user's, an ordinary tensor, alike on every rank."""
        self._seen.release()
        self.scalings, self._scaled = [], 0

    def is_apart_from(self, result: Any) -> bool:
        """Whether a result of an operation on ``p.grad`` has no part in its memory."""
        if isinstance(result, (list, tuple)):
            return all(self.is_apart_from(item) for item in result)
        gradient = self._seen.tensor
        if isinstance(result, torch.Tensor) and gradient is not None:
            with torch._C.DisableTorchFunctionSubclass():
                if result.layout != torch.strided or gradient.layout != torch.strided:
                    return False
                memories = [tensor.untyped_storage().data_ptr() for tensor in (result, gradient)]
                return memories[0] != memories[1]
        return result is None or isinstance(result, (bool, float, str))

    # Without waiting, see `gradientmath`.
    @property
    def may_answer(self) -> bool:
        """Whether operations may be answered that come before `step()`."""
        return self._update is None

    def asked(self, func: Callable[..., Any]) -> bool:
        """An operation that may be answered comes: have all averages made that it needs."""
        if not (needs_squares(func) or is_scaling(func)):
            return False
        if self._needs_round:
            self.wanted = True
            with torch._C.DisableTorchFunctionSubclass():
                self._session.gradients_read(self, norm=needs_squares(func))
        return True

    def squares(self) -> SquareSum | None:
        """The sum of the average's squares, if the servers tell it; blocks until they have."""
        if self._update is not None or not (self._together.measures and self.left):
            return None
        return self._session.square_sums(self._serial)[self.index]

    def scale(self, scaling: Scaling) -> None:
        """Multiply the average, when it is here."""
        self.scalings.append(scaling)
        if not self._under_way and self._seen.tensor is not None:
            self._apply_scalings(self._seen.tensor)

    def _apply_scalings(self, gradient: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for method, factor in self.scalings[self._scaled :]:
                method(gradient, factor)
            self._scaled = len(self.scalings)
            self._seen.version = gradient._version

    def _show(self, gradient: torch.Tensor) -> None:
        """Put what has landed where the user looks for it."""
        landed = self._landing()
        if gradient.layout != torch.strided:
            gradient.data = landed.to_sparse(gradient.sparse_dim())
        elif self._may_swap(gradient):
            self._room = gradient.detach()
            gradient.data = landed
        else:
            gradient.copy_(landed, non_blocking=True)
        increment_version(gradient)
        self._seen.see(gradient)
        self._fresh = False
        self._apply_scalings(gradient)

    def _landed_like(self, parameter: torch.Tensor) -> torch.Tensor:
        """What has landed, laid out as autograd would: kernels round by layout."""
        landed = self._landing()
        if parameter.device.type == "cpu" and parameter.is_contiguous():
            return landed
        return torch.empty_like(parameter).copy_(landed, non_blocking=True)

    def _may_swap(self, gradient: torch.Tensor) -> bool:
        """Whether nobody can tell that the gradient has got other memory: no need to copy."""
        return (
            self._fresh
            and gradient.device.type == "cpu"
            and gradient.is_contiguous()
            and not gradient._is_view()
            and gradient.untyped_storage().nbytes() == gradient.nbytes
        )

    # The end of a step.
    def finish_step(self, step: int) -> None:
        """`optimizer.step()` begins: have averaged what has not been."""
        self.attach_hook()
        self.settle()  # an earlier step's update, if nothing has used the parameter since
        if self.left or not (self.wanted or self._is_counted):
            return
        # who counts on this one may as well have it, if it is there
        gradient = self.parameter.grad if self.wanted or self._own else None
        if gradient is None and not self._takes_part:
            return
        kept = gradient is not None and gradient is self._seen.tensor and not self._own
        if kept:
            gradient = None  # averaged already, and no pass has added to it
        if gradient is not None:
            self._note_own(gradient)
        self._begin_round(gradient)
        self._kept = kept

    def end_step(self) -> None:
        """The step's update is made, or will be."""
        self.passes = self.discards = 0

    @property
    def _takes_part(self) -> bool:
        return self.parameter.requires_grad or self._is_counted

    @property
    def _is_counted(self) -> bool:
        """Whether a round is only complete with word of every parameter."""
        return self._together.measures or self._session.engine.every_parameter

    @property
    def _is_as_it_left(self) -> bool:
        """Whether ``p.grad`` has been neither discarded nor replaced since its round began."""
        gradient = self.parameter.grad
        if gradient is None:
            return not self._gave
        return self._gave and self._seen.tensor is gradient

    def defer(self, update: Update) -> bool:
        """Make the step's update at the first use, if its gradient is still on its way.

        False: ``p.grad``, if there is any, is what the update is to be made with now.
        """
        if not (self._under_way and self._is_as_it_left):
            return False
        increment_version(self.parameter)  # whoever saved the old value must not use it
        self._update = update
        make_wait(self.parameter, self)
        if (readers := self._session.stale_readers) is not None:
            readers.pending(self.name, self.parameter, poisoned=self._session.completed > 0)
        return True

    def receive_gradient(self) -> None:
        """Have the average in ``p.grad``, also where only other ranks had a gradient."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if self.parameter.grad is not None:
                self.averaged()
                self.edited()  # the user's own step may do with it what it likes
            elif self._end_round() and not self._gave:
                self.parameter.grad = self._landed_like(self.parameter).clone()

    # First use, and any other.
    def watch(self) -> None:
        """Report the parameter's next differentiable use to the session, as its first."""
        self._watched = True
        make_wait(self.parameter, self)

    def unwatch(self) -> None:
        if self._watched:
            self._watched = False
            if self._update is None:
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
        watched = self._watched
        if watched:
            self._session.first_use_begins(self)
        if func == GET_DATA:
            self.start.exposed = True
        self.settle()
        with torch._C.DisableTorchFunctionSubclass():
            stop_waiting(self.parameter)
        return watched

    def after_use(self, result: Any) -> None:
        if not self._watched:
            return
        if self._session.is_first_use(self, result):
            self._watched = False
        elif not is_waiting(self.parameter):
            make_wait(self.parameter, self)

    def meets_compiler(self) -> None:
        """Compiled code waits at its entry, where parameters are settled."""
        refuse_to_be_compiled()

    def check_stepped(self) -> None:
        """Until the step is made a parameter keeps its value, so any use is right."""

    def settle(self) -> None:
        """Make the pending update, if there is one."""
        if self._update is not None:
            with self._together.settling, torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                self._make_update()

    def _make_update(self) -> None:
        update = self._update
        if update is None:  # another thread has been here
            return
        if (readers := self._session.stale_readers) is not None:
            readers.settled(self.parameter)
        if self._end_round():
            self._apply(update)
        self._update = None
        if not self._watched:
            stop_waiting(self.parameter)

    def _apply(self, update: Update) -> None:
        parameter = self.parameter
        shown, seen = parameter.grad, self._seen.tensor
        if seen is not None and self._gave:  # it is ``p.grad``, or somebody holds it
            self._show(seen)
            self._seen.release()
            parameter.grad = seen
        else:  # it has been discarded since, or there never was one here
            parameter.grad = self._landed_like(parameter)
            self._apply_scalings(parameter.grad)
        update.apply(parameter)
        parameter.grad = shown

    def settle_whole(self) -> None:
        """Make every element show the last step's result."""
        self.settle()

    def settle_if_stepped(self) -> None:
        self.settle()

    # The start and the end.
    def before_offering(self) -> None:
        """Rank 0: the values are about to be read."""
        self._memory.before_sending_values()

    def receive_initial_value(self) -> None:
        """Other ranks: block until rank 0's values are here."""
        self._session.engine.wait(self.index, 0)
        self._memory.land()
        self.start = ValueMark(self.parameter)

    def give_away(self) -> None:
        """Another session has it from now on, and averages its gradients."""
        self.detach()
        self.wanted, self._given_away = False, True

    def detach(self) -> None:
        """The session is over: parameter and gradient become ordinary ones."""
        self._watched = False
        self._update = None
        self._seen.release()
        if is_waiting(self.parameter):
            stop_waiting(self.parameter)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


class _AverageReader:
    """Whom a waiting gradient asks."""

    def __init__(self, parameter: AveragedParameter) -> None:
        self._parameter = parameter

    def answer(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        parameter = self._parameter
        if not parameter.may_answer:
            return NotImplemented
        if not parameter.asked(func):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return answer(func, args, kwargs, _find)

    def before_use(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        in_place: bool,
    ) -> bool:
        self._parameter.averaged()
        if in_place:
            self._parameter.edited()
        return not in_place

    def after_use(self, result: Any) -> None:
        """Who has another tensor of the same memory may edit it, and leave no trace."""
        if not self._parameter.is_apart_from(result):
            self._parameter.edited()

    def meets_compiler(self) -> None:
        """Compiled code may read it, a compiled optimizer's step for one."""
        self._parameter.averaged()
        self._parameter.edited()


def _find(value: Any) -> Scalable | None:
    reader = waits_for(value)
    return reader._parameter if isinstance(reader, _AverageReader) else None

"""The gradient of one parameter that servers update: from autograd's hook to its push.

It counts backward passes to know which is the step's last. From its push until the optimizer's step
has returned the new values the gradient belongs to the library: whatever would silently give other
results than plain PyTorch raises `TrainingLoopError` (`path.looprules`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from foreprop.path.waiting import Pending, forget, is_waiting, make_wait, no_answer, stop_waiting

if TYPE_CHECKING:
    from foreprop.path.managedparameter import Pusher, SessionState


class SeenGradient:
    """Known without being kept alive; while it waits, ``reader`` is asked before each use."""

    def __init__(self, reader: Pending) -> None:
        self._reader = reader
        self.tensor: Callable[[], torch.Tensor | None] = _none
        self._id = 0
        self.version = 0
        """The tensor's, when it was last seen."""

    def see(self, gradient: torch.Tensor) -> bool:
        """Now it is this one; whether it is another than before."""
        new = self.tensor() is not gradient
        if new:
            if self._id:
                self.forget()
            self.tensor, self._id = weakref.ref(gradient), id(gradient)
        self.version = gradient._version
        return new

    def wait(self) -> None:
        """Whoever uses it from now on asks first."""
        gradient = self.tensor()
        if gradient is not None and not is_waiting(gradient):
            make_wait(gradient, self._reader)

    def release(self) -> None:
        """It is an ordinary tensor again."""
        gradient = self.tensor()
        if gradient is not None:
            stop_waiting(gradient)

    def forget(self) -> None:
        """It is not ``p.grad`` any more, and may be gone."""
        forget(self._id, self._reader)
        self.tensor, self._id = _none, 0


def _none() -> None:
    """No gradient."""


_LEARNING_STEPS = 2
"""Later gradients leave before the end of their step."""


class BackwardPasses:
    """How many one parameter has had in this step, and which will be the last."""

    def __init__(self, fixed: int | None) -> None:
        """``fixed``: so many per step, as the user says; None: to be learned."""
        self.expected = 0
        """Per step; 0: not known yet."""
        self.now = 0
        """Since the gradient was last discarded."""
        self.discards = 0
        """In this step before that."""
        self._expected_discards = 0  # passes whose gradients are discarded first (a GAN's)
        self._fixed = fixed

    @property
    def is_last(self) -> bool:
        """Whether the gradient is complete, as far as earlier steps tell."""
        return self.now == self.expected and self.discards >= self._expected_discards

    def discard(self) -> None:
        """The passes so far do not count."""
        self.discards, self.now = self.discards + self.now, 0

    def learn(self, *, early: bool) -> None:
        """A step has had so many. ``early``: its gradients may have left before its end."""
        self._expected_discards = self.discards
        if not (early and self.expected):
            self.expected = self._fixed or max(self.now, self.expected)


class ServedGradient:
    """``leaf``: where autograd gathers it, the parameter or what stands for it."""

    def __init__(
        self,
        owner: Pusher,
        leaf: torch.nn.Parameter,
        session: SessionState,
        usual_layout: torch.layout | None,
        hook: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """``usual_layout``: of gradients that need not be checked.

        ``hook`` is to call `added`; by default it is that.
        """
        self.seen = SeenGradient(_Reader(owner))
        self.pushed_step = 0
        self.guarded = False
        """Nobody may write to it: it is being sent."""
        self._owner = owner
        self._leaf = leaf
        self._session = session
        self._usual_layout = usual_layout
        self._on_gradient = hook or self.added
        self._hook: RemovableHandle | None = None
        self._passes = BackwardPasses(session.fixed_passes)
        self._applied = False  # the gradient in `p.grad` has been used by a step already
        self.attach_hook()

    @property
    def left(self) -> bool:
        """Whether the coming step's gradient has been sent."""
        return self.pushed_step > self._session.completed

    @property
    def is_new(self) -> bool:
        """Whether there is one that no step has used."""
        return self._passes.now > 0 and not self._applied

    # In the backward pass.
    def attach_hook(self) -> None:
        """Watch for gradients, if the parameter can have any."""
        if self._hook is None and self._leaf.requires_grad:
            register: Any = self._leaf.register_post_accumulate_grad_hook
            self._hook = register(self._on_gradient)

    def added(self, leaf: torch.Tensor) -> None:
        """Autograd has added to ``leaf.grad``; push it after the step's last pass."""
        with torch._C.DisableTorchFunctionSubclass():
            gradient = leaf.grad
            if gradient is None:
                return
            owner, session, seen = self._owner, self._session, self.seen
            if gradient.layout != self._usual_layout:
                owner.check_gradient(gradient)
            session.gradient_ready(owner)
            step = session.completed + 1
            before = seen.tensor()
            if self.pushed_step == step:
                raise self._too_late(kept=before is gradient)
            if before is gradient:
                self.check_unedited()
            self.guarded = False
            if before is not gradient and before is not None:
                owner.gradient_follows(before)
            if before is not gradient or gradient._version != seen.version + 1:
                if self._passes.now:  # a new gradient, or a zeroed one
                    self._passes.discard()
                self._applied = False
            self._passes.now += 1
            seen.see(gradient)
            seen.wait()
            if self._passes.is_last and not self._applied and session.eager:
                session.begin_pushing()
                owner.push(gradient, step)

    def _too_late(self, *, kept: bool) -> Exception:
        from foreprop.path import looprules

        if kept:
            return looprules.another_pass(self._owner.name, self._passes.expected)
        return looprules.step_left_out(self._owner, self.pushed_step)

    def check_unedited(self) -> None:
        """Raise if somebody has written to the gradient since its push.

        Asked in the training thread, where nobody writes to it rightfully before its reply is in.
        """
        gradient = self.seen.tensor() if self.guarded else None
        if gradient is not None and gradient._version != self.seen.version:
            from foreprop.path import looprules

            raise looprules.changed_while_sent(self._owner.name)

    def discarded(self, *, dropped: bool) -> None:
        """`optimizer.zero_grad()`: what has been accumulated and not pushed does not count."""
        if not self.left:
            self._passes.discard()
            if not (dropped and self.pushed_step):
                self.seen.release()

    # The end of a step.
    def finish_step(self, step: int) -> None:
        """`optimizer.step()`: push what has not been pushed; check what has."""
        owner, session, gradient = self._owner, self._session, self._leaf.grad
        if self.pushed_step == step:
            if gradient is None or gradient is not self.seen.tensor():
                from foreprop.path import looprules

                raise looprules.discarded_after_push(owner.name)
            if gradient._version != self.seen.version and self.is_new:
                from foreprop.path import looprules

                raise looprules.edited(owner.name)
        else:
            awaited = (
                owner.parameter.requires_grad
                or session.every_parameter
                or owner.index in session.just_frozen
            )
            if gradient is None and not awaited:
                return
            self._check_as_computed(gradient)
            self.attach_hook()
            owner.settle()
            if gradient is not None:
                if gradient.layout != self._usual_layout:
                    owner.check_gradient(gradient)
                self.seen.see(gradient)
            session.begin_pushing()
            owner.push(gradient, step)
        if owner.counts_rows:
            from foreprop.path.sums import count_rows

            owner.touched_rows = count_rows(gradient)
        if (step <= _LEARNING_STEPS or not self._passes.expected) and self.is_new:
            self._passes.learn(early=session.eager)
        self._applied = True
        self._passes.now = self._passes.discards = 0

    def _check_as_computed(self, gradient: torch.Tensor | None) -> None:
        if gradient is None or not self.is_new:
            return
        if self.seen.tensor() is not gradient:
            from foreprop.path import looprules

            raise looprules.replaced(self._owner.name)
        if gradient._version != self.seen.version:
            from foreprop.path import looprules

            raise looprules.edited(self._owner.name)

    # The parameter's use.
    def check_stepped(self) -> None:
        """Raise if the gradient of a step has been pushed that has not been made."""
        if self.pushed_step > self._session.completed:
            from foreprop.path import looprules

            raise looprules.used_before_step(self._owner, self._session.completed + 1)

    def detach(self) -> None:
        """The session is over."""
        self.seen.release()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


class _Reader:
    """Whom a waiting gradient asks."""

    def __init__(self, owner: Pusher) -> None:
        self._owner = owner

    answer = staticmethod(no_answer)

    def before_use(self, func: Any, args: Any, kwargs: Any, *, in_place: bool) -> bool:
        self._owner.read_gradient(in_place=in_place)
        return False

    def after_use(self, result: Any) -> None:
        """Nothing is watched."""

    def meets_compiler(self) -> None:
        """It looks at gradients of parameters that it uses; who reads them was seen before."""

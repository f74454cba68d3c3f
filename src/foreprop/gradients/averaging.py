"""What a session's averaged parameters have in common: rounds, the local step, and readers.

The step is that of the user's optimizer. Who reads a gradient that waits finds the average.

Theory of operation. A *round* averages every parameter's gradient once. A step has one round, which
begins in the backward pass that is the step's last as far as earlier steps tell (the first one, in
the first step): then every gradient leaves as soon as autograd has computed it. If another backward
pass follows, or the step is never made, that round's averages are not what the step needs: the
round is closed, and another one begins, in which all gradients leave when the step is made. Loops
run as many backward passes on every rank, so every rank counts the same rounds, whatever parameters
its passes have used: the passes are those of the parameter that had most.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from foreprop.core.wire import MOST_ROUNDS, ROUND_SHIFT

if TYPE_CHECKING:
    from foreprop.gradients.averaged import AveragedParameter
    from foreprop.gradients.localstep import LocalStepper
    from foreprop.gradients.pack import Pack


class Rounds:
    """One session's count of passes and rounds. Not thread-safe: for the training thread."""

    def __init__(self, fixed_passes: int | None = None, *, counts_rounds: bool = False) -> None:
        """``fixed_passes``: backward passes per step as the user says; None: to be learned.

        ``counts_rounds``: who makes the averages knows no rounds of a step: each is one itself.
        """
        self.serial = 1
        """Of this round, counted from the session's start."""
        self.step = 1
        """Of this round, as servers or collectives count."""
        self._counts_rounds = counts_rounds
        self._again = 0  # rounds of this step before it
        self._more = 0  # times that a pack has left in this step beyond its rounds
        self._fixed = fixed_passes
        # passes per step, with those whose gradients are discarded
        self._expected = fixed_passes or 1
        self._passes = 0  # of the parameter that had most, since the last step
        self._fewer = 0  # passes of the last step, if it had fewer than expected

    def go_on(self, before: Rounds) -> None:
        """Its passes are these: in the middle of a step, too."""
        self._expected, self._fewer = before._expected, before._fewer
        self._passes = before._passes

    def begin_at(self, step: int) -> None:
        """A newcomer's first step."""
        self.step = step

    @property
    def flags(self) -> int:
        """For a push's flags: which of the step's rounds this is."""
        return self._again << ROUND_SHIFT

    def note_pass(self, passes: int) -> None:
        """A parameter has had so many passes since the last step."""
        if passes > self._passes:
            self._passes = passes

    @property
    def is_last_pass(self) -> bool:
        """Whether gradients may leave as they become ready."""
        return self._passes == self._expected

    def begin_again(self) -> None:
        """The gradients have changed since they left: another round of the same step."""
        self.serial += 1
        self._again += 1
        self.step += self._counts_rounds
        if not self.may_follow(self._more):  # nobody makes steps: gradients are only read
            self._again = self._more = 0
            self.step += not self._counts_rounds

    def may_follow(self, more: int) -> bool:
        """Whether a pack may leave in this step for the so-manieth time beyond its rounds."""
        return self._again + more < MOST_ROUNDS

    def flags_after(self, more: int) -> int:
        """As `flags`, of a pack that has left so often beyond its rounds."""
        self._more = max(self._more, more)
        return (self._again + more) << ROUND_SHIFT

    def end_step(self, discards: int, *, learning: bool) -> None:
        """The step is made. ``discards``: of the passes of the parameter that had most.

        While ``learning``, what the step shows is what the next ones are expected to be. Later
        ones raise that at once, and lower it when two agree.
        """
        self.serial += 1
        self.step += 1
        self._again = self._more = 0
        passes, self._passes = self._passes, 0
        if not passes:
            return
        if learning:
            self._expected = (self._fixed or passes - discards) + discards
        elif self._fixed is None:
            self._expect(passes)

    def _expect(self, passes: int) -> None:
        if passes >= self._expected or passes == self._fewer:
            self._expected = passes
        self._fewer = passes


class Averaging:
    """What the averaged parameters of one session have in common. Training thread."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, fixed_passes: int | None, *, counts_rounds: bool
    ) -> None:
        """``counts_rounds``: see `Rounds`."""
        self.rounds = Rounds(fixed_passes, counts_rounds=counts_rounds)
        self.settling = threading.RLock()
        """Held while gradients or updates are made visible: any thread may want them."""
        self.measures = False
        """Whether servers tell every round's sums of squares, as all ranks have agreed."""
        self._measured_from = 0  # the first round since then
        self._measured_before = 0  # rounds, until it was off again
        self.asks_norm = False
        """Whether this rank's loop has taken the norm of gradients in this step."""
        self.parameters: list[AveragedParameter] = []
        self.packs: list[Pack] = []
        self.watches_uses = False
        """Whether somebody looks at which parameters the next step uses first."""
        self._parts: list[AveragedParameter] = []
        self._pass_with_parts = -1
        self.unscaled_by: torch.Tensor | None = None
        """By what a scaler has multiplied the gradients to take the loss's factor out."""
        self.known: dict[int, AveragedParameter] = {}
        """By the parameter's id: those that a backend had before, or that are new in the loop."""
        self.nothing_left: tuple[int, bool, bool] | None = None
        """The round of which nothing is left to be averaged, and how it was."""
        self._optimizer = optimizer
        self._fixed_passes = fixed_passes

    def connect(self, *, counts_rounds: bool) -> None:
        """Another backend makes the averages. No round is under way."""
        before, self.rounds = self.rounds, Rounds(self._fixed_passes, counts_rounds=counts_rounds)
        self.rounds.go_on(before)
        self.measures, self._measured_before, self.nothing_left = False, 0, None
        self.known |= {id(each.parameter): each for each in self.parameters}
        self.parameters.clear()
        self.packs.clear()

    @property
    def _wanted(self) -> Iterator[AveragedParameter]:
        return (parameter for parameter in self.parameters if parameter.wanted)

    @cached_property
    def _stepper(self) -> LocalStepper:
        from foreprop.gradients.localstep import LocalStepper  # if the workers update

        return LocalStepper(self._optimizer, self.settle)

    def forget_others(self) -> None:
        """Those that were known before and that the backend has not."""
        for parameter in self.known.values():
            parameter.detach()
        self.known.clear()

    def measure(self, *, on: bool) -> None:
        """Between two steps, on all ranks alike."""
        if on and not self.measures:
            self._measured_from = self.rounds.serial
        if self.measures and not on:
            self._measured_before += self.rounds.serial - self._measured_from
        self.measures = on

    def measured_number(self, serial: int) -> int:
        """Of a measured round, counted from the first one that was."""
        return self._measured_before + serial - self._measured_from + 1

    def defers(self) -> bool:
        """Whether the step that is called now may be made later, parameter by parameter."""
        return self._stepper.can_defer()

    def close_round(self) -> None:
        """Some gradients have changed since they left: average all of them once more."""
        for parameter in self.parameters:
            parameter.leave_out()
        self.leave()
        self.rounds.begin_again()

    def leave(self) -> None:
        """Nothing more comes now: packs wait for no more gradients."""
        for pack in self.packs:
            pack.leave()

    def leave_round(self) -> bool:
        """Say of what has not left that it does not; whether there is a round under way."""
        if not any(parameter.left for parameter in self.parameters):
            return False
        for parameter in self.parameters:
            parameter.leave_out()
        return True

    def end_round(self) -> None:
        """Have nothing under way; what has not been shown is this rank's own again."""
        if self.leave_round():
            for parameter in self.parameters:
                parameter.end_round()

    def average_all(self, *, every: bool) -> None:
        """Somebody reads a gradient: have all averaged that are there.

        ``every``: tell also of parameters without one, for whom the others wait.
        """
        asked = (self.rounds.serial, every, self.measures)
        if asked == self.nothing_left:  # whoever clips asks once for each gradient
            return
        for parameter in self.parameters:
            parameter.average()
            if (every or self.measures) and not parameter.left:
                parameter.leave_out()
        self.leave()
        self.nothing_left = asked

    def show_after_pass(self, parameter: AveragedParameter) -> None:
        """Have its average in ``p.grad`` when this backward pass ends, as DDP has every one.

        A flat buffer of all gradients (Megatron's, apex's) is read past ``p.grad``.
        """
        this_pass = torch._C._current_graph_task_id()
        if self._pass_with_parts != this_pass:
            self._pass_with_parts, self._parts = this_pass, []
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._show_parts)
        self._parts.append(parameter)

    def _show_parts(self) -> None:
        for parameter in self._parts:
            parameter.averaged()
            parameter.edited()

    def defer_step(self) -> None:
        """Make the optimizer's step for each parameter when its average is here."""
        step = self._stepper.begin()
        with self.settling, torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            deferred = []
            for parameter in self.parameters:
                if parameter.parameter not in step:
                    continue
                if parameter.defer(step):
                    deferred.append(parameter.parameter)
                elif parameter.parameter.grad is not None:
                    parameter.averaged()  # if the optimizer has come to have it
                    step.apply([parameter.parameter])
            if deferred:
                increment_version(deferred)

    def arrived_after(self, first: AveragedParameter) -> list[AveragedParameter]:
        """Those next to it, in the model's order, that wait for the same step with their averages.

        One call of the optimizer makes the updates of all. Averages come about in that order, so
        the first one that is not here ends the search.
        """
        found = []
        for parameter in self.parameters[first.place + 1 :]:
            if not parameter.arrived_with(first):
                break
            found.append(parameter)
        return found

    def settle(self) -> None:
        """Make the pending updates."""
        for parameter in self.parameters:
            parameter.settle()

    def receive_others(self) -> None:
        """Have the averages of those that only other ranks had a gradient of."""
        for parameter in self._wanted:
            if parameter.parameter.grad is None:
                parameter.receive_gradient()

    def receive_all(self) -> None:
        """Have all averages in ``p.grad``."""
        for parameter in self._wanted:
            parameter.receive_gradient()

    def end_step(self, *, learning: bool) -> None:
        most = max(self.parameters, key=lambda parameter: parameter.passes, default=None)
        self.rounds.end_step(0 if most is None else most.discards, learning=learning)
        for parameter in self.parameters:
            parameter.passes = parameter.discards = 0


class AverageReader:
    """Whom a waiting gradient asks: before each operation with it."""

    def __init__(self, parameter: AveragedParameter) -> None:
        self.parameter = parameter

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Without waiting for the average, where that can be."""
        from foreprop.gradients import gradientmath  # for whom gradients are read at all

        norm = gradientmath.needs_squares(func)
        if not (norm or gradientmath.is_scaling(func)) or not self.parameter.ask(norm=norm):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return gradientmath.answer(func, args, kwargs)

    def before_use(self, func: Any, args: Any, kwargs: Any, *, in_place: bool) -> bool:
        self.parameter.averaged()
        if in_place:
            self.parameter.edited()
        return not in_place

    def after_use(self, result: Any) -> None:
        """Who has another tensor of the same memory may edit it, and leave no trace."""
        if not _is_apart(result, self.parameter.shown):
            self.parameter.edited()

    def meets_compiler(self) -> None:
        """Compiled code may read it, a compiled optimizer's step for one."""
        self.parameter.averaged()
        self.parameter.edited()


def outside_transforms() -> AbstractContextManager[object]:
    """What a wait does belongs to no transform of ``torch.func`` whose function has to wait."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def is_part_of_more(gradient: torch.Tensor) -> bool:
    """Whether a gradient that was there before the backward pass is a part of a larger tensor.

    What autograd makes itself (views of one buffer of cuDNN's, say) has not been written to.
    """
    if gradient.layout != torch.strided or not gradient._version:
        return False
    return gradient.untyped_storage().nbytes() > gradient.nbytes


def _is_apart(result: Any, gradient: torch.Tensor | None) -> bool:
    """Whether a result of an operation on the gradient has no part in its memory."""
    if isinstance(result, (list, tuple)):
        return all(_is_apart(item, gradient) for item in result)
    if isinstance(result, torch.Tensor) and gradient is not None:
        with torch._C.DisableTorchFunctionSubclass():
            if result.layout != torch.strided or gradient.layout != torch.strided:
                return False
            memories = [tensor.untyped_storage().data_ptr() for tensor in (result, gradient)]
            return memories[0] != memories[1]
    return result is None or isinstance(result, (bool, float, str))

"""What a session's averaged parameters have in common: their rounds, and the optimizer's step.

Theory of operation. A *round* averages every parameter's gradient once. A step has one round, which
begins in the backward pass that is the step's last as far as earlier steps tell (the first one, in
the first step): then every gradient leaves as soon as autograd has computed it. If another backward
pass follows, or the step is never made, that round's averages are not what the step needs: the
round is closed, and another one begins, in which all gradients leave when the step is made. Loops
run as many backward passes on every rank, so every rank counts the same rounds, whatever parameters
its passes have used: the passes are those of the parameter that had most.

The optimizer is the user's. Its step is made for each parameter when its average is here, in the
thread that uses the parameter first; ``settling`` is held meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import increment_version

from foreprop.core.wire import MOST_ROUNDS, ROUND_SHIFT
from foreprop.params.localstep import LocalStepper

if TYPE_CHECKING:
    from foreprop.params.averaged import AveragedGradient, Averages
    from foreprop.params.pack import Pack


class Rounds:
    """One session's count of passes and rounds. Not thread-safe: for the training thread."""

    def __init__(self, fixed_passes: int | None = None, *, counts_rounds: bool = False) -> None:
        """``fixed_passes``: backward passes per step as the user says; None: to be learned.

        ``counts_rounds``: each round counts as a step, for a backend that knows no rounds of one.
        """
        self.serial = 1  # the round's number, counted from the session's start
        self.step = 1  # the round's step, as servers or collectives count
        self._counts_rounds = counts_rounds
        self._again = 0  # rounds of this step before this one
        self._more = 0  # times that a pack has left in this step beyond its rounds
        self._fixed = fixed_passes
        # passes per step, with those whose gradients are discarded
        self._expected = fixed_passes or 1
        self._passes = 0  # of the parameter that had most, since the last step
        self._fewer = 0  # passes of the last step, if it had fewer than expected

    def go_on(self, before: Rounds) -> None:
        """Take over the count of passes, in the middle of a step, too."""
        self._expected, self._fewer = before._expected, before._fewer
        self._passes = before._passes

    @property
    def flags(self) -> int:
        """Which of the step's rounds this is, in the flags of a push."""
        return self._again << ROUND_SHIFT

    def note_pass(self, passes: int) -> None:
        """Note that a parameter has had so many passes since the last step."""
        self._passes = max(self._passes, passes)

    @property
    def is_last_pass(self) -> bool:
        """Whether gradients may leave as they become ready."""
        return self._passes == self._expected

    def begin_again(self) -> None:
        """Begin another round of the same step: gradients have changed since they left."""
        self.serial += 1
        self._again += 1
        self.step += self._counts_rounds
        if not self.may_follow(self._more):  # nobody makes steps: gradients are only read
            self._again = self._more = 0
            self.step += not self._counts_rounds

    def may_follow(self, more: int) -> bool:
        """Whether a pack may leave in this step for the so-manieth time beyond its rounds."""
        if self._counts_rounds and more:
            return False
        return self._again + more < MOST_ROUNDS

    def flags_after(self, more: int) -> int:
        """The `flags` of a pack that has left so often beyond its rounds."""
        self._more = max(self._more, more)
        return (self._again + more) << ROUND_SHIFT

    def end_step(self, discards: int, *, learning: bool) -> None:
        """Go on with the next step, and expect as many passes in it as this one shows.

        ``discards``: how many passes of the parameter that had most came to nothing. When it is no
        more ``learning``, more passes are expected at once, and fewer when two steps agree.
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
            if passes >= self._expected or passes == self._fewer:
                self._expected = passes
            self._fewer = passes


class Averaging:
    """The averaged parameters of one session. Training thread, but for `settle`."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, fixed_passes: int | None, *, counts_rounds: bool
    ) -> None:
        self.rounds = Rounds(fixed_passes, counts_rounds=counts_rounds)
        self.gradients: list[AveragedGradient] = []  # in the model's order
        self.packs: list[Pack] = []
        self.known: dict[int, AveragedGradient] = {}
        """Gradients that a backend had before, or that are new in the loop, by parameter's id."""
        self.settling = threading.RLock()
        """Held while gradients or updates are made visible, by any thread."""
        self.measures = False
        """Whether servers tell every round's sums of squares, as all ranks have agreed."""
        self._measured_from = 0  # the first round since then
        self._measured_before = 0  # rounds that were measured before that
        self.asks_norm = False
        """Whether this rank's loop has taken the norm of gradients in this step."""
        self.asks_dropped = False
        """Whether whoever reads now holds a gradient that is not ``p.grad`` any more."""
        self.watches_uses = False
        """Whether the order is looked at in which the next step uses parameters first."""
        self.unscaled_by: torch.Tensor | None = None
        """What a scaler has multiplied the gradients with, to take the loss's factor out."""
        self.nothing_left: tuple[int, bool, bool] | None = None
        """What `average_all` was last called for; None if there are gradients since."""
        self._parts: list[AveragedGradient] = []  # of flat buffers, see `show_after_pass`
        self._pass_with_parts = -1
        self._optimizer = optimizer
        self._fixed_passes = fixed_passes

    def connect(self, *, counts_rounds: bool) -> None:
        """Go on with another backend that makes the averages. No round is under way."""
        before, self.rounds = self.rounds, Rounds(self._fixed_passes, counts_rounds=counts_rounds)
        self.rounds.go_on(before)
        self.measures, self._measured_before, self.nothing_left = False, 0, None
        self.known |= {id(each.leaf): each for each in self.gradients}
        self.gradients.clear()
        self.packs.clear()

    @cached_property
    def stepper(self) -> LocalStepper:
        return LocalStepper(self._optimizer, self.settle)

    def forget_others(self) -> None:
        """Let go of the gradients that were known before and that the backend does not have."""
        for gradient in self.known.values():
            gradient.detach()
        self.known.clear()

    def measure(self, *, on: bool) -> None:
        """Measure rounds from now on, or no more; between two steps, on all ranks alike."""
        if on and not self.measures:
            self._measured_from = self.rounds.serial
        if self.measures and not on:
            self._measured_before += self.rounds.serial - self._measured_from
        self.measures = on

    def measured_number(self, serial: int) -> int:
        """The round's number among those that were measured."""
        return self._measured_before + serial - self._measured_from + 1

    def close_round(self) -> None:
        """Begin another round for all gradients: some have changed since they left."""
        for gradient in self.gradients:
            gradient.leave_out()
        self.leave()
        self.rounds.begin_again()

    def leave(self) -> None:
        """Have packs leave with what they have."""
        for pack in self.packs:
            pack.leave()

    def leave_round(self) -> bool:
        """Leave out what has not left, if a round is under way; whether one is."""
        if not any(gradient.left for gradient in self.gradients):
            return False
        for gradient in self.gradients:
            gradient.leave_out()
        return True

    def end_round(self) -> None:
        """Wait for all that is under way; what has not been shown is this rank's own again."""
        if self.leave_round():
            for gradient in self.gradients:
                gradient.arrival.end()

    def average_all(self, *, every: bool) -> None:
        """Have all gradients averaged that are there: somebody reads one.

        ``every``: tell of parameters without one, too, for the others wait for them.
        """
        asked = (self.rounds.serial, every, self.measures)
        if asked == self.nothing_left:  # whoever clips asks once for each gradient
            return
        for gradient in self.gradients:
            gradient.average()
            if (every or self.measures) and not gradient.left:
                gradient.leave_out()
        self.leave()
        self.nothing_left = asked

    def show_after_pass(self, gradient: AveragedGradient) -> None:
        """Put the average into ``p.grad`` when this backward pass ends, as DDP does with all.

        A flat buffer of all gradients (Megatron's, apex's) is read past ``p.grad``.
        """

        def show_parts() -> None:
            for part in self._parts:
                part.ensure_averaged()
                part.give_to_user()

        this_pass = torch._C._current_graph_task_id()
        if self._pass_with_parts != this_pass:
            self._pass_with_parts, self._parts = this_pass, []
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(show_parts)
        self._parts.append(gradient)

    def defer_step(self) -> None:
        """Make the optimizer's step for each parameter when its average is here."""
        step = self.stepper.begin()
        with self.settling, torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            deferred, ready = [], []
            for gradient in self.gradients:
                parameter = gradient.leaf
                if parameter not in step:
                    continue
                if gradient.arrival.defer(step):
                    deferred.append(parameter)
                elif parameter.grad is not None:
                    gradient.ensure_averaged()  # if the optimizer has come to have it
                    ready.append(parameter)
            step.apply(ready)
            if deferred:
                increment_version(deferred)

    def arrived_after(self, first: Averages) -> list[Averages]:
        """Those that follow it in the model's order and can be updated in the same call.

        They wait for the same step, and their averages are here. Averages come about in that
        order, so the first one that is not here ends the search.
        """
        found = []
        for gradient in self.gradients[first.gradient.place + 1 :]:
            arrival = gradient.arrival
            if arrival.update is not first.update or not arrival.has_arrived:
                break
            found.append(arrival)
        return found

    def settle(self) -> None:
        """Make the pending updates."""
        for gradient in self.gradients:
            gradient.arrival.settle()

    def receive(self, *, only_missing: bool = False) -> None:
        """Put the averages into ``p.grad``; with ``only_missing`` where only others had one."""
        for gradient in self.gradients:
            if gradient.wanted and not (only_missing and gradient.leaf.grad is not None):
                gradient.receive()

    def end_step(self, *, learning: bool) -> None:
        most = max(self.gradients, key=lambda gradient: gradient.passes, default=None)
        self.rounds.end_step(0 if most is None else most.discards, learning=learning)
        for gradient in self.gradients:
            gradient.passes = gradient.discards = 0


def outside_transforms() -> AbstractContextManager[object]:
    """A context in which what a wait does belongs to no transform of ``torch.func``."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return contextlib.nullcontext()
    return temporarily_clear_interpreter_stack()


def is_in_flat_buffer(gradient: torch.Tensor) -> bool:
    """Whether the gradient was there before the backward pass, as a part of a larger tensor."""
    # what autograd makes itself (views of one buffer of cuDNN's, say) has not been written to
    if gradient.layout != torch.strided or not gradient._version:
        return False
    return gradient.untyped_storage().nbytes() > gradient.nbytes

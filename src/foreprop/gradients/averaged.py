"""One parameter whose gradient is averaged, and which the workers update: ``update="workers"``.

Theory of operation. After its backward pass a gradient waits (`path.waiting`): whoever reads
or edits ``p.grad`` finds the average over the ranks, as with DDP. What autograd has computed leaves
as early as with ``update="servers"``, in the same slices; the answers land beside the gradient,
never in it. So a gradient that is accumulated into after it has left, because a step had another
backward pass or was skipped, is still this rank's own: it is averaged again, in another *round*
(`gradients.averaging`), and nothing is lost but the overlap.

After `optimizer.step()` the parameter waits instead, until its average is here and the user's own
optimizer has been applied to it (`gradients.localstep`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from foreprop.errors import TrainingLoopError
from foreprop.gradients.averaging import (
    AverageReader,
    Averaging,
    is_part_of_more,
    outside_transforms,
)
from foreprop.gradients.roundpart import RoundPart
from foreprop.path.parameter import GET_DATA, FirstUse, ValueMark
from foreprop.path.servedgradient import SeenGradient
from foreprop.path.waiting import (
    is_waiting,
    make_wait,
    no_answer,
    refuse_to_be_compiled,
    stop_waiting,
)

if TYPE_CHECKING:  # for loops in which the workers update
    from foreprop.core.norm import SquareSum
    from foreprop.gradients.localstep import DeferredStep
    from foreprop.gradients.roundpart import Scaling
    from foreprop.path.managedparameter import SessionState
    from foreprop.path.memory import Memory


def can_be_trained(parameter: Any) -> bool:
    return bool(parameter.is_leaf and (parameter.is_floating_point() or parameter.is_complex()))


def watch_gradients(parameter: Any, hook: Callable[[torch.nn.Parameter], None]) -> RemovableHandle:
    """Be told of its gradients: also of one that requires none yet, which torch does not allow."""
    with torch._C.DisableTorchFunctionSubclass():  # or a lazy one refuses
        required = parameter.requires_grad
        parameter.requires_grad_(True)
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
        parameter.requires_grad_(required)
    return handle


class AveragedParameter:
    """The life of one parameter between `backward()`, `step()` and its next use."""

    index: int
    name: str
    wanted: bool
    """In every step, because the optimizer has it; others are averaged if they are read."""
    memory: Memory
    start: ValueMark
    """As it was when all ranks had the same value."""
    _part: RoundPart
    """Its part in the last round; where servers come to update there is none."""

    def __init__(
        self, parameter: torch.nn.Parameter, session: SessionState, together: Averaging
    ) -> None:
        """Averaged once it is connected; its gradients wait for that."""
        self.parameter = parameter
        self.wanted = self.connected = False
        self.place = 0  # among those that are averaged together
        self.counts_rows = False
        self.touched_rows = 0
        self.passes = 0  # since the last step
        self.discards = 0  # of these, those whose gradients have been discarded
        self._session = session
        self._together = together
        self._in_rounds = False  # it has had a part in one
        self._seen = SeenGradient(AverageReader(self))
        self._own = False  # ``p.grad`` is this rank's own, to be averaged
        self._fresh = False  # and was made by autograd since the last round
        self._builds_on = False  # on an average that it had been
        self._is_seen_elsewhere = False  # ``p.grad`` is a part of a tensor that the user reads
        self._update: DeferredStep | None = None  # what `step()` has left to be done
        self._first_use = FirstUse(self, session)
        self._hook: RemovableHandle | None = None
        self._given_away = False
        self.attach_hook()

    def connect(self, index: int, name: str, *, wanted: bool) -> None:
        """The session has a backend for it, or another one: also in the middle of a step."""
        self.index, self.name = index, name
        self.wanted |= wanted
        self.memory = self._session.memory_of(self.parameter)
        self.start = ValueMark(self.parameter)
        self._part = RoundPart(self, self._session, self._together)
        self._in_rounds, self.connected = False, True
        self.attach_hook()
        if self._own:
            self._seen.wait()

    @property
    def part(self) -> RoundPart:
        """Its part in rounds, which may be one of a pack's."""
        return self._part

    # What the engine reads and writes.
    @property
    def values(self) -> memoryview:
        """The parameter's values at the start; from then on room for the averaged gradient."""
        if self._in_rounds or self._part.pack is not None:
            return self._part.room
        return self.memory.values

    def take_gradient(self, start_bytes: int, stop_bytes: int) -> Any:
        return self._part.take_gradient(start_bytes, stop_bytes)

    def sent_gradient(self, start_bytes: int, stop_bytes: int) -> memoryview | None:
        return self._part.sent_gradient(start_bytes, stop_bytes)

    @property
    def landed(self) -> memoryview:
        return self._part.landed

    def land_average(self, gradient: torch.Tensor) -> None:
        self._part.land_average(gradient)

    # Gradients.
    @property
    def gradient(self) -> torch.Tensor | None:
        """This rank's own, if it has not left."""
        return self._seen.tensor() if self._own else None

    def gradient_came(self) -> None:
        """Autograd has made one before this was there to be told of it."""
        self._on_gradient(self.parameter)

    def attach_hook(self) -> None:
        """Watch for gradients, if the parameter can ever have any."""
        if self._hook is None and not self._given_away and can_be_trained(self.parameter):
            self._hook = watch_gradients(self.parameter, self._on_gradient)

    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        """Autograd has added to ``parameter.grad``. Runs in the backward pass."""
        with torch._C.DisableTorchFunctionSubclass():
            gradient = parameter.grad
            if gradient is None:
                return
            session, together, seen = self._session, self._together, self._seen
            rounds = together.rounds
            if self.connected:
                if gradient.layout != torch.strided or session.reduces_by_kind:
                    session.check_layout(self.index, gradient.layout)
                session.gradient_ready(self)
                part = self._part
                if part.serial == rounds.serial or (part.pack is not None and part.pack.is_full):
                    self._check_not_scaled(gradient)
                    together.close_round()
            if gradient is not seen.tensor():
                self._is_seen_elsewhere = gradient._version > 0 and is_part_of_more(gradient)
                self.discards, self._builds_on = self.passes, False
            elif gradient._version != seen.version + 1:
                self.discards, self._builds_on = self.passes, False  # it has been zeroed
            elif self._in_rounds and not self._own:
                self._builds_on = True
            self.passes += 1
            self._note_own(gradient)
            rounds.note_pass(self.passes)
            if rounds.is_last_pass and self.wanted and session.eager:
                self._begin_round(gradient)
            if self._is_seen_elsewhere:
                together.show_after_pass(self)

    def _check_not_scaled(self, gradient: torch.Tensor) -> None:
        """A factor that waits for the average would be lost when a pass adds to the gradient."""
        if self._under_way and self._part.scalings.all and gradient is self._seen.tensor():
            raise TrainingLoopError(
                f"the gradient of {self.name} was multiplied after its backward pass, and another"
                " pass adds to it before it has been used: scale the loss instead, call"
                " optimizer.zero_grad() in between, or read the gradient once it is multiplied"
            )

    def _note_own(self, gradient: torch.Tensor) -> None:
        """What is in ``p.grad`` is this rank's own: who reads it waits for the average."""
        self._own = True
        self._together.nothing_left = None
        if self._seen.see(gradient):
            self._fresh = True
        self._seen.wait()

    def gradient_discarded(self, *, dropped: bool) -> None:
        """`optimizer.zero_grad()`: what has been accumulated does not count, and is not shown."""
        self.discards = self.passes
        self._own = False
        if not (dropped and self._under_way):
            self._seen.release()
            self._seen.forget()

    def replace_busy_gradient(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            gradient = self.parameter.grad
            if self._under_way and gradient is not None:
                self.parameter.grad = torch.zeros_like(gradient)

    # A round.
    @property
    def left(self) -> bool:
        """Whether it has had its part in this round."""
        return self._in_rounds and self._part.is_in_this_round

    @property
    def _under_way(self) -> bool:
        """Whether its average has not been shown yet."""
        return self._in_rounds and self._part.under_way

    def _begin_round(self, gradient: torch.Tensor | None) -> None:
        """Have the gradient averaged; None: this rank has none."""
        if self._update is not None:  # nothing has used the parameter: its average is still here
            self.settle()
        if self.counts_rows:
            from foreprop.path.sums import count_rows

            self.touched_rows = count_rows(gradient)
        if self._part.under_way:
            self._part.end()  # of an earlier gradient, which has changed since
        dropped = self._own and self.parameter.grad is None  # by hand: the step leaves it out
        self._own = False
        self._in_rounds = True
        self._part.begin(gradient, dropped=dropped, builds_on=self._builds_on)
        self._builds_on = False

    def leave_out(self) -> None:
        """The round is closed before its gradient has left: it is averaged in the next one."""
        own = self._own or (self._under_way and self.left)
        if not self.left and self._part.is_expected:
            self._begin_round(None)
        # one that has been dropped may still be there, until it has been sent
        gradient = self._seen.tensor()
        self._own = own and gradient is not None and self.parameter.grad is gradient

    def end_round(self) -> None:
        """Wait for the average, which nobody will look at."""
        self._part.end()

    def average(self) -> None:
        """Have ``p.grad`` averaged, if it is this rank's own."""
        gradient = self.gradient
        if gradient is None and self.wanted and not self.left:
            gradient = self._made_otherwise()
        if gradient is not None:
            self._begin_round(gradient)

    def _made_otherwise(self) -> torch.Tensor | None:
        """One that no pass of this step has made: zeros, say.

        Another rank's pass may have made one. What follows is to be done with the average on both.
        """
        gradient = self.parameter.grad
        if gradient is None or gradient is self._seen.tensor():
            return None
        if torch._C._current_graph_task_id() != -1:  # the pass may add to it
            return None
        self.settle()  # an earlier step's update, which is made with another gradient
        self._note_own(gradient)
        return gradient

    def averaged(self) -> None:
        """Make ``p.grad`` the average over the ranks. For whoever reads or edits it."""
        if self._update is not None:  # the step comes first: it was called before
            self.settle()
            return
        with self._together.settling, torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            gradient = self._seen.tensor()
            if self._needs_round and gradient is not None:
                self.wanted = True  # from now on in every step
                self._session.gradients_read()
            if self._part.end() and gradient is not None:
                self._show(gradient)

    @property
    def _needs_round(self) -> bool:
        """Whether its average may wait for gradients that are here and have not left."""
        return self._own or (self._under_way and self.left and self._part.is_counted)

    def edited(self) -> None:
        """From now on ``p.grad`` is the user's, an ordinary tensor, alike on every rank."""
        self._seen.release()
        self._part.scalings.clear()

    @property
    def shown(self) -> torch.Tensor | None:
        """What is, or was last, ``p.grad``."""
        return self._seen.tensor()

    def _show(self, gradient: torch.Tensor) -> None:
        """Put what has landed where the user looks for it."""
        self._part.landing.show_in(gradient, fresh=self._fresh)
        self._fresh = False
        self._part.scalings.apply_to(gradient)
        self._seen.see(gradient)

    # Without waiting, see `gradientmath`.
    def ask(self, *, norm: bool) -> bool:
        """An operation is about to be answered: have all averages made that it needs.

        False: it must wait, for the update that `step()` has left to be made comes first.
        """
        if self._update is not None:
            return False
        self._together.asks_norm |= norm
        if self._needs_round:
            self.wanted = True
            with torch._C.DisableTorchFunctionSubclass():
                self._session.gradients_read()
        return True

    def squares(self) -> SquareSum | None:
        """The sum of the average's squares; blocks until the servers tell it, or it is here.

        None if it is known in another way only: the average has been multiplied already, say.
        """
        if not self.ask(norm=True):  # of a list the first one alone has been asked
            return None
        if self._together.measures and self.left and self._part.gave:
            return self._session.square_sums(self._together.measured_number(self._part.serial))[
                self.index
            ]
        self.averaged()
        gradient = self._seen.tensor()
        if gradient is None or self._part.scalings.all or gradient.layout != torch.strided:
            return None
        from foreprop.path.sums import square_sum  # for loops that take the norm

        # what a device shows is a copy of what has landed on the host
        return square_sum(gradient.detach() if gradient.is_cpu else self._part.landing.room)

    @property
    def scalings(self) -> Sequence[Scaling]:
        """By which the average is, or is to be, multiplied, in order."""
        return self._part.scalings.all

    def scale(self, scaling: Scaling) -> None:
        """Multiply the average, when it is here.

        An earlier average, which has no part in the round that is under way, is here.
        """
        if not (self.ask(norm=False) and self._part.gave):
            self.averaged()
        self._part.scalings.all.append(scaling)
        gradient = self._seen.tensor()
        if not self._under_way and gradient is not None:
            self._part.scalings.apply_to(gradient)
            self._seen.version = gradient._version

    def note_scale(self, inverse: torch.Tensor) -> None:
        """A scaler takes its factor out of the gradients: it is to be the same on all ranks."""
        self._together.unscaled_by = inverse.detach().clone()

    # The end of a step.
    def finish_step(self, step: int) -> None:
        """`optimizer.step()` begins: have averaged what has not been."""
        if self._hook is None:
            self.attach_hook()
        if is_waiting(self.parameter):
            self.settle()  # an earlier step's update, if nothing has used the parameter since
        if self.left or not (self.wanted or self._part.is_counted):
            return
        # who counts on this one may as well have it, if it is there
        gradient = self.parameter.grad if self.wanted or self._own else None
        if gradient is None and not self._part.is_expected:
            return
        kept = gradient is not None and gradient is self._seen.tensor() and not self._own
        if kept:
            gradient = None  # averaged already, and no pass has added to it
        elif gradient is not None:
            self._note_own(gradient)
        self._begin_round(gradient)
        self._part.kept = kept

    @property
    def _is_as_it_left(self) -> bool:
        """Whether ``p.grad`` has been neither discarded nor replaced since its round began."""
        gradient = self.parameter.grad
        if gradient is None:
            return not self._part.gave
        return self._part.gave and self._seen.tensor() is gradient

    def defer(self, update: DeferredStep) -> bool:
        """Make the step's update at the first use, if its gradient is still on its way.

        False: ``p.grad``, if there is any, is what the update is to be made with now. Else the
        caller raises the parameter's version: whoever saved the old value must not use it.
        """
        if not (self._under_way and self._is_as_it_left):
            return False
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
            elif self._part.end() and not self._part.gave:
                self.parameter.grad = self._part.landing.as_autograd_would().clone()

    # First use, and any other.
    def watch(self) -> None:
        """Report the parameter's next differentiable use to the session, as its first."""
        self._first_use.watched = True
        make_wait(self.parameter, self)

    def unwatch(self) -> None:
        if self._first_use.watched:
            self._first_use.watched = False
            if self._update is None:
                stop_waiting(self.parameter)

    answer = staticmethod(no_answer)
    meets_compiler = staticmethod(refuse_to_be_compiled)

    def before_use(self, func: Any, args: Any, kwargs: Any, *, in_place: bool) -> bool:
        """Called by the waiting parameter: wait, and give the class back."""
        self._first_use.begins()
        if func == GET_DATA:
            self.start.exposed = True
        self.settle()
        with torch._C.DisableTorchFunctionSubclass():
            stop_waiting(self.parameter)
        return self._first_use.watched

    def after_use(self, result: Any) -> None:
        if self._first_use.is_awaited_after(result) and not is_waiting(self.parameter):
            make_wait(self.parameter, self)

    def check_stepped(self) -> None:
        """Until the step is made a parameter keeps its value, so any use is right."""

    def settle(self) -> None:
        """Make the pending update, if there is one."""
        if self._update is None:
            if not self._first_use.watched and is_waiting(self.parameter):
                stop_waiting(self.parameter)  # it has been made together with another one's
        else:
            with (
                self._together.settling,
                outside_transforms(),
                torch._C.DisableTorchFunctionSubclass(),
                torch.no_grad(),
            ):
                self._make_update()

    def _make_update(self) -> None:
        update = self._update
        if update is None:  # another thread has been here
            return
        ended = [self]
        if (readers := self._session.stale_readers) is not None:
            readers.settled(self.parameter)
        together = [self] if self._part.end() else []
        if readers is None:
            arrived = self._together.arrived_after(self)
            together += [each for each in arrived if each._part.end()]
            for each in arrived:
                each._update = None
            if not self._together.watches_uses:  # else these, too, are waited for one by one
                ended += [each for each in arrived if each._part.pack is not None]
        shown = [each._put_average() for each in together]
        for pack in dict.fromkeys(each._part.pack for each in together):
            own = [each.parameter for each in together if each._part.pack is pack]
            update.apply(own, small=pack is not None)
        for each, gradient in zip(together, shown, strict=True):
            each.parameter.grad = gradient
        self._update = None
        for each in ended:
            if not each._first_use.watched:
                stop_waiting(each.parameter)

    def arrived_with(self, other: AveragedParameter) -> bool:
        """Whether the step that the other one waits for is to be made for it, with its average."""
        return self._update is other._update and self._part.has_arrived

    def _put_average(self) -> torch.Tensor | None:
        """Have it in ``p.grad`` for the optimizer; returns what is there otherwise."""
        parameter, part = self.parameter, self._part
        shown, seen = parameter.grad, self._seen.tensor()
        if seen is not None and part.gave:  # it is ``p.grad``, or somebody holds it
            self._show(seen)
            self._seen.release()
            parameter.grad = seen
        else:  # it has been discarded since, or there never was one here
            parameter.grad = part.landing.as_autograd_would()
            part.scalings.apply_to(parameter.grad)
        return shown

    def settle_whole(self) -> None:
        self.settle()

    def settle_if_stepped(self) -> None:
        self.settle()

    # The start and the end.
    def before_offering(self) -> None:
        if self._part.pack is not None:
            self._part.pack.before_offering(self._part)
        else:
            self.memory.before_sending_values()

    def receive_initial_value(self) -> None:
        if self._part.pack is not None:
            self._part.pack.receive_value(self._part)
        else:
            engine, number = self._session.engine_of(self.index)
            engine.wait(number, 0)
            self.memory.land()
        self.has_first_value()

    def has_first_value(self) -> None:
        """It is what all ranks have."""
        self.start = ValueMark(self.parameter)

    def give_away(self) -> None:
        """Another session has it from now on, and averages its gradients."""
        self.detach()
        self.wanted, self._own, self._given_away = False, False, True

    def detach(self) -> None:
        """The session is over: parameter and gradient become ordinary ones."""
        self._first_use.watched = False
        self._update = None
        self._seen.release()
        if is_waiting(self.parameter):
            stop_waiting(self.parameter)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

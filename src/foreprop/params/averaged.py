"""One parameter that the workers update: its gradient, and the averages that arrive for it.

Theory of operation. After its backward pass a gradient waits (`params.waiting`): whoever reads
or edits ``p.grad`` finds the average over the ranks, as with DDP. What autograd has computed leaves
as early as with ``update="servers"``, in the same slices; the averages land beside the gradient,
never in it. So a gradient that is accumulated into after it has left, because a step had another
backward pass or was skipped, is still this rank's own: it is averaged again, in another *round*
(`params.averaging`), and nothing is lost but the overlap.

A gradient that is only scaled or measured need not wait (`params.gradientmath`): factors are kept
as *scalings* of the round, and applied to the average once that is shown in the gradient.

After `optimizer.step()` the parameter waits instead: at its first use its average is waited for,
and the user's own optimizer is applied to it (`params.localstep`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from foreprop.core.wire import Flag
from foreprop.engine.memory import Copying, HeldGradient, bytes_of
from foreprop.errors import TrainingLoopError
from foreprop.params.averaging import Averaging, is_in_flat_buffer, outside_transforms
from foreprop.params.landing import Landing
from foreprop.params.localstep import DeferredStep
from foreprop.params.parameter import (
    Parameter,
    ParameterArrival,
    ParameterGradient,
    check_same_kind,
)
from foreprop.params.setup import SessionState
from foreprop.params.waiting import is_waiting, make_wait, stop_waiting

if TYPE_CHECKING:  # what only some parameters have
    from foreprop.params.pack import Pack

Scaling = tuple[Callable[[Any, Any], Any], Any]
"""A tensor's method, and the number or the tensor of one element to call it with."""


def can_be_trained(parameter: Any) -> bool:
    return bool(parameter.is_leaf and (parameter.is_floating_point() or parameter.is_complex()))


def watch_gradients(parameter: Any, hook: Callable[[torch.nn.Parameter], None]) -> RemovableHandle:
    """Call ``hook`` with each gradient of the parameter, also if it requires none yet."""
    with torch._C.DisableTorchFunctionSubclass():  # or a lazy one refuses
        # torch registers such hooks only where a gradient is required
        required = parameter.requires_grad
        parameter.requires_grad_(True)
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
        parameter.requires_grad_(required)
    return handle


class AveragedGradient(ParameterGradient):
    """What autograd makes of the parameter, until it is averaged; the session's for its whole life.

    Where the session connects anew, also in the middle of a step, it goes on as it is with another
    arrival. Until the parameter is connected first, it waits for that to be averaged.
    """

    is_averaged = True
    arrival: Averages  # of the present connection

    def __init__(
        self, leaf: torch.nn.Parameter, session: SessionState, averaging: Averaging
    ) -> None:
        super().__init__(leaf)
        self.averaging = averaging
        self.connected = False
        self.wanted = False  # in every step: the optimizer has it, or it has been read
        self.place = 0  # among those that are averaged together
        self.passes = 0  # since the last step
        self.discards = 0  # of these, those whose gradients have been discarded
        self._session = session
        self._is_own = False  # ``p.grad`` is this rank's own, to be averaged
        self._was_discarded = False  # before it had left: only who holds the tensor may ask for it
        self._unseen = False  # autograd has made it since the last round, and nobody has read it
        self._builds_on = False  # autograd has added to an average
        self._in_flat_buffer = False  # ``p.grad`` is a part of a tensor that the user reads
        self._given_away = False
        self.attach_hook()

    def connect(self, arrival: Averages) -> None:
        self.arrival, self.connected = arrival, True
        self.attach_hook()
        if self._is_own:
            self.seen.wait()

    def attach_hook(self) -> None:
        if self._hook is None and not self._given_away and can_be_trained(self.leaf):
            self._hook = watch_gradients(self.leaf, self.added)

    def give_away(self) -> None:
        self.arrival.owner.detach()
        self.wanted, self._is_own, self._given_away = False, False, True

    # In the backward pass.
    def added(self, leaf: torch.nn.Parameter) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            gradient = leaf.grad
            if gradient is None:
                return
            session, averaging, seen = self._session, self.averaging, self.seen
            rounds = averaging.rounds
            if self.connected:
                arrival = self.arrival
                if gradient.layout != torch.strided or session.reduces_by_kind:
                    session.check_layout(arrival.owner.index, gradient.layout)
                session.gradient_ready(arrival.owner)
                pack = arrival.pack
                if arrival.serial == rounds.serial or (pack is not None and pack.is_full):
                    if arrival.under_way and arrival.scalings and gradient is seen.tensor():
                        # a factor that waits for the average would be lost
                        raise TrainingLoopError(
                            f"the gradient of {arrival.owner.name} was multiplied after its"
                            " backward pass, and another pass adds to it before it has been used:"
                            " scale the loss instead, call optimizer.zero_grad() in between, or"
                            " read the gradient once it is multiplied"
                        )
                    averaging.close_round()
            if gradient is not seen.tensor():
                self._in_flat_buffer = is_in_flat_buffer(gradient)
                self.discards, self._builds_on = self.passes, False
            elif gradient._version != seen.version + 1:
                self.discards, self._builds_on = self.passes, False  # it has been zeroed
            elif self.connected and self.arrival.serial and not self._is_own:
                self._builds_on = True
            self.passes += 1
            self._note_own(gradient)
            rounds.note_pass(self.passes)
            if rounds.is_last_pass and self.wanted and session.eager:
                self._begin_round(gradient)
            if self._in_flat_buffer:
                averaging.show_after_pass(self)

    def _note_own(self, gradient: torch.Tensor) -> None:
        # from now on whoever reads it waits for the average
        self._is_own, self._was_discarded = True, False
        self.averaging.nothing_left = None
        if self.seen.see(gradient):
            self._unseen = True
        self.seen.wait()

    def discarded(self, *, dropped: bool) -> None:
        self.discards = self.passes
        self._was_discarded |= dropped and self._is_own
        self._is_own = False
        if not (dropped and (self._was_discarded or self.arrival.under_way)):
            self._was_discarded = False
            self.seen.release()
            self.seen.forget()

    # A round.
    @property
    def left(self) -> bool:
        return self.arrival.serial == self.averaging.rounds.serial

    def _begin_round(self, gradient: torch.Tensor | None) -> None:
        arrival = self.arrival
        if arrival.update is not None:  # nothing has used the parameter: its average is still here
            arrival.settle()
        if arrival.owner.counts_rows:
            arrival.owner.count_rows(gradient)
        arrival.end()  # of an earlier gradient, which has changed since
        dropped = self._is_own and self.leaf.grad is None  # by hand: the step leaves it out
        self._is_own = self._was_discarded = False
        arrival.begin(gradient, dropped=dropped, builds_on=self._builds_on)
        self._builds_on = False

    def leave_out(self) -> None:
        """Close the round for this gradient: what has not left is averaged in the next one."""
        arrival = self.arrival
        if arrival.under_way and arrival.scalings and arrival.update is None:
            # a factor that no other average has, and that no step has taken
            with self.averaging.settling, torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                self._show_average()
        own = self._is_own or (arrival.under_way and self.left and arrival.contributed)
        if not self.left and arrival.is_expected:
            self._begin_round(None)
        # one that has been dropped may still be there, until it has been sent
        gradient = self.seen.tensor()
        self._is_own = own and gradient is not None and self.leaf.grad is gradient

    def average(self) -> None:
        """Begin the round of ``p.grad``, if that is this rank's own."""
        gradient = self.seen.tensor() if self._is_own or self._was_discarded else None
        if gradient is not self.leaf.grad and not self.averaging.asks_dropped:
            gradient = None  # whether somebody holds it decides nothing, until they read it
        if gradient is None and self.wanted and not self.left:
            # one that no pass of this step has made, zeros, say: maybe another rank's has
            gradient, in_a_pass = self.leaf.grad, torch._C._current_graph_task_id() != -1
            if gradient is None or gradient is self.seen.tensor() or in_a_pass:
                return  # or the pass may add to it
            self.arrival.settle()  # an earlier step's update, which is made with another one
            self._note_own(gradient)
        if gradient is not None:
            self._begin_round(gradient)

    # Who reads or edits it.
    def before_use(self, func: Any, args: Any, kwargs: Any, *, in_place: bool) -> bool:
        self.ensure_averaged()
        if in_place:
            self.give_to_user()
        return not in_place

    def after_use(self, result: Any) -> None:
        # whoever has another tensor of the same memory may edit it, and leave no trace
        if not _shares_no_memory(result, self.seen.tensor()):
            self.give_to_user()

    def meets_compiler(self) -> None:
        # compiled code may read it, as a compiled optimizer's step does
        self.ensure_averaged()
        self.give_to_user()

    def ensure_averaged(self) -> None:
        """Make ``p.grad`` the average over the ranks, for whoever reads or edits it."""
        if self.connected and self.arrival.update is not None:  # the step comes first
            self.arrival.settle()
            return
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self.make_averaged()

    def make_averaged(self) -> None:  # where neither autograd nor torch functions are in the way
        with self.averaging.settling:
            self._have_all_averaged()
            self._show_average()

    def _have_all_averaged(self) -> None:
        if not (self._is_own or self._was_discarded):
            arrival = self.arrival  # whose average may wait for gradients that have not left
            if not (arrival.under_way and self.left and arrival.is_counted):
                return
        gradient, averaging = self.seen.tensor(), self.averaging
        if gradient is None:
            return
        self.wanted = True  # from now on in every step
        with torch._C.DisableTorchFunctionSubclass():
            if gradient is not self.leaf.grad and not self.left:
                averaging.asks_dropped, averaging.nothing_left = True, None
            self._session.gradients_read()
        averaging.asks_dropped = False

    def _show_average(self) -> None:
        # ``settling`` is held
        gradient = self.seen.tensor()
        if self.arrival.end() and gradient is not None:
            self.show(gradient)

    def give_to_user(self) -> None:
        """Let ``p.grad`` be an ordinary tensor, alike on every rank, whatever the user does."""
        self.seen.release()
        self.arrival.forget_scalings()

    def show(self, gradient: torch.Tensor) -> None:
        self.arrival.landing.show_in(gradient, unseen=self._unseen)
        self._unseen = False
        self.arrival.apply_scalings(gradient)
        self.seen.see(gradient)

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        from foreprop.params.gradientmath import answer  # where gradients are read at all

        return answer(self, func, args, kwargs)

    def ask(self, *, norm: bool) -> bool:
        """Have all averages made that an operation needs that is answered without waiting.

        False if it must wait: the update that `step()` has left to be made comes first.
        """
        if self.connected and self.arrival.update is not None:
            return False
        self.averaging.asks_norm |= norm
        self._have_all_averaged()
        return True

    # The end of a step.
    def finish_step(self, step: int) -> None:
        if self._hook is None:
            self.attach_hook()
        arrival = self.arrival
        if is_waiting(self.leaf):
            arrival.settle()  # an earlier step's update, if nothing has used the parameter since
        if self.left or not (self.wanted or arrival.is_counted):
            return
        # the ranks that wait for word of this one may as well have its gradient, if there is one
        gradient = self.leaf.grad if self.wanted or self._is_own else None
        if gradient is None and not arrival.is_expected:
            return
        kept = gradient is not None and gradient is self.seen.tensor() and not self._is_own
        if kept:
            gradient = None  # averaged already, and no pass has added to it
        elif gradient is not None:
            self._note_own(gradient)
        self._begin_round(gradient)
        arrival.kept = kept

    def receive(self) -> None:
        """Put the average into ``p.grad``, also where only other ranks had a gradient."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if self.leaf.grad is not None:
                self.ensure_averaged()
                self.give_to_user()  # the user's own step may do with it what it likes
            elif self.arrival.end() and not self.arrival.contributed:
                self.leaf.grad = self.arrival.landing.as_autograd_would().clone()


def _shares_no_memory(result: Any, gradient: torch.Tensor | None) -> bool:
    if isinstance(result, (list, tuple)):
        return all(_shares_no_memory(item, gradient) for item in result)
    if isinstance(result, torch.Tensor) and gradient is not None:
        with torch._C.DisableTorchFunctionSubclass():
            if result.layout != torch.strided or gradient.layout != torch.strided:
                return False
            memories = [tensor.untyped_storage().data_ptr() for tensor in (result, gradient)]
            return memories[0] != memories[1]
    return result is None or isinstance(result, (bool, float, str))


class Averages(ParameterArrival):
    """What arrives for the parameter over one connection, round by round.

    Training thread, but for what lands.
    """

    gradient: AveragedGradient
    update: DeferredStep | None = None

    def __init__(
        self, owner: Parameter, *, gradient: AveragedGradient, averaging: Averaging
    ) -> None:
        super().__init__(owner)
        session = owner.session
        self.gradient = gradient
        stays = session.keeps_averages
        self.memory = session.memory_of(owner.parameter)
        self.landing = Landing(owner.parameter, self.memory, stays=stays)
        self.scalings: list[Scaling] = []  # of this round's average, made or to be made
        self._scaled = 0  # so many of them have been made
        self.serial = 0  # of the last round that it had a part in; 0: of none
        self.under_way = False  # its average has not been shown yet
        self.contributed = False
        """Whether this rank had a gradient in the round, also if the user has dropped it since."""
        self.kept = False  # or it kept an earlier average, as all ranks must
        self.pack: Pack | None = None  # in which it leaves, if not alone
        self.place = 0  # in the pack
        self._answered = False  # something has landed: a rank had a gradient
        self._engine, self._number = session.engine_of(owner.index)
        self._averaging = averaging
        self._rounds = averaging.rounds
        self._is_lent = self.memory.counts = self._engine.lends
        self._held = HeldGradient(owner.name, stays=stays or self._is_lent)
        self._sent: memoryview | None = None  # until the round is over, where passes may add to it
        gradient.connect(self)

    # What the engine reads and writes.
    @property
    def values(self) -> memoryview:  # type: ignore[override]
        # before the first round these are the parameter's; from then on the average lands
        if self.pack is not None:
            return self.pack.landing_bytes
        if not self.serial:
            return self.memory.values
        self._answered = True
        return self.landed

    @property
    def copying(self) -> Copying | None:  # type: ignore[override]
        return self.memory.copying

    @property
    def landed(self) -> memoryview:
        return bytes_of(self.landing.buffer)

    def land_average(self, gradient: torch.Tensor) -> None:
        self._answered = True
        self.landing.buffer.view(-1).copy_(gradient)

    def take_gradient(self, start_bytes: int, stop_bytes: int) -> Any:
        if self.pack is not None:
            return self.pack.take(start_bytes, stop_bytes)
        return self._held.take(start_bytes, stop_bytes)

    def lent_gradient(self) -> memoryview:
        whole: memoryview = self._held.whole if self.pack is None else self.pack.leaving
        return whole

    def landing_bytes(self) -> memoryview:
        return self.landed if self.pack is None else self.pack.landing

    def answered(self) -> None:
        if self.pack is None:
            self._answered = True
        else:
            self.pack.answered()

    def sent_gradient(self, start_bytes: int, stop_bytes: int) -> memoryview | None:
        sent = self._sent
        return None if sent is None else sent[start_bytes:stop_bytes]

    # The start.
    def before_offering(self) -> None:
        if self.pack is not None:
            self.pack.before_offering(self)
        else:
            self.memory.before_sending_values()

    def receive_initial_value(self) -> None:
        self._engine.wait(self._number, 0)
        if self.pack is None:
            self.memory.land()
        elif self.memory.receives_values:
            self.pack.receive_value(self)

    # A round.
    @property
    def is_counted(self) -> bool:
        """Whether a round is complete only with word of every parameter."""
        return self._averaging.measures or self.owner.session.every_parameter

    @property
    def is_expected(self) -> bool:
        """Whether the others wait for word of it."""
        return self._averaging.measures or self.owner.is_expected

    def begin(self, gradient: torch.Tensor | None, *, dropped: bool, builds_on: bool) -> None:
        """Have the gradient averaged; None if this rank has none. The last round must be over.

        ``builds_on``: the gradient has the last round's average in it.
        """
        alone = gradient if self.pack is None else None
        dense = None if alone is None else self.as_dense(alone)  # first: this may raise
        self.serial = self._rounds.serial
        self.under_way, self._answered = True, False
        self.contributed, self.kept = gradient is not None or dropped, False
        self.forget_scalings()
        if self.pack is not None:
            self.pack.add(self, gradient)
            return
        if self._engine.is_ahead:  # until the others come, servers hold as much of this gradient
            self.landing.empty()
        self.owner.session.begin_pushing()
        # it belongs to this round, though it may be called when the next one has begun
        flags = self._rounds.flags | Flag.GRADIENT | (Flag.MEASURE * self._averaging.measures)
        push = partial(self._engine.push, self._number, self._rounds.step)
        if dense is None:
            self.memory.pass_by(partial(push, flags=flags | Flag.NO_GRADIENT))
            return

        def send(its_bytes: Any) -> None:
            self._held.hold(dense, its_bytes)
            self._sent = None if self.memory.is_staged else its_bytes
            push(flags=flags | (Flag.BUILDS_ON * builds_on))

        self.memory.stage_gradient(dense.detach(), send)

    def as_dense(self, gradient: torch.Tensor) -> torch.Tensor:
        owner = self.owner
        check_same_kind(owner.index, gradient, owner.session, ", and its gradient is")
        return gradient if gradient.layout == torch.strided else gradient.to_dense()

    @property
    def has_arrived(self) -> bool:
        if self.pack is not None:
            return self.under_way and self.pack.has_arrived(self)
        return self.under_way and self._engine.is_complete(self._number)

    def end(self) -> bool:
        """Wait for the average; whether one has landed that has not been shown."""
        if not self.under_way:
            return False
        if self.pack is not None:
            self._answered = self.pack.receive(self)
        else:
            self.memory.await_staged()
            self._engine.wait(self._number, self._rounds.step)
            if self._is_lent:
                self._held.release()
        self.under_way, self._sent = False, None
        if self._answered and self.kept:
            raise self.split_error()
        return self._answered

    def split_error(self) -> TrainingLoopError:
        return TrainingLoopError(
            f"the gradient of {self.owner.name} was read or edited on this rank between two"
            " backward passes of a step, but not on another: do it on every rank alike, or"
            " after the last pass"
        )

    # The step's update.
    def defer(self, update: DeferredStep) -> bool:
        """Make the step's update at the first use, if its gradient is still on its way.

        If so the caller raises the parameter's version, so that whoever saved the old value cannot
        use it. If not, the update is to be made now, with ``p.grad`` as it is.
        """
        owner, gradient = self.owner, self.owner.parameter.grad
        is_seen = gradient is not None and gradient is self.gradient.seen.tensor()
        is_as_it_left = is_seen if self.contributed else gradient is None
        if not (self.under_way and is_as_it_left):
            return False
        self.update = update
        make_wait(owner.parameter, owner)
        if (readers := owner.session.stale_readers) is not None:
            readers.pending(owner.name, owner.parameter, poisoned=owner.session.completed > 0)
        return True

    def settle(self) -> None:
        owner = self.owner
        if self.update is not None:
            with (
                self._averaging.settling,
                outside_transforms(),
                torch._C.DisableTorchFunctionSubclass(),
                torch.no_grad(),
            ):
                self._make_update()
        elif not owner.watched and is_waiting(owner.parameter):
            stop_waiting(owner.parameter)  # it has been made together with another one's

    def _make_update(self) -> None:
        update = self.update
        if update is None:  # another thread has been here
            return
        ended = [self]
        if (readers := self.owner.session.stale_readers) is not None:
            readers.settled(self.owner.parameter)
        together = [self] if self.end() else []
        if readers is None:
            arrived = self._averaging.arrived_after(self)
            together += [each for each in arrived if each.end()]
            for each in arrived:
                each.update = None
            if not self._averaging.watches_uses:  # else these, too, are waited for one by one
                ended += [each for each in arrived if each.pack is not None]
        shown = [each._put_average() for each in together]
        for pack in dict.fromkeys(each.pack for each in together):
            own = [each.owner.parameter for each in together if each.pack is pack]
            update.apply(own, small=pack is not None)
        for each, gradient in zip(together, shown, strict=True):
            each.owner.parameter.grad = gradient
        self.update = None
        for each in ended:
            if not each.owner.watched:
                stop_waiting(each.owner.parameter)

    def _put_average(self) -> torch.Tensor | None:
        """Put the average into ``p.grad`` for the optimizer; returns what is to be there after."""
        parameter, seen = self.owner.parameter, self.gradient.seen
        shown, gradient = parameter.grad, seen.tensor()
        if gradient is not None and self.contributed:  # it is ``p.grad``, or somebody holds it
            self.gradient.show(gradient)
            seen.release()
            parameter.grad = gradient
        else:  # it has been discarded since, or there never was one here
            parameter.grad = self.landing.as_autograd_would()
            self.apply_scalings(parameter.grad)
        return shown

    def apply_scalings(self, gradient: torch.Tensor) -> None:
        for method, factor in self.scalings[self._scaled :]:
            method(gradient, factor)
        self._scaled = len(self.scalings)

    def forget_scalings(self) -> None:
        self.scalings, self._scaled = [], 0

    def replace_busy_gradient(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            parameter = self.owner.parameter
            if self.under_way and parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter.grad)

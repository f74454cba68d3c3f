"""One parameter's part in a round: its gradient leaves, and the average over the ranks lands.

It lands beside the gradient, is shown in that, and multiplied by what the gradient was to be
multiplied by before its average was here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from foreprop.core.wire import Flag
from foreprop.errors import TrainingLoopError
from foreprop.path.memory import HeldGradient, bytes_of, drop_pages
from foreprop.path.parameter import check_same_kind

if TYPE_CHECKING:
    from foreprop.gradients.averaged import AveragedParameter
    from foreprop.gradients.averaging import Averaging
    from foreprop.gradients.pack import Pack
    from foreprop.path.asyncdevice import Accelerator
    from foreprop.path.managedparameter import SessionState

Scaling = tuple[Callable[[Any, Any], Any], Any]
"""A tensor's method, and the number or the tensor of one element to call it with."""


class RoundPart:
    """The last round in which the parameter had a part. Not thread-safe, but for what lands."""

    def __init__(
        self, owner: AveragedParameter, session: SessionState, together: Averaging
    ) -> None:
        accelerator = getattr(owner.memory, "accelerator", None)
        self.landing = Landing(owner.parameter, accelerator, stays=session.keeps_averages)
        self.scalings = Scalings()
        """By which this round's average is, or is to be, multiplied."""
        self.serial = 0
        """The round's."""
        self.under_way = False
        """Its average has not been shown yet."""
        self.gave = False
        """This rank had a gradient in it, or has dropped it since: no other's is to be used."""
        self.kept = False
        """Or it kept an earlier average, as all ranks must."""
        self.pack: Pack | None = None
        """That it leaves in together with others."""
        self.place = 0
        """In the pack."""
        self._answered = False  # something has landed: a rank had a gradient
        self._owner = owner
        self._session = session
        self._engine, self._number = session.engine_of(owner.index)
        self._together = together
        self._rounds = together.rounds
        self._held = HeldGradient(owner.name, stays=session.keeps_averages)
        self._sent: memoryview | None = None  # until the round is over, where passes may add to it

    # What the engine reads and writes. Any thread.
    @property
    def room(self) -> memoryview:
        """For the average, or all of the pack that it leads."""
        if self.pack is not None:
            return self.pack.room
        self._answered = True
        return bytes_of(self.landing.room)

    @property
    def landed(self) -> memoryview:
        """The last average, as others may need it. Any thread."""
        return bytes_of(self.landing.room)

    def land_average(self, gradient: torch.Tensor) -> None:
        """Collectives have averaged it: flat, where the engine computes."""
        self._answered = True
        self.landing.room.view(-1).copy_(gradient)

    def take_gradient(self, start_bytes: int, stop_bytes: int) -> Any:
        if self.pack is not None:
            return self.pack.take(start_bytes, stop_bytes)
        return self._held.take(start_bytes, stop_bytes)

    def sent_gradient(self, start_bytes: int, stop_bytes: int) -> memoryview | None:
        sent = self._sent
        return None if sent is None else sent[start_bytes:stop_bytes]

    # A round.
    @property
    def is_in_this_round(self) -> bool:
        return self.serial == self._rounds.serial

    @property
    def is_counted(self) -> bool:
        """Whether a round is only complete with word of every parameter."""
        return self._together.measures or self._session.every_parameter

    @property
    def is_expected(self) -> bool:
        """Whether the others wait for word of it."""
        owner = self._owner
        return (
            owner.parameter.requires_grad
            or self.is_counted
            or owner.index in self._session.just_frozen
        )

    @property
    def is_awaited(self) -> bool:
        """Whether the pack is to wait for it: it comes at the end of the step at the latest."""
        return self.is_counted or (self._owner.wanted and self.is_expected)

    def begin(
        self, gradient: torch.Tensor | None, *, dropped: bool, builds_on: bool = False
    ) -> None:
        """Have the gradient averaged; None: this rank has none. The last round must be over.

        ``builds_on``: the gradient has the last round's average in it.
        """
        dense = None
        if gradient is not None and self.pack is None:
            dense = self.as_dense(gradient)  # first: it may refuse it
        self.serial = self._rounds.serial
        self.under_way, self._answered = True, False
        self.gave, self.kept = gradient is not None or dropped, False
        self.scalings.clear()
        if self.pack is not None:
            self.pack.add(self, gradient)
            return
        if self._engine.is_ahead:  # meanwhile a server has as much of this gradient
            self.landing.empty()
        self._session.begin_pushing()
        if dense is None:
            self._owner.memory.pass_by(self._pushing(Flag.GRADIENT | Flag.NO_GRADIENT))
            return
        push = self._pushing(Flag.GRADIENT | (Flag.BUILDS_ON if builds_on else 0))

        def send(its_bytes: Any) -> None:
            self._held.hold(dense, its_bytes)
            self._sent = None if self._owner.memory.is_staged else its_bytes
            push()

        self._owner.memory.stage_gradient(dense.detach(), send)

    def as_dense(self, gradient: torch.Tensor) -> torch.Tensor:
        check_same_kind(self._owner.index, gradient, self._session, ", and its gradient is")
        return gradient if gradient.layout == torch.strided else gradient.to_dense()

    def _pushing(self, flags: int) -> Callable[[], None]:
        """Pushes what belongs to this round, though it may be called when the next has begun."""
        flags |= self._rounds.flags | (Flag.MEASURE if self._together.measures else 0)
        return partial(self._engine.push, self._number, self._rounds.step, flags=flags)

    @property
    def has_arrived(self) -> bool:
        """Whether nothing has to be waited for."""
        if self.pack is not None:
            return self.under_way and self.pack.has_arrived(self)
        return self.under_way and self._engine.is_complete(self._number)

    def end(self) -> bool:
        """Wait for the average; whether one has landed that is still wanted."""
        if not self.under_way:
            return False
        if self.pack is not None:
            self._answered = self.pack.receive(self)
        else:
            self._owner.memory.await_staged()
            self._engine.wait(self._number, self._rounds.step)
        self.under_way, self._sent = False, None
        if self._answered and self.kept:
            raise self.split_error()
        return self._answered

    def split_error(self) -> TrainingLoopError:
        """What to raise where ranks' gradients came in different rounds."""
        return TrainingLoopError(
            f"the gradient of {self._owner.name} was read or edited on this rank between two"
            " backward passes of a step, but not on another: do it on every rank alike, or"
            " after the last pass"
        )


class Landing:
    """Host memory of the parameter's shape, from the first average on."""

    def __init__(
        self, parameter: torch.nn.Parameter, device: Accelerator | None, *, stays: bool = False
    ) -> None:
        """``device``: that gradients are copied from beside training, if they are.

        What lands ``stays`` as it is until the next average does: others may need it.
        """
        self._parameter = parameter
        self._device = device
        self._stays = stays
        self._room: torch.Tensor | None = None
        self._is_lent = False  # the room: a part of what a whole pack lands in
        self._making_room = threading.Lock()

    @property
    def room(self) -> torch.Tensor:
        """Any thread."""
        if self._room is None:
            parameter = self._parameter
            with self._making_room, torch._C.DisableTorchFunctionSubclass():
                if self._room is None:  # several servers' answers may come at once
                    make = torch.empty if self._device is None else self._device.host_memory
                    self._room = make(parameter.shape, dtype=parameter.dtype)
        return self._room

    def empty(self) -> None:
        """Nobody needs what has landed, and no more lands soon: the room takes no memory."""
        room = self._room
        stays = self._stays or self._is_lent or self._device is not None
        if room is not None and not stays:
            drop_pages(room)

    def lend(self, room: torch.Tensor) -> None:
        """It lands here, together with others."""
        self._room, self._is_lent = room, True

    def _copy_to(self, target: torch.Tensor) -> torch.Tensor:
        late = self._device is not None and self._device.is_pinned(self.room)
        return target.copy_(self.room, non_blocking=late)

    def as_autograd_would(self) -> torch.Tensor:
        """What has landed, in the parameter's layout and place: kernels round by layout."""
        parameter = self._parameter
        is_alike = self._is_lent or parameter.device.type == "cpu"
        if parameter.is_contiguous() and is_alike and not self._stays:
            return self.room
        return self._copy_to(torch.empty_like(parameter))

    def show_in(self, gradient: torch.Tensor, *, fresh: bool) -> None:
        """``fresh``: autograd has made this gradient, and nobody has looked at it since."""
        landed = self.room
        if gradient.layout != torch.strided:
            gradient.data = landed.to_sparse(gradient.sparse_dim()).to(gradient.device)
        elif fresh and not (self._is_lent or self._stays) and _may_swap(gradient):
            self._room = gradient.detach()
            gradient.data = landed
        else:
            self._copy_to(gradient)
        increment_version(gradient)


def _may_swap(gradient: torch.Tensor) -> bool:
    """Whether nobody can tell that the gradient has got other memory: no need to copy."""
    return (
        gradient.device.type == "cpu"
        and gradient.is_contiguous()
        and not gradient._is_view()
        and gradient.untyped_storage().nbytes() == gradient.nbytes
    )


class Scalings:
    """Those of one round's average."""

    def __init__(self) -> None:
        self.all: list[Scaling] = []
        self._applied = 0  # so many of them

    def clear(self) -> None:
        """Another average will come, or none is wanted."""
        if self.all:
            self.all, self._applied = [], 0

    def apply_to(self, gradient: torch.Tensor) -> None:
        """Apply those that have not been applied."""
        if len(self.all) == self._applied:
            return
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for method, factor in self.all[self._applied :]:
                method(gradient, factor)
            self._applied = len(self.all)

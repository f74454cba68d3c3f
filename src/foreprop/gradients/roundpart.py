"""One parameter's part in a round: its gradient leaves, and the average over the ranks lands."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, Protocol

import torch

from foreprop.core.rounds import Rounds
from foreprop.core.wire import Flag
from foreprop.errors import TrainingLoopError
from foreprop.gradients.landing import Landing
from foreprop.path.managedparameter import SessionState
from foreprop.path.memory import HeldGradient
from foreprop.path.parameter import check_same_kind
from foreprop.path.tensors import bytes_of


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


class RoundPart:
    """The last round in which the parameter had a part. Not thread-safe, but for what lands."""

    def __init__(
        self,
        index: int,
        name: str,
        parameter: torch.nn.Parameter,
        session: SessionState,
        together: Together,
    ) -> None:
        self.memory = session.memory_of(parameter)
        self.landing = Landing(parameter)
        self.serial = 0
        """The round's."""
        self.under_way = False
        """Its average has not been shown yet."""
        self.gave = False
        """This rank had a gradient in it."""
        self.kept = False
        """Or it kept an earlier average, as all ranks must."""
        self._answered = False  # something has landed: a rank had a gradient
        self._index = index
        self._name = name
        self._parameter = parameter
        self._session = session
        self._together = together
        self._rounds = together.rounds
        self._held = HeldGradient(name)

    # What the engine reads and writes. Any thread.
    @property
    def values(self) -> memoryview:
        """The parameter's values at the start; from then on room for the averaged gradient."""
        if not self.serial:
            return self.memory.values
        self._answered = True
        return bytes_of(self.landing.room)

    def land_average(self, gradient: torch.Tensor) -> None:
        """Collectives have averaged it: flat, where the engine computes."""
        self._answered = True
        self.landing.room.view(-1).copy_(gradient)

    def take_gradient(self, start_bytes: int, stop_bytes: int) -> Any:
        return self._held.take(start_bytes, stop_bytes)

    # A round.
    @property
    def is_in_this_round(self) -> bool:
        return self.serial == self._rounds.serial

    @property
    def is_counted(self) -> bool:
        """Whether a round is only complete with word of every parameter."""
        return self._together.measures or self._session.engine.every_parameter

    @property
    def is_expected(self) -> bool:
        return self._parameter.requires_grad or self.is_counted

    def begin(self, gradient: torch.Tensor | None) -> None:
        """Have the gradient averaged; None: this rank has none. The last round must be over."""
        self.serial = self._rounds.serial
        self.under_way, self._answered = True, False
        self.gave, self.kept = gradient is not None, False
        if gradient is None:
            self._push(Flag.GRADIENT | Flag.NO_GRADIENT)
            return
        check_same_kind(self._index, gradient, self._session, ", and its gradient is")
        dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
        self.memory.stage_gradient(dense.detach(), partial(self._send, dense))

    def _send(self, gradient: torch.Tensor, its_bytes: Any) -> None:
        self._held.hold(gradient, its_bytes)
        self._push(Flag.GRADIENT)

    def _push(self, flags: int) -> None:
        flags |= Flag.MEASURE if self._together.measures else 0
        self._session.engine.push(self._index, self._rounds.step, flags=flags | self._rounds.flags)

    def end(self) -> bool:
        """Wait for the average; whether one has landed that is still wanted."""
        if not self.under_way:
            return False
        self.memory.await_staged()
        self._session.engine.wait(self._index, self._rounds.step)
        self.under_way = False
        if self._answered and self.kept:
            raise TrainingLoopError(
                f"the gradient of {self._name} was read or edited on this rank between two backward"
                " passes of a step, but not on another: do it on every rank alike, or after the"
                " last pass"
            )
        return self._answered

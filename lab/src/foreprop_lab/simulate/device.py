"""The lab's emulated accelerator on the simulated clock: one worker's training loop.

A layer's forward pass begins when its arrays are there (`params.waiting`: the first use waits);
its gradients are ready when its backward pass ends (`lab.accelerator`).

Crowds are nodes that do the same, so that one of them stands for all. What happens to a crowd's
worker happens to all its members at once; what it does is done when the last of them has done it.
That is what the others wait for: a slice is updated, and a collective begins, when the last worker
is ready. Each member's computing times are drawn by themselves, so that a step has the slowest of
all members, not that of one in the middle (`CrowdDevice`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreprop.plan.profile import Layer
from foreprop_lab.setting.unevenness import Draw
from foreprop_lab.simulate.connection import Clock

_FORWARD, _BACKWARD = 0, 1
"""Places in a layer's `unevenness.Times`."""


class Synchronisation:
    """What a training loop asks of the system that synchronises its parameters.

    A system calls ``look`` when the device may find something complete; see `end_step`, too.
    """

    look: Callable[[], None]
    proceed: Callable[[], None]

    def attach(self, look: Callable[[], None], proceed: Callable[[], None]) -> None:
        """Take the device's callbacks; the device calls this before all else."""
        self.look, self.proceed = look, proceed

    def is_complete(self, parameter: int) -> bool:
        raise NotImplementedError

    def start_step(self) -> None:
        """Note that a forward pass begins."""

    def needed(self, parameter: int) -> None:
        """Note that the forward pass uses a parameter now, and waits if it is not complete."""

    def waited(self, seconds: float) -> None:
        """Note how long the forward pass has waited, after `needed`."""

    def gradient_ready(self, parameter: int, step: int) -> None:
        raise NotImplementedError

    def end_step(self, step: int) -> bool:
        """End the backward pass; if this is False the device goes on when ``proceed`` is called."""
        del step
        return True


class Device:
    """One worker's training loop; a step ends with a forward pass, as in the lab.

    ``finished`` is called when ``steps`` of them are done, the first of which has the number
    ``first_step`` of those that are drawn. With ``goes_on`` it goes on training for the others.
    """

    def __init__(
        self,
        clock: Clock,
        layers: Sequence[Layer],
        synchronisation: Synchronisation,
        *,
        steps: int,
        finished: Callable[[], None],
        draw: Draw,
        first_step: int = 1,
        goes_on: bool = False,
    ) -> None:
        self.step_s: list[float] = []
        self.waited_s: list[float] = []
        self._clock = clock
        self._layers = layers
        self._parameters = number_arrays(layers)
        self._synchronisation = synchronisation
        synchronisation.attach(self._look, self._proceed)
        self._steps = steps
        self._finished = finished
        self._draw = draw
        self._first_step = first_step
        self._goes_on = goes_on
        self._times = draw(first_step - 1)
        self._step = 0  # whose gradients the pass that follows uses
        self._layer = 0
        self._array = 0  # of the layer, that the forward pass asks for next
        self._blocked = False
        self._blocked_s = 0.0
        self._idle_s = 0.0
        self._ended_s = 0.0

    def start(self) -> None:
        self._synchronisation.start_step()
        self._forward()

    def _look(self) -> None:
        if self._blocked:
            self._forward()

    def _proceed(self) -> None:
        # the time since the end of the backward pass was spent waiting
        self._idle_s += self._clock.now_s - self._blocked_s
        self._begin_forward()

    def _forward(self) -> None:
        """Begin the next layer's forward pass when its arrays are there, asked for one by one."""
        arrays = self._parameters[self._layer]
        while self._array < len(arrays):
            if not self._blocked:
                self._synchronisation.needed(arrays[self._array])
            if not self._synchronisation.is_complete(arrays[self._array]):
                if not self._blocked:
                    self._blocked, self._blocked_s = True, self._clock.now_s
                return
            self._unblock()
            self._array += 1
        self._array = 0
        self._start_layer()

    def _start_layer(self) -> None:
        self._clock.at(self._computed_s(_FORWARD), self._forward_done)

    def _unblock(self) -> None:
        if self._blocked:
            self._blocked = False
            waited_s = self._clock.now_s - self._blocked_s
            self._idle_s += waited_s
            self._synchronisation.waited(waited_s)

    def _forward_done(self, _: None) -> None:
        self._layer += 1
        if self._layer < len(self._layers):
            self._forward()
            return
        now_s = self._now_s()
        if self._step:
            self.step_s.append(now_s - self._ended_s)
            self.waited_s.append(self._idle_s)
        self._ended_s, self._idle_s = now_s, 0.0
        if len(self.step_s) == self._steps:
            self._finished()
            if not self._goes_on:
                return
        self._step += 1
        self._times = self._draw(self._first_step + self._step - 1)
        self._backward()

    def _backward(self) -> None:
        self._layer -= 1
        self._clock.at(self._computed_s(_BACKWARD), self._backward_done)

    def _backward_done(self, _: None) -> None:
        for parameter in self._parameters[self._layer]:
            self._push(parameter)
        if self._layer:
            self._backward()
        elif self._synchronisation.end_step(self._step):
            self._begin_forward()
        else:
            self._blocked_s = self._clock.now_s

    def _push(self, parameter: int) -> None:
        self._synchronisation.gradient_ready(parameter, self._step)

    def _begin_forward(self) -> None:
        self._synchronisation.start_step()
        self._forward()

    def _computed_s(self, which: int) -> float:
        return self._clock.now_s + float(self._times[0, self._layer, which])

    def _now_s(self) -> float:
        return self._clock.now_s


class CrowdDevice(Device):
    """The devices of a crowd's members, whose times are drawn for each member.

    A member's forward pass goes on when its layer's arrays are there and it has done the layer
    before; a gradient is ready when the last member has it. Times of steps are the members' means.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        members = len(self._times)
        self._ends_s: NDArray[np.float64] = np.zeros(members)  # of what each member does now
        self._there_s = [0.0] * sum(map(len, self._parameters))  # by array: since when
        self._awaited: set[int] = set()

    def _look(self) -> None:
        self._note_complete(self._clock.now_s)
        super()._look()

    def _computed_s(self, which: int) -> float:
        self._ends_s = self._ends_s + self._times[:, self._layer, which]
        return max(float(self._ends_s.max()), self._clock.now_s)

    def _start_layer(self) -> None:
        arrays = self._parameters[self._layer]
        self._wait_until(max((self._there_s[array] for array in arrays), default=0.0))
        super()._start_layer()

    def _wait_until(self, time_s: float) -> None:
        starts_s = np.maximum(self._ends_s, time_s)
        self._idle_s += float((starts_s - self._ends_s).mean())
        self._ends_s = starts_s

    def _unblock(self) -> None:
        if self._blocked:
            self._blocked = False
            self._synchronisation.waited(self._clock.now_s - self._blocked_s)

    def _proceed(self) -> None:
        self._wait_until(self._clock.now_s)
        self._begin_forward()

    def _push(self, parameter: int) -> None:
        super()._push(parameter)
        self._awaited.add(parameter)

    def _begin_forward(self) -> None:
        self._note_complete(0.0)  # at once, as DDP's arrays are: there was no call of look
        super()._begin_forward()

    def _note_complete(self, since_s: float) -> None:
        for parameter in [p for p in self._awaited if self._synchronisation.is_complete(p)]:
            self._awaited.remove(parameter)
            self._there_s[parameter] = since_s

    def _now_s(self) -> float:
        return float(self._ends_s.mean())


def number_arrays(layers: Sequence[Layer]) -> list[tuple[int, ...]]:
    """The numbers of each layer's arrays, counted in forward order."""
    numbers: list[tuple[int, ...]] = []
    first = 0
    for layer in layers:
        numbers.append(tuple(range(first, first + len(layer.sizes_elems))))
        first += len(layer.sizes_elems)
    return numbers

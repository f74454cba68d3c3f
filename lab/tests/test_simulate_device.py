"""The emulated device on the simulated clock: what it asks for and when, and when it is idle."""

from __future__ import annotations

import pytest

from foreprop.plan.profile import Layer
from foreprop_lab.setting.unevenness import Unevenness
from foreprop_lab.simulate.connection import Clock
from foreprop_lab.simulate.device import Device, Synchronisation

LAYERS = [
    Layer(name="first", sizes_elems=(4, 1), forward_s=1.0, backward_s=2.0),
    Layer(name="second", sizes_elems=(6,), forward_s=3.0, backward_s=6.0),
]
Story = list[tuple[float, str, int]]


class Replies(Synchronisation):
    """A system whose parameters are complete some time after their gradients."""

    def __init__(self, clock: Clock, after_s: float, *, holds_step_s: float = 0.0) -> None:
        self.story: Story = []
        self._clock = clock
        self._after_s = after_s
        self._holds_step_s = holds_step_s
        self._pending: set[int] = set()

    def _note(self, what: str, number: int) -> None:
        self.story.append((self._clock.now_s, what, number))

    def is_complete(self, parameter: int) -> bool:
        return parameter not in self._pending

    def start_step(self) -> None:
        self._note("forward", 0)

    def needed(self, parameter: int) -> None:
        self._note("needed", parameter)

    def waited(self, seconds: float) -> None:
        self._note("waited", round(seconds))

    def gradient_ready(self, parameter: int, step: int) -> None:
        self._note("gradient", parameter)
        self._pending.add(parameter)
        self._clock.at(self._clock.now_s + self._after_s, self._reply, parameter)

    def _reply(self, parameter: int) -> None:
        self._pending.remove(parameter)
        self.look()

    def end_step(self, step: int) -> bool:
        self._note("end", step)
        if not self._holds_step_s:
            return True
        self._clock.at(self._clock.now_s + self._holds_step_s, lambda _: self.proceed())
        return False


def train(replies: Replies, clock: Clock, *, steps: int = 1, jitter: float = 0.0) -> Device:
    done: list[bool] = []
    device = Device(
        clock,
        LAYERS,
        replies,
        steps=steps,
        finished=lambda: done.append(True),
        draw=Unevenness(jitter=jitter).draw(LAYERS, [0], nodes=1),
    )
    device.start()
    clock.run(lambda: bool(done))
    return device


def test_a_layer_begins_when_all_its_arrays_are_there() -> None:
    clock = Clock()
    replies = Replies(clock, after_s=5.0)
    device = train(replies, clock)
    assert replies.story == [
        (0.0, "forward", 0),
        (0.0, "needed", 0),
        (0.0, "needed", 1),
        (1.0, "needed", 2),
        (10.0, "gradient", 2),
        (12.0, "gradient", 0),
        (12.0, "gradient", 1),
        (12.0, "end", 1),
        (12.0, "forward", 0),
        (12.0, "needed", 0),
        (17.0, "waited", 5),
        (17.0, "needed", 1),
        (17.0, "waited", 0),  # its reply came second
        (18.0, "needed", 2),
    ]
    assert device.step_s == [8.0 + 5.0 + 4.0]
    assert device.waited_s == [5.0]


def test_what_comes_back_in_time_is_not_waited_for() -> None:
    clock = Clock()
    device = train(Replies(clock, after_s=0.0), clock, steps=3)
    assert device.step_s == [12.0, 12.0, 12.0]
    assert device.waited_s == [0.0, 0.0, 0.0]


def test_a_step_that_is_held_at_its_end_is_idle() -> None:
    clock = Clock()
    device = train(Replies(clock, after_s=0.0, holds_step_s=2.5), clock)
    assert (device.step_s, device.waited_s) == ([14.5], [2.5])


def test_jitter_is_drawn_anew_in_each_step() -> None:
    clock = Clock()
    device = train(Replies(clock, after_s=0.0), clock, steps=20, jitter=0.1)
    assert len(set(device.step_s)) == 20
    assert all(0.9 * 12.0 < step_s < 1.1 * 12.0 for step_s in device.step_s)
    assert sum(device.step_s) == pytest.approx(20 * 12.0, rel=0.05)

"""What a rank reports, and publishes for the others' reports, when nothing goes on."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from foreprop.collectives.group import Group
from foreprop.core.manifest import ParameterInfo
from foreprop.core.ring_machine import RingMachine
from foreprop.observe.trace import RingStage
from foreprop.path.progress import NOTHING


class RingReports:
    """One rank's; any thread. ``lock`` is the machine's."""

    def __init__(
        self,
        machine: RingMachine,
        lock: threading.Condition,
        parameters: Sequence[ParameterInfo],
        group: Group,
    ) -> None:
        self._machine = machine
        self._lock = lock
        self._parameters = parameters
        self._group = group

    def describe_wait(self, parameter: int, step: int) -> str:
        name = self._parameters[parameter].name
        stage = RingStage.CHUNK_REDUCED.value
        return f"parameter {name}, step {step}, stage {stage}; {self.describe()}"

    def describe_awaited(self, awaited: int) -> str:
        """Of a parameter, or nothing."""
        if awaited == NOTHING:
            return "nothing"
        return self.describe_wait(awaited, self._machine.step_of(awaited))

    def describe(self) -> str:
        """What is being reduced, what comes next, and what other ranks publish of themselves."""
        with self._lock:
            under_way, following = self._machine.under_way, self._machine.next_chunk
        text = f"the next collective here is that of {self._name_and_step(following)}"
        if under_way is not None:
            text = f"the collective of {self._name_and_step(under_way)} is under way; {text}"
        return f"{text}; {self._group.states()}"

    def publish(self) -> None:
        """What is missing here."""
        with self._lock:
            following = self._machine.next_chunk
        self._group.publish_state(f"waits to reduce {self._name_and_step(following)}")

    def _name_and_step(self, chunk: tuple[int, int]) -> str:
        parameter, step = chunk
        return f"{self._parameters[parameter].name}, step {step}"

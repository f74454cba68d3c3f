"""Small parameters whose gradients leave as one slice, and whose averages come as one.

Theory of operation. Each parameter has its own part in a round (`gradients.roundpart`), as if it
went alone. A pack leaves when all parts of the round are in: those that are expected, with their
gradients or without. It also leaves when somebody waits for one of its averages, and when the round
ends. Who has not had its part by then counts as without a gradient; if it has one later in the same
round, the pack leaves once more, with what has come since (`core.packs` says how it is laid out).
Averages land side by side. One that nobody has been shown when others are to land there is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from foreprop.core.packs import places_in
from foreprop.core.wire import Flag
from foreprop.path.memory import bytes_of

if TYPE_CHECKING:
    from foreprop.gradients.averaged import AveragedParameter
    from foreprop.gradients.averaging import Averaging
    from foreprop.gradients.roundpart import RoundPart
    from foreprop.path.managedparameter import SessionState

NO_ROUND = 0


class Pack:
    """Parts of CPU parameters of one type, in one slice. Training thread, but for bytes."""

    def __init__(
        self, members: Sequence[AveragedParameter], session: SessionState, together: Averaging
    ) -> None:
        """Engine and servers know it by its first member's number."""
        self._engine, self._number = session.engine_of(members[0].index)
        self._session = session
        self._together = together
        self._members = members
        self._parts = parts = [member.part for member in members]
        self._parameters = parameters = [member.parameter for member in members]
        sizes = [parameter.numel() for parameter in parameters]
        whole, dtype = sum(sizes) + len(sizes), parameters[0].dtype
        self._leaving, self._landed = (torch.zeros(whole, dtype=dtype) for _ in range(2))
        self._leaving_bytes, self._landed_bytes = map(bytes_of, (self._leaving, self._landed))
        self._gradients, averages = (
            [flat[a:b].view_as(p) for p, (a, b) in zip(parameters, places_in(sizes), strict=True)]
            for flat in (self._leaving, self._landed)
        )
        self._marks, self._landed_marks = (
            flat[-len(sizes) :] for flat in (self._leaving, self._landed)
        )
        self._averages = averages
        for place, (part, average) in enumerate(zip(parts, averages, strict=True)):
            part.pack, part.place = self, place
            part.landing.lend(average)
        self._kept: dict[tuple[RoundPart, int], torch.Tensor | None] = {}
        """Averages that have been put aside, by part and round; None: there was none."""
        self._added: dict[int, torch.Tensor] = {}  # gradients that are to leave, by place
        self._serial = self._left_serial = NO_ROUND  # of the parts that come, and that have left
        self._in = self._expected = 0  # parts that the round has, and is to have
        self._step = self._more = 0  # of what has left; so often it had before, beyond its rounds
        self._had: Sequence[float] = ()  # the marks that have landed
        self._answered = False

    # What the engine reads and writes. Any thread.
    @property
    def room(self) -> memoryview:
        self._answered = True
        return self._landed_bytes

    def take(self, start_bytes: int, stop_bytes: int) -> memoryview:
        return self._leaving_bytes[start_bytes:stop_bytes]

    # The start.
    def before_offering(self, part: RoundPart) -> None:
        """Rank 0: its value is about to be read."""
        with torch.no_grad():
            self._averages[part.place].copy_(self._parameters[part.place])

    def receive_value(self, part: RoundPart) -> None:
        """Other ranks: block until rank 0's values are here; this is one of them."""
        self._engine.wait(self._number, 0)
        with torch.no_grad():
            self._parameters[part.place].copy_(self._averages[part.place])

    # A round.
    def add(self, part: RoundPart, gradient: torch.Tensor | None) -> None:
        """It has its part in the round."""
        if self._serial != part.serial:
            self._begin(part.serial)
        self._in += 1
        if self._kept:
            self._forget_kept(part)
        if gradient is not None:
            usual = self._gradients[part.place]
            alike = gradient.shape == usual.shape and gradient.dtype == usual.dtype
            if not alike or gradient.layout != torch.strided:
                gradient = part.as_dense(gradient)
            self._added[part.place] = gradient
        if self._in == self._expected:
            self.leave()

    def _begin(self, serial: int) -> None:
        self._serial, self._in = serial, 0
        self._expected = sum(part.is_awaited for part in self._parts)

    @property
    def is_full(self) -> bool:
        """Whether it cannot leave again in this round."""
        rounds = self._together.rounds
        return self._left_serial == rounds.serial and not rounds.may_follow(self._more + 1)

    def leave(self) -> None:
        """What has come in this round leaves, if it has not."""
        again = self._left_serial == self._serial
        if not (self._added if again else self._in):
            return
        rounds, added = self._together.rounds, self._added
        self._session.begin_pushing()
        self._put_aside(again)
        self._more = 0 if rounds.step != self._step else self._more + again
        self._left_serial, self._step, self._added = self._serial, rounds.step, {}
        self._had, self._answered = (), False
        flags = Flag.GRADIENT | rounds.flags_after(self._more)
        if self._together.measures:
            flags |= Flag.MEASURE
        if added:
            self._fill(added)
        else:
            flags |= Flag.NO_GRADIENT
        self._engine.push(self._number, rounds.step, flags=flags)

    def _fill(self, added: Mapping[int, torch.Tensor]) -> None:
        if len(added) < len(self._parts):
            self._leaving.fill_(-0.0)
            self._marks.zero_()
            self._marks[list(added)] = 1.0
        else:
            self._marks.fill_(1.0)
        torch._foreach_copy_([self._gradients[place] for place in added], list(added.values()))

    def _put_aside(self, again: bool) -> None:
        """Other averages are about to land: keep those that are still wanted."""
        if not self._step:
            return
        self._engine.wait(self._number, self._step)
        for part in self._parts:
            is_late = part.place in self._added
            waits = part.under_way and part.serial == self._left_serial and not is_late
            if waits or (again and part.serial != self._serial):  # it may still come in this round
                self._keep(part)
            elif again and is_late and self._has_landed(part):
                raise part.split_error()

    def _keep(self, part: RoundPart) -> None:
        key = (part, self._left_serial)
        if self._kept.get(key) is None:
            average = self._averages[part.place]
            self._kept[key] = average.clone() if self._has_landed(part) else None

    def _forget_kept(self, part: RoundPart) -> None:
        """All but what has been kept of the round that it has its part in now."""
        for key in [key for key in self._kept if key[0] is part and key[1] != part.serial]:
            del self._kept[key]
        part.landing.lend(self._averages[part.place])

    def _has_landed(self, part: RoundPart) -> bool:
        if self._answered and not self._had:
            self._had = self._landed_marks.tolist()
        return self._answered and self._had[part.place] > 0

    def has_arrived(self, part: RoundPart) -> bool:
        """Whether its average need not be waited for."""
        if self._is_kept(part):
            return True
        has_left = self._left_serial == part.serial and part.place not in self._added
        return has_left and self._engine.is_complete(self._number)

    def _is_kept(self, part: RoundPart) -> bool:
        """Whether what has landed last is not its average."""
        if not self._kept:
            return False
        key = (part, part.serial)
        return key in self._kept and (
            self._kept[key] is not None or part.serial != self._left_serial
        )

    def receive(self, part: RoundPart) -> bool:
        """Wait for its average; whether there is one."""
        if self._is_kept(part):
            average = self._kept[part, part.serial]
            if average is not None:
                part.landing.lend(average)
            return average is not None
        is_new = part.serial != self._left_serial or part.place in self._added
        if is_new and part.serial == self._serial:
            if torch._C._current_graph_task_id() == -1:  # else a pass may add to them
                for member in self._members:
                    member.average()
            self.leave()
        if not self._had:
            self._engine.wait(self._number, self._step)
        return self._has_landed(part)

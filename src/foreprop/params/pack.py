"""Small parameters whose gradients leave as one slice, and whose averages come as one.

Theory of operation. Each parameter is a *part*, and takes part in a round (`params.averaged`) as if
it went alone. A pack leaves when all parts of the round are in: those that are expected, with their
gradients or without. It also leaves when somebody waits for one of its averages, and when the round
ends. A part that is not in by then counts as one without a gradient. If it has one later in the
same round, the pack leaves once more, with what has come since. Averages land side by side
(`core.slicing` says how a pack is laid out). One that nobody has been shown when others are to land
there is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foreprop.core.slicing import places_in
from foreprop.core.wire import Flag
from foreprop.engine.memory import bytes_of
from foreprop.params.averaged import Averages
from foreprop.params.averaging import Averaging
from foreprop.params.setup import SessionState

NO_ROUND = 0


class Pack:
    """CPU parameters of one type, in one slice. Training thread, but for bytes."""

    def __init__(
        self, parts: Sequence[Averages], session: SessionState, averaging: Averaging
    ) -> None:
        # engine and servers know it by its first part's number
        self._engine, self._number = session.engine_of(parts[0].owner.index)
        self._session = session
        self._averaging = averaging
        self._parts = parts
        self._parameters = parameters = [part.owner.parameter for part in parts]
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
        self._kept: dict[tuple[Averages, int], torch.Tensor | None] = {}
        """Averages that nobody has been shown, by part and round; None: there was none."""
        self._added: dict[int, torch.Tensor] = {}  # gradients that are to leave, by place
        self._serial = self._left_serial = NO_ROUND  # of the parts that come, and that have left
        self._in = self._expected = 0  # parts that the round has, and is to have
        self._step = self._more = 0  # of what has left; so often it had before, beyond its rounds
        self._had: Sequence[float] = ()  # the marks that have landed
        self._answered = False

    # What the engine reads and writes, in any thread.
    @property
    def landing_bytes(self) -> memoryview:
        self._answered = True
        return self._landed_bytes

    def take(self, start_bytes: int, stop_bytes: int) -> memoryview:
        return self._leaving_bytes[start_bytes:stop_bytes]

    @property
    def leaving(self) -> memoryview:
        return self._leaving_bytes

    @property
    def landing(self) -> memoryview:
        return self._landed_bytes

    def answered(self) -> None:
        self._answered = True

    # The start.
    def before_offering(self, part: Averages) -> None:
        with torch.no_grad():
            self._averages[part.place].copy_(self._parameters[part.place])

    def receive_value(self, part: Averages) -> None:
        with torch.no_grad():
            self._parameters[part.place].copy_(self._averages[part.place])

    # A round.
    def add(self, part: Averages, gradient: torch.Tensor | None) -> None:
        """Take a part of the round in, with its gradient or None."""
        if self._serial != part.serial:
            self._serial, self._in = part.serial, 0
            self._expected = sum(  # at the end of the step at the latest
                each.is_counted or (each.gradient.wanted and each.is_expected)
                for each in self._parts
            )
        self._in += 1
        if self._kept:
            now = (part, part.serial)  # what is kept of the round that it has its part in now
            for key in [key for key in self._kept if key[0] is part and key != now]:
                del self._kept[key]
            part.landing.lend(self._averages[part.place])
        if gradient is not None:
            usual = self._gradients[part.place]
            alike = gradient.shape == usual.shape and gradient.dtype == usual.dtype
            if not alike or gradient.layout != torch.strided:
                gradient = part.as_dense(gradient)
            self._added[part.place] = gradient
        if self._in == self._expected:
            self.leave()

    @property
    def is_full(self) -> bool:
        """Whether it cannot leave once more in this round."""
        rounds = self._averaging.rounds
        return self._left_serial == rounds.serial and not rounds.may_follow(self._more + 1)

    def leave(self) -> None:
        """Send what has come in this round, if it has not been sent."""
        again = self._left_serial == self._serial
        if not (self._added if again else self._in):
            return
        rounds, added = self._averaging.rounds, self._added
        self._session.begin_pushing()
        self._put_aside(again)
        self._more = 0 if rounds.step != self._step else self._more + again
        self._left_serial, self._step, self._added = self._serial, rounds.step, {}
        self._had, self._answered = (), False
        flags = Flag.GRADIENT | rounds.flags_after(self._more)
        if self._averaging.measures:
            flags |= Flag.MEASURE
        if not added:
            flags |= Flag.NO_GRADIENT
        elif len(added) < len(self._parts):
            self._leaving.fill_(-0.0)
            self._marks.zero_()
            self._marks[list(added)] = 1.0
        else:
            self._marks.fill_(1.0)
        if added:
            torch._foreach_copy_([self._gradients[place] for place in added], list(added.values()))
        self._engine.push(self._number, rounds.step, flags=flags)

    def _put_aside(self, again: bool) -> None:
        # other averages are about to land: keep those that are still wanted
        if not self._step:
            return
        self._engine.wait(self._number, self._step)
        for part in self._parts:
            is_late = part.place in self._added
            waits = part.under_way and part.serial == self._left_serial and not is_late
            if waits or (again and part.serial != self._serial):  # it may still come in this round
                key = (part, self._left_serial)
                if self._kept.get(key) is None:
                    average = self._averages[part.place]
                    self._kept[key] = average.clone() if self._has_landed(part) else None
            elif again and is_late and self._has_landed(part):
                raise part.split_error()

    def _has_landed(self, part: Averages) -> bool:
        if self._answered and not self._had:
            self._had = self._landed_marks.tolist()
        return self._answered and self._had[part.place] > 0

    def has_arrived(self, part: Averages) -> bool:
        if self._is_kept(part):
            return True
        has_left = self._left_serial == part.serial and part.place not in self._added
        return has_left and (bool(self._had) or self._engine.is_complete(self._number))

    def _is_kept(self, part: Averages) -> bool:
        """Whether what has landed last is not the part's average."""
        if not self._kept:
            return False
        key = (part, part.serial)
        return key in self._kept and (
            self._kept[key] is not None or part.serial != self._left_serial
        )

    def receive(self, part: Averages) -> bool:
        """Wait for the part's average; whether there is one."""
        if not self._is_kept(part):
            is_new = part.serial != self._left_serial or part.place in self._added
            if is_new and part.serial == self._serial:
                if torch._C._current_graph_task_id() == -1:  # else a pass may add to them
                    for each in self._parts:
                        each.gradient.average()
                if not self._averaging.rounds.may_follow(1):  # what is not in yet has its part now
                    for each in self._parts:
                        if not each.gradient.left:
                            each.gradient.leave_out()
                self.leave()
        if self._is_kept(part):  # also if the others' gradients have left once more just now
            average = self._kept[part, part.serial]
            if average is not None:
                part.landing.lend(average)
            return average is not None
        if not self._had:
            self._engine.wait(self._number, self._step)
        return self._has_landed(part)

"""What a newcomer gets where workers update, and who waits until that has left.

Theory of operation. A newcomer counts from step J on (`core.views`), and all that it gets is of
step J - 1: a slice's values, then its *state* (the optimizer's). The slices are divided over those
who count in J - 1; each gives its share when it has made that step, in the order of use: values
first, so that the newcomer's first pass can begin. Nobody updates a slice for J before its own
share of that slice has left. And nobody could before the newcomer has pushed it, so step J waits
for that, and for nothing else. The newcomer updates a slice when its state is there.

If the view changes, the newcomer goes on in it only if it has everything: otherwise it ends, and
comes again. Of whom nothing was sent yet, the shares are divided anew: a member that has not
entered the view before could have got nothing in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from foreprop.core.retention import ViewEntered
from foreprop.core.views import EndMember, SendTo, View
from foreprop.errors import InternalError, RemoteProtocolError

PartName = Literal["values", "state"]
PARTS: tuple[PartName, ...] = ("values", "state")
"""In the order in which they leave. What belongs to no slice goes with the first one's."""


class Part(NamedTuple):
    """A frame: of a slice, as it is after a step. Where it arrives, an event."""

    member: int
    view: int
    slice: int
    step: int
    name: PartName


# Events.
class PartSent(NamedTuple):
    """It has left."""

    member: int
    """The newcomer."""
    slice: int
    name: PartName


class UpdateDue(NamedTuple):
    """The average that the slice's step is to be made with is there."""

    slice: int
    step: int


class UpdateMade(NamedTuple):
    """The slice is as it is after this step: also one that is frozen, or had no gradient."""

    slice: int
    step: int


# Instructions.
class MakeUpdate(NamedTuple):
    slice: int
    step: int


class InstallPart(NamedTuple):
    slice: int
    name: PartName


TransferInstruction = SendTo | MakeUpdate | InstallPart | EndMember


class StateTransfer:
    """One member's: what it owes newcomers, and, if it is one, what it lacks. Not thread-safe.

    ``slices`` are in the order of their first use. ``view`` is None on a newcomer.
    """

    def __init__(self, me: int, view: View | None, slices: Sequence[int]) -> None:
        self._me = me
        self._view = view
        self._slices = slices
        self._owed: dict[int, set[tuple[int, PartName]]] = {}
        """By newcomer."""
        self._made = 0  # the last step that some slice is after
        self._lacked = {(slice_, name) for slice_ in slices for name in PARTS if view is None}
        self._due: dict[int, UpdateDue] = {}

    def handle(self, event: Any) -> list[TransferInstruction]:
        """The only way state changes; `RemoteProtocolError` leaves it as it was."""
        handler = _HANDLERS.get(type(event))
        if handler is None:
            raise InternalError(f"a state transfer does not know the event {event!r}")
        return handler(self, event)

    def has_values(self, slice_: int) -> bool:
        """Whether a pass may use the slice."""
        return (slice_, "values") not in self._lacked

    def _first(self, member: int) -> int:
        """The member's first step; 0: it was there at the start, or is none any more."""
        view = self._view
        return dict(zip(view.members, view.since, strict=True)).get(member, 0) if view else 0

    def _on_view_entered(self, event: ViewEntered) -> list[TransferInstruction]:
        before, view = self._view, event.view
        self._view = view
        if before is not None and self._lacked:
            return [EndMember("others were lost while it got its values: start this node again")]
        self._owed = {m: parts for m, parts in self._owed.items() if m in view.members}
        for newcomer in set(view.members) - {self._me}:
            if self._made < self._first(newcomer) - 1:  # so nothing was sent
                self._owed[newcomer] = self._share(newcomer)
        return self._released()

    def _share(self, newcomer: int) -> set[tuple[int, PartName]]:
        givers = self._view.counting(self._first(newcomer) - 1) if self._view else ()
        return {
            (slice_, name)
            for place, slice_ in enumerate(self._slices)
            if givers[place % len(givers)] == self._me
            for name in PARTS
        }

    def _on_update_due(self, event: UpdateDue) -> list[TransferInstruction]:
        self._due[event.slice] = event
        return self._released()

    def _released(self) -> list[TransferInstruction]:
        """The updates that may be made now."""
        free = [due for due in self._due.values() if not self._waits(*due)]
        for due in free:
            del self._due[due.slice]
        return [MakeUpdate(*due) for due in free]

    def _waits(self, slice_: int, step: int) -> bool:
        owing = [m for m, parts in self._owed.items() if any(s == slice_ for s, _ in parts)]
        return (slice_, "state") in self._lacked or any(step >= self._first(m) for m in owing)

    def _on_update_made(self, event: UpdateMade) -> list[TransferInstruction]:
        slice_, step = event
        self._made = max(self._made, step)
        followed: list[TransferInstruction] = []
        for newcomer, parts in sorted(self._owed.items()):
            if self._view is None or step != self._first(newcomer) - 1:
                continue
            due = [name for name in PARTS if (slice_, name) in parts]
            about = self._me, self._view.number, slice_, step
            followed += [SendTo((newcomer,), Part(*about, name)) for name in due]
        return followed

    def _on_part_sent(self, event: PartSent) -> list[TransferInstruction]:
        self._owed.get(event.member, set()).discard((event.slice, event.name))
        return self._released()

    def _on_part(self, part: Part) -> list[TransferInstruction]:
        member, view, slice_, step, name = part
        if self._view is None or view != self._view.number:
            return []
        if step != self._first(self._me) - 1 or slice_ not in self._slices:
            raise RemoteProtocolError(f"member {member} gave what nobody lacks: {part}")
        if (slice_, name) not in self._lacked:
            return []  # by an earlier share
        self._lacked.remove((slice_, name))
        return [InstallPart(slice_, name), *self._released()]


_HANDLERS: dict[type, Callable[[StateTransfer, Any], list[TransferInstruction]]] = {
    ViewEntered: StateTransfer._on_view_entered,
    UpdateDue: StateTransfer._on_update_due,
    UpdateMade: StateTransfer._on_update_made,
    PartSent: StateTransfer._on_part_sent,
    Part: StateTransfer._on_part,
}

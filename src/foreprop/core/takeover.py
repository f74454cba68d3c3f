"""A lost server's slices go on at a substitute: from which step, with whose values.

Theory of operation. A lost server takes with it what it had summed, what it had to send, and the
optimizer state. The survivors have all else. Each claims, by slice, the step of the last answer
that it has. A slice goes on from the newest step that any of them has: its values may have been
used. The claims of a slice are at most one step apart, for nobody pushes a step before it has been
answered about the one before, and no step is updated before all have pushed it. Who is behind is
owed that step's answer, and gets it from the substitute. A push of the step after it is sent again
to the substitute, for its bytes are kept until it is answered; all other pushes are in the values.

A substitute updates no slice before its values and its state are there: a slice needs the push of
every survivor, and the connection of who sends the values brings them first, as the buddy's brings
the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec

from foreprop.errors import RemoteProtocolError


# Events.
class SliceTakenOver(NamedTuple):
    """The values of a slice after this step are here, from a survivor; ``owed`` lack them."""

    slice: int
    step: int
    priority: int
    owed: tuple[int, ...]
    """The numbers of the peers that wait for the answer of this step."""


class Settled(NamedTuple):
    """Where a slice goes on."""

    slice: int
    step: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    """The newest whose values a survivor has."""
    giver: int
    """The number of the peer that is to send them."""
    owed: tuple[int, ...]
    """Those that lack them."""


RESTS = -1
"""Claimed of a slice by who has come later, and has its values, but no step's: it is not pushed."""


class Settlement:
    """Collects the claims of the survivors about one server's slices. Not thread-safe.

    ``slices`` are the numbers of its slices, ascending; ``members`` the survivors' numbers;
    ``buddy`` is the one on the substitute's node, who gives what it has: that crosses no link.
    """

    def __init__(self, slices: Sequence[int], members: Sequence[int], *, buddy: int) -> None:
        self._slices = slices
        self._members = frozenset(members)
        self._buddy = buddy
        self._claims: dict[int, Sequence[int]] = {}

    @property
    def missing(self) -> list[int]:
        """Who has not claimed anything yet."""
        return sorted(self._members - self._claims.keys())

    def add(self, member: int, steps: Sequence[int]) -> list[Settled]:
        """Its last answered steps, by slice; with the last claim, all that is settled.

        `RemoteProtocolError` leaves everything as it was.
        """
        if member not in self._members or member in self._claims:
            raise RemoteProtocolError(f"peer {member} claims slices out of turn")
        if len(steps) != len(self._slices):
            raise RemoteProtocolError(
                f"peer {member} claims {len(steps)} slices of {len(self._slices)}"
            )
        for other, claimed in self._claims.items():
            for slice_, ours, theirs in zip(self._slices, steps, claimed, strict=True):
                if RESTS not in (ours, theirs) and abs(ours - theirs) > 1:
                    raise RemoteProtocolError(
                        f"peer {member} has step {ours} of slice {slice_}, and peer {other} step"
                        f" {theirs}: they cannot be more than one apart"
                    )
        self._claims[member] = tuple(steps)
        return [] if self.missing else [*map(self._settle, range(len(self._slices)))]

    def _settle(self, place: int) -> Settled:
        steps = {member: claimed[place] for member, claimed in sorted(self._claims.items())}
        newest = max(steps.values())
        having = [member for member, step in steps.items() if step == newest]
        giver = self._buddy if self._buddy in having else having[0]
        owed = tuple(member for member, step in steps.items() if RESTS != step < newest)
        return Settled(self._slices[place], newest, giver, owed)


def pushed_again(unanswered: Mapping[int, int], settled: Mapping[int, int]) -> list[int]:
    """Of the slices whose push of a step has left unanswered, those whose push is lost.

    ``settled``: by slice, the step that it goes on from. Raises `RemoteProtocolError` if the
    survivors have settled what this one cannot follow.
    """
    again = []
    for slice_, step in sorted(unanswered.items()):
        if slice_ not in settled:
            continue
        ahead = step - settled[slice_]
        if ahead not in (0, 1):
            raise RemoteProtocolError(
                f"slice {slice_} goes on from step {settled[slice_]}, and its push of step {step}"
                " is unanswered"
            )
        if ahead:
            again.append(slice_)
    return again

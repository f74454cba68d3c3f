"""What a worker keeps where workers update, so that no loss takes an average with it.

Theory of operation. A slice passes its *rounds*, (step, which of the step's rounds), one after the
other: a worker pushes one when the round before is answered. (A step counts optimizer steps that
were made: a further pass, and a skipped step, begin another round of the same step.) Of each slice
a worker keeps

- a push's encoded bytes until it is answered;
- the last average, whole and beside the gradient, until the slice's next average is there. For that
  one all have pushed, and so all have had the one before.

So of any two workers none is more than one round ahead, and what the last one lacks is somewhere:
the average with who has it, or, if nobody has, all pushes.

Left its view, a worker sends nothing and takes nothing of it. In the next one it first *claims*:
per slice, the last round whose average it has, and the push that is unanswered. The slice's owner
(`core.repair`) asks for what is missing: for the average, or for the same bytes once more.

Residuals. Who encodes keeps what the codec left out, and adds it to what it encodes next. It is
*committed* when its round counts, which the slice's next round tells: that is of a later step.
Another round of the same step means that the round before was closed, or its step skipped: then the
residual is again what it was before (`Residual`, on both sides). Sent again, bytes are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from foreprop.core.collect import NEVER, Round
from foreprop.core.views import LeaveView, SendTo, View, owner_of, slices_of
from foreprop.errors import InternalError, LocalProtocolError, RemoteProtocolError


# Events; `LeaveView` is one, too.
class ViewEntered(NamedTuple):
    """The connections to the lost are closed. Also a server's, which any worker tells."""

    view: View


class ContributionReady(NamedTuple):
    """This worker's part of a slice's round is there, or it is certain that it has none."""

    slice: int
    round: Round
    has_gradient: bool = True


# Frames, which are events where they arrive. Each names who sends it, and its view.
class Claim(NamedTuple):
    """What a worker has of a slice."""

    slice: int
    answered: Round
    """Whose average it has; `NEVER`: none yet."""
    pushed: Round
    """The same, or the round after it, whose push is unanswered."""


class Claims(NamedTuple):
    """All of a worker, about the receiver's slices."""

    member: int
    view: int
    claims: tuple[Claim, ...]


class Contribution(NamedTuple):
    """A push: the bytes that are kept, or that there is no gradient."""

    member: int
    view: int
    slice: int
    round: Round
    workers: int
    """So many of the member's workers it counts."""
    has_gradient: bool


class Average(NamedTuple):
    """From an owner, who made it or has it from another worker; or to the owner who wants it."""

    member: int
    view: int
    slice: int
    round: Round


class Wanted(NamedTuple):
    """An owner lacks this round: the average, from who has it; otherwise the same push again."""

    member: int
    view: int
    slice: int
    round: Round


# Instructions.
class EncodePush(NamedTuple):
    """Encode it, with the residual; keep the bytes until the round's average is there."""

    slice: int
    round: Round


class KeepAverage(NamedTuple):
    """The loop may have it. Forget the slice's average before it, and the push's bytes."""

    slice: int
    round: Round


class SettleResidual(NamedTuple):
    """What the round left out is the slice's residual, if it counted; otherwise as before it."""

    slice: int
    round: Round
    counted: bool


RetentionInstruction = EncodePush | KeepAverage | SendTo | SettleResidual


class Residual:
    """Of one slice and direction: which round's is not committed yet."""

    __slots__ = ("open",)

    def __init__(self) -> None:
        self.open = NEVER

    def follow(self, slice_: int, round_: Round) -> list[SettleResidual]:
        """The slice's next round begins: it tells whether the one before counted."""
        before, self.open = self.open, NEVER
        return [] if before == NEVER else [SettleResidual(slice_, before, before[0] < round_[0])]


class _Kept:
    """What a worker keeps of one slice."""

    __slots__ = ("answered", "has_gradient", "next", "pushed", "residual")

    def __init__(self) -> None:
        self.answered = NEVER
        self.pushed = NEVER
        self.has_gradient = False
        self.next: ContributionReady | None = None  # comes after the push that is unanswered
        self.residual = Residual()


class Retention:
    """One member's. Not thread-safe. It has ``workers``; ``homes``: by slice, its server's slot.

    ``view`` is None on a newcomer.
    """

    def __init__(
        self, me: int, view: View | None, homes: Mapping[int, int], *, workers: int = 1
    ) -> None:
        self._me = me
        self._workers = workers
        self._view = view
        self._homes = homes
        self._kept = {slice_: _Kept() for slice_ in homes}

    def handle(self, event: Any) -> list[RetentionInstruction]:
        """The only way state changes; `RemoteProtocolError` leaves it as it was."""
        handler = _HANDLERS.get(type(event))
        if handler is None:
            raise InternalError(f"a worker's retention does not know the event {event!r}")
        return handler(self, event)

    def unanswered(self) -> list[tuple[int, Round]]:
        """The pushes whose bytes are kept."""
        return [(slice_, k.pushed) for slice_, k in self._kept.items() if k.pushed != k.answered]

    # Views.
    def _on_leave_view(self, _: LeaveView) -> list[RetentionInstruction]:
        self._view = None
        return []

    def _on_view_entered(self, event: ViewEntered) -> list[RetentionInstruction]:
        view = self._view = event.view
        return [
            SendTo((owner,), Claims(self._me, view.number, tuple(map(self._claim, owned))))
            for owner in view.members
            if (owned := slices_of(owner, view, self._homes))
        ]

    def _claim(self, slice_: int) -> Claim:
        kept = self._kept[slice_]
        return Claim(slice_, kept.answered, kept.pushed)

    def _is_past(self, view: int) -> bool:
        """Whether a frame is of another view than this worker is in."""
        return self._view is None or view != self._view.number

    # Rounds.
    def _on_contribution_ready(self, event: ContributionReady) -> list[RetentionInstruction]:
        kept = self._kept[event.slice]
        last = kept.next.round if kept.next else kept.pushed
        if kept.next or event.round <= last:
            raise LocalProtocolError(
                f"slice {event.slice} is ready for round {event.round} after {last}"
            )
        if kept.pushed != kept.answered:
            kept.next = event
            return []
        return self._push(event, kept)

    def _push(self, event: ContributionReady, kept: _Kept) -> list[RetentionInstruction]:
        slice_, round_, has_gradient = event
        kept.pushed, kept.has_gradient = round_, has_gradient
        followed: list[RetentionInstruction] = [*kept.residual.follow(slice_, round_)]
        if has_gradient:
            kept.residual.open = round_
            followed.append(EncodePush(slice_, round_))
        return followed if self._view is None else [*followed, self._pushed(slice_, self._view)]

    def _pushed(self, slice_: int, view: View) -> SendTo:
        kept, owner = self._kept[slice_], owner_of(slice_, self._homes[slice_], view)
        about = view.number, slice_, kept.pushed, self._workers, kept.has_gradient
        return SendTo((owner,), Contribution(self._me, *about))

    def _on_average(self, average: Average) -> list[RetentionInstruction]:
        _, view, slice_, round_ = average
        if self._is_past(view):
            return []
        kept = self._kept_of(slice_)
        if round_ != kept.pushed or round_ == kept.answered:
            raise RemoteProtocolError(
                f"the average of slice {slice_}, round {round_}, came to who has pushed"
                f" {kept.pushed} and has {kept.answered}"
            )
        kept.answered = round_
        due, kept.next = kept.next, None
        return [KeepAverage(slice_, round_), *(self._push(due, kept) if due else [])]

    # Repair.
    def _on_wanted(self, wanted: Wanted) -> list[RetentionInstruction]:
        owner, view, slice_, round_ = wanted
        if self._view is None or self._is_past(view):
            return []
        kept = self._kept_of(slice_)
        if round_ == kept.answered != NEVER:
            return [SendTo((owner,), Average(self._me, view, slice_, round_))]
        if round_ == kept.pushed:
            return [self._pushed(slice_, self._view)]
        raise RemoteProtocolError(
            f"member {owner} wants round {round_} of slice {slice_}: {self._claim(slice_)}"
        )

    def _kept_of(self, slice_: int) -> _Kept:
        kept = self._kept.get(slice_)
        if kept is None:
            raise RemoteProtocolError(f"there is no slice {slice_}")
        return kept


_HANDLERS: dict[type, Callable[[Retention, Any], list[RetentionInstruction]]] = {
    LeaveView: Retention._on_leave_view,
    ViewEntered: Retention._on_view_entered,
    ContributionReady: Retention._on_contribution_ready,
    Average: Retention._on_average,
    Wanted: Retention._on_wanted,
}

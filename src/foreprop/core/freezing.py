"""Whether ranks freeze and unfreeze the same parameters after the same steps (`requires_grad`).

A rank reports what has changed as it ends a step, before anything of the next one leaves. Nobody
waits for the gradient of a frozen parameter, so only these reports show that ranks differ. A peer
that is in a later step has reported all there is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

_STEPS_KEPT = 64  # ranks are fewer steps apart, or nobody compares them


class Turned(NamedTuple):
    """The numbers, ascending, of the parameters whose `requires_grad` changed in a step."""

    frozen: tuple[int, ...] = ()
    unfrozen: tuple[int, ...] = ()

    def of(self, numbers: Sequence[int]) -> Turned:
        """The same changes of these parameters only, numbered by their places among them."""
        places = {number: place for place, number in enumerate(numbers)}
        frozen, unfrozen = (
            tuple(places[number] for number in part if number in places) for part in self
        )
        return Turned(frozen, unfrozen)


NOTHING_TURNED = Turned()


def what_turned(before: Sequence[bool | None], now: Sequence[bool]) -> Turned:
    """The changes of `requires_grad` between two steps' ends; None: it was not known before."""
    changed = [n for n in range(len(now)) if before[n] is not None and now[n] != before[n]]
    frozen = tuple(number for number in changed if before[number])
    return Turned(frozen, tuple(number for number in changed if now[number]))


class TrainableWords:
    """What the peers of a server have reported. ``names`` are the parameters'. Not thread-safe."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._reported: dict[int, dict[int, Turned]] = {}  # by step and peer

    def tell(self, peer: int, step: int, turned: Turned) -> None:
        self._reported.setdefault(step, {})[peer] = turned
        for old in sorted(self._reported)[:-_STEPS_KEPT]:
            del self._reported[old]

    def differing(self, peer: int, begun: int, others: Collection[int]) -> tuple[int, int] | None:
        """The first of the ``others`` that differs from a peer which has begun a step.

        It is returned with the step before, at whose end the two have differed.
        """
        reported = self._reported.get(begun - 1, {})
        own = reported.get(peer, NOTHING_TURNED)
        for other in sorted(reported):
            if other in others and reported[other] != own:
                return begun - 1, other
        return None

    def describe(self, step: int, ranks: Sequence[tuple[int, str]]) -> str:
        """What these have changed, in words; each is a peer and its name."""
        done = []
        for peer, name in ranks:
            turned = self._reported.get(step, {}).get(peer, NOTHING_TURNED)
            parts = []
            for verb, numbers in (("frozen", turned.frozen), ("unfrozen", turned.unfrozen)):
                if numbers:
                    more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
                    names = ", ".join(self._names[number] for number in numbers[:3])
                    parts.append(f"has {verb} {names}{more}")
            done.append(f"{name} {' and '.join(parts) or 'has changed nothing'}")
        return (
            f"step {step}: {', and '.join(done)} since the step before: set requires_grad alike on"
            " every rank, before the same step"
        )

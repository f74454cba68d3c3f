"""Whether ranks freeze and unfreeze the same parameters after the same steps (`requires_grad`).

A rank says so as it ends a step, before anything of the next one leaves. A frozen parameter has no
gradient to wait for, so nobody else would miss the word: who is in a later step has said all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

_STEPS_KEPT = 64
"""Of which words are kept; ranks are fewer steps apart, or nobody compares them."""


class Turned(NamedTuple):
    """Parameters by number, ascending, whose `requires_grad` has changed since the last step."""

    frozen: tuple[int, ...] = ()
    unfrozen: tuple[int, ...] = ()

    def of(self, numbers: Sequence[int]) -> Turned:
        """Of a part of them, by their places in it."""
        places = {number: place for place, number in enumerate(numbers)}
        frozen, unfrozen = (
            tuple(places[number] for number in part if number in places) for part in self
        )
        return Turned(frozen, unfrozen)


NOTHING_TURNED = Turned()


class TrainableWords:
    """What each peer of a server has said. ``names`` are the parameters'. Not thread-safe."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._told: dict[int, dict[int, Turned]] = {}
        """By step and peer."""

    def tell(self, peer: int, step: int, turned: Turned) -> None:
        self._told.setdefault(step, {})[peer] = turned
        for old in sorted(self._told)[:-_STEPS_KEPT]:
            del self._told[old]

    def differing(self, peer: int, begun: int, others: Collection[int]) -> tuple[int, int] | None:
        """Of one that has begun a step: the step after which it differs, and from whom."""
        told = self._told.get(begun - 1, {})
        own = told.get(peer, NOTHING_TURNED)
        differing = (other for other in sorted(told) if other in others and told[other] != own)
        found = next(differing, None)
        return None if found is None else (begun - 1, found)

    def describe(self, step: int, ranks: Sequence[tuple[int, str]]) -> str:
        """What these have done, each a peer and what it is called."""
        done = []
        for peer, name in ranks:
            turned = self._told.get(step, {}).get(peer, NOTHING_TURNED)
            parts = [
                f"has {verb} {self._listed(numbers)}"
                for verb, numbers in (("frozen", turned.frozen), ("unfrozen", turned.unfrozen))
                if numbers
            ]
            done.append(f"{name} {' and '.join(parts) or 'has changed nothing'}")
        return (
            f"step {step}: {', and '.join(done)} since the step before: set requires_grad alike on"
            " every rank, before the same step"
        )

    def _listed(self, numbers: Sequence[int]) -> str:
        more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
        return ", ".join(self._names[number] for number in numbers[:3]) + more

"""Whose time is it: a pass cut at first uses and gradients, and shared out among the arrays."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """One forward and backward pass, seconds; arrays go by numbers."""

    forward_s: float
    backward_s: float
    used_s: Mapping[int, float]
    """First uses since the forward pass began, in their order."""
    ready_s: Mapping[int, float]
    """When gradients were ready, since the backward pass began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Medians over some passes; ``forward_s`` and ``backward_s`` belong to ``order``'s arrays."""

    order: tuple[int, ...]
    """The arrays that got a gradient, in the order of their first use."""
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    before_first_use_s: float
    after_last_gradient_s: float


def attribute(records: Sequence[PassRecord], *, forward_s: float, backward_s: float) -> Attribution:
    """Share out ``forward_s`` and ``backward_s`` as the recorded passes, at least one, say.

    From its first use until the next array's, the forward pass works for an array. The backward
    pass works for it from when all later arrays have their gradients until it has its own, too:
    where several are ready at once (an LSTM's), the first in forward order need not be the last.
    """
    order = _forward_order(records)
    forward = [_forward_parts(record, set(order)) for record in records]
    backward = [_backward_parts(record, order) for record in records]
    before_s, *forwards_s = _shared_out(
        [[before, *(parts.get(array, 0.0) for array in order)] for before, parts in forward],
        forward_s,
    )
    after_s, *backwards_s = _shared_out(backward, backward_s)
    return Attribution(
        order=tuple(order),
        forward_s=tuple(forwards_s),
        backward_s=tuple(backwards_s),
        before_first_use_s=before_s,
        after_last_gradient_s=after_s,
    )


def _forward_order(records: Sequence[PassRecord]) -> list[int]:
    """As a session has it: by first use in the first pass that uses an array, then by number."""
    with_gradient = set(itertools.chain.from_iterable(record.ready_s for record in records))
    used = dict.fromkeys(itertools.chain.from_iterable(record.used_s for record in records))
    first = [array for array in used if array in with_gradient]
    return first + sorted(with_gradient.difference(first))


def _forward_parts(record: PassRecord, arrays: Collection[int]) -> tuple[float, dict[int, float]]:
    """Before the first use, and from each array's first use to the next one's."""
    marks = [(array, at_s) for array, at_s in record.used_s.items() if array in arrays]
    ends_s = [at_s for _, at_s in marks] + [record.forward_s]
    lasted = {array: end_s - at_s for (array, at_s), end_s in zip(marks, ends_s[1:], strict=True)}
    return ends_s[0], lasted


def _backward_parts(record: PassRecord, order: Sequence[int]) -> list[float]:
    """After the last gradient, then by array in forward order."""
    ready_s = [max(0.0, record.ready_s.get(array, 0.0)) for array in order]
    all_later_s = list(itertools.accumulate(reversed(ready_s), max, initial=0.0))[::-1]
    parts = [own - later for own, later in itertools.pairwise(all_later_s)]
    return [record.backward_s - all_later_s[0], *parts]


def _shared_out(passes: Sequence[Sequence[float]], total_s: float) -> list[float]:
    """Medians by column, stretched so that they add up to ``total_s``."""
    medians = [max(0.0, statistics.median(column)) for column in zip(*passes, strict=True)]
    measured_s = sum(medians)
    return [median * total_s / measured_s if measured_s else 0.0 for median in medians]

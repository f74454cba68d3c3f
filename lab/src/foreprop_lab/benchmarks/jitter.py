"""What a fixed order of collectives costs when layers do not take the same time in every step.

A simulation of ready times: every rank's layers take drawn times, a chunk can be reduced once all
ranks have its gradient, and the link takes one chunk at a time. A planned order waits for whatever
comes next in it; an adaptive one, which would need the ranks to agree anew for every chunk, takes
the most urgent chunk that is ready everywhere.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from foreprop.features.collectives.order import (
    Chunk,
    Observation,
    Observer,
    backward_order,
    cut_chunks,
    plan_order,
)
from foreprop.plan import limit
from foreprop.plan.profile import Layer

_OBSERVED_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class JitterResult:
    """Medians of a step, seconds."""

    even_s: float
    """The step without jitter, in the planned order."""
    planned_s: float
    adaptive_s: float
    backward_s: float
    """The step in the order of the backward pass, without regard to urgency."""


@dataclass(frozen=True, slots=True)
class _Times:
    """One rank's step: by layer, when its gradient is ready, and how long its forward takes."""

    ready_s: Sequence[float]
    forward_s: Sequence[float]


def simulate_jitter(
    layers: Sequence[Layer],
    *,
    nodes: int,
    rate_bits_per_s: float,
    chunk_elems: int,
    jitter: float,
    steps: int,
    seed: int = 0,
) -> JitterResult:
    """Simulate steps in which a layer's time is off by up to ``jitter``, in each rank and step."""
    chunks = cut_chunks([sum(layer.sizes_elems) for layer in layers], chunk_elems)
    chunk_s = tuple(
        limit.wire_s(
            limit.HEADER_FACTOR * limit.BYTES_PER_ELEM * chunk.elems,
            nodes=nodes,
            rate_bits_per_s=rate_bits_per_s,
        )
        for chunk in chunks
    )
    chance = random.Random(seed)
    forward_order = range(len(layers))
    even = [_draw(layers, 0.0, chance)]
    planned = plan_order(
        chunks, forward_order, _observe_steps(layers, nodes, jitter, chance, chunk_s)
    )
    backward = backward_order(chunks, forward_order)
    results: list[tuple[float, float, float]] = []
    for _ in range(steps):
        ranks = [_draw(layers, jitter, chance) for _ in range(nodes)]
        adaptive = plan_order(chunks, forward_order, _observe(ranks, chunk_s))
        orders = (planned, adaptive, backward)
        a, b, c = (_step_s(order, chunks, chunk_s, ranks) for order in orders)
        results.append((a, b, c))
    planned_s, adaptive_s, backward_s = (
        statistics.median(column) for column in zip(*results, strict=True)
    )
    return JitterResult(
        even_s=_step_s(planned, chunks, chunk_s, even),
        planned_s=planned_s,
        adaptive_s=adaptive_s,
        backward_s=backward_s,
    )


def _draw(layers: Sequence[Layer], jitter: float, chance: random.Random) -> _Times:
    forward_s = [layer.forward_s * (1 + jitter * chance.uniform(-1, 1)) for layer in layers]
    backward_s = [layer.backward_s * (1 + jitter * chance.uniform(-1, 1)) for layer in layers]
    ready_s = list(itertools.accumulate(reversed(backward_s)))
    return _Times(ready_s[::-1], forward_s)


def _observe(ranks: Sequence[_Times], chunk_s: tuple[float, ...]) -> Observation:
    """An observation in which a gradient is ready when the last rank has it."""
    ready_s = tuple(map(max, zip(*(times.ready_s for times in ranks), strict=True)))
    needed_s = tuple(itertools.accumulate(ranks[0].forward_s, initial=0.0))[:-1]
    return Observation(ready_s=ready_s, needed_s=needed_s, chunk_s=chunk_s)


def _observe_steps(
    layers: Sequence[Layer],
    nodes: int,
    jitter: float,
    chance: random.Random,
    chunk_s: tuple[float, ...],
) -> Observation:
    """The observation that the ranks' observers would make of a few steps."""
    observers = [Observer(len(layers), [1]) for _ in range(nodes)]
    for step, observer in itertools.product(range(1, _OBSERVED_STEPS + 1), observers):
        times = _draw(layers, jitter, chance)
        for layer in reversed(range(len(layers))):
            observer.gradient_ready(layer, step, times.ready_s[layer])
    first_s = layers[-1].backward_s  # observers count from the first gradient
    latest_s = map(max, zip(*(observer.ready_s() for observer in observers), strict=True))
    even = _observe([_draw(layers, 0.0, chance)], chunk_s)
    return even._replace(ready_s=tuple(first_s + late_s for late_s in latest_s))


def _step_s(
    order: Sequence[int], chunks: Sequence[Chunk], chunk_s: Sequence[float], ranks: Sequence[_Times]
) -> float:
    """The time from the start of the backward pass to the end of the last rank's forward pass."""
    ready_s = _observe(ranks, tuple(chunk_s)).ready_s
    reduced_s = [0.0] * len(ready_s)
    now_s = 0.0
    for number in order:
        layer = chunks[number].pieces[0].parameter
        now_s = max(now_s, ready_s[layer]) + chunk_s[number]
        reduced_s[layer] = now_s
    ends = []
    for times in ranks:
        now_s = times.ready_s[0]
        for layer_reduced_s, forward_s in zip(reduced_s, times.forward_s, strict=True):
            now_s = max(now_s, layer_reduced_s) + forward_s
        ends.append(now_s)
    return max(ends)

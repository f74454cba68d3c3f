"""The one order in which all ranks issue their collectives, planned from what was observed.

Collectives have to be issued alike everywhere, so no rank may decide by what it has at hand, as
the parameter server's send queue does. Instead rank 0 runs that queue once on paper: gradients
become ready at the times that were seen, the link takes one chunk at a time, and the most urgent
chunk that is ready goes next (P3 section 4.2). The order that comes out is everybody's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from foreprop.core.sendqueue import SendQueue
from foreprop.errors import ConfigError, InternalError


class Piece(NamedTuple):
    """A contiguous run of a parameter's flattened elements."""

    parameter: int
    start_elems: int
    stop_elems: int


class Chunk(NamedTuple):
    """What one collective sums: a piece of a large parameter, small neighbours, or both."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def elems(self) -> int:
        return sum(stop - start for _, start, stop in self.pieces)

    @property
    def parameters(self) -> tuple[int, ...]:
        return tuple(piece.parameter for piece in self.pieces)


def cut_chunks(
    sizes_elems: Sequence[int], chunk_elems: int, *, kinds: Sequence[object] | None = None
) -> tuple[Chunk, ...]:
    """Cut parameters into chunks that cover every element once, in order.

    A piece has at most ``chunk_elems`` elements. A parameter of at most a quarter of that is small:
    it joins its neighbour's chunk if both are of the same of ``kinds`` and the chunk then has no
    more than five quarters. (Without ``kinds`` none joins.) A collective of a few elements passes
    every node as often as a large one and takes nearly as long. Empty parameters have no chunk.
    """
    if chunk_elems < 1:
        raise ConfigError(f"chunk_elems is {chunk_elems}; it must be at least 1")
    small_elems = chunk_elems // 4
    chunks: list[list[Piece]] = []
    free_elems = 0  # in the last chunk
    for parameter, size in enumerate(sizes_elems):
        for start in range(0, size, chunk_elems):
            piece = Piece(parameter, start, min(start + chunk_elems, size))
            alike = kinds and chunks and kinds[chunks[-1][-1].parameter] == kinds[parameter]
            if alike and size <= min(small_elems, free_elems):
                chunks[-1].append(piece)
            else:
                chunks.append([piece])
                free_elems = chunk_elems + small_elems
            free_elems -= piece.stop_elems - piece.start_elems
    return tuple(Chunk(number, tuple(pieces)) for number, pieces in enumerate(chunks))


class Observation(NamedTuple):
    """The times of a step, as seen of late, from which an order is planned.

    They are, for each parameter, when its gradient was ready on the last rank, since the step's
    first one; when the forward pass used it, since its first use of any, waits left out; and for
    each chunk, how long the link was busy with it.
    """

    ready_s: tuple[float, ...]
    needed_s: tuple[float, ...]
    chunk_s: tuple[float, ...]


def plan_order(
    chunks: Sequence[Chunk], forward_order: Sequence[int], observed: Observation
) -> tuple[int, ...]:
    """The chunks' numbers in the order in which a priority queue would send them.

    ``forward_order`` names the parameters as the next forward pass needs them.
    """
    if len(observed.chunk_s) != len(chunks) or len(observed.ready_s) != len(forward_order):
        raise InternalError("an observation of other parameters or chunks")
    urgency = _urgency(chunks, forward_order)
    ready_s = [max(observed.ready_s[p] for p in chunk.parameters) for chunk in chunks]
    arrivals = sorted(chunks, key=lambda c: (ready_s[c.number], urgency[c.number], c.number))
    queue: SendQueue[Chunk] = SendQueue()
    order: list[int] = []
    arrived = 0
    now_s = 0.0
    while len(order) < len(chunks):
        if not queue and arrived < len(arrivals):
            now_s = max(now_s, ready_s[arrivals[arrived].number])
        while arrived < len(arrivals) and ready_s[arrivals[arrived].number] <= now_s:
            chunk = arrivals[arrived]
            queue.push(0, urgency[chunk.number], chunk)
            arrived += 1
        chunk = queue.pop()
        order.append(chunk.number)
        now_s += observed.chunk_s[chunk.number]
    return tuple(order)


def backward_order(chunks: Sequence[Chunk], forward_order: Sequence[int]) -> tuple[int, ...]:
    """The chunks' numbers, last used first: a fair guess at when gradients will be ready.

    It serves while nothing has been observed.
    """
    urgency = _urgency(chunks, forward_order)
    ranked = sorted(chunks, key=lambda chunk: (-urgency[chunk.number], chunk.number))
    return tuple(chunk.number for chunk in ranked)


def _urgency(chunks: Sequence[Chunk], forward_order: Sequence[int]) -> list[int]:
    """Each chunk's place in ``forward_order``: that of the first of its parameters."""
    places = {parameter: place for place, parameter in enumerate(forward_order)}
    return [min(places[parameter] for parameter in chunk.parameters) for chunk in chunks]


def lateness_s(order: Sequence[int], chunks: Sequence[Chunk], observed: Observation) -> float:
    """How long after a step's first gradient a forward pass can begin that need not wait.

    A chunk waits for its gradient and for all chunks before it in the order. The smaller this is,
    the shorter the step.
    """
    late_s = now_s = 0.0
    for number in order:
        parameters = chunks[number].parameters
        ready_s = max(observed.ready_s[parameter] for parameter in parameters)
        now_s = max(now_s, ready_s) + observed.chunk_s[number]
        late_s = max(late_s, now_s - min(observed.needed_s[parameter] for parameter in parameters))
    return late_s


_WORTHWHILE = 0.99
"""A new order must let the forward pass begin within this share of the old one's lateness."""
_FIRST_PLANS = (4, 8)
_PLAN_EVERY = 50


def plans_after(step: int) -> bool:
    """Whether rank 0 looks for a better order when this step is over."""
    return step in _FIRST_PLANS or step % _PLAN_EVERY == 0


def better_order(
    order: Sequence[int] | None,
    chunks: Sequence[Chunk],
    forward_order: Sequence[int],
    observed: Observation | None,
) -> tuple[int, ...] | None:
    """The order to change to from ``order``, which is None if nothing was planned yet.

    None if the ranks are to keep the one they have.
    """
    if observed is None:
        return None
    planned = plan_order(chunks, forward_order, observed)
    if order is None:
        return planned
    before_s = lateness_s(order, chunks, observed)
    return planned if lateness_s(planned, chunks, observed) <= _WORTHWHILE * before_s else None


_REMEMBERED_STEPS = 5


class Observer:
    """Gathers one rank's times over the last steps; the clock is the caller's, in seconds."""

    def __init__(
        self,
        parameters: int,
        chunk_sizes_bytes: Sequence[int],
        *,
        summed: Iterable[int] | None = None,
    ) -> None:
        """``summed``: the parameters that chunks have, if those are not all of them."""

        def recent() -> list[deque[float]]:
            return [deque(maxlen=_REMEMBERED_STEPS) for _ in range(parameters)]

        self._sizes_bytes = chunk_sizes_bytes
        self._summed = range(parameters) if summed is None else summed
        self._ready_s = recent()
        self._needed_s = recent()
        self._backward = _Pass()
        self._forward = _Pass()
        self._reduced_at_s: float | None = None
        self._busy_s = 0.0
        self._busy_bytes = 0

    def gradient_ready(self, parameter: int, step: int, now_s: float) -> None:
        self._ready_s[parameter].append(self._backward.since_start(step, now_s))

    def needed(self, parameter: int, step: int, now_s: float) -> None:
        """Note that the forward pass after ``step`` uses the parameter, and may wait for it."""
        self._needed_s[parameter].append(self._forward.since_start(step, now_s))

    def waited(self, seconds: float) -> None:
        self._forward.started_s += seconds

    def reduced(self, chunk: int, now_s: float, *, more: bool) -> None:
        """Note that a collective has ended; ``more``: others keep the link busy."""
        if self._reduced_at_s is not None:
            self._busy_s += now_s - self._reduced_at_s
            self._busy_bytes += self._sizes_bytes[chunk]
        self._reduced_at_s = now_s if more else None

    def ready_s(self) -> list[float]:
        """When this rank's gradients were ready, by parameter, late rather than early.

        An order that expects a gradient too early makes everything behind it wait; too late, only
        itself. So the second latest of the last steps' times counts. Empty while some parameter has
        not been seen yet.
        """
        if not all(self._ready_s[parameter] for parameter in self._summed):
            return []
        return [sorted(times)[-2:][0] if times else 0.0 for times in self._ready_s]

    def observation(self, others_ready_s: Sequence[Sequence[float]]) -> Observation | None:
        """What the last steps showed, with the other ranks' `ready_s`.

        None while some parameter has not been seen on some rank.
        """
        ready_s = [self.ready_s(), *others_ready_s]
        is_needed = all(self._needed_s[parameter] for parameter in self._summed)
        if not (all(ready_s) and is_needed and self._busy_bytes):
            return None
        byte_s = self._busy_s / self._busy_bytes
        return Observation(
            ready_s=tuple(map(max, zip(*ready_s, strict=True))),
            needed_s=tuple(median(times) if times else 0.0 for times in self._needed_s),
            chunk_s=tuple(size_bytes * byte_s for size_bytes in self._sizes_bytes),
        )

    def forget_rate(self) -> None:
        """Measure the link's rate anew: it may have changed."""
        self._busy_s = 0.0
        self._busy_bytes = 0


class _Pass:
    """A pass through the model, forward or backward, in the step that is under way."""

    def __init__(self) -> None:
        self.started_s = 0.0
        self._step = -1

    def since_start(self, step: int, now_s: float) -> float:
        if step != self._step:
            self._step, self.started_s = step, now_s
        return now_s - self.started_s

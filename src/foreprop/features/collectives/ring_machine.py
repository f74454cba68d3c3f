"""A worker's side of all-reduce as a state machine: which collective is issued when.

Theory of operation. All ranks issue the same chunks in the same order, without asking each other:
an order is in force from a step that all know, and a chunk that is not ready holds up those behind
it. So no rank can wait for a collective that another one will not issue, as long as every rank
makes the same steps; within a step, `GradientReady` comes for every parameter, with a gradient or
without.

At most ``in_flight`` chunks are under way, and unless it is a single one, ``in_flight_elems``
elements: what becomes ready and urgent has to pass behind them, and fewer would leave the link idle
between two. A parameter whose last chunk is in is updated, then complete; an empty one is complete
at once.

If updates need the norm of all gradients (``needs_norm``), a reduced parameter is measured first.
When all have been, the updates of the step begin, the most urgent first. Every rank has the same
sums, so nothing more is sent. If other parameters have a part in that norm (``shares_norm``), the
updates begin when the total has come, which may be before this rank has measured all of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from foreprop.core.frames import (
    Closing,
    CompleteParameter,
    Finish,
    GradientReady,
    NormArrived,
    PrioritiesLearned,
)
from foreprop.core.norm import ZERO, SendNormPart, SquareSum
from foreprop.errors import InternalError, LocalProtocolError, RemoteProtocolError
from foreprop.features.collectives.order import Chunk, backward_order


# Events: what has happened.
class ChunkReduced(NamedTuple):
    chunk: int


class ParameterMeasured(NamedTuple):
    parameter: int
    part: SquareSum  # of its aggregated gradient


class ParameterUpdated(NamedTuple):
    parameter: int


class OrderLearned(NamedTuple):
    order: tuple[int, ...]
    step: int  # from this one on, on every rank


# Instructions: what the shell is to do.
class ReduceChunk(NamedTuple):
    chunk: int
    step: int


class MeasureParameter(NamedTuple):
    parameter: int
    step: int


class UseNorm(NamedTuple):
    step: int
    norm: float  # of all gradients of the step, for the updates that follow


class UpdateParameter(NamedTuple):
    parameter: int
    step: int


RingInstruction = (
    ReduceChunk
    | MeasureParameter
    | SendNormPart
    | UseNorm
    | UpdateParameter
    | CompleteParameter
    | Finish
)


def most_collectives(chunks_in_flight: int) -> int:
    """How many collectives may be under way at once, if their chunks are small."""
    return 2 * chunks_in_flight


class RingMachine:
    """Decides what a rank issues next and when a parameter is complete. Not thread-safe."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        parameters: int,
        in_flight: int,
        in_flight_elems: int,
        needs_norm: bool = False,
        shares_norm: bool = False,
    ) -> None:
        if in_flight < 1:
            raise InternalError(f"{in_flight} collectives in flight")
        self._chunks = chunks
        self._parameters_of = [chunk.parameters for chunk in chunks]
        self._elems_of = [chunk.elems for chunk in chunks]
        self._in_flight = in_flight
        self._in_flight_elems = in_flight_elems
        self._issued_elems = 0
        self._chunks_of = [0] * parameters
        for together in self._parameters_of:
            for parameter in together:
                self._chunks_of[parameter] += 1
        self._order = backward_order(chunks, range(parameters))
        self._next_order: OrderLearned | None = None
        self._step = 1  # the one whose chunks are being issued
        self._position = 0  # of the next chunk, in the order
        self._issued: set[int] = set()
        self._ready_step = [0] * parameters
        self._complete_step = [0] * parameters
        self._missing_chunks = list(self._chunks_of)
        self._closing = False
        self._needs_norm = needs_norm
        self._shares_norm = shares_norm
        self._measured: dict[int, SquareSum] = {}  # of one step, by parameter
        self._held_step = 0  # the step whose updates wait for its norm, or 0
        self._norm: NormArrived | None = None  # it may come before all here are measured
        self._priority: Sequence[int] = range(parameters)
        self._handlers: dict[type, Any] = {
            GradientReady: self._on_gradient_ready,
            ChunkReduced: self._on_chunk_reduced,
            ParameterMeasured: self._on_parameter_measured,
            NormArrived: self._on_norm_arrived,
            ParameterUpdated: self._on_parameter_updated,
            PrioritiesLearned: self._on_priorities_learned,
            OrderLearned: self._on_order_learned,
            Closing: self._on_closing,
        }

    def handle(self, event: Any) -> list[RingInstruction]:
        """Take in what has happened and return what is to be done: only here state changes."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise InternalError(f"a ring does not know the event {event!r}")
        instructions: list[RingInstruction] = handler(event)
        return instructions

    # Read-only views.
    def is_complete(self, parameter: int) -> bool:
        """Whether every step for which the parameter was ready is complete."""
        return self._complete_step[parameter] == self._ready_step[parameter]

    def step_of(self, parameter: int) -> int:
        """The latest step for which the parameter was ready."""
        return self._ready_step[parameter]

    @property
    def queue_depth(self) -> int:
        """How many chunks are ready and wait for their turn."""
        waiting = self._order[self._position :]
        return sum(self._maybe_missing(number) is None for number in waiting)

    @property
    def next_chunk(self) -> tuple[int, int]:
        """(parameter, step) of the chunk whose turn it is: what everything behind it waits for."""
        chunk = self._order[self._position]
        missing = self._maybe_missing(chunk)
        return self._parameters_of[chunk][0] if missing is None else missing, self._step

    def _maybe_missing(self, chunk: int) -> int | None:
        """A parameter of the chunk that is not ready for the step, if there is any."""
        for parameter in self._parameters_of[chunk]:
            if self._ready_step[parameter] < self._step:
                return parameter
        return None

    @property
    def under_way(self) -> tuple[int, int] | None:
        """(parameter, step) of a chunk that was issued and is not reduced, if there is any."""
        if not self._issued:
            return None
        parameter = self._parameters_of[min(self._issued)][0]
        return parameter, self._ready_step[parameter]

    # Handlers.
    def _on_gradient_ready(self, event: GradientReady) -> list[RingInstruction]:
        parameter, step = event.parameter, event.step
        if not self.is_complete(parameter) or step != self._ready_step[parameter] + 1:
            raise LocalProtocolError(
                f"parameter {parameter} is ready for step {step}; its last step was"
                f" {self._ready_step[parameter]}, complete is {self._complete_step[parameter]}"
            )
        self._ready_step[parameter] = step
        if self._chunks_of[parameter]:
            return self._issue()
        self._complete_step[parameter] = step
        return [CompleteParameter(parameter, step)]

    def _on_chunk_reduced(self, event: ChunkReduced) -> list[RingInstruction]:
        if event.chunk not in self._issued:
            raise LocalProtocolError(f"chunk {event.chunk} was reduced, but is not under way")
        self._issued.remove(event.chunk)
        self._issued_elems -= self._elems_of[event.chunk]
        instructions = self._issue()
        then = MeasureParameter if self._needs_norm else UpdateParameter
        for parameter in self._parameters_of[event.chunk]:
            self._missing_chunks[parameter] -= 1
            if not self._missing_chunks[parameter]:
                self._missing_chunks[parameter] = self._chunks_of[parameter]
                instructions.append(then(parameter, self._ready_step[parameter]))
        return instructions

    def _on_parameter_measured(self, event: ParameterMeasured) -> list[RingInstruction]:
        self._measured[event.parameter] = event.part
        if len(self._measured) < sum(map(bool, self._chunks_of)):
            return []
        step, total = self._ready_step[event.parameter], ZERO
        for part in self._measured.values():  # in any order: the sum is exact
            total = total.plus(part)
        self._held_step = step
        if self._shares_norm:
            return [SendNormPart(step, total), *self._release()]
        self._norm = NormArrived(0, step, norm=total.norm)
        return self._release()

    def _on_norm_arrived(self, event: NormArrived) -> list[RingInstruction]:
        if not self._shares_norm or self._norm is not None:
            raise RemoteProtocolError(f"the norm of step {event.step} came, which is not awaited")
        self._norm = event
        return self._release()

    def _release(self) -> list[RingInstruction]:
        norm, step = self._norm, self._held_step
        if norm is None or not step:
            return []
        if norm.step != step:
            raise RemoteProtocolError(f"the norm of step {norm.step} came, not of step {step}")
        urgent_first = sorted(self._measured, key=self._priority.__getitem__)
        self._measured, self._norm, self._held_step = {}, None, 0
        return [UseNorm(step, norm.norm), *(UpdateParameter(p, step) for p in urgent_first)]

    def _on_priorities_learned(self, event: PrioritiesLearned) -> list[RingInstruction]:
        places = {parameter: place for place, parameter in enumerate(event.order)}
        if sorted(places) != list(range(len(self._ready_step))):
            raise LocalProtocolError("priorities must name every parameter once")
        self._priority = [places[parameter] for parameter in range(len(places))]
        return []

    def _on_parameter_updated(self, event: ParameterUpdated) -> list[RingInstruction]:
        parameter = event.parameter
        step = self._complete_step[parameter] = self._ready_step[parameter]
        return [CompleteParameter(parameter, step), *self._finished()]

    def _on_order_learned(self, event: OrderLearned) -> list[RingInstruction]:
        if sorted(event.order) != list(range(len(self._chunks))):
            raise LocalProtocolError("an order must name every chunk once")
        if event.step < self._step or (event.step == self._step and self._position):
            raise LocalProtocolError(
                f"an order for step {event.step} comes when step {self._step} is under way"
            )
        self._next_order = event
        self._begin_step()
        return self._issue()

    def _on_closing(self, _: Closing) -> list[RingInstruction]:
        self._closing = True
        return self._finished()

    # What several handlers do.
    def _issue(self) -> list[RingInstruction]:
        instructions: list[RingInstruction] = []
        while self._order:
            chunk = self._order[self._position]
            if self._maybe_missing(chunk) is not None:
                break  # whatever is ready behind it: on another rank it may not be
            if self._issued and (
                len(self._issued) >= self._in_flight
                or self._issued_elems + self._elems_of[chunk] > self._in_flight_elems
            ):
                break
            self._issued.add(chunk)
            self._issued_elems += self._elems_of[chunk]
            instructions.append(ReduceChunk(chunk, self._step))
            self._position += 1
            if self._position == len(self._order):
                self._position = 0
                self._step += 1
                self._begin_step()
        return instructions

    def _begin_step(self) -> None:
        """Go over to a new order if it is due: an order changes between two steps only."""
        if self._next_order is not None and self._next_order.step == self._step:
            self._order = self._next_order.order
            self._next_order = None

    def _finished(self) -> list[RingInstruction]:
        done = self._closing and all(map(self.is_complete, range(len(self._ready_step))))
        return [Finish()] if done else []

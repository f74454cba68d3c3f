"""The order of collectives as it gets better: what ranks observe, and rank 0 makes of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence

from foreprop.cluster.entries import decode_entry, decode_order
from foreprop.cluster.rendezvous import Look
from foreprop.collectives.group import Group
from foreprop.core.order import Chunk, Observer, better_order, plans_after

_FIRST_OBSERVED = 2  # in the first step gradients are pushed all at once, at its end


class Ordering:
    """One rank's view. Observations come from any thread, all else from the training thread."""

    def __init__(
        self,
        group: Group,
        look: Look,
        chunks: Sequence[Chunk],
        sizes_bytes: Sequence[int],
        parameters: int,
    ) -> None:
        """``look`` raises what has gone wrong here, while other ranks are waited for."""
        self.forward_order: Sequence[int] = range(parameters)
        """The parameters by their first use."""
        self.order: tuple[int, ...] | None = None
        """As planned; None until there is a plan."""
        self._board = group.board
        self._look = look
        self._chunks = chunks
        self._ranks = group.size
        self._published = ""
        self._observer = Observer(parameters, sizes_bytes)
        self._lock = threading.Lock()

    # What is observed.
    def gradient_ready(self, parameter: int, step: int) -> None:
        if step >= _FIRST_OBSERVED:
            with self._lock:
                self._observer.gradient_ready(parameter, step, time.monotonic())

    def needed(self, parameter: int, step: int) -> None:
        """The forward pass after ``step`` uses the parameter, and may have to wait for it."""
        if step >= _FIRST_OBSERVED:
            with self._lock:
                self._observer.needed(parameter, step, time.monotonic())

    def waited(self, seconds: float) -> None:
        with self._lock:
            self._observer.waited(seconds)

    def reduced(self, chunk: int, *, more: bool) -> None:
        """A collective has ended; ``more``: others are under way."""
        with self._lock:
            self._observer.reduced(chunk, time.monotonic(), more=more)

    # What is made of it.
    def end_step(self, step: int) -> tuple[int, ...] | None:
        """At some steps rank 0 publishes a better order, if there is one, for the ones to come."""
        if not plans_after(step) or self._ranks == 1:
            return None
        order = self._publish_order(step) if self._board.rank == 0 else self._lookup_order(step)
        if order is None:
            return None
        self.order = tuple(order)
        return self.order

    def _publish_order(self, step: int) -> Sequence[int] | None:
        order = self._better_order(self._others_ready_s(step))
        key = f"order/{step}"
        self._board.publish(key, json.dumps(order))
        if self._published:  # all ranks have it: they are in this step
            self._board.forget(self._published)
        self._published = key
        return order

    def _others_ready_s(self, step: int) -> list[list[float]]:
        """When gradients are ready on the other ranks."""
        found: list[list[float]] = []
        for rank in range(1, self._ranks):
            key = f"ready/{step}/{rank}"
            what = f"rank {rank}'s times of its gradients, after step {step}"
            text = self._board.lookup(key, what, self._look)
            found.append(decode_entry(text, list[float], what))
            self._board.forget(key)
        return found

    def _better_order(self, others_ready_s: Sequence[Sequence[float]]) -> Sequence[int] | None:
        with self._lock:
            observed = self._observer.observation(others_ready_s)
            self._observer.forget_rate()
        return better_order(self.order, self._chunks, self.forward_order, observed)

    def _lookup_order(self, step: int) -> Sequence[int] | None:
        with self._lock:
            ready_s = self._observer.ready_s()
        self._board.publish(f"ready/{step}/{self._board.rank}", json.dumps(ready_s))
        what = f"rank 0's order of collectives after step {step}"
        text = self._board.lookup(f"order/{step}", what, self._look)
        return None if text == "null" else decode_order(text, len(self._chunks), what)

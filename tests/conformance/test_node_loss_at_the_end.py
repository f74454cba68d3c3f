"""A node dies when some ranks have closed their session: those are done, and others go on.

Who has closed has all it needs, but others may lack the last averages of the lost server. All
survivors end without an error, with the bits of a run without a loss.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import foreprop
from foreprop.engine.world import World
from tests.cluster import run_cluster
from tests.conformance.counting_runs import Died, make_step, wait_for
from tests.conformance.node_losses import BESIDE, lose_node
from tests.conformance.parity import (
    batches_of,
    build_seeded,
    check_same_bits,
    check_same_optimizer_state,
    servers_only,
    snapshot,
    with_sgd,
)
from tests.tiers import long_cases

pytestmark = servers_only  # it names the architecture that it needs

STEPS = 4
SO_ATTACH_FILTER = 26  # socket(7); the module does not name it
ORDERS: list[Any] = list(itertools.permutations(range(3), 2))
"""Whose node dies, and who closes after that; the third rank has closed before."""


class Ended:
    """What the ranks of a session have at its end. Ranks that do not say otherwise close."""

    def __init__(self, ranks: int, **settings: Any) -> None:
        self.closed = [threading.Event() for _ in range(ranks)]
        self.gone = [threading.Event() for _ in range(ranks)]
        self.settings = {**BESIDE, **settings}
        self.takeovers: list[int] = [0] * ranks
        self.found: list[Any] = []
        self._ranks = ranks

    def run(self, at_the_end: dict[int, Callable[[Any, Any], Any]], deaf: int | None = None) -> Any:
        """By rank what it does after its last step; ``deaf`` hears nothing of it from rank 0."""
        by_rank = batches_of(self._ranks, count=STEPS)

        def work(world: World) -> Any:
            model, optimizer = build_seeded(with_sgd(), seed=world.rank)
            do = at_the_end.get(world.rank)
            try:
                with foreprop.parallelize(
                    model, optimizer, world=world, **self.settings
                ) as session:
                    for number, batch in enumerate(by_rank[world.rank], 1):
                        if number == STEPS and world.rank == deaf:
                            session.flush()
                            hear_nothing(session, server=0, until=self.gone[0])
                        make_step(model, optimizer, batch)
                    note_close(session, self.closed[world.rank])
                    state = None if do is None else do(session, optimizer)
            except Died:
                return None
            finally:
                self.gone[world.rank].set()
            self.takeovers[world.rank] = len(session.stats()["takeovers"])
            return snapshot(model.state_dict()), state

        self.found = run_cluster(self._ranks, work)
        return self

    def dies(self, rank: int, after: Sequence[int]) -> Callable[[Any, Any], None]:
        """When these have closed, without having closed itself."""

        def do(session: Any, optimizer: Any) -> None:
            session.flush()
            for other in after:
                wait_for(self.closed[other])
            lose_node(session)

        return do

    def dies_closed(self, rank: int, after: Sequence[int]) -> Callable[[Any, Any], None]:
        """The same, but it has closed, and waits for the others."""

        def do(session: Any, optimizer: Any) -> None:
            def die() -> None:
                self.closed[rank].set()
                for other in after:
                    wait_for(self.closed[other])
                try:
                    lose_node(session)
                finally:
                    ending_of(session).abort()

            ending_of(session)._await_the_end = die

        return do

    def asks(self, after: int) -> Callable[[Any, Any], Any]:
        """For the optimizer's state, when that rank is gone."""

        def do(session: Any, optimizer: torch.optim.Optimizer) -> Any:
            wait_for(self.gone[after])
            return snapshot(optimizer.state_dict())

        return do

    def check(self, survivors: Sequence[int]) -> None:
        """All of them have the bits of a run without a loss, and who has asked, its state."""
        wanted, state = usual(self._ranks)
        assert [rank for rank, each in enumerate(self.found) if each] == sorted(survivors)
        for rank in survivors:
            model, own_state = self.found[rank]
            check_same_bits(model, wanted)
            if own_state is not None:
                check_same_optimizer_state(own_state, state)


def ending_of(session: Any) -> Any:
    return session._training.backends.all[0].engine.ending


def note_close(session: Any, closed: threading.Event) -> None:
    """The event is set when the rank has said goodbye, and waits for the servers to end."""
    ending = ending_of(session)
    await_the_end = ending._await_the_end

    def noted() -> None:
        closed.set()
        await_the_end()

    ending._await_the_end = noted


def hear_nothing(session: Any, *, server: int, until: threading.Event) -> None:
    """What comes from a server is lost with it, whoever reads it: the kernel drops it."""
    stream = session._training.backends.all[0].engine.connections[server].stream
    while (inner := getattr(stream, "_stream", None)) is not None:
        stream = inner
    sock = stream._sock
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # "ret #0"
    program = struct.pack("HP", 1, ctypes.addressof(drop_all))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)

    def end() -> None:
        wait_for(until)
        with contextlib.suppress(OSError):  # it may have ended without a word
            sock.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=end, daemon=True).start()


@functools.cache
def usual(ranks: int) -> Any:
    """Model and optimizer's state without a loss."""
    ended = Ended(ranks)
    ended.gone[0].set()
    return ended.run({0: ended.asks(0)}).found[0]


@pytest.mark.parametrize(
    ("victim", "late"),
    [*ORDERS[:2], *[pytest.param(*each, marks=pytest.mark.long) for each in ORDERS[2:]]],
)
@pytest.mark.parametrize("has_closed", [False, True])
def test_who_closes_later_is_none_the_worse(victim: int, late: int, has_closed: bool) -> None:
    """Whoever takes the slices over: who has closed, or who goes on."""
    ended = Ended(3)
    early = 3 - victim - late
    dies = ended.dies_closed if has_closed else ended.dies
    ended.run({victim: dies(victim, [early]), late: ended.asks(victim)})
    ended.check([early, late])
    assert ended.takeovers[late] <= 1, "it may have been done, too, when it heard of it"


@pytest.mark.parametrize("late", [2, *long_cases(1)])
def test_who_lacks_the_last_averages_gets_them_of_who_has_closed(late: int) -> None:
    """Nobody would push that step again: all others have used what they have."""
    ended = Ended(3)
    early = 3 - late
    ended.run({0: ended.dies(0, [early])}, deaf=late)
    ended.check([early, late])
    assert ended.takeovers[late] == 1


def test_the_last_one_to_close_dies_and_nobody_needs_it() -> None:
    ended = Ended(3)
    ended.run({1: ended.dies(1, [0, 2])})
    ended.check([0, 2])


@pytest.mark.long
def test_a_node_that_died_after_its_close_is_not_waited_for_again() -> None:
    """Its worker had left; then another node goes, to which some of its slices had come."""
    ended = Ended(4)

    def asks_twice(session: Any, optimizer: torch.optim.Optimizer) -> None:
        ended.asks(0)(session, optimizer)
        ended.closed[3].set()
        ended.asks(1)(session, optimizer)

    dies = {0: ended.dies_closed(0, [2]), 1: ended.dies(1, [2, 3])}
    ended.run({**dies, 3: asks_twice})
    ended.check([2, 3])
    assert ended.takeovers[3] <= 2

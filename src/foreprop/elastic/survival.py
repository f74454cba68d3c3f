"""A worker outlives the loss of servers, where workers update: see `core.takeover`.

A lost server's connection ends, or is ended by this side when the server is silent. Then the worker
claims the slices at their next owners, to which it has connections already. The owners say where
each slice goes on, and the worker sends once more what is lost. Training knows nothing of this: an
answer comes a little later.

A worker that has closed its session takes part until the servers end, for others may need what it
has. A server that ends because all workers have left says so. One that says nothing is lost.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from foreprop.config import LOGGER
from foreprop.core.collect import Round
from foreprop.core.frames import CONTROL_PRIORITY, SlicesGoOn, SlicesLost
from foreprop.core.takeover import NOBODY, Claim, Settled, owner_of
from foreprop.core.wire import ROUND_SHIFT, Flag, Header, Kind
from foreprop.elastic.takenover import LIMIT_BYTES, decode_settled
from foreprop.errors import RemoteProtocolError
from foreprop.link.connection import EMPTY, Connection, bounded, nothing

if TYPE_CHECKING:
    from foreprop.path.worker import WorkerEngine

_LOOK_S = 0.01


class _Loss:
    """Of one server, until all its slices have gone on."""

    def __init__(self, server: int, slices: Sequence[int]) -> None:
        self.server = server
        self.since_s = time.monotonic()
        self.waiting = set(slices)
        self.rounds: set[Round] = set()
        self.pushed_again = 0


class Survival:
    """Owns word of where lost servers' slices go on.

    ``nodes`` say by server where it is; who is on ``own_node`` goes with its servers. ``on_lost``
    is told of each.
    """

    kinds = frozenset({Kind.SETTLED, Kind.BYE})

    def __init__(
        self,
        engine: WorkerEngine,
        nodes: Sequence[int],
        own_node: int,
        on_lost: Callable[[int], None],
    ) -> None:
        self._engine = engine
        self._machine = engine.machine
        self._lock = engine.lock
        self._nodes, self._own_node = nodes, own_node
        self._on_lost = on_lost
        self._leaves = False
        """An error has ended its part: the others go on without this worker."""
        self._lost = set[int]()
        self._parted = set[int]()
        """Servers that all have left."""
        self._losses: list[_Loss] = []
        self._rounds: dict[int, Round] = {}
        """Of slices that have been settled: after which round."""
        self._takeovers: list[dict[str, Any]] = []

    def begin_without(self, lost: Sequence[int]) -> None:
        """A newcomer's: these were lost before it came, and it has no connection to them."""
        self._lost.update(lost)
        for server in lost:
            owners = self._next_owners(server)
            self._machine.handle(SlicesLost(server, owners))
            self._machine.handle(SlicesGoOn(dict.fromkeys(owners, (0, 0))))

    # A loss.
    def outlives(self, peer: Connection) -> bool:
        """Whether this worker goes on although a server is gone. In its receiving thread."""
        server = peer.number
        with self._lock:
            if server in self._lost:
                return True
            if self._is_over(server) or self._is_entering() or self._goes_with(server):
                return False
            self._lost.add(server)
            owners = self._next_owners(server)
            if NOBODY in owners.values() or len(self._lost) == len(self._nodes):
                return False
            for slice_ in owners:
                self._rounds.pop(slice_, None)
            self._losses.append(_Loss(server, list(owners)))
            self._engine.executor.dispatch(SlicesLost(server, owners))
            self._claim(owners)
        others = sorted(set(owners.values()))
        LOGGER.warning(
            "rank %d: server %d is gone; its %d slices are to go on at servers %s",
            *(self._engine.rank, server, len(owners), others),
        )
        self._on_lost(server)
        self._end_losses()
        return True

    def cut(self, peer: Connection) -> None:
        """It is silent: nothing more is sent to it."""
        peer.stream.close()

    def undelivered(self, server: int) -> bool:
        """Whether what it has not taken is outlived: its receiving thread follows."""
        self._engine.connections[server].stream.close()
        return not self._is_over(server)

    def _goes_with(self, server: int) -> bool:
        """Whether this worker is on its node, which is going."""
        return 0 <= self._nodes[server] == self._own_node and self._engine.config.join is None

    def _is_entering(self) -> bool:
        """There is nothing yet to claim: what does not begin is to be started again."""
        if self._engine.config.join is not None:
            return not self._engine.steps
        return not self._engine.has_joined

    def _is_over(self, server: int) -> bool:
        """Whether it ends with the session, or this worker's part of that does."""
        engine = self._engine
        ended = server in self._parted or self._leaves
        return ended or engine.ending.failed.is_set() or engine.progress.failed

    def _next_owners(self, server: int) -> dict[int, int]:
        """Of the slices that it has now."""
        servers = len(self._nodes)
        return {
            piece.number: owner_of(piece.number, piece.server, servers, self._lost)
            for piece in self._engine.slices
            if self._machine.owner_of(piece.number) == server
        }

    def _claim(self, owners: dict[int, int]) -> None:
        by_owner: defaultdict[int, list[Claim]] = defaultdict(list)
        for slice_, owner in owners.items():
            by_owner[owner].append(Claim(slice_, *self._machine.claim(slice_)))
        for owner, claims in by_owner.items():
            data = msgspec.json.encode(claims)
            self._engine.executor.send(owner, Kind.CLAIM, 0, CONTROL_PRIORITY, 0, data)

    # Going on.
    def room(self, peer: Connection, header: Header) -> memoryview:
        return nothing(header) if header.kind == Kind.BYE else bounded(header, LIMIT_BYTES)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.BYE:
            self._parted.add(peer.number)
            return
        settled = decode_settled(payload)
        with self._lock:
            for each in settled:
                known = each.slice < len(self._engine.slices)
                if not known or self._machine.owner_of(each.slice) != peer.number:
                    raise RemoteProtocolError(f"server {peer.number} settled slice {each.slice}")
            self._go_on(peer.number, settled)
        self._end_losses()

    def _go_on(self, owner: int, settled: Sequence[Settled]) -> None:
        """What is to be given first: no push overtakes it."""
        engine = self._engine
        for each in settled:
            if each.giver == engine.rank:
                is_empty = self._machine.was_unchanged(each.slice)
                data = EMPTY if is_empty else engine.memory.landed(each.slice)
                flags = each.again << ROUND_SHIFT | (Flag.UNCHANGED if is_empty else 0)
                about = (owner, Kind.TAKEN_OVER, each.step, CONTROL_PRIORITY, each.slice)
                engine.executor.send(*about, data, flags)
        rounds = {
            each.slice: each.round for each in settled if self._rounds.get(each.slice) != each.round
        }
        self._rounds |= rounds
        for loss in self._losses:
            its = loss.waiting & rounds.keys()
            loss.waiting -= its
            loss.rounds |= {rounds[slice_] for slice_ in its}
            loss.pushed_again += sum(self._machine.is_lost(n, rounds[n]) for n in its)
        engine.executor.dispatch(SlicesGoOn(rounds))

    def _end_losses(self) -> None:
        with self._lock:
            ended = [loss for loss in self._losses if not loss.waiting]
            self._losses = [loss for loss in self._losses if loss.waiting]
        for loss in ended:
            took_s = time.monotonic() - loss.since_s
            self._takeovers.append(
                {
                    "server": loss.server,
                    "lost_node": self._nodes[loss.server],
                    "steps": sorted({step for step, _ in loss.rounds}),
                    "pushed_again": loss.pushed_again,
                    "seconds": took_s,
                }
            )
            LOGGER.warning(
                "rank %d: the slices of server %d have gone on after %.2f s; %d pushes were sent"
                " again",
                *(self._engine.rank, loss.server, took_s, loss.pushed_again),
            )

    def close(self, *, failure: BaseException | None) -> None:
        """In the engine's place: see `path.ending`."""
        if failure is not None or self._engine.progress.failed:
            self._leaves = True
        else:
            self._await_takeovers()
        self._engine.close(failure=failure)

    def _await_takeovers(self) -> None:
        """For at most ``step_timeout_s``: until then this rank may still be owed something."""
        deadline = time.monotonic() + self._engine.config.step_timeout_s
        while self._losses and not self._engine.progress.failed and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def stats(self) -> dict[str, Any]:
        """For `Session.stats`."""
        with self._lock:
            return {"takeovers": [dict(each) for each in self._takeovers]}

"""A worker outlives the loss of servers, where workers update: see `core.takeover`.

A lost server's connection ends, or is ended by this side when the server is silent. Then the worker
claims the slices at their next owners, to which it has connections already. The owners say at which
round each slice goes on, and the worker sends once more what is lost. Training knows nothing of
this: an answer comes a little later.

A worker does not outlive a server of its own node, for the node is going, nor one that it loses
before training has begun: what does not begin is to be started again.

A worker that has closed its session takes part until the servers end, for others may need what it
has. A server that ends because all workers have left says goodbye. One that says nothing is lost.

Slices also move while the session trains. A plan goes to all servers, and each passes it on to all
members. Who hears of it for the first time sends it to all servers, too: so all hear of it if
anybody goes on who has (`core.takeover`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from foreprop.config import LOGGER
from foreprop.core.frames import CONTROL_PRIORITY, Round, SlicesGoOn, SlicesLost
from foreprop.core.takeover import NOBODY, Claim, MovePlan, MoveState, Settled, owner_of
from foreprop.core.wire import ROUND_SHIFT, Flag, Header, Kind
from foreprop.engine.connection import EMPTY, BoundedService, Connection, bounded, nothing
from foreprop.engine.ending import Losses
from foreprop.engine.worker import WorkerEngine
from foreprop.errors import RemoteProtocolError
from foreprop.features.members.messages import (
    CLAIMS_LIMIT_BYTES,
    LIMIT_BYTES,
    decode_plan,
    decode_settled,
)

_LOOK_S = 0.01


class _Loss:
    """The loss of one server, until all its slices have gone on, which are ``waiting``."""

    def __init__(self, server: int, slices: Sequence[int]) -> None:
        self.server = server
        self.since_s = time.monotonic()
        self.waiting = set(slices)
        self.rounds: set[Round] = set()
        self.pushed_again = 0


class Survival(Losses):
    """Claims lost servers' slices, and has them go on where their new owners say.

    ``nodes`` has each server's node. ``on_lost`` is called with each server that is lost.
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
        self._leaves = False  # after an error: the others go on without this worker
        self._lost = set[int]()
        self._finished = set[int]()  # servers that have said goodbye
        self.moves = [0] * len(engine.slices)  # how many moves each slice has made
        self._losses: list[_Loss] = []
        self._rounds: dict[int, Round] = {}  # after which slices have been settled
        # the number of steps that the session had made when these servers began
        self.steps_before = 0
        self._takeovers: list[dict[str, Any]] = []

    def begin_without(self, lost: Sequence[int]) -> None:
        """Begin as a newcomer that has no connection to servers lost before it came."""
        self._lost.update(lost)
        for server in lost:
            owners = self._next_owners(server)
            self._machine.handle(SlicesLost(server, owners))
            self._machine.handle(SlicesGoOn(dict.fromkeys(owners, (0, 0))))

    def begin_after(self, moves: Sequence[int]) -> None:
        """Begin as a newcomer when each slice has made so many moves. With the lock held."""
        self.moves = list(moves)
        owners = self._moved(range(len(moves)))
        self._engine.executor.dispatch(SlicesLost(None, owners))
        self._engine.executor.dispatch(SlicesGoOn(dict.fromkeys(owners, (0, 0))))

    # A move.
    def move(self, slices: Iterable[int]) -> None:
        """Move each slice to the next server in its order; all pushes have been answered."""
        with self._lock:
            for slice_ in slices:
                self.moves[slice_] += 1
            owners = self._moved(slices)
            for slice_ in owners:
                self._rounds.pop(slice_, None)
            self._engine.executor.dispatch(SlicesLost(None, owners))
            self._claim(owners, self._engine.steps + 1)

    def _moved(self, slices: Iterable[int]) -> dict[int, int]:
        """The new owners of the slices that another server is to have."""
        owners = {slice_: self._owner_of(slice_) for slice_ in slices}
        return {n: owner for n, owner in owners.items() if owner != self._machine.owner_of(n)}

    # A loss.
    def outlives(self, peer: Connection) -> bool:
        """Whether this worker goes on although a server is gone. In its receiving thread."""
        server, engine = peer.number, self._engine
        is_newcomer = engine.config.join is not None
        with self._lock:
            if server in self._lost:
                return True
            # not if the session is over, if its start is still under way, or this node is going
            if self._is_over(server):
                return False
            has_begun = engine.steps if is_newcomer else engine.has_joined
            if not has_begun or (not is_newcomer and engine.begins_with(server)):
                return False
            if 0 <= self._nodes[server] == self._own_node and not is_newcomer:
                return False
            self._lost.add(server)
            owners = self._next_owners(server)
            if NOBODY in owners.values() or len(self._lost) == len(self._nodes):
                return False
            for slice_ in owners:
                self._rounds.pop(slice_, None)
            self._losses.append(_Loss(server, list(owners)))
            engine.executor.dispatch(SlicesLost(server, owners))
            self._claim(owners)
        others = sorted(set(owners.values()))
        LOGGER.warning(
            "rank %d: server %d is gone; its %d slices are to go on at servers %s",
            *(engine.rank, server, len(owners), others),
        )
        self._on_lost(server)
        self._end_losses()
        return True

    @property
    def lost(self) -> frozenset[int]:
        """The servers that are lost. Any thread."""
        with self._lock:
            return frozenset(self._lost)

    def cut(self, peer: Connection) -> None:
        peer.stream.close()

    def undelivered(self, server: int) -> bool:
        """Whether the loss of frames that a server has not taken is outlived.

        The server's receiving thread will notice that the connection has ended.
        """
        self._engine.connections[server].stream.close()
        return not self._is_over(server)

    def _is_over(self, server: int) -> bool:
        """Whether the server ends with the session, or this worker's part in it has ended."""
        engine = self._engine
        ended = server in self._finished or self._leaves
        return ended or engine.ending.failed.is_set() or engine.progress.failed

    def _next_owners(self, server: int) -> dict[int, int]:
        return {
            piece.number: self._owner_of(piece.number)
            for piece in self._engine.slices
            if self._machine.owner_of(piece.number) == server
        }

    def _owner_of(self, slice_: int) -> int:
        home, servers = self._engine.slices[slice_].server, len(self._nodes)
        return owner_of(slice_, home, servers, self._lost, self.moves[slice_])

    def _claim(self, owners: dict[int, int], first: int = 0) -> None:
        """Claim slices at their owners; they move before step ``first``, or are lost if it is 0."""
        by_owner: defaultdict[int, list[Claim]] = defaultdict(list)
        for slice_, owner in owners.items():
            by_owner[owner].append(Claim(slice_, *self._machine.claim(slice_)))
        for owner, claims in by_owner.items():
            data = msgspec.json.encode(claims)
            self._engine.executor.send(owner, Kind.CLAIM, first, CONTROL_PRIORITY, 0, data)

    # Going on.
    def room(self, peer: Connection, header: Header) -> memoryview:
        return nothing(header) if header.kind == Kind.BYE else bounded(header, CLAIMS_LIMIT_BYTES)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.BYE:
            self._finished.add(peer.number)
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
        engine, kind = self._engine, Kind.TAKEN_OVER
        for each in settled:  # first of all, so that no push overtakes it
            if each.giver == engine.rank:
                is_empty = self._machine.was_unchanged(each.slice)
                data = EMPTY if is_empty else engine.memory.landed(each.slice)
                flags = each.again << ROUND_SHIFT | (Flag.UNCHANGED if is_empty else 0)
                step, number = each.step, each.slice
                engine.executor.send(owner, kind, step, CONTROL_PRIORITY, number, data, flags)
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
                    "steps": sorted({self.steps_before + step for step, _ in loss.rounds}),
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
        """Close in the engine's place: see `engine.ending`."""
        engine = self._engine
        if failure is not None or engine.progress.failed:
            self._leaves = True
        else:  # wait for takeovers, whose slices may still owe this rank an answer
            deadline = time.monotonic() + engine.config.step_timeout_s
            progress = self._engine.progress
            while self._losses and not progress.failed and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
        engine.close(failure=failure)

    def stats(self) -> dict[str, Any]:
        with self._lock:
            return {"takeovers": [dict(each) for each in self._takeovers]}


class Moves(BoundedService):
    """Receives plans on a worker, and makes their moves.

    Methods are called by the training thread, unless they say otherwise.
    """

    kinds = frozenset({Kind.MOVES})
    limit_bytes = LIMIT_BYTES

    def __init__(self, engine: WorkerEngine, survival: Survival) -> None:
        self.survival = survival
        self._engine = engine
        self._slices = len(engine.slices)
        self._known: set[MovePlan] = set()
        self._wanted = [0] * self._slices  # how many moves each slice is to have made
        self._is_moving = False
        self.is_told = engine.config.join is None
        """Whether this rank knows where slices are: a newcomer has to be told."""

    def tell(self, plan: MovePlan) -> None:
        """Send a plan that is new to all servers. Any thread."""
        with self._engine.lock:
            if plan in self._known:
                return
            self._known.add(plan)
        data = msgspec.json.encode(plan)
        self._engine.send_to_all(Kind.MOVES, plan.first, CONTROL_PRIORITY, data)

    # In receiving threads.
    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        self.tell(decode_plan(payload, self._slices))

    def begin_with(self, state: MoveState) -> None:
        """Begin as a newcomer with the others' moves before its first step."""
        if not len(state.made) == len(state.wanted) == self._slices:
            raise RemoteProtocolError(f"{len(state.made)} moves of {self._slices} slices")
        with self._engine.lock:
            self._known |= set(state.plans)
            self._wanted, self._is_moving = list(state.wanted), True
            self.survival.begin_after(state.made)
            self.is_told = True

    # Between two steps.
    def state(self) -> MoveState:
        with self._engine.lock:
            plans = sorted(plan for plan in self._known if plan.first > self._engine.steps)
        return MoveState(tuple(self.survival.moves), tuple(self._wanted), tuple(plans))

    def begin_step(self, step: int) -> bool:
        """Make the moves that are due; returns whether links are to be measured before the step."""
        if not (self._known or self._is_moving):
            return False
        with self._engine.lock:
            due = sorted(plan for plan in self._known if plan.first == step)
        for plan in due:
            self._wanted = list(plan.moves or self._wanted)
        if due or self._is_moving:
            made = self.survival.moves
            moving = [n for n, wanted in enumerate(self._wanted) if made[n] < wanted]
            self._is_moving = bool(moving)
            if moving:
                self.await_answers()
                self.survival.move(moving)
        return any(not plan.moves for plan in due)

    def await_answers(self) -> None:
        engine = self._engine
        numbers = range(len(engine.parameters))
        engine.progress.wait_until(
            lambda: all(map(engine.machine.is_complete, numbers)),
            engine.config.step_timeout_s,
            lambda: f"the answers of step {engine.steps}, after which slices move",
        )

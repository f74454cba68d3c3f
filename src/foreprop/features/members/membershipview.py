"""The membership view of a worker: who takes part from when on, as servers tell it.

Dealing an epoch asks for it. `core.dealing` says why every worker is certain to know of one that
has left within step s when s + 2 steps are done, and `core.newcomers` of one that joins. A change
holds when all servers with slices have said it (`core.membershipwords`). Where servers are beside
workers, the one that goes with the worker's node is not asked, for only some would hear it.

A newcomer also needs to know what was said before it came, and where the others' loaders are: its
*positions*. Members send them when they have ended the step before the newcomer's first one. Until
they have come, whoever asks the view waits.

Servers' notices come in receiving threads. Methods are called between two steps by the thread that
trains, unless they say "any thread".
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from foreprop.config import LOGGER
from foreprop.core.dealing import MemberChange, PassProgress
from foreprop.core.frames import CONTROL_PRIORITY
from foreprop.core.membershipwords import MembershipWord, MembershipWords
from foreprop.core.wire import Flag, Header, Kind
from foreprop.engine.connection import BoundedService, Connection, Service
from foreprop.engine.worker import WorkerEngine
from foreprop.engine.world import Partings, World
from foreprop.errors import ForepropError, RemoteProtocolError
from foreprop.features.members.messages import (
    LIMIT_BYTES,
    Arrival,
    Departure,
    PassPosition,
    Positions,
    decode_arrival,
    decode_departure,
    decode_positions,
)
from foreprop.features.members.planemembers import await_heard
from foreprop.features.members.statetransfer import GivenBlobs, GivenModel
from foreprop.features.members.survival import Moves
from foreprop.params.modelhooks import ModelBuffers

_NO_STEP = -1
LoaderPosition = Callable[[], tuple[int, PassProgress | None] | None]
"""Says at which epoch a loader is, and how far in its pass; or None, if nobody knows."""


class MembershipView:
    """The members of one session, as a worker knows them; the training thread makes it.

    ``workers_per_node`` have a server beside them; with None servers are dedicated.
    """

    def __init__(self, engine: WorkerEngine, workers_per_node: int | None) -> None:
        self.on_membership: list[Callable[[MemberChange, Sequence[int]], object]] = []
        """Called with each change of the members once it is known, and with who is here then.
        In a receiving thread, without a lock."""
        self.rank, self.workers = engine.rank, engine.manifest.most_workers
        self.started = engine.manifest.world_size
        """The number of ranks at the start; ``workers`` are all that there may be."""
        self.is_newcomer = engine.config.join is not None
        self.on_end: list[Callable[[Sequence[int]], object]] = []
        """Called before this member ends the session, with others' first steps that it does not
        make."""
        # what gives newcomers all that they need beside positions
        self.givers: list[GivenBlobs | GivenModel] = []
        self.moves: Moves | None = None  # where slices may move, what moves them
        self._ended = False
        self._thread = threading.get_ident()
        self._engine = engine
        self._words = MembershipWords(
            frozenset(piece.server for piece in engine.slices),
            workers_per_node=workers_per_node,
            absent=frozenset(range(self.started, self.workers)),
        )
        self._words.waits = self.is_newcomer
        self._loaders: dict[int, weakref.WeakMethod[LoaderPosition]] = {}
        self._positions: dict[int, PassPosition] = {}  # the others', at a newcomer's first step

    # Servers' notices, in receiving threads.
    def hear_left(self, rank: int, server: int, step: int) -> None:
        """Note that a server says: a worker has left, and pushed this step last."""
        self._hear(rank, server, MembershipWord(joins=False, step=step))

    def hear_joined(self, rank: int, server: int, step: int) -> None:
        """Note that a server says: a worker takes part from this step on."""
        self._hear(rank, server, MembershipWord(joins=True, step=step))
        if self._ended and rank != self.rank and step > self.done:
            with contextlib.suppress(ForepropError):  # the session is over; closing says so
                self._give_at_the_end([(rank, step)])

    def lose_server(self, server: int) -> None:
        with self._engine.lock:
            changes = self._words.lose(server)
        self._announce(changes)

    def _hear(self, rank: int, server: int, word: MembershipWord) -> None:
        with self._engine.lock:
            changes = self._words.hear(rank, server, word)
        self._announce(changes)

    def _announce(self, changes: Sequence[MemberChange]) -> None:
        self._engine.progress.notify()
        for change in changes:
            for function in self.on_membership:
                function(change, self.members)

    def replay(self, changes: Sequence[MemberChange]) -> None:
        """Know from the start all changes that there will be, as a replayed log has them."""
        self._words.changes = list(changes)
        self._words.gone = {change.rank for change in changes}

    @property
    def members(self) -> list[int]:
        """The members after all changes that are known."""
        return [rank for rank in range(self.workers) if rank not in self._words.gone]

    # Questions.
    @property
    def done(self) -> int:
        return self._engine.steps

    @property
    def is_training_thread(self) -> bool:
        """Whether ``done`` stands still while the caller looks at it."""
        return threading.get_ident() == self._thread

    def changes(self) -> list[MemberChange]:
        """All changes of members that this rank knows, with each `MemberChange.is_certain`.

        Waits for what some server has still to say of a worker, where it could matter already.
        Raises what has ended the session meanwhile.
        """

        def partly_known() -> list[int]:
            with self._engine.lock:
                return self._words.partly(self.done)

        self._await_positions()
        if partly_known():
            self._engine.progress.wait_until(
                lambda: not partly_known(),
                self._engine.config.step_timeout_s,
                lambda: f"all servers to tell who has left; some have told of {partly_known()}",
            )
        return self.known()

    def known(self) -> list[MemberChange]:
        """All changes of members that this rank knows at this moment. Any thread."""
        with self._engine.lock:
            return list(self._words.changes)

    def present(self, step: int) -> list[int]:
        """The ranks that have taken part in this step, as far as is known. Any thread."""
        with self._engine.lock:
            changes, gone = list(self._words.changes), set(self._words.gone)
        since = {each.rank: each.step for each in changes if each.joins}
        here = (rank for rank in range(self.workers) if rank not in gone)
        return [rank for rank in here if since.get(rank, 0) <= step]

    def left_before(self, step: int) -> list[int]:
        """The ranks that have left and pushed nothing of this step. Any thread."""
        with self._engine.lock:
            changes, gone = list(self._words.changes), set(self._words.gone)
        within = {each.rank: each.step for each in changes if not each.joins}
        return [rank for rank in sorted(gone) if within.get(rank, 0) < step]

    def is_settled(self) -> bool:
        """Whether all servers have said what any has said. Any thread."""
        with self._engine.lock:
            return not self._words.partly(sys.maxsize)

    def coming(self) -> list[int]:
        """The next step, if somebody joins at it, in a list."""
        with self._engine.lock:
            steps = {step for _, step in self._words.joining()}
        return sorted(steps & {self.done + 1})

    # What newcomers get.
    def keep_loader(self, number: int, position: LoaderPosition) -> None:
        """Ask a loader for its position by this bound method, which is not kept alive for it."""
        self._loaders[number] = weakref.WeakMethod(position)

    def end_step(self, done: int) -> None:
        """Give to the newcomers of the next step."""
        await_heard(self._engine)
        with self._engine.lock:
            coming = [(rank, step) for rank, step in self._words.joining() if step == done + 1]
        self._send_positions(coming)
        for giver in self.givers:
            giver.end_step(done)

    def end(self) -> None:
        """Give to newcomers of later steps, too: this member ends the session before them."""
        await_heard(self._engine)
        with self._engine.lock:
            coming = [(rank, step) for rank, step in self._words.joining() if step > self.done + 1]
            self._ended = True  # from now on a newcomer is given to when it is heard of
        self._give_at_the_end(coming)

    def _give_at_the_end(self, coming: Sequence[tuple[int, int]]) -> None:
        self._send_positions(coming)
        firsts = sorted({step for _, step in coming})
        for giver in self.givers:
            giver.end(firsts)
        for function in self.on_end if firsts else ():
            function(firsts)

    def _send_positions(self, coming: Sequence[tuple[int, int]]) -> None:
        """Send all loaders' positions to newcomers, given by their ranks and first steps."""
        if not coming:
            return
        with self._engine.lock:
            said = {
                str(rank): {str(server): list(words) for server, words in by_server.items()}
                for rank, by_server in self._words.said.items()
            }
        loaders = []
        for number, reference in self._loaders.items():
            position = reference()
            if position is not None and (found := position()) is not None:
                loaders.append(PassPosition(number, *found))
        moves = None if self.moves is None else self.moves.state()
        data = msgspec.json.encode(Positions(tuple(loaders), said, moves))
        send, kind = self._engine.send_message, Kind.POSITIONS
        for rank, step in coming:
            for server in range(len(self._engine.connections)):
                send(server, kind, step, CONTROL_PRIORITY, data, slice_=rank)

    # What this newcomer gets.
    def hear_positions(self, positions: Positions) -> None:
        """Begin with members' positions; the first ones count. A receiving thread."""
        with self._engine.lock:
            if not self._words.waits:
                return
            self._positions = {each.loader: each for each in positions.loaders}
            self._words.begin_with(positions.words())
        if self.moves is not None and positions.moves is not None:
            self.moves.begin_with(positions.moves)
        self._engine.progress.notify()

    def position_of(self, loader: int) -> PassPosition | None:
        """Where the others' loader was at this newcomer's first step; None if it was not read.

        Waits until the others have ended the step before.
        """
        self._await_positions()
        return self._positions.get(loader)

    def _await_positions(self) -> None:
        if self._words.waits:
            self._engine.progress.wait_until(
                lambda: not self._words.waits,
                self._engine.config.step_timeout_s,
                lambda: f"a member to tell where its loaders are, after step {self.done}",
            )


_newest: weakref.WeakKeyDictionary[Partings, weakref.ref[MembershipView]] = (
    weakref.WeakKeyDictionary()
)


def keep_view(world: World, view: MembershipView) -> None:
    _newest[world.partings] = weakref.ref(view)


def maybe_view(world: World) -> MembershipView | None:
    """The view of this world's newest elastic session; None if it has ended, or never was."""
    found = _newest.get(world.partings)
    return None if found is None else found()


class MemberNotices(BoundedService):
    """Receives a worker's notices of who has left and who has joined, with newcomers' positions.

    It counts who is here by the first notice of any server; the view, when all have sent theirs.
    """

    kinds = frozenset({Kind.LEFT, Kind.JOINED, Kind.POSITIONS})
    limit_bytes = LIMIT_BYTES

    def __init__(self, engine: WorkerEngine, workers_per_node: int | None) -> None:
        self.arrivals: dict[int, dict[int, Arrival]] = {}
        """The last arrival in each server's notices, by rank and server."""
        self._engine = engine
        self._started, self._most = engine.manifest.world_size, engine.manifest.most_workers
        self._departures: dict[int, dict[int, Departure]] = {}  # as `arrivals`
        # the step within which each absent rank has left, as far as is known; 0: before the start
        self._left_within = dict.fromkeys(range(self._started, self._most), 0)
        self.view = MembershipView(engine, workers_per_node)
        self.given: GivenBlobs | None = None
        self.steps_before = 0
        """The number of steps that the session had made when these servers began."""
        self.model: GivenModel | None = None

    def end(self) -> None:
        """Give to newcomers, for the last time, before this member says goodbye."""
        with contextlib.suppress(ForepropError):  # the session is over; closing says so
            self.view.end()

    def give(self, buffers: ModelBuffers, frozen: Sequence[torch.Tensor]) -> None:
        self.given = GivenBlobs(self._engine, self.first_steps, buffers, frozen)
        self.view.givers.append(self.given)

    def give_model(self, model: GivenModel) -> None:
        self.model = model
        self.view.givers.append(model)

    def first_steps(self) -> dict[int, int]:
        """The first steps of those who are here, by rank; 0 if they were here at the start."""
        joined = self.joined()
        return {rank: joined.get(rank, 0) for rank in self.members}

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.JOINED:
            self._on_arrival(peer.number, decode_arrival(payload))
        elif header.kind == Kind.POSITIONS:
            self.view.hear_positions(decode_positions(payload, self._most))
        else:
            self._on_departure(peer.number, decode_departure(payload))

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self._most:
            raise RemoteProtocolError(f"word of rank {rank} of {self._most}")

    def _on_departure(self, server: int, departure: Departure) -> None:
        rank, step = departure.rank, departure.step
        self._check_rank(rank)
        self.view.hear_left(rank, server, step)
        with self._engine.lock:
            is_first = rank not in self._left_within
            by_server = self._departures.setdefault(rank, {})
            if step < self._joined_at(rank) - 1:  # a slow server's, of before it joined again
                if is_first:
                    by_server[server] = departure
                return
            if is_first:
                by_server.clear()
            by_server[server] = departure
            self._left_within[rank] = max(self._left_within.get(rank, -1), step)
            members = self.members
        if not is_first:
            return
        for giver in self.view.givers:
            giver.hear_left(rank)
        if members[:1] == [self._engine.rank]:
            LOGGER.warning(
                "rank %d has left within step %d: %s; %d of %d workers are left",
                *(rank, self.steps_before + step, departure.reason),
                *(len(members), self._ever),
            )

    def _on_arrival(self, server: int, arrival: Arrival) -> None:
        rank, step = arrival.rank, arrival.step
        self._check_rank(rank)
        with self._engine.lock:
            by_server = self.arrivals.setdefault(rank, {})
            before = self._joined_at(rank)
            if step < before:
                return
            if step > before:
                by_server.clear()
                self._left_within.pop(rank, None)
            by_server[server] = arrival
            if rank == self._engine.rank:
                for other in set(arrival.members) - self._departures.keys():
                    self._left_within.pop(other, None)  # it has joined before this one
                known = {*arrival.members, *self.arrivals, *self._left_within}
                self._left_within |= {n: 0 for n in range(self._most) if n not in known}
            members = self.members
        self._engine.progress.notify()
        self.view.hear_joined(rank, server, step)
        for giver in self.view.givers:
            giver.hear_joined(rank, server, step)
        others = [member for member in members if member != rank]
        if step > before and self._engine.rank == min(others, default=rank):
            LOGGER.warning(
                "rank %d has joined, and counts from step %d on; %d of %d workers are here",
                *(rank, self.steps_before + step, len(members), self._ever),
            )

    def joined(self) -> dict[int, int]:
        """The first steps of all that joined later, by rank."""
        return {rank: self._joined_at(rank) for rank in list(self.arrivals)}

    def _joined_at(self, rank: int) -> int:
        return max((each.step for each in self.arrivals.get(rank, {}).values()), default=0)

    @property
    def members(self) -> list[int]:
        return [rank for rank in range(self._most) if rank not in self._left_within]

    @property
    def _ever(self) -> int:
        """How many ranks have been here, as far as is known."""
        return len({*range(self._started), *self.arrivals, *self.members})

    @property
    def gone(self) -> list[int]:
        """The ranks of which some server has said that they left. Any thread."""
        with self._engine.lock:
            return sorted(self._departures)

    def stats(self) -> dict[str, Any]:
        """What `Session.stats` has of members: see docs/elastic.md."""
        with self._engine.lock:
            departures = {rank: list(each.values()) for rank, each in self._departures.items()}
            before, members = self.steps_before, self.members
            joined = {rank: before + step for rank, step in self.joined().items()}
        left = {}
        for rank, by_server in departures.items():
            step = max(each.step for each in by_server)
            left[rank] = {
                "step": before + step,
                "counted_slices": sum(each.counted for each in by_server if each.step == step),
                "slices": sum(each.slices for each in by_server),
                "reason": by_server[0].reason,
            }
        return {"members": members, "left": left, "joined": joined}


class LatePushes:
    """Receives values of slices and rows on a worker that may be a backup, and finds newer ones.

    A worker that gets values of a later step than it has pushed holds parameters of two steps. So
    its next gradients must not count (`core.firstmembers`). ``receivers`` take the values then.
    """

    kinds = frozenset({Kind.REPLY, Kind.ROWS_REPLY})

    def __init__(self, engine: WorkerEngine, receivers: Mapping[int, Service]) -> None:
        self._inner = {int(kind): receivers[kind] for kind in self.kinds}
        self._lock = engine.lock
        self._newer_than = _NO_STEP  # the last step to which an answer was newer
        self.late_slices = 0  # how many answers were of a later step than was pushed
        self.late_steps = 0  # how many steps' pushes were not to count for that
        self._counted_step = 0

    def flags_of(self, step: int) -> int:
        """The flags that all pushes of a step have beside their own."""
        if step != self._newer_than + 1:
            return 0
        if self._counted_step != step:
            self._counted_step = step
            self.late_steps += 1
        return int(Flag.LATE)

    def room(self, peer: Connection, header: Header) -> memoryview:
        return self._inner[header.kind].room(peer, header)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.REPLY and header.step == 0:
            self._newer_than = _NO_STEP  # all values are read anew
        elif header.flags & Flag.LATE:
            with self._lock:
                self._newer_than = max(self._newer_than, header.step)
                self.late_slices += 1
        self._inner[header.kind].on_frame(peer, header, payload)

    def stats(self) -> dict[str, Any]:
        return {"late_slices": self.late_slices, "late_steps": self.late_steps}

"""Who takes part from when on, as all survivors come to know it: what dealing an epoch asks.

`core.dealing` says why everybody is certain to know of a worker that has left within step s when
s + 2 steps are done, and `core.newcomers` of one that joins. All servers must have told that hold
slices (`core.membershipwords`). Where servers are beside workers, the one that goes with the
worker's node is not asked, for only some would hear it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Sequence

import msgspec

from foreprop.cluster.world import Partings, World
from foreprop.core.dealing import MemberChange, PassProgress
from foreprop.core.frames import CONTROL_PRIORITY
from foreprop.core.membershipwords import MembershipWord, MembershipWords
from foreprop.core.wire import Kind
from foreprop.elastic.givenmodel import GivenModel
from foreprop.elastic.memberblobs import GivenBlobs
from foreprop.elastic.positions import PassPosition, Positions
from foreprop.errors import ForepropError
from foreprop.path.worker import WorkerEngine

Where = Callable[[], tuple[int, PassProgress | None] | None]
"""A loader's: the epoch of its pass, or of its next one, and how far that is; None: nobody knows.
"""


class Attendance:
    """Of one session, on a worker; made by the thread that trains."""

    def __init__(self, engine: WorkerEngine, workers_per_node: int | None) -> None:
        """``workers_per_node``: that have a server beside them; None: servers are dedicated."""
        self.on_membership: list[Callable[[MemberChange, Sequence[int]], object]] = []
        """Told of each change of the members once it is known, and who is here then.
        In a receiving thread, without a lock."""
        self.rank, self.workers = engine.rank, engine.manifest.most_workers
        self.started = engine.manifest.world_size
        """Ranks of the start; ``workers`` are all that there may be."""
        self.is_newcomer = engine.config.join is not None
        self.on_end: list[Callable[[Sequence[int]], object]] = []
        """Told, before this member ends the session, of others' first steps that it does not make.
        """
        self.gives: list[GivenBlobs | GivenModel] = []
        """What this rank has for newcomers beside positions."""
        self._ended = False
        self._thread = threading.get_ident()
        self._engine = engine
        self._words = MembershipWords(
            frozenset(piece.server for piece in engine.slices),
            workers_per_node=workers_per_node,
            absent=frozenset(range(self.started, self.workers)),
        )
        self._words.waits = self.is_newcomer
        self._loaders: dict[int, weakref.WeakMethod[Where]] = {}
        self._positions: dict[int, PassPosition] = {}
        """For a newcomer: the others' at its first step."""

    # Hearing of it, in receiving threads.
    def hear_left(self, rank: int, server: int, step: int) -> None:
        """A server has told that a worker has left; ``step``: the last one that it has pushed."""
        self._hear(rank, server, MembershipWord(joins=False, step=step))

    def hear_joined(self, rank: int, server: int, step: int) -> None:
        """A server has told that a worker takes part from this step on."""
        self._hear(rank, server, MembershipWord(joins=True, step=step))
        if self._ended and rank != self.rank and step > self.done:
            with contextlib.suppress(ForepropError):  # the session is over; closing says so
                self._tell_at_the_end([(rank, step)])

    def lose_server(self, server: int) -> None:
        with self._engine.lock:
            news = self._words.lose(server)
        self._tell_of(news)

    def _hear(self, rank: int, server: int, word: MembershipWord) -> None:
        with self._engine.lock:
            news = self._words.hear(rank, server, word)
        self._tell_of(news)

    def _tell_of(self, news: Sequence[MemberChange]) -> None:
        self._engine.progress.notify()
        for change in news:
            for function in self.on_membership:
                function(change, self.members)

    def replay(self, changes: Sequence[MemberChange]) -> None:
        """Of a session that is run again by its log: all that there will be. At the start."""
        self._words.changes = list(changes)
        self._words.gone = {change.rank for change in changes}

    @property
    def members(self) -> list[int]:
        """After all changes that are known."""
        return [rank for rank in range(self.workers) if rank not in self._words.gone]

    # Asking. Between two steps.
    @property
    def done(self) -> int:
        """Steps that this rank has done."""
        return self._engine.steps

    @property
    def is_training_thread(self) -> bool:
        """Whether ``done`` stands still while the caller looks at it."""
        return threading.get_ident() == self._thread

    def changes(self) -> list[MemberChange]:
        """Of the members, that this rank knows of: all of `MemberChange.is_certain` among them.

        Waits for what some server has still to tell of a worker, where it could matter already.
        Raises what has ended the session meanwhile.
        """
        self._await_positions()
        if self._partly():
            self._engine.progress.wait_until(
                lambda: not self._partly(),
                self._engine.config.step_timeout_s,
                lambda: f"all servers to tell who has left; some have told of {self._partly()}",
            )
        return self.known()

    def known(self) -> list[MemberChange]:
        """All that this rank knows of at this moment. Any thread."""
        with self._engine.lock:
            return list(self._words.changes)

    def present(self, step: int) -> list[int]:
        """Who has taken part in this step, as far as is known. Any thread."""
        with self._engine.lock:
            changes, gone = list(self._words.changes), set(self._words.gone)
        since = {each.rank: each.step for each in changes if each.joins}
        here = (rank for rank in range(self.workers) if rank not in gone)
        return [rank for rank in here if since.get(rank, 0) <= step]

    def behind(self, step: int) -> list[int]:
        """Who has left before it has pushed anything of this step. Any thread."""
        with self._engine.lock:
            changes, gone = list(self._words.changes), set(self._words.gone)
        within = {each.rank: each.step for each in changes if not each.joins}
        return [rank for rank in sorted(gone) if within.get(rank, 0) < step]

    def is_settled(self) -> bool:
        """Whether all servers have told of each that any has told of. Any thread."""
        with self._engine.lock:
            return not self._words.partly(sys.maxsize)

    def coming(self) -> list[int]:
        """The next step, if somebody joins at it. Between two steps."""
        with self._engine.lock:
            steps = {step for _, step in self._words.joining()}
        return sorted(steps & {self.done + 1})

    def _partly(self) -> list[int]:
        with self._engine.lock:
            return self._words.partly(self.done)

    # Where loaders are, when somebody joins.
    def keep_loader(self, number: int, where: Where) -> None:
        """A bound method; it is not kept alive by this."""
        self._loaders[number] = weakref.WeakMethod(where)

    def end_step(self, done: int) -> None:
        """Tell who joins at the next step. Training thread."""
        with self._engine.lock:
            coming = [(rank, step) for rank, step in self._words.joining() if step == done + 1]
        self._tell(coming)
        for gives in self.gives:
            gives.end_step(done)

    def end(self) -> None:
        """This member ends the session: tell who was to join at a step that nobody makes."""
        with self._engine.lock:
            coming = [(rank, step) for rank, step in self._words.joining() if step > self.done + 1]
            self._ended = True  # of who is told of from now on: when that is heard
        self._tell_at_the_end(coming)

    def _tell_at_the_end(self, coming: Sequence[tuple[int, int]]) -> None:
        self._tell(coming)
        firsts = sorted({step for _, step in coming})
        for gives in self.gives:
            gives.end(firsts)
        for function in self.on_end if firsts else ():
            function(firsts)

    def _tell(self, coming: Sequence[tuple[int, int]]) -> None:
        """By rank and first step."""
        if not coming:
            return
        with self._engine.lock:
            said = {
                str(rank): {str(server): list(words) for server, words in by_server.items()}
                for rank, by_server in self._words.said.items()
            }
        loaders = []
        for number, alive in self._loaders.items():
            where = alive()
            if where is not None and (found := where()) is not None:
                loaders.append(PassPosition(number, *found))
        data = msgspec.json.encode(Positions(tuple(loaders), said))
        for rank, step in coming:
            for server in range(len(self._engine.connections)):
                about = (server, Kind.POSITIONS, step, CONTROL_PRIORITY, data)
                self._engine.send_message(*about, slice_=rank)

    def hear_positions(self, told: Positions) -> None:
        """For a newcomer; the first one counts. A receiving thread."""
        with self._engine.lock:
            if not self._words.waits:
                return
            self._positions = {each.loader: each for each in told.loaders}
            self._words.begin_with(told.words())
        self._engine.progress.notify()

    def position_of(self, loader: int) -> PassPosition | None:
        """Where the others' loader was at this newcomer's first step; None if it was not read.

        Waits until they have ended the step before.
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


_newest: weakref.WeakKeyDictionary[Partings, weakref.ref[Attendance]] = weakref.WeakKeyDictionary()
"""By world."""


def keep_attendance(world: World, attendance: Attendance) -> None:
    """For `maybe_attendance`."""
    _newest[world.partings] = weakref.ref(attendance)


def maybe_attendance(world: World) -> Attendance | None:
    """Of the elastic session that this process has made last; None if there is none any more."""
    found = _newest.get(world.partings)
    return None if found is None else found()

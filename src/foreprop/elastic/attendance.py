"""Who takes part from when on, as all survivors come to know it: what dealing an epoch asks.

`core.dealing` says why everybody is certain to know of a worker that has left within step s when
s + 2 steps are done. Its step is the last one that any server has a push of. So all servers must
have told that hold slices: one without any waits for nobody, and tells when it likes. Where servers
are beside workers, the one that goes with the worker's node is not asked, for only some would hear
it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

from foreprop.cluster.world import Partings, World
from foreprop.core.dealing import CERTAIN_STEPS, MemberChange
from foreprop.path.worker import WorkerEngine

_NEVER = 2**62


class Attendance:
    """Of one session, on a worker; made by the thread that trains."""

    def __init__(self, engine: WorkerEngine) -> None:
        self.on_membership: list[Callable[[int, Sequence[int]], object]] = []
        """Told of each change of the members once it is known: its step, and who is here then.
        In a receiving thread, without a lock."""
        self.rank, self.workers = engine.rank, engine.manifest.world_size
        self._thread = threading.get_ident()
        self._engine = engine
        self._beside = engine.manifest.knobs.buddy_steps is not None
        self._holders = {piece.server for piece in engine.slices}
        self._told: dict[int, dict[int, int]] = {}
        """By rank and server: its last step, of those that not all have told of."""
        self._partly = _NEVER
        """The first step that somebody in there has left within, as far as is known."""
        self._gone: set[int] = set()
        self._ever_gone: set[int] = set()
        """Their servers stay away, also when another worker has come."""
        self._changes: list[MemberChange] = []

    # Hearing of it, in receiving threads.
    def hear_left(self, rank: int, server: int, step: int) -> None:
        """A server has told that a worker has left; ``step``: the last one that it has pushed."""
        with self._engine.lock:
            if rank in self._gone:
                return
            self._told.setdefault(rank, {})[server] = step
            known = len(self._changes)
            while (complete := self._maybe_complete()) is not None:
                self._changes.append(MemberChange(complete, self._step_of(complete)))
                self._gone.add(complete)
                self._ever_gone.add(complete)
                del self._told[complete]
            self._partly = min(map(self._step_of, self._told), default=_NEVER)
            news = self._changes[known:]
        self._announce(news)

    def hear_joined(self, rank: int, step: int) -> None:
        """A worker takes part from this step on; all ranks must hear it before it is done."""
        with self._engine.lock:
            change = MemberChange(rank, step, joins=True)
            self._changes.append(change)
            self._gone.discard(rank)
        self._announce([change])

    def _maybe_complete(self) -> int | None:
        """One of whom all have told."""
        return next((r for r in self._told if self._tellers(r) <= self._told[r].keys()), None)

    def replay(self, changes: Sequence[MemberChange]) -> None:
        """Of a session that is run again by its log: all that there will be. At the start."""
        self._changes = list(changes)
        self._gone = {change.rank for change in changes}

    def _announce(self, news: Sequence[MemberChange]) -> None:
        if not news:
            return
        self._engine.progress.notify()
        for change in news:
            for function in self.on_membership:
                function(change.step, self.members)

    def _tellers(self, rank: int) -> set[int]:
        return self._holders - self._ever_gone - {rank} if self._beside else self._holders

    def _step_of(self, rank: int) -> int:
        """The last one that is known to have a push of it."""
        told, tellers = self._told[rank], self._tellers(rank)
        steps = [step for server, step in told.items() if server in tellers or not tellers]
        return max(steps, default=_NEVER)

    @property
    def members(self) -> list[int]:
        """After all changes that are known."""
        return [rank for rank in range(self.workers) if rank not in self._gone]

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
        if self._is_partly_told():
            self._engine.progress.wait_until(
                lambda: not self._is_partly_told(),
                self._engine.config.step_timeout_s,
                lambda: f"all servers to tell who has left; some have told of {[*self._told]}",
            )
        return self.known()

    def known(self) -> list[MemberChange]:
        """All that this rank knows of at this moment. Any thread."""
        with self._engine.lock:
            return list(self._changes)

    def _is_partly_told(self) -> bool:
        return self._partly <= self.done - CERTAIN_STEPS


_newest: weakref.WeakKeyDictionary[Partings, weakref.ref[Attendance]] = weakref.WeakKeyDictionary()
"""By world."""


def keep_attendance(world: World, attendance: Attendance) -> None:
    """For `maybe_attendance`."""
    _newest[world.partings] = weakref.ref(attendance)


def maybe_attendance(world: World) -> Attendance | None:
    """Of the elastic session that this process has made last; None if there is none any more."""
    found = _newest.get(world.partings)
    return None if found is None else found()

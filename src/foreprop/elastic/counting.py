"""What a server is made of that counts not always all workers, and how it goes on without some.

It stands in the place of the usual machine and store (`servers.composed`). A worker whose
connection ends is dropped, and one that pushes nothing while others wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch

from foreprop.config import LOGGER, Config
from foreprop.core.collect import AnswerSlice, DropPush, UpdateSlice
from foreprop.core.firstmembers import FirstMembers
from foreprop.core.frames import CONTROL_PRIORITY, SendFrame
from foreprop.core.manifest import Manifest
from foreprop.core.membership import (
    CountedLog,
    CountedReplay,
    MemberLeft,
    Members,
    PeerDropped,
    is_quorum,
)
from foreprop.core.sendqueue import turns_of
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Slice
from foreprop.core.wire import Flag, Kind
from foreprop.elastic.admission import Admission
from foreprop.elastic.countedfile import CountedFile, read_replay
from foreprop.elastic.departure import Departure
from foreprop.elastic.takenover import TakenOver
from foreprop.errors import Failure, ForepropError, StorageError, failure_of
from foreprop.link.connection import EMPTY, Connection
from foreprop.link.stream import is_refused
from foreprop.path.executor import Doer, Executor
from foreprop.path.slicestore import SliceStore
from foreprop.path.versions import Versions

if TYPE_CHECKING:
    from foreprop.compression.images import CodedSlices

SILENT_SHARE = 0.75
"""Of ``step_timeout_s``: a server drops who is silent before others give up waiting."""
_GOODBYE_S = 1.0
_TOLD_S = 2.0
"""How long a dropped worker may take to be told so."""


class Counting:
    """The machine and store of one server, and who is dropped. See `servers.composed`."""

    def __init__(
        self, manifest: Manifest, slices: Sequence[Slice], index: int, config: Config
    ) -> None:
        knobs, workers, started = manifest.knobs, manifest.most_workers, manifest.world_size
        own = [piece.number for piece in slices if piece.server == index]
        self._manifest = manifest
        self._elastic = knobs.elastic
        self._limit_s = SILENT_SHARE * config.step_timeout_s
        self.members = Members(workers, backups=knobs.backup_workers, started=started)
        replay = _maybe_replay(config, index, workers, own)
        self.machine = ServerMachine(
            slices,
            index=index,
            workers=workers,
            order=knobs.order,
            names=[info.name for info in manifest.parameters],
            turns=turns_of(knobs.lanes, index, started),
            closing=partial(
                FirstMembers,
                members=self.members,
                replay=replay,
                has_values=not manifest.outlives_servers,
            ),
        )
        self._codes: CodedSlices | None = None
        self._index, self._started = index, started
        self.taken_over = TakenOver(slices, index, self) if manifest.outlives_servers else None
        self._slices, self._log_folder = slices, config.counted_log
        log = CountedLog(workers, own, started=started)
        self._logs = dict.fromkeys(own, log)
        """By slice."""
        self._files: dict[CountedLog, CountedFile] = {}
        if config.counted_log is not None:
            self._files[log] = CountedFile(config.counted_log, index, manifest.session, log)
        self._silent: dict[int, tuple[tuple[int, int] | None, float]] = {}
        """Who is awaited: its last push, and since when that is its last."""
        self._leaving: list[tuple[Connection, float]] = []
        """Dropped, and still to be told: when they are given up."""
        self._reasons: dict[int, str] = {}
        self._base = set(self.members.started)
        """Of whom those who go on must be a majority."""
        self._ended: set[int] = set()
        """Whose connections their side has ended."""
        self._dead: set[int] = set()
        """Of these, those whose processes are no more."""
        self.newcomers: set[int] = set()
        """All that have ever joined."""
        self.admission = Admission(manifest, index, self) if self._elastic else None

    def make_store(self, codes: CodedSlices | None) -> SliceStore:
        """``codes``: of slices whose pushes are codes, where workers update."""
        versions = Versions(self._manifest) if self._manifest.knobs.backup_workers else None
        self._codes = codes
        about = (self._manifest, self._slices, self._index)
        self.store = SliceStore(*about, versions=versions, codes=codes)
        return self.store

    def payload_of(self, frame: SendFrame) -> memoryview:
        """Values go with their frame: see `_answer`."""
        return EMPTY

    def begin(
        self,
        executor: Executor,
        connections: Mapping[int, Connection],
        unlike: dict[int, str],
    ) -> None:
        """When `path.slices.Updates` has its part in the executor.

        ``unlike``: newcomers whose hyperparameters are not the others', and in what.
        """
        self._unlike = unlike
        self._executor = executor
        self._lock: threading.RLock = executor.lock
        self.connections = connections
        self._update: Doer = executor.doers[UpdateSlice]
        executor.doers |= {
            UpdateSlice: self._update_counted,
            AnswerSlice: self._answer,
            DropPush: self._drop,
        }
        for service in (self.admission, self.taken_over):
            if service is not None:
                service.begin(executor)

    # Doing.
    def _update_counted(self, due: UpdateSlice) -> Sequence[object] | None:
        with self._lock:
            log = self._logs[due.slice]
            lines = log.note(due.slice, due.step, due.counted or ())
            if lines and log in self._files:
                self._files[log].write(lines)
        return self._update(due)

    def adopt(self, pieces: Sequence[Slice]) -> None:
        """A lost server's: each has a log of its own. With the lock held."""
        if self._codes is not None:
            self._codes.adopt(pieces)
        self.store.adopt(pieces)
        for home in {piece.server for piece in pieces}:
            own = [piece.number for piece in pieces if piece.server == home]
            every = [piece.number for piece in self._slices if piece.server == home]
            log = CountedLog(self.members.workers, every, started=self._started, goes_on=True)
            self._logs |= dict.fromkeys(own, log)
            if self._log_folder is not None:
                session = f"{self._manifest.session}-{home}-{self._index}-{own[0]}"
                self._files[log] = CountedFile(self._log_folder, home, session, log)

    def _answer(self, answer: AnswerSlice) -> None:
        slice_, step, priority, ranks, flags, is_average = answer
        at_step, data = self.store.read(slice_, ranks)
        if 0 < step < at_step:
            flags |= Flag.LATE
        data = EMPTY if flags & Flag.UNCHANGED else data
        if is_average and self._codes is not None and len(data):
            data = self._codes.averages.code(slice_, data)
        for rank in ranks:
            self._executor.send(rank, Kind.REPLY, step, priority, slice_, data, flags)

    def _drop(self, push: DropPush) -> None:
        with self._lock:
            self.store.drop(push.slice, push.rank)

    def _tell(self, left: MemberLeft) -> None:
        """All others."""
        rank, step, counted, slices = left
        reason = self._reasons.get(rank, "")
        with self._lock:
            here, ever = sorted(self.members.here), len(self.members.ever)
        LOGGER.warning(
            "server %d goes on without rank %d, which has left within step %d (%d of %d slices"
            " here count it): %s; %d of %d workers are left",
            *(self._index, rank, step, counted, slices, reason, len(here), ever),
        )
        told = Departure(rank, step, counted, slices, reason)
        data = msgspec.json.encode(told)
        for member in here:
            self._executor.send(member, Kind.LEFT, step, CONTROL_PRIORITY, 0, data)

    # Who goes.
    def lose(self, peer: Connection, failure: Failure) -> bool:
        """Whether the session goes on without this worker, which then is told so. Any thread."""
        if not self._elastic:
            return False
        if peer.ended:
            self._ended.add(peer.number)
        looked: set[int] = set()
        while True:
            with self._lock:
                if peer.left:
                    return True
                if not self.machine.can_spare(peer.number):
                    return False
                rest = self.members.settled - {peer.number}
                if is_quorum(rest, self._base, self._dead):
                    told, instructions = self._let_go(peer, failure)
                    break
                if rest == looked:
                    self._executor.host.fail(self._out_of_reach(peer.number, failure))
                    return True
            self._look_for_dead(rest)  # others may go meanwhile
            looked = rest
        farewell = Failure(
            kind="PeerLost",
            message=f"rank {peer.number} was dropped, and the others go on without it:"
            f" {failure.message}",
            peer=failure.peer,
            step=failure.step,
        )
        peer.start_sending_past_queue("foreprop-dropped", Kind.FAILURE, farewell.encode())
        self._go_on(told, instructions)
        if self.taken_over is not None:
            with self._lock:
                self.taken_over.drop(peer.number)
        return True

    def _let_go(
        self, peer: Connection, failure: Failure
    ) -> tuple[list[MemberLeft], Sequence[object]]:
        """With the lock held."""
        peer.left = peer.silent = True
        self._reasons[peer.number] = failure.message
        told, instructions = _parted(self.machine.handle(PeerDropped(peer.number)))
        for left in told:  # before any answer that does without this worker: `core.dealing`
            self._tell(left)
        self._leaving.append((peer, time.monotonic() + _TOLD_S))
        return told, instructions

    def _look_for_dead(self, rest: set[int]) -> None:
        """Whose process is no more: asked only where that decides, for it takes a moment."""
        for rank in sorted(self._ended - self._dead - rest):
            if is_quorum(rest, self._base, self._dead):
                return
            place = None if self.admission is None else self.admission.place_of(rank)
            # of a worker without a server there is nobody else to be asked
            if place is None or is_refused(place.host, place.port):
                self._dead.add(rank)

    def _out_of_reach(self, rank: int, failure: Failure) -> Failure:
        rest = sorted(self.members.settled - {rank})
        return msgspec.structs.replace(
            failure,
            message=f"{failure.message}. Server {self._index} can reach only ranks {rest} of"
            f" {sorted(self._base)}, and no majority: others may have gone on without them. Start"
            " these again when they reach the others, or all from a checkpoint",
        )

    def joined(self, rank: int) -> None:
        """It counts. With the lock held."""
        self._base.add(rank)
        self._dead.discard(rank)
        self._ended.discard(rank)

    def agreed(self) -> None:
        """All who are here have done so as these members. With the lock held."""
        self._base = set(self.members.settled)

    def expect(self, peer: Connection) -> None:
        """It may come: in the place of one that was lost, or for the first time."""
        with self._lock:
            self._silent.pop(peer.number, None)
            self._reasons.pop(peer.number, None)

    def _go_on(self, told: Sequence[MemberLeft], instructions: Sequence[object]) -> None:
        """Close what waited for it; no receiving thread is there to take an error."""
        host = self._executor.host
        try:
            with self._lock:
                for log, file in self._files.items():
                    file.write([line for left in told for line in log.left(*left[:2])])
            with torch.no_grad():  # in the server's own thread it is not off
                self._executor.execute(instructions)
        except ForepropError as error:
            host.fail(failure_of(error))
        except BaseException as error:  # whatever it is, nobody must wait
            host.broke(error)

    def look(self) -> None:
        """Now and then: drop the one that has been silent for too long. The server's thread."""
        now = time.monotonic()
        with self._lock:
            over = [peer for peer, until in self._leaving if now >= until]
            self._leaving = [each for each in self._leaving if each[0] not in over]
            awaited = self.machine.awaited() if self._elastic else set()
            unlike = dict(self._unlike)
            self._unlike.clear()
        for peer in over:
            peer.stream.close()
        for rank, why in unlike.items():
            failure = Failure(kind="TrainingLoopError", message=why, peer=f"rank {rank}")
            self.lose(self.connections[rank], failure)
        for rank in self._silent.keys() - awaited:
            del self._silent[rank]
        for rank in awaited:
            last = self.connections[rank].last_push
            if rank not in self._silent or self._silent[rank][0] != last:
                self._silent[rank] = (last, now)
        longest = min(awaited, key=lambda rank: (self._silent[rank][1], rank), default=None)
        if longest is not None and now > self._silent[longest][1] + self._limit_s:
            self._drop_silent(longest)

    def _drop_silent(self, rank: int) -> None:
        del self._silent[rank]
        peer = self.connections[rank]
        why = (
            f"rank {rank} has pushed nothing to server {self._index} for {self._limit_s:g} s"
            f" ({SILENT_SHARE:g} of step_timeout_s), and others wait for it"
        )
        self.lose(
            peer, Failure(kind="PeerLost", message=why, peer=f"rank {rank}", step=peer.last_step)
        )

    def close(self, *, failed: bool) -> None:
        """The session is over. If all workers have left, they are told that this is no loss."""
        if self.taken_over is not None and self.members.all_left and not failed:
            goodbyes = [
                self.connections[rank].start_sending_past_queue("foreprop-goodbye", Kind.BYE)
                for rank in sorted(self.members.left)
            ]
            deadline = time.monotonic() + _GOODBYE_S
            for goodbye in goodbyes:
                goodbye.join(max(0.0, deadline - time.monotonic()))
        try:
            with self._lock:  # an update may still be under way
                self._log_folder = None  # whoever still settles a slice opens no other one
                for file in self._files.values():
                    file.close()
        except StorageError as error:
            LOGGER.error("server %d: %s", self._index, error)


def _parted(instructions: Sequence[object]) -> tuple[list[MemberLeft], list[object]]:
    """Word of who has left, and all else, in order."""
    told = [each for each in instructions if isinstance(each, MemberLeft)]
    return told, [each for each in instructions if not isinstance(each, MemberLeft)]


def _maybe_replay(
    config: Config, index: int, workers: int, own: Sequence[int]
) -> CountedReplay | None:
    if config.counted_replay is None:
        return None
    return read_replay(config.counted_replay, index, workers, own)

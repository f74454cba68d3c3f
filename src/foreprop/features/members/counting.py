"""The parts of a server that does not always count all workers, and goes on without some.

It has another closing rule and store than usual (`backends.composed`). In an elastic session a
worker is dropped when its connection ends, or when it pushes nothing while others wait for it. The
session goes on only if those who are left are a quorum (`core.membership.is_quorum`): a majority of
the voters, the members as all of them last knew them, without those whose processes are known to
have ended. Where workers update, the server takes over slices of servers that are lost, and slices
move: see `core.takeover`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec
import torch

from foreprop.config import LOGGER, Config
from foreprop.core.collect import AnswerSlice, UpdateSlice
from foreprop.core.firstmembers import FirstMembers
from foreprop.core.frames import CONTROL_PRIORITY, SendFrame
from foreprop.core.manifest import Manifest
from foreprop.core.membership import (
    CountedLog,
    MemberLeft,
    Members,
    PeerDropped,
    is_quorum,
)
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Shard, Slice
from foreprop.core.staleness import rule_of
from foreprop.core.takeover import EVERY, MovePlan, Settled, SlicesSettled, Takeovers
from foreprop.core.wire import ROUND_SHIFT, Flag, Header, Kind
from foreprop.engine.connection import EMPTY, BoundedService, Connection, bounded, exactly
from foreprop.engine.executor import Doer, Executor
from foreprop.engine.plane import PlaneStream
from foreprop.engine.slicestore import Codes, SliceStore
from foreprop.engine.slicetensors import Versions
from foreprop.engine.stream import is_refused
from foreprop.errors import Failure, ForepropError, RemoteProtocolError, StorageError, failure_of
from foreprop.features.members.countedlog import CountedFile, read_replay
from foreprop.features.members.messages import (
    CLAIMS_LIMIT_BYTES,
    LIMIT_BYTES,
    Departure,
    ServerPlace,
    decode_claims,
    decode_plan,
)

SILENT_SHARE = 0.75
"""The share of ``step_timeout_s`` after which a silent worker is dropped, before others give up."""
_GOODBYE_S = 1.0
_FAREWELL_S = 2.0
"""How long a dropped worker's connection is kept, for the message that says so."""


class Counting:
    """The closing rule and store of one server, and the workers that it drops."""

    machine: ServerMachine[FirstMembers]

    def __init__(
        self,
        manifest: Manifest,
        slices: Sequence[Slice],
        shards: Sequence[Shard],
        index: int,
        config: Config,
    ) -> None:
        knobs, workers, started = manifest.knobs, manifest.most_workers, manifest.world_size
        pieces: list[Slice | Shard] = [*slices, *shards]
        own = [piece.number for piece in pieces if piece.server == index]
        self._manifest = manifest
        self._elastic = knobs.elastic
        self._limit_s = SILENT_SHARE * config.step_timeout_s
        self.members = Members(workers, backups=knobs.backup_workers, started=started)
        folder = config.counted_replay
        replay = None if folder is None else read_replay(folder, index, workers, own)
        self.closing = partial(
            FirstMembers,
            members=self.members,
            replay=replay,
            has_values=not manifest.outlives_servers,
        )
        self._index, self._started = index, started
        self.taken_over = TakenOver(slices, index, self) if manifest.outlives_servers else None
        self._slices, self._log_folder = slices, config.counted_log
        log = CountedLog(workers, own, started=started)
        self._logs = dict.fromkeys(own, log)  # by slice or shard
        self._files: dict[CountedLog, CountedFile] = {}
        if config.counted_log is not None:
            self._files[log] = CountedFile(config.counted_log, index, manifest.session, log)
        # for each awaited rank its last push, and since when that is its last
        self._silent: dict[int, tuple[tuple[int, int] | None, float]] = {}
        self._leaving: list[tuple[Connection, float]] = []  # dropped, and when to close for good
        self._reasons: dict[int, str] = {}
        self._voters = set(self.members.started)
        self._ended: set[int] = set()  # ranks that have ended their connections
        self._dead: set[int] = set()  # those of them whose processes have ended
        self.newcomers: set[int] = set()  # all ranks that have ever joined

    def make_store(self, codes: Codes | None) -> SliceStore:
        """The server's store; ``codes`` are of the slices whose pushes are codes."""
        self._codes = codes or Codes()
        self.store = SliceStore(
            self._manifest,
            self._slices,
            self._index,
            versions=Versions(self._manifest) if self._manifest.knobs.backup_workers else None,
            codes=codes,
        )
        return self.store

    def payload_of(self, frame: SendFrame) -> memoryview:
        return EMPTY  # values go with their frame: see `_answer`

    def begin(
        self,
        machine: ServerMachine[FirstMembers],
        executor: Executor,
        connections: Mapping[int, Connection],
        *,
        unlike: dict[int, str],
        place_of: Callable[[int], ServerPlace | None],
        last_push: Callable[[int], tuple[int, int] | None],
        draw_counted: Callable[[], Iterable[tuple[int, int, Sequence[int]]]] = tuple,
    ) -> None:
        """Take part in the executor, when `engine.slices.Updates` has done so.

        ``unlike`` says of newcomers in what their hyperparameters differ from the others'.
        ``place_of`` says where the server of a worker's node is, as far as is known, and
        ``last_push`` what a rank has pushed last: slice and step. Where the executor updates
        nothing, ``draw_counted`` gives slice, step and ranks of counted sets that have changed.
        """
        self._draw_counted = draw_counted
        self._last_push = last_push
        self._unlike = unlike
        self.machine = machine
        self._executor = executor
        self._place_of = place_of
        self._lock: threading.RLock = executor.lock
        self.connections = connections
        self._update: Doer = executor.doers[UpdateSlice]
        executor.doers[UpdateSlice] = self._update_counted
        executor.doers[AnswerSlice] = self._answer
        if self.taken_over is not None:
            self.taken_over.begin(executor)

    # What the executor does. With the lock held: `note`, `adopt`, `note_anew`.
    def _update_counted(self, due: UpdateSlice) -> Sequence[object] | None:
        with self._lock:
            self.note(due.slice, due.step, due.counted or ())
        return self._update(due)

    def note(self, number: int, step: int, counted: Sequence[int]) -> None:
        log = self._logs[number]
        lines = log.note(number, step, tuple(counted))
        if lines and log in self._files:
            self._files[log].write(lines)

    def catch_up(self) -> None:
        """Note and log what has been counted elsewhere until now."""
        with self._lock:
            changed = [*self._draw_counted()]
            for number, step, counted in changed:
                self.note(number, step, counted)
            for log, file in self._files.items() if changed else ():
                file.write(log.rest())  # nothing is told of steps without changes

    def adopt(self, pieces: Sequence[Slice]) -> None:
        """Hold slices of lost servers; each server's are logged in a file of their own."""
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

    def note_anew(self, pieces: Sequence[Slice]) -> None:
        """Have slices logged as if they were new: another server may have had them meanwhile."""
        for piece in pieces:
            self._logs[piece.number].note_anew(piece.number)

    def _answer(self, answer: AnswerSlice) -> None:
        slice_, step, priority, ranks, flags, is_average = answer
        at_step, data, given = self.store.read(slice_, ranks)
        left = None if given is None else partial(self.store.was_read, slice_, given)
        if 0 < step < at_step:
            flags |= Flag.LATE
        data = EMPTY if flags & Flag.UNCHANGED else data
        if len(data) and step:
            data = self._codes.answer(slice_, data, step, is_average=is_average)
        for rank in ranks:
            self._executor.send(rank, Kind.REPLY, step, priority, slice_, data, flags, left)

    def _announce(self, left: MemberLeft) -> None:
        rank, step, counted, slices = left
        reason = self._reasons.get(rank, "")
        with self._lock:
            here, ever = sorted(self.members.here), len(self.members.ever)
        LOGGER.warning(
            "server %d goes on without rank %d, which has left within step %d (%d of %d slices"
            " here count it): %s; %d of %d workers are left",
            *(self._index, rank, step, counted, slices, reason, len(here), ever),
        )
        data = msgspec.json.encode(Departure(rank, step, counted, slices, reason))
        for member in here:
            self._executor.send(member, Kind.LEFT, step, CONTROL_PRIORITY, 0, data)

    # Dropping workers.
    def lose(self, peer: Connection, failure: Failure) -> bool:
        """Whether the session goes on without this worker, which then is told so. Any thread."""
        if not self._elastic:
            return False
        if peer.ended:
            self._ended.add(peer.number)
        looked_at: set[int] = set()
        while True:
            with self._lock:
                if peer.left:
                    return True
                if not self.machine.can_spare(peer.number):
                    return False
                rest = self.members.settled - {peer.number}
                if is_quorum(rest, self._voters, self._dead):
                    departures, instructions = self._drop(peer, failure)
                    break
                if rest == looked_at:
                    self._executor.host.fail(self._no_quorum(peer.number, failure))
                    return True
            self._find_dead(rest)  # without the lock, so others may go meanwhile
            looked_at = rest
        farewell = Failure(
            kind="PeerLost",
            message=f"rank {peer.number} was dropped, and the others go on without it:"
            f" {failure.message}",
            peer=failure.peer,
            step=failure.step,
        )
        peer.start_sending_past_queue("foreprop-dropped", Kind.FAILURE, farewell.encode())
        self._go_on(departures, instructions)
        if self.taken_over is not None:
            with self._lock:
                self.taken_over.drop(peer.number)
        return True

    def _drop(
        self, peer: Connection, failure: Failure
    ) -> tuple[list[MemberLeft], Sequence[object]]:
        """Drop a worker, with the lock held; returns who has left, and what is to be done."""
        peer.left = peer.silent = True
        self._reasons[peer.number] = failure.message
        decided = self.machine.handle(PeerDropped(peer.number))
        departures = [each for each in decided if isinstance(each, MemberLeft)]
        instructions = [each for each in decided if not isinstance(each, MemberLeft)]
        for left in departures:  # before any answer that does without this worker: `core.dealing`
            self._announce(left)
        self._leaving.append((peer, time.monotonic() + _FAREWELL_S))
        return departures, instructions

    def _find_dead(self, rest: set[int]) -> None:
        """Find ranks whose processes have ended, until the rest is a quorum: it takes a moment."""
        for rank in sorted(self._ended - self._dead - rest):
            if is_quorum(rest, self._voters, self._dead):
                return
            place = self._place_of(rank)
            # if no server stands beside a worker, nobody else can be asked
            if place is None or is_refused(place.host, place.port):
                self._dead.add(rank)

    def _no_quorum(self, rank: int, failure: Failure) -> Failure:
        rest = sorted(self.members.settled - {rank})
        return msgspec.structs.replace(
            failure,
            message=f"{failure.message}. Server {self._index} can reach only ranks {rest} of"
            f" {sorted(self._voters)}, and no majority: others may have gone on without them. Start"
            " these again when they reach the others, or all from a checkpoint",
        )

    def add_voter(self, rank: int) -> None:
        """Count a rank that has joined. With the lock held."""
        self._voters.add(rank)
        self._dead.discard(rank)
        self._ended.discard(rank)

    def reset_voters(self) -> None:
        """Have the present members vote: all of them know now who they are. With the lock held."""
        self._voters = set(self.members.settled)

    def expect(self, peer: Connection) -> None:
        """Forget what was known of the rank before: a newcomer has it now."""
        with self._lock:
            self._silent.pop(peer.number, None)
            self._reasons.pop(peer.number, None)
        if isinstance(peer.stream, PlaneStream):
            peer.stream.carry(peer.number)

    def _go_on(self, departures: Sequence[MemberLeft], instructions: Sequence[object]) -> None:
        """Close what waited for a dropped worker.

        No receiving thread is there to take an error, so the host gets it.
        """
        host = self._executor.host
        try:
            with self._lock:
                for log, file in self._files.items():
                    file.write([line for left in departures for line in log.left(*left[:2])])
            with torch.no_grad():  # the server's own thread records gradients otherwise
                self._executor.execute(instructions)
        except ForepropError as error:
            host.fail(failure_of(error))
        except BaseException as error:  # whatever it is, nobody must wait
            host.broke(error)

    def look(self) -> None:
        """Drop the worker that has been silent for too long; the server's thread calls it often."""
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
            last = self.connections[rank].last_push = self._last_push(rank)
            if rank not in self._silent or self._silent[rank][0] != last:
                self._silent[rank] = (last, now)
        longest = min(awaited, key=lambda rank: (self._silent[rank][1], rank), default=None)
        if longest is None or now <= self._silent[longest][1] + self._limit_s:
            return
        del self._silent[longest]
        peer = self.connections[longest]
        why = (
            f"rank {longest} has pushed nothing to server {self._index} for {self._limit_s:g} s"
            f" ({SILENT_SHARE:g} of step_timeout_s), and others wait for it"
        )
        name, step = f"rank {longest}", peer.last_step
        self.lose(peer, Failure(kind="PeerLost", message=why, peer=name, step=step))

    def close(self, *, failed: bool) -> None:
        """End with the session; if all workers have left, say goodbye: this server is not lost."""
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
                self.catch_up()
                self._log_folder = None  # if a slice is still settled, that opens no other file
                for file in self._files.values():
                    file.close()
        except StorageError as error:
            LOGGER.error("server %d: %s", self._index, error)


class TakenOver:
    """Takes over slices for one server: by workers' claims, and by averages that survivors give.

    It is the `engine.connection.Collecting` of slices that may come here, and have not.
    """

    kinds = frozenset({Kind.CLAIM, Kind.TAKEN_OVER})

    def __init__(self, slices: Sequence[Slice], index: int, counting: Counting) -> None:
        self._slices = slices
        self._index = index
        self._counting = counting
        self._members = counting.members
        self._takeovers = Takeovers(
            lambda step: self._members.settled & self._members.of_step(step)
        )
        # the slices that are here, or have been
        self._known = {piece.number for piece in slices if piece.server == index}

    def begin(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = executor.lock

    # Frames.
    def room(self, peer: Connection, header: Header) -> memoryview:
        if header.kind == Kind.CLAIM:
            return bounded(header, CLAIMS_LIMIT_BYTES)
        slice_, round_ = header.slice, (header.step, header.flags >> ROUND_SHIFT)
        with self._lock:
            self._takeovers.check_given(peer.number, slice_, round_)
        if header.flags & Flag.UNCHANGED:
            return exactly(header, 0)
        return exactly(header, self._counting.store.size_bytes(slice_, value=True))

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind != Kind.CLAIM:
            self._give_average(peer.number, header, payload)
            return
        rank, claims, first = peer.number, decode_claims(payload), header.step or EVERY
        for claim in claims:
            if not 0 <= claim.slice < len(self._slices):
                raise RemoteProtocolError(f"rank {rank} claims slice {claim.slice}")
        with self._lock:
            if rank in self._members.here:  # or it has been dropped meanwhile
                self._settle(self._takeovers.add(rank, claims, first), lost=first == EVERY)

    def __contains__(self, number: int) -> bool:
        return 0 <= number < len(self._slices) and number not in self._known

    def incomplete(self) -> Sequence[tuple[int, int]]:
        return []  # workers that wait for a slice say so themselves

    def describe_wait(self, number: int, step: int) -> str:
        return f"a slice of a lost server waits for the claims of ranks {self._takeovers.missing()}"

    def drop(self, rank: int) -> None:
        """Wait for a rank's claims no longer. With the lock held."""
        self._settle(self._takeovers.drop(rank))

    def _settle(self, settled: Sequence[Settled], *, lost: bool = True) -> None:
        """Have slices go on here, with the lock held; without ``lost`` they have moved."""
        if not settled:
            return
        pieces = tuple(self._slices[each.slice] for each in settled)
        new = [piece for piece in pieces if piece.number not in self._known]
        self._known.update(piece.number for piece in new)
        self._counting.catch_up()
        self._counting.adopt(new)
        self._counting.note_anew(pieces)
        self._counting.reset_voters()
        rounds = {each.slice: each.round for each in settled}
        self._counting.machine.handle(SlicesSettled(pieces, rounds))
        if lost and new:
            LOGGER.warning("server %d takes over %d slices", self._index, len(new))
        for rank in sorted(self._members.settled):
            its = [each for each in settled if rank in self._takeovers.claimed(each.slice)]
            if its:
                data = msgspec.json.encode(its)
                self._executor.send(rank, Kind.SETTLED, 0, CONTROL_PRIORITY, 0, data)

    def _give_average(self, rank: int, header: Header, average: memoryview) -> None:
        """Answer, with a survivor's average, the ranks that are owed it.

        It goes as it is, and not as its code: so the others have it.
        """
        with self._lock:
            if rank not in self._members.here:
                return  # it has been dropped meanwhile, and another one gives
            owed = self._takeovers.given(header.slice)
        step, number, flags = header.step, header.slice, header.flags & Flag.UNCHANGED
        for rank in owed:
            self._executor.send(rank, Kind.REPLY, step, CONTROL_PRIORITY, number, average, flags)


class MovesPassedOn(BoundedService):
    """Forwards each plan of moves to all members, once."""

    kinds = frozenset({Kind.MOVES})
    limit_bytes = LIMIT_BYTES

    def __init__(self, slices: int, members: Members, executor: Executor) -> None:
        self._slices = slices
        self._members = members
        self._executor = executor
        self._forwarded: set[MovePlan] = set()

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        plan = decode_plan(payload, self._slices)
        with self._executor.lock:
            if plan in self._forwarded or peer.number not in self._members.here:
                return
            self._forwarded.add(plan)
            for rank in sorted(self._members.here):
                data = bytes(payload)
                self._executor.send(rank, Kind.MOVES, header.step, CONTROL_PRIORITY, 0, data)


class StalenessServer:
    """The closing rule and store of one server whose workers may be some steps apart."""

    def __init__(self, manifest: Manifest, slices: Sequence[Slice], index: int) -> None:
        self._manifest, self._slices, self._index = manifest, slices, index
        self.closing = rule_of(manifest.knobs.staleness)

    def make_store(self, codes: Codes | None) -> SliceStore:
        versions = Versions(self._manifest)
        self.store = SliceStore(
            self._manifest, self._slices, self._index, versions=versions, codes=codes
        )
        return self.store

    def payload_of(self, frame: SendFrame) -> memoryview:
        if frame.kind == Kind.REPLY and not frame.flags & Flag.UNCHANGED:
            return self.store.read(frame.slice, (frame.peer,))[1]
        return EMPTY

"""Members with a worker and a server each, of which some are lost: core machines and their links.

An average is data here: its round, and who was counted. A slice's *story* at a worker is all
averages that it has had, in order. A link is a queue in order, from each worker to each server and
back. When a member is lost, what it had sent arrives up to some point, and what was sent to it is
lost; each of the others notices for itself. What happens next is chosen outside: by a seed, or
every choice is looked at.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from foreprop.core.collect import AnswerSlice, DropPush, SliceUpdated, UpdateSlice
from foreprop.core.frames import (
    CONTROL_PRIORITY,
    CompleteParameter,
    Finish,
    FrameSent,
    GradientReady,
    MessageReady,
    PeerLeft,
    PushArrived,
    ReplyArrived,
    Round,
    SendFrame,
    SlicesGoOn,
    SlicesLost,
    ValueArrived,
)
from foreprop.core.membership import MemberLeft, Members, PeerDropped
from foreprop.core.slicing import Slice
from foreprop.core.takeover import (
    NOBODY,
    Claim,
    Settled,
    SlicesSettled,
    Takeovers,
    owner_of,
)
from foreprop.core.wire import ROUND_SHIFT, Flag, Kind
from foreprop.core.worker_machine import WorkerMachine
from foreprop.errors import RemoteProtocolError
from tests.unit.counting_world import counting_server
from tests.unit.exploration import explore_states

Choice = tuple[Any, ...]
STEPS: tuple[Round, ...] = ((1, 0), (2, 0))
PASSES: tuple[Round, ...] = ((1, 0), (1, 1), (2, 0))
"""A step of two rounds, and one of one."""


class Average(NamedTuple):
    round: Round
    counted: tuple[int, ...]
    """Empty: no rank had a gradient."""


Story = tuple[Average, ...]


class Sent(NamedTuple):
    """A frame that has left, and what is in it."""

    frame: SendFrame
    content: Any


class Worker:
    """What `members.survival` does around its machine, without threads."""

    def __init__(self, world: TakeoverWorld, rank: int) -> None:
        self.rank = rank
        self.machine = WorkerMachine(
            world.slices,
            parameters=len(world.slices),
            order="priority",
            reply="broadcast",
            outlives=True,
        )
        self.stories: list[Story] = [()] * len(world.slices)
        self.begun = 0
        """Rounds of which a gradient has been ready."""
        self.to_compute: list[int] = []
        self.lost: set[int] = set()
        self.moves = [0] * len(world.slices)
        self.moved_before = 0
        """Rounds, by their number from 1: before the last one of these it has moved slices."""
        self.parted: set[int] = set()
        self.settled: dict[int, Round] = {}
        self.pushed_again = 0
        self.contents: dict[int, Any] = {}
        self.under_way: list[int] = []
        """Servers to which a frame is on its way out of the machine."""


class Server:
    """What `members.counting` and `members.counting` do around their machines."""

    def __init__(self, world: TakeoverWorld, index: int) -> None:
        self.index = index
        self.members = Members(len(world.ranks))
        names = [f"p{piece.number}" for piece in world.slices]
        self.machine = counting_server(
            world.slices, self.members, names, index=index, has_values=False
        )
        self.takeovers = Takeovers(self.settled_members)
        self.gradients: dict[tuple[int, int], Round] = {}
        self.averages: dict[int, Average] = {}
        self.updating: UpdateSlice | None = None
        self.contents: dict[int, Any] = {}
        self.under_way: list[int] = []
        self.undropped: list[int] = []
        """Members that are dropped, and whose claims are not yet."""
        self.is_over = False

    def settled_members(self, step: int) -> set[int]:
        return self.members.settled


class TakeoverWorld:
    """``homes``: by slice, its first server. ``kills``: so many may be lost, of ``mortal`` ones.

    ``accusations``: so often a server drops a slow worker, which ends when it hears that.
    ``prompt``: frames leave, and sums are made, at once. ``unused``: by rank, slice and round, of
    which a rank has no gradient. ``leaves``: who is done says goodbye. ``moves``: before which
    rounds, by their number from 1, which slices move.
    """

    def __init__(
        self,
        members: int,
        *,
        homes: Sequence[int] = (0,),
        rounds: tuple[Round, ...] = STEPS,
        kills: int = 1,
        mortal: Sequence[int] | None = None,
        accusations: int = 0,
        prompt: bool = True,
        unused: frozenset[tuple[int, int, Round]] = frozenset(),
        leaves: bool = False,
        moves: Mapping[int, Collection[int]] = MappingProxyType({}),
    ) -> None:
        self.ranks = range(members)
        self.rounds, self.kills, self.prompt, self.leaves = rounds, kills, prompt, leaves
        self.moves = dict(moves)
        self.mortal = list(self.ranks) if mortal is None else list(mortal)
        self.unused, self.accusations = unused, accusations
        self.doomed: set[int] = set()
        """Those that some server has dropped, or that are lost."""
        self.slices = [Slice(number, number, 0, 1, home) for number, home in enumerate(homes)]
        self.dead: set[int] = set()
        self.to_server = {(r, s): deque[Any]() for r in self.ranks for s in self.ranks}
        self.to_worker = {(r, s): deque[Any]() for r in self.ranks for s in self.ranks}
        self.next_token = 0
        self.gone: set[tuple[int, int]] = set()
        """Rank and server: the server has noticed that the worker is lost."""
        self.byes: set[tuple[int, int]] = set()
        self.given = self.given_anew = 0
        self.happened: list[Choice] = []
        self.workers = [Worker(self, rank) for rank in self.ranks]
        self.servers = [Server(self, index) for index in self.ranks]
        for piece in self.slices:
            server = self.servers[piece.server]
            server.machine.handle(ValueArrived(0, piece.number, 0, piece.number))
            while server.machine._replies.lanes._busy:
                for rank in sorted(server.machine._replies.lanes._busy):
                    server.machine.handle(FrameSent(rank))

    @property
    def alive(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.dead]

    # What may happen.
    def choices(self) -> list[Choice]:
        return self.pressing() + self.mishaps()

    def mishaps(self) -> list[Choice]:
        found: list[Choice] = []
        hopeful = [rank for rank in self.ranks if rank not in self.doomed]
        for rank in self.mortal:
            if rank in self.dead or (rank in hopeful and len(hopeful) == 1):
                continue
            found += [("kill", rank)] if self.kills else []
            there = [i for i in self.alive if i != rank and rank in self.servers[i].members.here]
            there = [i for i in there if not self.servers[i].is_over]
            found += [("accuse", rank, index) for index in there if self.accusations]
        return found

    def pressing(self) -> list[Choice]:
        found: list[Choice] = []
        for (rank, index), queue in self.to_server.items():
            if index in self.dead or self.servers[index].is_over or (rank, index) in self.gone:
                continue
            if queue:
                found.append(("serve", rank, index))
            if rank in self.dead:
                found.append(("gone", rank, index))
        for (rank, index), queue in self.to_worker.items():
            worker = self.workers[rank]
            if rank in self.dead or index in worker.lost:
                continue
            if queue:
                found.append(("answer", rank, index))
            if index in self.dead and index not in worker.parted:
                found.append(("notice", rank, index))
        for rank in self.alive:
            found += self._choices_of(rank)
        return found

    def _choices_of(self, rank: int) -> list[Choice]:
        worker, server = self.workers[rank], self.servers[rank]
        found: list[Choice] = [("left", "worker", rank, peer) for peer in worker.under_way]
        if self._may_move(worker):
            found.append(("move", rank))
        if self._may_compute(worker):
            found.append(("compute", rank))
        if self.leaves and self._is_done(worker):
            there = [i for i in self.ranks if (rank, i) not in self.byes and i not in worker.lost]
            found += [("bye", rank, index) for index in there]
        if not server.is_over:
            found += [("left", "server", rank, peer) for peer in server.under_way]
            found += [("summed", rank)] if server.updating is not None else []
            found += [("dropped", rank, gone) for gone in server.undropped[:1]]
        return found

    def _is_complete(self, worker: Worker) -> bool:
        return all(worker.machine.is_complete(piece.parameter) for piece in self.slices)

    def _may_move(self, worker: Worker) -> bool:
        is_due = worker.begun + 1 in self.moves and worker.moved_before <= worker.begun
        return is_due and not worker.to_compute and self._is_complete(worker)

    def _may_compute(self, worker: Worker) -> bool:
        if worker.to_compute:
            return True
        if self._may_move(worker):
            return False
        return worker.begun < len(self.rounds) and self._is_complete(worker)

    def _is_done(self, worker: Worker) -> bool:
        moves = self._may_move(worker)
        return not (moves or self._may_compute(worker)) and self._is_complete(worker)

    def happen(self, choice: Choice) -> None:
        what, *who = choice
        if what == "kill":
            self.kills -= 1
            self._kill(who[0])
        elif what == "accuse":
            self.accusations -= 1
            self.doomed.add(who[0])
            self._drop(who[0], self.servers[who[1]])
            self.to_worker[who[0], who[1]].append("dropped")
        elif what == "compute":
            self._compute(self.workers[who[0]])
        elif what == "move":
            self._move(self.workers[who[0]])
        elif what == "serve":
            self._serve(who[0], self.servers[who[1]], self.to_server[who[0], who[1]].popleft())
        elif what == "answer":
            self._answer(self.workers[who[0]], who[1], self.to_worker[who[0], who[1]].popleft())
        elif what == "notice":
            self._notice(self.workers[who[0]], who[1])
        elif what == "gone":
            self._lose(who[0], self.servers[who[1]])
        elif what == "dropped":
            server = self.servers[who[0]]
            server.undropped.remove(who[1])
            self._settle(server, server.takeovers.drop(who[1]))
        elif what == "summed":
            self._sum(self.servers[who[0]])
        elif what == "bye":
            self.byes.add((who[0], who[1]))
            self._post(who[0], who[1], "bye")
        else:
            self._let_leave(*who)
        self.check()

    def _kill(self, rank: int) -> None:
        self.dead.add(rank)
        self.doomed.add(rank)
        for other in self.ranks:
            self.to_server[other, rank].clear()
            self.to_worker[rank, other].clear()

    # Workers.
    def _compute(self, worker: Worker) -> None:
        if not worker.to_compute:
            worker.begun += 1
            worker.to_compute = list(range(len(self.slices)))
        slice_ = worker.to_compute.pop()  # last layer first
        step, again = self.rounds[worker.begun - 1]
        is_unused = (worker.rank, slice_, (step, again)) in self.unused
        flags = again << ROUND_SHIFT | Flag.GRADIENT | (Flag.NO_GRADIENT if is_unused else 0)
        self._do(worker, worker.machine.handle(GradientReady(slice_, step, flags)))

    def _do(self, worker: Worker, instructions: Sequence[Any]) -> None:
        for each in instructions:
            if isinstance(each, SendFrame):
                self._post(
                    worker.rank, each.peer, Sent(each, worker.contents.pop(each.token, None))
                )
                worker.under_way.append(each.peer)
                if self.prompt:
                    self._let_leave("worker", worker.rank, each.peer)
            else:
                assert isinstance(each, CompleteParameter), each

    def _post(self, rank: int, index: int, what: Any) -> None:
        if index not in self.dead and not self.servers[index].is_over:
            self.to_server[rank, index].append(what)

    def _let_leave(self, side: str, who: int, peer: int) -> None:
        if side == "worker":
            self.workers[who].under_way.remove(peer)
            self._do(self.workers[who], self.workers[who].machine.handle(FrameSent(peer)))
        else:
            self.servers[who].under_way.remove(peer)
            self._act(self.servers[who], self.servers[who].machine.handle(FrameSent(peer)))

    def _say(self, worker: Worker, index: int, kind: Kind, content: Any, *about: int) -> None:
        step, slice_, flags = about or (0, 0, 0)
        self.next_token += 1
        worker.contents[self.next_token] = content
        ready = MessageReady(index, kind, step, CONTROL_PRIORITY, slice_, self.next_token, flags)
        self._do(worker, worker.machine.handle(ready))

    def _notice(self, worker: Worker, server: int) -> None:
        """As `Survival.outlives`."""
        self.to_worker[worker.rank, server].clear()
        worker.lost.add(server)
        owners = {
            number: owner
            for number, owner in self._owners(worker).items()
            if worker.machine.owner_of(number) == server
        }
        self._do(worker, worker.machine.handle(SlicesLost(server, owners)))
        self._claim(worker, owners)

    def _move(self, worker: Worker) -> None:
        """As `Survival.move`."""
        worker.moved_before = worker.begun + 1
        for slice_ in self.moves[worker.moved_before]:
            worker.moves[slice_] += 1
        owners = {
            number: owner
            for number, owner in self._owners(worker).items()
            if worker.machine.owner_of(number) != owner
        }
        self._do(worker, worker.machine.handle(SlicesLost(None, owners)))
        self._claim(worker, owners)

    def _owners(self, worker: Worker) -> dict[int, int]:
        servers = len(self.ranks)
        owners = {
            n: owner_of(n, home, servers, worker.lost, worker.moves[n])
            for n, (_, _, _, _, home) in enumerate(self.slices)
        }
        assert NOBODY not in owners.values(), "its own server lives"
        return owners

    def _claim(self, worker: Worker, owners: Mapping[int, int]) -> None:
        for slice_ in owners:
            worker.settled.pop(slice_, None)
        by_owner: dict[int, list[Claim]] = {}
        for slice_, owner in owners.items():
            claim = Claim(slice_, *worker.machine.claim(slice_))
            assert (
                worker.stories[slice_][-1:] == () or worker.stories[slice_][-1].round == claim[1:]
            )
            by_owner.setdefault(owner, []).append(claim)
        for owner, claims in by_owner.items():
            self._say(worker, owner, Kind.CLAIM, claims)

    def _answer(self, worker: Worker, server: int, sent: Any) -> None:
        if sent == "bye":
            worker.parted.add(server)
        elif sent == "dropped":
            self._kill(worker.rank)
        elif sent.frame.kind == Kind.SETTLED:
            self._go_on(worker, server, sent.content)
        else:
            self._land(worker, server, sent.frame, sent.content)

    def _go_on(self, worker: Worker, owner: int, settled: Sequence[Settled]) -> None:
        """As `Survival.on_frame`."""
        for each in settled:
            assert worker.machine.owner_of(each.slice) == owner, "settled by another one"
            if each.giver == worker.rank:
                assert worker.machine.claim(each.slice) == each.round, "it has another average"
                last = worker.stories[each.slice][-1]
                is_empty = worker.machine.was_unchanged(each.slice)
                assert is_empty == (not last.counted)
                flags = each.again << ROUND_SHIFT | (Flag.UNCHANGED if is_empty else 0)
                self._say(worker, owner, Kind.TAKEN_OVER, last, each.step, each.slice, flags)
        rounds = {
            each.slice: each.round
            for each in settled
            if worker.settled.get(each.slice) != each.round
        }
        worker.settled |= rounds
        worker.pushed_again += sum(worker.machine.is_lost(*each) for each in rounds.items())
        self._do(worker, worker.machine.handle(SlicesGoOn(rounds)))

    def _land(self, worker: Worker, server: int, frame: SendFrame, average: Average) -> None:
        assert frame.kind == Kind.REPLY
        slice_ = frame.slice
        if worker.rank in self.doomed and not worker.machine.awaits(slice_, frame.step):
            self._kill(worker.rank)  # others had dropped it, and went on; it ends with an error
            return
        assert worker.machine.awaits(slice_, frame.step)
        assert bool(frame.flags & Flag.UNCHANGED) == (not average.counted)
        story = (*worker.stories[slice_], average)
        assert [each.round for each in story] == list(self.rounds[: len(story)])
        worker.stories[slice_] = story
        event = ReplyArrived(slice_, frame.step, server, 0, frame.flags)
        self._do(worker, worker.machine.handle(event))

    # Servers.
    def _serve(self, rank: int, server: Server, sent: Any) -> None:
        if sent == "bye":
            self._act(server, server.machine.handle(PeerLeft(rank)))
            return
        frame, content = sent
        if frame.kind == Kind.PUSH:
            self._receive_push(rank, server, frame)
        elif frame.kind == Kind.CLAIM:
            if rank in server.members.here:
                self._receive_claims(rank, server, content)
        elif rank in server.members.here:
            assert frame.kind == Kind.TAKEN_OVER
            self._receive_average(rank, server, frame, content)

    def _receive_claims(self, rank: int, server: Server, claims: Sequence[Claim]) -> None:
        try:
            settled = server.takeovers.add(rank, claims)
        except RemoteProtocolError:
            assert rank in self.doomed, "a worker that does right is refused"
            self._drop(rank, server)
            self.to_worker[rank, server.index].append("dropped")
        else:
            self._settle(server, settled)

    def _receive_push(self, rank: int, server: Server, frame: SendFrame) -> None:
        at = (frame.step, frame.flags >> ROUND_SHIFT)
        server.gradients[frame.slice, rank] = at
        push = PushArrived(rank, frame.slice, frame.step, frame.priority, frame.flags)
        self._act(server, server.machine.handle(push))

    def _receive_average(self, rank: int, server: Server, frame: SendFrame, given: Average) -> None:
        server.takeovers.check_given(rank, frame.slice, given.round)
        if not frame.flags & Flag.UNCHANGED:
            server.averages[frame.slice] = given
        owed = server.takeovers.given(frame.slice)
        self.given += 1
        unchanged = bool(frame.flags & Flag.UNCHANGED)
        if unchanged:
            server.averages[frame.slice] = given  # the shell sends no bytes, and the flag
        flags = int(frame.flags & Flag.UNCHANGED)
        about = (frame.slice, frame.step, CONTROL_PRIORITY, owed, flags)
        self._act(server, [AnswerSlice(*about, is_average=True)])

    def _lose(self, rank: int, server: Server) -> None:
        """As `Counting.lose`: what waits for it goes on first, and then its claims are dropped."""
        self.gone.add((rank, server.index))
        self.to_server[rank, server.index].clear()
        if rank in server.members.here:
            self._drop(rank, server)

    def _drop(self, rank: int, server: Server) -> None:
        server.undropped.append(rank)
        self._act(server, server.machine.handle(PeerDropped(rank)))
        if self.prompt and not server.is_over:
            server.undropped.remove(rank)
            self._settle(server, server.takeovers.drop(rank))

    def _settle(self, server: Server, settled: Sequence[Settled]) -> None:
        """As `TakenOver._settle`."""
        if not settled:
            return
        pieces = tuple(self.slices[each.slice] for each in settled)
        self.given_anew += sum(each.number in server.machine._slices for each in pieces)
        rounds = {each.slice: each.round for each in settled}
        self._act(server, server.machine.handle(SlicesSettled(pieces, rounds)))
        for rank in sorted(server.members.settled):
            its = [each for each in settled if rank in server.takeovers.claimed(each.slice)]
            if its:
                self._tell(server, rank, Kind.SETTLED, 0, CONTROL_PRIORITY, 0, its)

    def _sum(self, server: Server) -> None:
        due, server.updating = server.updating, None
        assert due is not None
        counted = due.counted or ()
        state = server.machine._states[due.slice]
        for rank in counted:
            assert server.gradients.pop((due.slice, rank)) == state.oldest
        step, again = state.oldest
        used = tuple(r for r in counted if (r, due.slice, (step, again)) not in self.unused)
        assert used == due.ranks
        server.averages[due.slice] = Average(state.oldest, used)
        self._act(server, server.machine.handle(SliceUpdated()))

    def _act(self, server: Server, instructions: Sequence[Any]) -> None:
        for each in instructions:
            if isinstance(each, SendFrame):
                self._send(server, each)
            elif isinstance(each, AnswerSlice):
                for rank in each.ranks:
                    assert each.slice in server.averages, "a push that was answered before"
                    about = (each.step, each.priority, each.slice, server.averages[each.slice])
                    self._tell(server, rank, Kind.REPLY, *about, each.flags)
            elif isinstance(each, UpdateSlice):
                assert server.updating is None
                assert each.gradient
                server.updating = each
                if self.prompt:
                    self._sum(server)
            elif isinstance(each, DropPush):
                server.gradients.pop((each.slice, each.rank), None)
            elif isinstance(each, Finish):
                self._end(server)
            else:
                assert isinstance(each, MemberLeft), each

    def _tell(
        self,
        server: Server,
        rank: int,
        kind: Kind,
        step: int,
        priority: int,
        slice_: int,
        content: Any,
        flags: int = 0,
    ) -> None:
        self.next_token += 1
        server.contents[self.next_token] = content
        ready = MessageReady(rank, kind, step, priority, slice_, self.next_token, flags)
        self._act(server, server.machine.handle(ready))

    def _send(self, server: Server, frame: SendFrame) -> None:
        content = server.contents.pop(frame.token)
        is_cut = frame.peer in self.dead or frame.peer not in server.members.here
        if not is_cut:
            self.to_worker[frame.peer, server.index].append(Sent(frame, content))
        server.under_way.append(frame.peer)
        if self.prompt:
            self._let_leave("server", server.index, frame.peer)

    def _end(self, server: Server) -> None:
        """All workers that are here have said goodbye; they are told that it is no loss."""
        server.is_over = True
        for rank in self.ranks:
            self.to_server[rank, server.index].clear()
            if rank not in self.dead:
                self.to_worker[rank, server.index].append("bye")

    # What must hold.
    def check(self) -> None:
        """Of those who will live: no two have had another average of the same round."""
        for piece in self.slices:
            hopeful = [rank for rank in self.ranks if rank not in self.doomed]
            stories = [self.workers[rank].stories[piece.number] for rank in hopeful]
            longest = max(stories, key=len)
            for story in stories:
                assert story == longest[: len(story)], (piece.number, stories)
                assert len(longest) - len(story) <= 1, "what it lacks may be nowhere"

    @property
    def is_done(self) -> bool:
        return all(self._is_done(self.workers[rank]) for rank in self.alive)

    def check_end(self) -> None:
        """All rounds have been made, and all who live are counted in each.

        Who was dropped by a server that was lost itself may be there, and lack one.
        """
        assert self.is_done, f"deadlock: {self.describe()}"
        for rank in self.alive:
            for number, story in enumerate(self.workers[rank].stories):
                assert [each.round for each in story] == list(self.rounds)
                for each in story:
                    used = {r for r in self.alive if (r, number, each.round) not in self.unused}
                    assert used - self.doomed <= set(each.counted), "a gradient is lost"

    def describe(self) -> str:
        waits = {r: (self.workers[r].begun, self.workers[r].stories) for r in self.alive}
        missing = {r: self.servers[r].takeovers.missing() for r in self.alive}
        return f"{waits}, claims missing {missing}, dead {self.dead}, noticed {self.gone}"

    def state(self) -> tuple[str, ...]:
        """All that what may follow depends on."""
        workers = [self._worker_state(self.workers[rank]) for rank in self.alive]
        servers = [self._server_state(self.servers[rank]) for rank in self.alive]
        links = [[_without_token(each) for each in queue] for queue in self.to_server.values()]
        links += [[_without_token(each) for each in queue] for queue in self.to_worker.values()]
        own = sorted(self.dead), sorted(self.gone), sorted(self.byes), sorted(self.doomed)
        return tuple(map(repr, (workers, servers, links, own, self.kills, self.accusations)))

    def _worker_state(self, worker: Worker) -> tuple[Any, ...]:
        machine = worker.machine
        return (
            (worker.stories, worker.begun, worker.to_compute, worker.under_way),
            (worker.moves, worker.moved_before),
            (sorted(worker.lost), sorted(worker.parted), sorted(worker.settled.items())),
            (machine._owner, sorted(machine._open.items()), sorted(machine._claimed)),
            (machine._answered_round, sorted(machine._unchanged), machine._awaited_step),
            (machine._missing, machine._step, sorted(machine._lanes._busy)),
            [
                (each._replace(token=0), worker.contents.get(each.token))
                for each in machine._lanes.items()
            ],
        )

    def _server_state(self, server: Server) -> tuple[Any, ...]:
        machine = server.machine
        collected = [
            (n, c.done, sorted(c.rounds.items()), c.updating, sorted(c.owed.items()), c.last)
            for n, c in sorted(machine._states.items())
        ]
        claims = [
            (n, sorted(c.by.items()), c.is_settled, c.round, c.giver, c.owed)
            for n, c in sorted(server.takeovers._slices.items())
        ]
        lanes = machine._replies.lanes
        queued = [(e._replace(token=0), server.contents.get(e.token)) for e in lanes.items()]
        return (
            (collected, claims, queued, sorted(lanes._busy), machine._updates.items()),
            (sorted(server.gradients.items()), sorted(server.averages.items()), server.updating),
            (sorted(server.members.here), sorted(server.members.left), server.undropped),
            (server.under_way, server.is_over),
        )


def _without_token(sent: Any) -> Any:
    return sent if isinstance(sent, str) else (sent.frame._replace(token=0), sent.content)


def explore(world: TakeoverWorld, look: Any = lambda _: None) -> int:
    """All states that any order of events can reach; returns how many. Each end is checked."""

    def visit(here: TakeoverWorld) -> list[Choice]:
        look(here)
        choices = here.choices()
        if all(choice[0] in ("kill", "accuse") for choice in choices):
            here.check_end()
        return [] if here.is_done and not here.leaves else choices

    return explore_states(world, visit)


def run(world: TakeoverWorld, seed: int) -> TakeoverWorld:
    """To the end, by priorities that are drawn, and change now and then.

    So some links and members are much slower than others, which finds more than a draw for each
    event (Burckhardt et al., A randomized scheduler with probabilistic guarantees of finding bugs,
    2010).
    """
    chance = random.Random(seed)
    length = 40 * len(world.ranks) * len(world.rounds)
    changes = set(chance.sample(range(length), 6))
    mishaps = sorted(chance.sample(range(length // 2), world.kills + world.accusations))
    if chance.random() < 0.5:  # they come together
        mishaps = [mishaps[0] + chance.randrange(30) for _ in mishaps]
    ranks: dict[Choice, float] = {}
    happened = 0
    while (choices := world.pressing()) or mishaps:
        if mishaps and (happened >= min(mishaps) or not choices):
            mishaps.remove(min(mishaps))
            if wrong := world.mishaps():
                world.happen(chance.choice(wrong))
            continue
        for choice in choices:
            ranks.setdefault(choice, chance.random())
        first = max(choices, key=ranks.__getitem__)
        if happened in changes or chance.random() < 0.02:
            ranks[first] = -chance.random()
        world.happen(first)
        happened += 1
        assert happened < 100 * length, "it never ends"
    world.check_end()
    return world

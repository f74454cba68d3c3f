"""A world of `counting_world` in which a rank was lost, and comes again when it is chosen to."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from foreprop.core.barrier import NormCombiner
from foreprop.core.frames import CONTROL_PRIORITY, MessageReady
from foreprop.core.newcomers import (
    AnswerJoin,
    JoinAsked,
    JoinBid,
    JoinSettled,
    MemberJoined,
)
from foreprop.core.wire import Kind
from tests.unit.counting_world import Answered, Choice, World

_NEVER = 2**62


class Asked(NamedTuple):
    event: JoinAsked | JoinSettled


class JoiningWorld(World):
    """``lost`` is gone from the start, ``absent`` ranks have not come: they come when it is chosen.

    ``again``: one may die once more, when it has come. ``late``: they come when the others are in
    this step. ``begun``: of `JoinBid`.
    """

    def __init__(
        self,
        *,
        lost: int | None = None,
        absent: int = 0,
        again: bool = False,
        late: int = 0,
        begun: int = 0,
        **about: Any,
    ) -> None:
        started = about["workers"] - absent
        super().__init__(**about, started=started)
        self.comers = [*range(started, self.workers)]
        self.again, self.late, self.begun_step = again, late, begun
        self.joined_at: dict[int, int] = {}
        self.bids: dict[int, JoinBid] = {}
        self.heard: list[dict[int, int]] = [{} for _ in range(self.workers)]
        """By member: what it knows of newcomers."""
        if lost is not None:
            self.comers.append(lost)
            self.dead.add(lost)
            for server in range(len(self.servers)):
                self._lose(lost, server)
        self._send_all_off()
        for queue in self.to_worker.values():
            queue.clear()
        self.left.clear()

    def _send_all_off(self) -> None:
        while self.unsent:
            self._send_off(*min(self.unsent))

    def state(self) -> tuple[str, ...]:
        newcomers = [
            (
                sorted(each._members.promised.items()),
                [(r, a.step, sorted(a.behind)) for r, a in each.closing.newcomers.awaiting.items()],
                sorted(each._members.since.items()),
            )
            for each in self.servers
        ]
        bids = [(rank, sorted(vars(bid).items())) for rank, bid in sorted(self.bids.items())]
        own = sorted(self.joined_at.items()), self.heard, self.again, bids
        return (*super().state(), repr(newcomers), repr(own))

    # What may happen.
    def choices(self) -> list[Choice]:
        found = super().choices()
        others = [rank for rank in self.alive if rank not in self.bids]
        for rank in self.comers:
            if rank not in self.dead or rank in self.joined_at:
                continue
            links = {(rank, server) for server in range(len(self.servers))}
            ended = links <= self.gone and not links & self.unsent
            if ended and min(map(self.begun, others)) >= self.late:
                found.append(("join", rank, 0))
        return [c for c in found if not (c[0] in ("push", "bye") and c[1] in self.bids)]

    def happen(self, choice: Choice) -> None:
        what, rank, server = choice
        if what == "join":
            self._come(rank)
        elif what == "arrive" and isinstance(self.to_server[rank, server][0], Asked):
            asked: Any = self.to_server[rank, server].popleft()
            self._handle(server, asked.event)
        elif what == "kill":
            self.again = False
            super().happen(choice)
            self.bids.pop(rank, None)
        else:
            super().happen(choice)

    def _come(self, rank: int) -> None:
        self.dead.discard(rank)
        slices = len(self.stories)
        self.known[rank], self.reads[rank] = [()] * slices, ()
        self.pushed[rank], self.answered[rank] = [0] * slices, [-1] * slices
        self.combiners[rank] = NormCombiner(range(len(self.servers)), from_all=True)
        self.meeting[rank].clear()
        for server in range(len(self.servers)):
            self.gone.discard((rank, server))
            self.to_worker[rank, server].clear()
        if self.again:
            self.kill = rank
        self.bids[rank] = JoinBid(len(self.servers), begun=self.begun_step)
        self._ask(rank)

    def _ask(self, rank: int) -> None:
        self._tell_servers(JoinAsked(rank, self.bids[rank].step))

    def _tell_servers(self, event: JoinAsked | JoinSettled) -> None:
        for server in range(len(self.servers)):
            queue: deque[Any] = self.to_server[event.rank, server]  # type: ignore[assignment]
            queue.append(Asked(event))

    def first_of(self, rank: int) -> int:
        return self.joined_at.get(rank, 1)

    # What servers say.
    def _do_more(self, server: int, instruction: Any) -> None:
        if isinstance(instruction, AnswerJoin):
            self._send(server, instruction.rank, Kind.JOIN, instruction)
        elif isinstance(instruction, MemberJoined):
            members = self.members[server]
            steps = {rank: members.since[rank] for rank in members.settled & members.since.keys()}
            for rank in sorted(members.settled):
                known = steps if rank == instruction.rank else {instruction.rank: instruction.step}
                self._send(server, rank, Kind.JOINED, known)
        else:
            super()._do_more(server, instruction)

    def _send(self, server: int, rank: int, kind: Kind, what: Any) -> None:
        token, self.next_token = self.next_token, self.next_token + 1
        self.tokens[token] = what
        self._handle(server, MessageReady(rank, kind, 0, CONTROL_PRIORITY, 0, token))

    def _answer(self, rank: int, answer: Answered) -> None:
        told: Any = answer.story
        if answer.frame.kind == Kind.JOINED:
            self.heard[rank] |= told
        elif answer.frame.kind == Kind.JOIN:
            self._bid(answer.frame.peer, told)
        else:
            super()._answer(rank, answer)

    def _bid(self, rank: int, told: AnswerJoin) -> None:
        bid = self.bids.get(rank)
        if bid is None:
            return
        if told.ending:
            self.late = _NEVER  # it gives up, and nobody starts it again
            self.happen(("kill", rank, 0))
            return
        said = bid.add(len(bid._said), told)
        if said is False:
            self._ask(rank)
        elif said:
            slices = len(self.stories)
            del self.bids[rank]
            self.joined_at[rank] = bid.step
            self.met[rank] = set(range(bid.step))
            self.pushed[rank], self.answered[rank] = (
                [bid.step - 1] * slices,
                [bid.step - 2] * slices,
            )
            self._tell_servers(JoinSettled(rank, bid.step, bid.newest))

    # What must hold.
    def _push(self, rank: int, slice_: int) -> None:
        step = self.begun(rank)
        if rank in self.joined_at:
            assert step >= self.joined_at[rank]
        super()._push(rank, slice_)
        for newcomer, first in self.joined_at.items():
            ended = self.pushed[rank] == [first - 1] * len(self.stories)
            if rank != newcomer and ended and newcomer not in self.dead:
                assert self.heard[rank].get(newcomer) == first, "it reads data, and has not heard"

    def _due(self, step: int) -> set[int]:
        return {rank for rank in self.alive if step >= self.joined_at.get(rank, 1)}

    def check_end(self) -> None:
        super().check_end()
        for story in self.stories:
            for step, counted in story:
                for rank in self.comers:
                    first = self.joined_at.get(rank)
                    assert rank not in counted or (first is not None and step >= first)

"""A world of `counting_world` in which a rank was lost, and comes again when it is chosen to."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

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
    """``lost`` is gone from the start; ``again``: it may die once more, when it has come.

    ``late``: it comes when the others are in this step.
    """

    def __init__(self, *, lost: int, again: bool = False, late: int = 0, **about: Any) -> None:
        super().__init__(**about)
        self.lost, self.again, self.late = lost, again, late
        self.joined_at: dict[int, int] = {}
        self.bid: JoinBid | None = None
        self.heard: list[dict[int, int]] = [{} for _ in range(self.workers)]
        """By member: what it knows of newcomers."""
        self.settled: dict[int, int] = {}
        servers = range(len(self.servers))
        self.dead.add(lost)
        for server in servers:
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
                [(r, a.step, sorted(a.behind)) for r, a in each._newcomers.awaiting.items()],
                sorted(each._members.since.items()),
            )
            for each in self.servers
        ]
        bid = None if self.bid is None else sorted(vars(self.bid).items())
        own = self.joined_at, self.heard, self.settled, self.again, bid
        return (*super().state(), repr(newcomers), repr(own))

    # What may happen.
    def choices(self) -> list[Choice]:
        found = super().choices()
        if self.lost in self.dead and not self.settled and self.bid is None:
            others = [rank for rank in self.alive if rank != self.lost]
            links = {(self.lost, server) for server in range(len(self.servers))}
            ended = links <= self.gone and not links & self.unsent
            if ended and min(map(self.begun, others)) >= self.late:
                found.append(("join", self.lost, 0))
        joining = self.bid is not None
        return [c for c in found if not (joining and c[0] in ("push", "bye") and c[1] == self.lost)]

    def happen(self, choice: Choice) -> None:
        what, rank, server = choice
        if what == "join":
            self._come()
        elif what == "arrive" and isinstance(self.to_server[rank, server][0], Asked):
            asked: Any = self.to_server[rank, server].popleft()
            self._handle(server, asked.event)
        elif what == "kill":
            self.again = False
            super().happen(choice)
            self.bid = None if rank == self.lost else self.bid
        else:
            super().happen(choice)

    def _come(self) -> None:
        rank = self.lost
        self.dead.discard(rank)
        slices = len(self.stories)
        self.known[rank], self.reads[rank] = [()] * slices, ()
        self.pushed[rank], self.answered[rank] = [0] * slices, [-1] * slices
        for server in range(len(self.servers)):
            self.gone.discard((rank, server))
            self.to_worker[rank, server].clear()
        if self.again:
            self.kill = rank
        self.bid = JoinBid(len(self.servers))
        self._ask()

    def _ask(self) -> None:
        assert self.bid is not None
        self._tell_servers(JoinAsked(self.lost, self.bid.step))

    def _tell_servers(self, event: JoinAsked | JoinSettled) -> None:
        for server in range(len(self.servers)):
            queue: deque[Any] = self.to_server[self.lost, server]  # type: ignore[assignment]
            queue.append(Asked(event))

    # What servers say.
    def _do_more(self, server: int, instruction: Any) -> None:
        if isinstance(instruction, AnswerJoin):
            self._send(server, instruction.rank, Kind.JOIN, instruction)
        elif isinstance(instruction, MemberJoined):
            for rank in sorted(self.members[server].here):
                self._send(server, rank, Kind.JOINED, instruction)
        else:
            super()._do_more(server, instruction)

    def _send(self, server: int, rank: int, kind: Kind, what: Any) -> None:
        token, self.next_token = self.next_token, self.next_token + 1
        self.tokens[token] = what
        self._handle(server, MessageReady(rank, kind, 0, CONTROL_PRIORITY, 0, token))

    def _answer(self, rank: int, answer: Answered) -> None:
        told: Any = answer.story
        if answer.frame.kind == Kind.JOINED:
            self.heard[rank][told.rank] = told.step
        elif answer.frame.kind == Kind.JOIN:
            self._bid(answer.frame.peer, told)
        else:
            super()._answer(rank, answer)

    def _bid(self, rank: int, told: AnswerJoin) -> None:
        bid = self.bid
        if bid is None:
            return
        if told.ending:
            self.bid, self.late = None, _NEVER  # it gives up, and nobody starts it again
            self.happen(("kill", rank, 0))
            return
        said = bid.add(len(bid._said), told)
        if said is False:
            self._ask()
        elif said:
            slices = len(self.stories)
            self.bid, self.settled = None, {rank: bid.step}
            self.joined_at[rank] = bid.step
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
                first = self.joined_at.get(self.lost)
                assert self.lost not in counted or (first is not None and step >= first)

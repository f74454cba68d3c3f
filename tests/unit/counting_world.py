"""Workers, servers that count, and links between them; what happens next is chosen outside.

A slice's value is its *story*: the steps that it has been through, each with who was counted. A
gradient is what its worker had read of all slices when it began the step.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from foreprop.core.collect import AnswerSlice, DropPush, SliceUpdated, UpdateSlice
from foreprop.core.firstmembers import FirstMembers
from foreprop.core.frames import (
    Finish,
    FrameSent,
    InstallValue,
    MessageReady,
    PeerLeft,
    PushArrived,
    SendFrame,
    ValueArrived,
)
from foreprop.core.membership import (
    CountedLog,
    CountedReplay,
    MemberLeft,
    Members,
    PeerDropped,
)
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Slice
from foreprop.core.wire import Flag, Kind
from tests.unit.exploration import explore_states

Story = tuple[tuple[int, tuple[int, ...]], ...]
Choice = tuple[str, int, int]
"""What happens, to which rank, and which slice or server."""


class Pushed(NamedTuple):
    slice: int
    step: int
    reads: tuple[Story, ...]
    flags: int


class Answered(NamedTuple):
    frame: SendFrame
    story: Story


def counting_server(
    slices: Sequence[Slice],
    members: Members,
    names: Sequence[str],
    *,
    index: int = 0,
    replay: CountedReplay | None = None,
    has_values: bool = True,
) -> ServerMachine:
    """One that closes slices with the pushes that count."""
    return ServerMachine(
        slices,
        index=index,
        workers=members.workers,
        order="priority",
        names=names,
        closing=partial(FirstMembers, members=members, replay=replay, has_values=has_values),
    )


class World:
    """``kill``: a rank that may die at any moment. ``leaves``: who is done says goodbye.
    ``started``: so many ranks are there at the start; by default all.

    ``prompt``: frames leave at once, so that there are fewer orders to be looked at.
    """

    def __init__(
        self,
        *,
        workers: int,
        servers: int = 1,
        slices: int = 1,
        steps: int = 2,
        backups: int = 0,
        started: int | None = None,
        kill: int | None = None,
        leaves: bool = True,
        prompt: bool = False,
        replay: list[list[str]] | None = None,
        unused: frozenset[tuple[int, int, int]] = frozenset(),
    ) -> None:
        self.workers, self.steps, self.kill, self.unused = workers, steps, kill, unused
        self.backups, self.leaves, self.prompt = backups, leaves, prompt
        pieces = [Slice(number, number, 0, 1, number % servers) for number in range(slices)]
        owned = [[each.number for each in pieces if each.server == i] for i in range(servers)]
        self.logs = [CountedLog(workers, own, started=started) for own in owned]
        self.lines: list[list[str]] = [[log.head()] for log in self.logs]
        read = (
            [CountedReplay(replay[i], workers, owned[i]) for i in range(servers)] if replay else []
        )
        self.members = [Members(workers, backups=backups, started=started) for _ in range(servers)]
        self.servers = [
            counting_server(
                pieces,
                self.members[index],
                [f"p{number}" for number in range(slices)],
                index=index,
                replay=read[index] if read else None,
            )
            for index in range(servers)
        ]
        self.stories: list[Story] = [()] * slices
        self.updating: list[UpdateSlice | None] = [None] * servers
        self.gradients: dict[tuple[int, int], Pushed] = {}
        """At the servers, by slice and rank."""
        self.tokens: dict[int, Story] = {}
        self.next_token = 0
        self.to_server = {(r, i): deque[Pushed]() for r in range(workers) for i in range(servers)}
        self.to_worker = {(r, i): deque[Answered]() for r in range(workers) for i in range(servers)}
        self.unsent: set[tuple[int, int]] = set()
        self.known = [[()] * slices for _ in range(workers)]  # type: list[list[Story]]
        self.pushed = [[0] * slices for _ in range(workers)]
        self.answered = [[0] * slices for _ in range(workers)]
        self.newer = [0] * workers
        """By worker: the last step of which an answer was newer."""
        self.reads: list[tuple[Story, ...]] = [()] * workers
        self.dead = set(range(workers if started is None else started, workers))
        self.gone = {(rank, server) for rank in self.dead for server in range(servers)}
        self.byes: set[tuple[int, int]] = set()
        self.finished: list[int] = []
        self.left: list[MemberLeft] = []
        for number in range(slices):
            self._handle(number % servers, ValueArrived(0, number, 0, number))
        while self.unsent:
            self._send_off(*min(self.unsent))
        for queue in self.to_worker.values():
            queue.clear()  # all have the values

    # Who is where.
    def begun(self, rank: int) -> int:
        return min(self.answered[rank]) + 1

    @property
    def alive(self) -> list[int]:
        return [rank for rank in range(self.workers) if rank not in self.dead]

    @property
    def is_done(self) -> bool:
        if not self.leaves:
            return all(self.begun(rank) > self.steps for rank in self.alive)
        return sorted(self.finished) == list(range(len(self.servers)))

    def state(self) -> tuple[str, ...]:
        """All that what may follow depends on."""
        servers = [
            (
                [
                    (c.done, c.rounds, c.updating, sorted(c.owed), c.last)
                    for c in s._states.values()
                ],
                s._updates.items(),
                s._updating,
                [frame._replace(token=0) for frame in s._replies.lanes.items()],
                sorted(s._replies.lanes._busy),
            )
            for s in self.servers
        ]
        members = [(sorted(each.here), sorted(each.left)) for each in self.members]
        answers = {
            link: [(each.frame._replace(token=0), each.story) for each in queue]
            for link, queue in self.to_worker.items()
        }
        waiting = [
            self.tokens[frame.token] for s in self.servers for frame in s._replies.lanes.items()
        ]
        own = (self.stories, self.updating, self.known, self.pushed, self.answered, self.newer)
        ends = sorted(self.dead), sorted(self.gone), sorted(self.byes), self.finished
        links = self.to_server, answers, sorted(self.unsent), waiting, self.reads, self.gradients
        return tuple(map(repr, (servers, members, links, own, ends)))

    # What may happen.
    def choices(self) -> list[Choice]:
        found: list[Choice] = []
        for (rank, server), queue in self.to_server.items():
            if queue and (rank, server) not in self.gone:
                found.append(("arrive", rank, server))
            if rank in self.dead and (rank, server) not in self.gone:
                found.append(("gone", rank, server))
        for (rank, server), answers in self.to_worker.items():
            if answers and rank not in self.dead:
                found.append(("answer", rank, server))
        found += [("sent", rank, server) for rank, server in sorted(self.unsent)]
        found += [("updated", 0, i) for i, each in enumerate(self.updating) if each is not None]
        for rank in self.alive:
            begun, pushed = self.begun(rank), self.pushed[rank]
            ready = [s for s in range(len(pushed)) if pushed[s] < begun <= self.steps]
            found += [("push", rank, slice_) for slice_ in ready[-1:]]  # last layer first
            if begun > self.steps and self.leaves and self.answered[rank] == pushed:
                servers = range(len(self.servers))
                found += [("bye", rank, i) for i in servers if (rank, i) not in self.byes]
            if rank == self.kill:
                found.append(("kill", rank, 0))
        return found

    def happen(self, choice: Choice) -> None:
        what, rank, which = choice
        if what == "push":
            self._push(rank, which)
        elif what == "arrive":
            pushed = self.to_server[rank, which].popleft()
            self.gradients[pushed.slice, rank] = pushed
            event = PushArrived(rank, pushed.slice, pushed.step, pushed.slice, pushed.flags)
            self._handle(which, event)
        elif what == "sent":
            self._send_off(rank, which)
        elif what == "answer":
            self._answer(rank, self.to_worker[rank, which].popleft())
        elif what == "updated":
            self._update(which)
        elif what == "bye":
            self.byes.add((rank, which))
            self._handle(which, PeerLeft(rank))
        elif what == "kill":
            self.dead.add(rank)
            self.kill = None
        else:
            self._lose(rank, which)

    def _lose(self, rank: int, server: int) -> None:
        """Its connection has ended; what was under way may be lost."""
        self.gone.add((rank, server))
        self.to_server[rank, server].clear()
        if server not in self.finished and (rank, server) not in self.byes:
            self._handle(server, PeerDropped(rank))

    def _send_off(self, rank: int, server: int) -> None:
        self.unsent.remove((rank, server))
        self._handle(server, FrameSent(rank))

    def _push(self, rank: int, slice_: int) -> None:
        step = self.begun(rank)
        if self.pushed[rank].count(step) == 0:
            self.reads[rank] = tuple(self.known[rank])
        self.pushed[rank][slice_] = step
        flags = int(Flag.LATE) if self.newer[rank] == step - 1 > 0 else 0
        flags |= int(Flag.NO_GRADIENT) if (rank, slice_, step) in self.unused else 0
        pushed = Pushed(slice_, step, self.reads[rank], flags)
        self.to_server[rank, slice_ % len(self.servers)].append(pushed)

    def _answer(self, rank: int, answer: Answered) -> None:
        slice_, step, flags = answer.frame.slice, answer.frame.step, answer.frame.flags
        assert (answer.frame.kind, step) == (Kind.REPLY, self.pushed[rank][slice_])
        if flags & Flag.UNCHANGED:
            assert answer.story[: len(self.known[rank][slice_])] == self.known[rank][slice_]
        self.known[rank][slice_] = answer.story
        exact = len(answer.story) == min(step, self.steps)
        assert exact != bool(flags & Flag.LATE), "an answer that says what it is not"
        if not exact:
            self.newer[rank] = max(self.newer[rank], step)
        self.answered[rank][slice_] = step

    def _update(self, server: int) -> None:
        due, self.updating[server] = self.updating[server], None
        assert due is not None
        slice_, step, ranks, counted = *due[:3], due.counted
        assert counted is not None
        story = self.stories[slice_]
        assert len(story) == step - 1
        for rank in counted:
            pushed = self.gradients.pop((slice_, rank))
            assert pushed.step == step
            self._check_reads(pushed)
        having = tuple(rank for rank in counted if (rank, slice_, step) not in self.unused)
        assert ranks == having
        self.stories[slice_] = (*story, (step, counted))
        self.lines[server] += self.logs[server].note(slice_, step, counted)
        self._handle(server, SliceUpdated())

    def _check_reads(self, pushed: Pushed) -> None:
        """A gradient that counts in step s is of exactly the values after step s - 1."""
        for number, read in enumerate(pushed.reads):
            assert len(read) == pushed.step - 1, f"slice {number} was read in step {pushed.step}"
            assert self.stories[number][: len(read)] == read

    def _handle(self, server: int, event: Any) -> None:
        waiting = deque(self.servers[server].handle(event))
        while waiting:
            instruction = waiting.popleft()
            if isinstance(instruction, SendFrame):
                link = (instruction.peer, server)
                assert link not in self.unsent, "two frames are under way to one worker"
                self.unsent.add(link)
                story = self.tokens.pop(instruction.token)
                self.to_worker[link].append(Answered(instruction, story))
                if self.prompt:
                    self._send_off(*link)
            elif isinstance(instruction, AnswerSlice):
                waiting.extendleft(reversed(self._bind(server, instruction)))
            elif isinstance(instruction, UpdateSlice):
                assert self.updating[server] is None, "two updates at once"
                self.updating[server] = instruction
            elif isinstance(instruction, DropPush):
                self.gradients.pop((instruction.slice, instruction.rank))
            elif isinstance(instruction, MemberLeft):
                self.left.append(instruction)
            elif isinstance(instruction, Finish):
                assert server not in self.finished
                self.finished.append(server)
            else:
                self._do_more(server, instruction)

    def _do_more(self, server: int, instruction: Any) -> None:
        assert isinstance(instruction, InstallValue), instruction

    def _bind(self, server: int, answer: AnswerSlice) -> list[Any]:
        """As the shell does: an answer carries the values of the moment, and says so."""
        story, followed = self.stories[answer.slice], []
        late = int(Flag.LATE) if 0 < answer.step < len(story) else 0
        for rank in answer.ranks:
            token, self.next_token = self.next_token, self.next_token + 1
            self.tokens[token] = story
            about = (rank, Kind.REPLY, answer.step, answer.priority, answer.slice, token)
            event = MessageReady(*about, answer.flags | late)
            followed += self.servers[server].handle(event)
        return followed

    # How it ends.
    def check_end(self) -> None:
        """Survivors have made all steps, and have the same values; the rest is counted for."""
        assert self.is_done, "deadlock"
        for rank in self.alive:
            assert self.begun(rank) > self.steps
        for slice_, story in enumerate(self.stories):
            assert [step for step, _ in story] == list(range(1, self.steps + 1))
            for rank in self.alive:
                assert self.known[rank][slice_] == story or self.backups
            for step, counted in story:
                assert self._due(step) <= set(counted) or self.backups
                assert len(counted) >= len(self._due(step)) - self.backups

    def _due(self, step: int) -> set[int]:
        """Those whose pushes of a step count, at least."""
        return set(self.alive)

    def log_lines(self) -> list[list[str]]:
        return [[*lines, *log.rest()] for lines, log in zip(self.lines, self.logs, strict=True)]


def explore(world: World, look: Callable[[World], None] = lambda _: None) -> int:
    """All states that any order of events can reach; returns how many. Each end is checked."""

    def visit(here: World) -> list[Choice]:
        look(here)
        choices = here.choices()
        if not choices or (here.is_done and all(what == "kill" for what, *_ in choices)):
            here.check_end()
            return []
        return choices

    return explore_states(world, visit)


def run(world: World, seed: int, *, kill_after: int | None = None) -> World:
    """One random order, in which some workers may be slow; the kill comes after so many events."""
    rng = random.Random(seed)
    pace = [rng.choice([0.1, 1.0, 1.0]) for _ in range(world.workers)]
    events = 0
    while choices := [c for c in world.choices() if c[0] != "kill"]:
        if events == kill_after and world.kill is not None:
            world.happen(("kill", world.kill, 0))
        else:
            weights = [pace[rank] if what == "push" else 1.0 for what, rank, _ in choices]
            world.happen(rng.choices(choices, weights)[0])
        events += 1
    world.check_end()
    return world


def replayed(world: World, seed: int) -> World:
    """A session of as many workers, of which none dies, that counts as this one did."""
    again = World(
        workers=world.workers,
        servers=len(world.servers),
        slices=len(world.stories),
        steps=world.steps,
        replay=world.log_lines(),
        unused=world.unused,
    )
    rng = random.Random(seed)
    while choices := again.choices():
        again.happen(rng.choice(choices))
    assert again.is_done
    return again


def sets_of(stories: Iterable[Story]) -> set[tuple[int, ...]]:
    """All that were counted together."""
    return {counted for story in stories for _, counted in story}

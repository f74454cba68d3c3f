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

from foreprop.core.barrier import NormCombiner, StepBarrier
from foreprop.core.collect import (
    AnswerSlice,
    DropPush,
    SliceSummed,
    SliceUpdated,
    SumSlice,
    UpdateSlice,
)
from foreprop.core.firstmembers import FirstMembers
from foreprop.core.frames import (
    CONTROL_PRIORITY,
    Finish,
    FrameSent,
    InstallValue,
    MessageReady,
    NormArrived,
    PeerLeft,
    PullArrived,
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
from foreprop.core.norm import SendNormPart, SquareSum
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
    barrier: StepBarrier | None = None,
) -> ServerMachine:
    """One that closes slices with the pushes that count."""
    return ServerMachine(
        slices,
        index=index,
        workers=members.workers,
        order="priority",
        names=names,
        barrier=barrier,
        closing=partial(FirstMembers, members=members, replay=replay, has_values=has_values),
    )


class World:
    """``kill``: a rank that may die at any moment. ``leaves``: who is done says goodbye.
    ``started``: so many ranks are there at the start; by default all. ``meets``: steps after which
    all meet. ``norm``: updates need that of all gradients, and some steps are left out.

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
        meets: Sequence[int] = (),
        norm: bool = False,
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
                barrier=StepBarrier(len(owned[index]), told_by="any") if norm else None,
            )
            for index in range(servers)
        ]
        self.combiners = [NormCombiner(range(servers), from_all=True) for _ in range(workers)]
        self.norms: dict[int, SquareSum] = {}
        """By step."""
        self.summing: list[SumSlice | None] = [None] * servers
        self.meets = meets
        self.met: list[set[int]] = [set() for _ in range(workers)]
        """By worker: steps after which it has met the others."""
        self.meeting: list[set[int]] = [set() for _ in range(workers)]
        """By worker: slices that it waits for at a meeting."""
        self.shown: dict[int, tuple[Story, ...]] = {}
        """By meeting, what all have had."""
        self.stories: list[Story] = [()] * slices
        self.updating: list[UpdateSlice | None] = [None] * servers
        self.gradients: dict[tuple[int, int], Pushed] = {}
        """At the servers, by slice and rank."""
        self.tokens: dict[int, Story] = {}
        self.next_token = 0
        self.to_server = {(r, i): deque[Any]() for r in range(workers) for i in range(servers)}
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
                sorted((n, sorted(asked.items())) for n, asked in s.closing._asked.items()),
                s._barrier and (s._barrier._known_step, sorted(s._held._held.get(0, {}).items())),
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
        own += self.summing, self.met, self.meeting, [each._parts for each in self.combiners]
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
        found += [("summed", 0, i) for i, each in enumerate(self.summing) if each is not None]
        for rank in self.alive:
            begun, pushed = self.begun(rank), self.pushed[rank]
            if rank == self.kill:
                found.append(("kill", rank, 0))
            if begun - 1 in self.meets and begun - 1 not in self.met[rank]:
                if self.answered[rank] == pushed and not self.meeting[rank]:
                    found.append(("meet", rank, begun - 1))
                continue
            ready = [s for s in range(len(pushed)) if pushed[s] < begun <= self.steps]
            found += [("push", rank, slice_) for slice_ in ready[-1:]]  # last layer first
            if begun > self.steps and self.leaves and self.answered[rank] == pushed:
                servers = range(len(self.servers))
                found += [("bye", rank, i) for i in servers if (rank, i) not in self.byes]
        return found

    def happen(self, choice: Choice) -> None:
        what, rank, which = choice
        if what == "push":
            self._push(rank, which)
        elif what == "arrive":
            self._arrive(rank, which, self.to_server[rank, which].popleft())
        elif what == "sent":
            self._send_off(rank, which)
        elif what == "answer":
            self._answer(rank, self.to_worker[rank, which].popleft())
        elif what == "updated":
            self._update(which)
        elif what == "summed":
            self._sum(which)
        elif what == "meet":
            self.meeting[rank] = set(range(len(self.stories)))
            for slice_ in range(len(self.stories)):
                pull = PullArrived(rank, slice_, which, slice_)
                self.to_server[rank, slice_ % len(self.servers)].append(pull)
        elif what == "bye":
            self.byes.add((rank, which))
            self._handle(which, PeerLeft(rank))
        elif what == "kill":
            self.dead.add(rank)
            self.kill = None
        else:
            self._lose(rank, which)

    def _arrive(self, rank: int, server: int, what: Any) -> None:
        if isinstance(what, Pushed):
            self.gradients[what.slice, rank] = what
            what = PushArrived(rank, what.slice, what.step, what.slice, what.flags)
        self._handle(server, what)

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
        if answer.frame.kind == Kind.NORM_PART:
            self._add_part(rank, slice_, step, answer.story)
            return
        if not step and self.meeting[rank]:
            self._meet(rank, slice_, answer.story)
            return
        assert (answer.frame.kind, step) == (Kind.REPLY, self.pushed[rank][slice_])
        if flags & Flag.UNCHANGED:
            assert answer.story[: len(self.known[rank][slice_])] == self.known[rank][slice_]
        self.known[rank][slice_] = answer.story
        exact = len(answer.story) == min(step, self.steps)
        assert exact != bool(flags & Flag.LATE), "an answer that says what it is not"
        if not exact:
            self.newer[rank] = max(self.newer[rank], step)
        if step >= self.first_of(rank):
            counted = rank in dict(answer.story)[step]
            assert counted != bool(flags & Flag.DROPPED), "it is told what is not so"
        self.answered[rank][slice_] = step

    def first_of(self, rank: int) -> int:
        """The first step that the rank pushes."""
        return 1

    def _meet(self, rank: int, slice_: int, story: Story) -> None:
        self.known[rank][slice_], self.newer[rank] = story, 0
        self.meeting[rank].remove(slice_)
        if not self.meeting[rank]:
            made, known = self.begun(rank) - 1, tuple(self.known[rank])
            self.met[rank].add(made)
            assert self.shown.setdefault(made, known) == known, "they have met, and differ"

    def _add_part(self, rank: int, server: int, step: int, part: Any) -> None:
        total = self.combiners[rank].add(server, step, part)
        if total is not None:
            assert self.norms.setdefault(step, total) == total
            for link in range(len(self.servers)):
                told = NormArrived(rank, step, skip=self._skips(step))
                self.to_server[rank, link].append(told)

    def _skips(self, step: int) -> bool:
        return sum(self.norms[step].bins) % 4 == 0

    def _sum(self, server: int) -> None:
        """Who is counted makes the part."""
        due, self.summing[server] = self.summing[server], None
        assert due is not None
        assert due.counted is not None
        which = sum(1 << rank for rank in due.ranks) * (due.slice + 1)
        self._handle(server, SliceSummed(SquareSum(0, (0, 0, which))))

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
        is_left_out = step in self.norms and self._skips(step)
        assert ranks == (() if is_left_out else having)
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
            elif isinstance(instruction, SumSlice):
                assert self.summing[server] is None, "two sums at once"
                self.summing[server] = instruction
            elif isinstance(instruction, SendNormPart):
                waiting.extendleft(reversed(self._send_part(server, instruction)))
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

    def _send_part(self, server: int, known: SendNormPart) -> list[Any]:
        followed: list[Any] = []
        for rank in sorted(self.members[server].settled):
            token, self.next_token = self.next_token, self.next_token + 1
            self.tokens[token] = known.part  # type: ignore[assignment]
            about = (rank, Kind.NORM_PART, known.step, CONTROL_PRIORITY, server, token)
            followed += self.servers[server].handle(MessageReady(*about))
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
                is_late = self.backups and self.steps not in self.meets
                assert self.known[rank][slice_] == story or is_late
            for step, counted in story:
                assert self._due(step) <= set(counted) or self.backups
                assert len(counted) >= len(self._due(step)) - self.backups
                assert counted or self._may_count_nobody

    @property
    def _may_count_nobody(self) -> bool:
        """All who had the values of the step may be dead."""
        return bool(self.left)

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
        norm=bool(world.norms),
    )
    rng = random.Random(seed)
    while choices := again.choices():
        again.happen(rng.choice(choices))
    assert again.is_done
    return again


def sets_of(stories: Iterable[Story]) -> set[tuple[int, ...]]:
    """All that were counted together."""
    return {counted for story in stories for _, counted in story}

"""One server's life under a schedule, from its first step past its node's loss: core machines only.

All slices belong to one server, whose node ``lost`` has a worker, too. Links are queues in order.
At some moment the node is gone: what it had sent arrives up to some point, and what was sent to it
is lost. The survivors settle with a substitute where its slices go on, and train to the end. A
slice's values and its optimizer state are the stories of their updates. What happens next is chosen
outside: by a seed, or every choice is looked at.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from foreprop.core.buddy import (
    BuddiedServer,
    HeldStates,
    KeepState,
    SnapshotHeld,
    StateKept,
    buddy_of,
    most_lost,
)
from foreprop.core.collect import AnswerSlice, SliceUpdated, UpdateSlice
from foreprop.core.frames import (
    CompleteParameter,
    FrameSent,
    GradientReady,
    InstallValue,
    MessageReady,
    PushArrived,
    ReplyArrived,
    SendFrame,
    ValueArrived,
)
from foreprop.core.membership import Members
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Partition, plan_slices
from foreprop.core.takeover import Settled, Settlement, SliceTakenOver, pushed_again
from foreprop.core.wire import Kind
from foreprop.core.worker_machine import WorkerMachine
from tests.unit.counting_world import counting_server
from tests.unit.exploration import explore_states

Story = tuple[tuple[int, tuple[int, ...]], ...]
"""The updates of a slice: step, and the ranks that were counted."""
Message = tuple[str, Any]
Choice = tuple[str, int]
"""What happens, and to whom: a worker's rank, or the place of what a server has copied."""
LOSE: Choice = ("lose", 0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``lost`` is None: no node is lost. ``kill_after`` so many events of a seeded run it is.

    ``prompt``: frames leave and copies are made at once, so that there are fewer orders.
    """

    workers: int
    sizes_elems: Sequence[int] = (2, 1)
    steps: int = 6
    every: int = 2
    lost: int | None = 0
    kill_after: int = 10**9
    prompt: bool = False


@dataclass
class Worker:
    rank: int
    machine: WorkerMachine
    stories: list[Story]
    held: HeldStates[Story] = field(default_factory=HeldStates)
    step: int = 0  # of the gradients that are ready, or the last that were
    to_compute: list[int] = field(default_factory=list)
    unanswered: dict[int, int] = field(default_factory=dict)  # by slice
    priorities: dict[int, int] = field(default_factory=dict)
    sees_loss: bool = False
    claimed: bool = False
    resumed: bool = False


class ServedLife:
    """Of one plan; raises `AssertionError` when a rule is broken."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        partition = Partition(servers=1, slice_elems=1)
        self.slices = plan_slices(plan.sizes_elems, [4] * len(plan.sizes_elems), partition)
        self.numbers = [piece.number for piece in self.slices]
        self.undone = 0
        """Updates that the lost server had made, and no survivor has seen."""
        self.behind: list[int] = []
        """By slice that was taken over, how many steps older its state was than its values."""
        self.settled: dict[int, Settled] = {}
        self.members = list(range(plan.workers))
        self.is_lost = False
        self.workers = [self._worker(rank) for rank in self.members]
        self.to_server: dict[int, deque[Message]] = {rank: deque() for rank in self.members}
        self.to_worker: dict[int, deque[Message]] = {rank: deque() for rank in self.members}
        host = plan.lost if plan.lost is not None else 0
        self.buddy = buddy_of(host, self.members)
        self.server = self._server(host, epoch=0)
        self.settlement: Settlement | None = None

    # Making them.
    def _worker(self, rank: int) -> Worker:
        machine = WorkerMachine(
            self.slices,
            parameters=len(self.plan.sizes_elems),
            order="priority",
            reply="broadcast",
        )
        return Worker(rank, machine, [((0, ()),) for _ in self.slices])

    def _server(self, node: int, *, epoch: int) -> Server:
        return Server(self, list(self.members), node, epoch)

    # The schedule.
    def run(self, seed: int) -> ServedLife:
        chance, happened = random.Random(seed), 0
        while not self.is_over:
            choices = [choice for choice in self.choices() if choice != LOSE]
            assert choices, self.describe()
            self.happen(chance.choice(choices))
            happened += 1
            if happened == self.plan.kill_after and self.plan.lost is not None:
                self.happen(LOSE)
        self.check_end()
        return self

    @property
    def is_over(self) -> bool:
        return all(
            worker.step == self.plan.steps and not worker.to_compute and self._is_complete(worker)
            for worker in self._present()
        ) and not (self.is_lost and not all(worker.resumed for worker in self._present()))

    def _present(self) -> list[Worker]:
        return [self.workers[rank] for rank in self.members]

    def _is_complete(self, worker: Worker) -> bool:
        return all(map(worker.machine.is_complete, range(len(self.plan.sizes_elems))))

    def choices(self) -> list[Choice]:
        found: list[Choice] = []
        for worker in self._present():
            found += self._choices_of(worker)
        if not self.is_lost and self.plan.lost is not None:
            found.append(LOSE)
        if self.is_lost and not self.settled:
            return found
        found += self.server.choices()
        return found + [("arrive", rank) for rank in self.members if self.to_server[rank]]

    def _choices_of(self, worker: Worker) -> list[Choice]:
        rank, found = worker.rank, list[Choice]()
        if worker.step < self.plan.steps or worker.to_compute:
            parameters = range(len(self.plan.sizes_elems))
            if worker.to_compute or all(map(worker.machine.is_complete, parameters)):
                found.append(("compute", rank))
        if self.to_worker[rank]:
            found.append(("receive", rank))
        if self.is_lost and not worker.claimed:
            found.append(("claim", rank))
        if worker.claimed and self.settled and not worker.resumed:
            found.append(("resume", rank))
        return found

    def happen(self, choice: Choice) -> None:
        what, which = choice
        if what == "lose":
            assert self.plan.lost is not None
            self._lose(self.plan.lost)
        elif what == "arrive":
            self.server.receive(which)
        elif what in ("updated", "sent", "copied"):
            self.server.happen(choice)
        else:
            do = {
                "compute": self._compute,
                "receive": self._receive,
                "claim": self._claim,
                "resume": self._resume,
            }
            do[what](self.workers[which])

    def _compute(self, worker: Worker) -> None:
        """The next gradient of a step; each worker has orders of its own."""
        if not worker.to_compute:
            worker.step += 1
            worker.to_compute = list(range(len(self.plan.sizes_elems)))
            order = random.Random(1000 * worker.step + worker.rank + self.plan.kill_after)
            order.shuffle(worker.to_compute)
        parameter = worker.to_compute.pop()
        self._do(worker, worker.machine.handle(GradientReady(parameter, worker.step)))

    def _do(self, worker: Worker, instructions: Sequence[object]) -> None:
        for instruction in instructions:
            if not isinstance(instruction, SendFrame):
                assert isinstance(instruction, CompleteParameter)
                continue
            if instruction.kind == Kind.PUSH:
                worker.unanswered[instruction.slice] = instruction.step
                worker.priorities[instruction.slice] = instruction.priority
            if not self.is_lost or worker.resumed:  # or else into nothing
                self.to_server[worker.rank].append(("frame", instruction))
            self._do(worker, worker.machine.handle(FrameSent(instruction.peer)))

    def _receive(self, worker: Worker) -> None:
        kind, content = self.to_worker[worker.rank].popleft()
        frame, story = content
        if kind == "snapshot":
            worker.held.put(frame.slice, frame.step, story)
            held = ("held", (frame.slice, frame.step))
            if not self.is_lost or worker.resumed:
                self.to_server[worker.rank].append(held)
            return
        assert frame.kind == Kind.REPLY
        assert worker.unanswered.pop(frame.slice) == frame.step
        worker.stories[frame.slice] = story
        self._do(worker, worker.machine.handle(ReplyArrived(frame.slice, frame.step, 0)))

    # The loss, and after it.
    def _lose(self, node: int) -> None:
        self.is_lost = True
        self.members.remove(node)
        for rank in self.members:
            self.to_server[rank].clear()

    def _claim(self, worker: Worker) -> None:
        """What had not come by then does not come any more."""
        worker.claimed = True
        self.to_worker[worker.rank].clear()
        if self.settlement is None:
            self.settlement = Settlement(self.numbers, self.members, buddy=self.buddy)
        steps = [worker.stories[number][-1][0] for number in self.numbers]
        for each in self.settlement.add(worker.rank, steps):
            self.settled[each.slice] = each
        if not self.settled:
            return
        for number, settled in self.settled.items():
            undone = self.server.stories[number][-1][0] - settled.step
            assert undone in (0, 1), "more than the last update was seen by nobody"
            self.undone += undone
        self.server = self._server(self.buddy, epoch=1)

    def _resume(self, worker: Worker) -> None:
        worker.resumed = True
        queue = self.to_server[worker.rank]
        for number in self.numbers:
            settled = self.settled[number]
            if settled.giver == worker.rank:
                assert worker.stories[number][-1][0] == settled.step
                queue.append(("taken over", (number, worker.stories[number])))
            if worker.rank == self.buddy:
                found = worker.held.newest(number, settled.step)
                queue.append(("state", (number, found)))
        steps = {number: settled.step for number, settled in self.settled.items()}
        for number in pushed_again(worker.unanswered, steps):
            step, priority = worker.unanswered[number], worker.priorities[number]
            frame = MessageReady(0, Kind.PUSH, step, priority, number, -1)
            self._do(worker, worker.machine.handle(frame))

    # The end.
    def check_end(self) -> None:
        first = self._present()[0]
        for worker in self._present():
            assert worker.stories == first.stories
        for story in first.stories:
            assert [step for step, _ in story] == list(range(self.plan.steps + 1))
            for _, ranks in story[1:]:
                assert set(ranks) >= set(self.members)

    def describe(self) -> str:
        waits = [(each.rank, each.step, each.unanswered, each.resumed) for each in self._present()]
        return f"deadlock: {waits}"

    def state(self) -> tuple[str, ...]:
        """All that what may follow depends on."""
        workers = [
            (
                (each.step, each.to_compute, each.unanswered, each.claimed, each.resumed),
                (each.stories, each.held.all()),
                (each.machine._awaited_step, each.machine._missing, each.machine._step),
            )
            for each in self._present()
        ]
        to_server = [list(self.to_server[rank]) for rank in self.members]
        to_worker = [
            [(kind, frame._replace(token=0), story) for kind, (frame, story) in queue]
            for queue in map(self.to_worker.__getitem__, self.members)
        ]
        claims = self.settlement and sorted(self.settlement._claims.items())
        own = self.is_lost, self.settled, claims
        lost_server = self.is_lost and not self.settled
        server = self.server.stories if lost_server else self.server.state()
        return tuple(map(repr, (workers, to_server, to_worker, own, server)))


def explore(plan: Plan, look: Callable[[ServedLife], None] = lambda _: None) -> int:
    """All states that any order of events can reach; returns how many. Each end is checked."""

    def visit(life: ServedLife) -> list[Choice]:
        look(life)
        choices = life.choices()
        if life.is_over:
            life.check_end()
        else:
            assert choices, life.describe()
        return choices

    return explore_states(ServedLife(plan), visit)


class Server:
    """The server, or (``epoch`` 1) its substitute. ``ranks``: whom it serves."""

    def __init__(self, life: ServedLife, ranks: list[int], node: int, epoch: int) -> None:
        self.epoch = epoch
        self.stories: list[Story] = [((0, ()),) for _ in life.slices]
        self.states: list[Story] = [() for _ in life.slices]
        self.kept: dict[tuple[int, int], Story] = {}
        self._life = life
        self._ranks = ranks
        self._updating: UpdateSlice | None = None
        self._sending: dict[int, SendFrame] = {}
        self._answers: list[Story] = []
        self._copied: list[StateKept] = []
        self._has_state = set(life.numbers) if epoch == 0 else set()
        members = Members(life.plan.workers)
        for rank in set(range(life.plan.workers)) - set(ranks):
            members.drop(rank)
        names = [f"p{n}" for n in range(len(life.plan.sizes_elems))]
        inner = counting_server(life.slices, members, names)
        for number in life.numbers if epoch == 0 else ():
            inner.handle(ValueArrived(0, number, 0, 0))  # the first values are everywhere
        self.machine = BuddiedServer(
            inner, life.numbers, node=node, members=ranks, every=life.plan.every
        )

    def choices(self) -> list[Choice]:
        found: list[Choice] = [("updated", 0)] if self._updating is not None else []
        found += [("sent", peer) for peer in self._sending]
        return found + [("copied", place) for place in range(len(self._copied))]

    def happen(self, choice: Choice) -> None:
        what, which = choice
        if what == "updated":
            self._updated()
        elif what == "sent":
            self._sent(which)
        else:  # some time later: other threads go on meanwhile
            self._do(self.machine.handle(self._copied.pop(which)))

    def state(self) -> tuple[Any, ...]:
        outer, inner = self.machine, self.machine._machine
        assert isinstance(inner, ServerMachine)
        lanes = inner._replies.lanes
        queued = lanes.items()
        collected = [
            (each.done, each.rounds, each.updating, each.owed, each.priority, each.last)
            for each in inner._states.values()
        ]
        return (
            (self.epoch, self.stories, self.states, self._updating, self._sending, self._copied),
            sorted(self._has_state),
            (outer.buddy, outer._done, outer._held, outer._next_due, outer._ready),
            (outer._waiting, outer._queued, outer._under_way, outer._unqueued),
            (collected, inner._updates.items(), inner._updating, sorted(lanes._busy)),
            [(frame._replace(token=0), self._story(frame)) for frame in queued],
        )

    def _story(self, frame: SendFrame) -> Story:
        is_snapshot = frame.kind == Kind.SNAPSHOT
        return self.kept[frame.slice, frame.step] if is_snapshot else self._answers[frame.token]

    def receive(self, rank: int) -> None:
        kind, content = self._life.to_server[rank].popleft()
        if kind == "frame":
            frame: SendFrame = content
            assert frame.kind == Kind.PUSH
            push = PushArrived(rank, frame.slice, frame.step, frame.priority, frame.flags)
            self._do(self.machine.handle(push))
        elif kind == "held":
            self._do(self.machine.handle(SnapshotHeld(rank, *content)))
        elif kind == "taken over":
            self._take_over(*content)
        else:
            self._take_state(*content)

    def _take_over(self, slice_: int, story: Story) -> None:
        settled = self._life.settled[slice_]
        assert self._updating is None or self._updating.slice != slice_
        self.stories[slice_] = story
        self._do(self.machine.handle(SliceTakenOver(slice_, settled.step, 0, settled.owed)))

    def _take_state(self, slice_: int, found: tuple[int, Story] | None) -> None:
        """Of the node's worker."""
        step, state = found or (0, ())
        life, settled = self._life, self._life.settled[slice_]
        assert self._updating is None or self._updating.slice != slice_
        assert state == tuple(story for story in self._story_of(slice_) if 0 < story[0] <= step)
        lost = settled.step - step
        assert 0 <= lost <= most_lost(life.plan.every)
        life.behind.append(lost)
        self.states[slice_] = state
        self._has_state.add(slice_)

    def _story_of(self, slice_: int) -> Story:
        settled = self._life.settled[slice_]
        return self._life.workers[settled.giver].stories[slice_][: settled.step + 1]

    def _updated(self) -> None:
        update, self._updating = self._updating, None
        assert update is not None
        slice_, step = update.slice, update.step
        assert slice_ in self._has_state, "updated before its state was there"
        ranks = update.ranks
        assert self.stories[slice_][-1][0] == step - 1, "a step was left out, or done twice"
        self.stories[slice_] += ((step, ranks),)
        self.states[slice_] += ((step, ranks),)
        self._do(self.machine.handle(SliceUpdated()))

    def _sent(self, peer: int) -> None:
        del self._sending[peer]
        self._do(self.machine.handle(FrameSent(peer)))

    def _do(self, instructions: Sequence[object]) -> None:
        for instruction in instructions:
            if isinstance(instruction, KeepState):
                slice_, step = instruction
                assert not self.states[slice_] or self.states[slice_][-1][0] <= step
                self.kept[slice_, step] = self.states[slice_]
                if self._life.plan.prompt:
                    self._do(self.machine.handle(StateKept(slice_, step)))
                else:
                    self._copied.append(StateKept(slice_, step))
            elif isinstance(instruction, UpdateSlice):
                assert self._updating is None
                assert instruction.counted == tuple(self._ranks)
                self._updating = instruction
            elif isinstance(instruction, AnswerSlice):
                self._answer(instruction)
            elif isinstance(instruction, SendFrame):
                self._send(instruction)
            else:
                assert isinstance(instruction, InstallValue), instruction

    def _answer(self, answer: AnswerSlice) -> None:
        """With the values of now, as `elastic.counting` does."""
        slice_, step, priority, ranks = answer[:4]
        assert self.stories[slice_][-1][0] == step or step == 0
        self._check_bound(slice_, step)
        for rank in ranks:
            self._answers.append(self.stories[slice_])
            place = (Kind.REPLY, step, priority, slice_, len(self._answers) - 1)
            self._do(self.machine.handle(MessageReady(rank, *place)))

    def _check_bound(self, slice_: int, step: int) -> None:
        """No answer leaves whose state might be lost for more than K steps."""
        life = self._life
        if self.epoch == 0:
            held = life.workers[life.buddy].held.newest(slice_, step)
            assert step - (0 if held is None else held[0]) <= most_lost(life.plan.every)

    def _send(self, frame: SendFrame) -> None:
        assert frame.peer not in self._sending, "two frames are in the hands of one link"
        self._sending[frame.peer] = frame
        kind = "snapshot" if frame.kind == Kind.SNAPSHOT else "reply"
        self._life.to_worker[frame.peer].append((kind, (frame, self._story(frame))))
        if self._life.plan.prompt:
            self._sent(frame.peer)

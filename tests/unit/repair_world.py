"""Workers and servers beside them, whose views an oracle forms: what is counted, kept and repaired.

An average is data here: who was counted, what it sums, and both residuals. A slice's *story* at a
worker is all averages that it has had, in order. Each member has a worker and a server; a link is a
queue in order, from each worker to each server and back, and stays open: that frames of another
view change nothing is the machines' part. What happens next is chosen outside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from foreprop.core.collect import Round
from foreprop.core.repair import CloseRound, EmptyResidual, Repair
from foreprop.core.retention import (
    Average,
    Contribution,
    ContributionReady,
    EncodePush,
    KeepAverage,
    Retention,
    SettleResidual,
    ViewEntered,
)
from foreprop.core.statetransfer import (
    PARTS,
    InstallPart,
    MakeUpdate,
    Part,
    PartSent,
    StateTransfer,
    UpdateDue,
    UpdateMade,
)
from foreprop.core.views import (
    LEAST_LEAD_STEPS,
    SLOTS,
    EndMember,
    LeaveView,
    SendTo,
    StepBegun,
    View,
    first_view,
    slices_of,
)
from tests.unit.exploration import explore_states

Choice = tuple[Any, ...]
PUSH_UNIT, REPLY_UNIT = 4, 8
"""What codecs keep are multiples of these; the rest is left out."""


class Sent(NamedTuple):
    """What one slice's encoding of a round was: a push's, or an average's."""

    round: Round
    exact: int
    """The gradient, or the sum of what was pushed."""
    value: int
    before: int
    """The residual that it began with."""
    after: int
    counted: tuple[int, ...] = ()
    tenure: tuple[int, int] = (0, 0)
    """The server, and how often it had begun with an empty residual."""
    has_gradient: bool = True


def encoded(round_: Round, exact: int, before: int, unit: int, **more: Any) -> Sent:
    left_out = (exact + before) % unit
    return Sent(round_, exact, exact + before - left_out, before, left_out, **more)


class RepairWorld:
    """Of ``members``; ``homes``: by slice. Every worker runs the ``rounds``, of every slice.

    ``lost``: they may be lost, in this order, at any moment; with ``silenced`` they live on.
    ``newcomer``: comes at any moment. ``unused``: (member, slice, round) without a gradient.
    ``prompt``: what each worker computes is there at once, so that there are fewer orders.
    """

    def __init__(
        self,
        members: int,
        *,
        homes: Sequence[int] = (0,),
        rounds: Sequence[Round] = ((1, 0), (2, 0)),
        lost: Sequence[int] = (),
        silenced: bool = False,
        newcomer: int | None = None,
        unused: Iterable[tuple[int, int, Round]] = (),
        prompt: bool = True,
    ) -> None:
        self.homes = dict(enumerate(homes))
        self.rounds, self.unused = tuple(rounds), frozenset(unused)
        self.last_rounds = {step: (step, again) for step, again in self.rounds}
        self.losses, self.silenced, self.prompt = list(lost), silenced, prompt
        self.newcomer = newcomer
        self.got_step = 0
        """Of what the newcomer gets."""
        first = first_view(range(members))
        everybody = [*first.members, *([] if newcomer is None else [newcomer])]
        self.views: dict[int, View | None] = dict.fromkeys(everybody)
        self.retentions: dict[int, Retention] = {}
        self.repairs: dict[int, Repair] = {}
        self.transfers: dict[int, StateTransfer] = {}
        self.begun = dict.fromkeys(everybody, 0)
        slices = list(self.homes)
        for m in everybody:
            view = first if m != newcomer else None
            self.views[m] = view
            self.retentions[m] = Retention(m, view, self.homes, workers=m % SLOTS + 1)
            self.repairs[m] = Repair(m, first, self.homes)
            self.transfers[m] = StateTransfer(m, view, slices)
        self.to_server = {(a, b): deque[Any]() for a in everybody for b in everybody}
        self.to_worker = {(a, b): deque[Any]() for a in everybody for b in everybody}
        self.parts = {(a, b): deque[Any]() for a in everybody for b in everybody if a != b}
        nothing = {m: dict.fromkeys(slices, ()) for m in everybody}
        self.stories: dict[int, dict[int, tuple[Sent, ...]]] = nothing
        self.pushes: dict[int, dict[int, tuple[Sent, ...]]] = {m: dict(nothing[m]) for m in nothing}
        """All that was encoded, by member and slice."""
        self.residuals = {m: dict.fromkeys(slices, 0) for m in everybody}
        self.updated = {m: dict.fromkeys(slices, 0) for m in everybody}
        """The steps that slices are after."""
        self.installed: set[tuple[int, str]] = set()
        """What the newcomer has."""
        self.unsent: set[tuple[int, int, int, str]] = set()
        self.summed: dict[int, dict[int, dict[int, Sent]]] = {
            m: {s: {} for s in slices} for m in everybody
        }
        self.given: dict[tuple[int, int], Sent] = {}
        self.open: dict[tuple[int, int], Sent] = {}
        """By server and slice: the last average that it encoded."""
        self.kept: dict[tuple[int, int], int] = {}
        """By server and slice: its residual."""
        self.tenures = dict.fromkeys(((m, s) for m in everybody for s in slices), 0)
        self.dead: set[int] = set()
        self.gone: set[int] = set()
        """Lost, dead or not."""
        self.compute_all()

    # What may happen.
    @property
    def alive(self) -> list[int]:
        return [member for member in self.views if member not in self.dead]

    def data_choices(self) -> list[Choice]:
        found: list[Choice] = []
        for (a, b), queue in self.to_server.items():
            found += [("serve", a, b)] if queue and b not in self.dead else []
        for (a, b), queue in self.to_worker.items():
            found += [("answer", a, b)] if queue and b not in self.dead else []
        for (a, b), queue in self.parts.items():
            found += [("part", a, b)] if queue and b not in self.dead else []
        found += [("left", *each) for each in sorted(self.unsent) if each[0] not in self.dead]
        for m in self.alive:
            found += [("ready", m, s) for s in self.homes if self.may_compute(m, s)]
        return found

    def next_round(self, member: int, slice_: int) -> Round | None:
        """The next that its loop computes."""
        done = self.ready_rounds(member, slice_)
        rest = [each for each in self.rounds if each > done]
        return rest[0] if rest else None

    def ready_rounds(self, member: int, slice_: int) -> Round:
        kept = self.retentions[member]._kept[slice_]
        ready = kept.next.round if kept.next else kept.pushed
        return max(ready, (self.got_step, 63)) if member == self.newcomer else ready

    def may_compute(self, member: int, slice_: int) -> bool:
        round_ = self.next_round(member, slice_)
        if round_ is None or self.retentions[member]._kept[slice_].next:
            return False
        if member == self.newcomer and not all(map(self.transfers[member].has_values, self.homes)):
            return False
        step, again = round_
        if again:
            others = [self.ready_rounds(member, s) for s in self.homes]
            return all(each >= (step, again - 1) for each in others)
        before = max((s for s, _ in self.rounds if s < step), default=0)
        return all(self.updated[member][s] >= before for s in self.homes)

    def compute_all(self) -> None:
        """With ``prompt``: what begins a step is there at once, not what comes in the middle."""
        for m in self.alive if self.prompt else ():
            for s in self.homes:
                round_ = self.next_round(m, s)
                if round_ and not round_[1] and self.may_compute(m, s):
                    self.compute(m, s)

    def compute(self, member: int, slice_: int) -> None:
        round_ = self.next_round(member, slice_)
        assert round_ is not None
        if round_[0] > self.begun[member]:
            self.begun[member] = round_[0]
            self.step_begun(member, StepBegun(round_[0]))
        used = (member, slice_, round_) not in self.unused
        self.tell_worker(member, ContributionReady(slice_, round_, used))

    def step_begun(self, member: int, event: StepBegun) -> None:
        """For who agrees on views."""

    def happen_data(self, choice: Choice) -> None:
        what, *who = choice
        if what == "serve":
            queue = self.to_server[who[0], who[1]]
            frame, payload = queue.popleft()
            self.serve(who[1], frame, payload)
            if isinstance(frame, ViewEntered) and queue and self.prompt:
                self.serve(who[1], *queue.popleft())  # the claims
        elif what == "answer":
            frame, payload = self.to_worker[who[0], who[1]].popleft()
            if isinstance(frame, Average):
                self.given[who[1], -1 - frame.slice] = payload
            self.tell_worker(who[1], frame)
        elif what == "part":
            self.tell_transfer(who[1], *self.parts[who[0], who[1]].popleft())
        elif what == "left":
            self.unsent.remove(choice[1:])
            self.tell_transfer(who[0], PartSent(*who[1:]))
        else:
            assert what == "ready"
            self.compute(who[0], who[1])
        self.compute_all()

    # Workers.
    def gradient(self, member: int, slice_: int, round_: Round) -> int:
        """Passes of a step add up."""
        return sum(
            3 * (member % SLOTS) + 5 * round_[0] + 7 * slice_ + 2 * again + 1
            for again in range(round_[1] + 1)
        )

    def tell_worker(self, member: int, event: Any) -> None:
        for instruction in self.retentions[member].handle(event):
            if isinstance(instruction, EncodePush):
                slice_, round_ = instruction
                pushes = self.pushes[member][slice_]
                assert round_ not in [each.round for each in pushes], "encoded anew"
                exact = self.gradient(member, slice_, round_)
                sent = encoded(round_, exact, self.residuals[member][slice_], PUSH_UNIT)
                self.pushes[member][slice_] = (*pushes, sent)
            elif isinstance(instruction, KeepAverage):
                self.keep(member, instruction)
            elif isinstance(instruction, SettleResidual):
                sent = self.pushes[member][instruction.slice][-1]
                assert sent.round == instruction.round
                if instruction.counted:
                    self.residuals[member][instruction.slice] = sent.after
            else:
                assert isinstance(instruction, SendTo)
                self.send_up(member, instruction)

    def send_up(self, member: int, send: SendTo) -> None:
        frame, payload = send.frame, None
        if isinstance(frame, Contribution) and frame.has_gradient:
            payload = self.pushes[member][frame.slice][-1]
            assert payload.round == frame.round
        elif isinstance(frame, Average):
            payload = self.stories[member][frame.slice][-1]
            assert payload.round == frame.round
        for server in send.members:
            self.to_server[member, server].append((frame, payload))

    def keep(self, member: int, kept: KeepAverage) -> None:
        slice_, round_ = kept
        average = self.given.pop((member, -1 - slice_))
        assert average.round == round_
        self.stories[member][slice_] = (*self.stories[member][slice_], average)
        self.check_alike(member)
        if self.last_rounds[round_[0]] == round_:
            self.tell_transfer(member, UpdateDue(slice_, round_[0]))

    def tell_transfer(self, member: int, event: Any, payload: Any = None) -> None:
        for instruction in self.transfers[member].handle(event):
            if isinstance(instruction, MakeUpdate):
                slice_, step = instruction
                assert self.updated[member][slice_] < step
                whole = member != self.newcomer or (slice_, PARTS[1]) in self.installed
                assert whole, "an update without the optimizer's state"
                for newcomer, _, what, _ in self.unsent_of(member):
                    view = self.views[newcomer]
                    assert what != slice_ or view is None or step < max(view.since)
                self.updated[member][slice_] = step
                self.tell_transfer(member, UpdateMade(slice_, step))
            elif isinstance(instruction, SendTo):
                part: Part = instruction.frame
                assert part.step == self.updated[member][part.slice]
                story = self.stories[member][part.slice]
                assert story[-1].round == self.last_rounds[part.step]
                self.parts[member, instruction.members[0]].append((part, story))
                self.unsent.add((member, instruction.members[0], part.slice, part.name))
            elif isinstance(instruction, InstallPart):
                assert isinstance(event, Part)
                self.installed.add((instruction.slice, instruction.name))
                if instruction.name == PARTS[0]:
                    self.stories[member][event.slice] = payload
                    self.updated[member][event.slice] = event.step
                assert self.stories[member][event.slice][: len(payload)] == payload
            else:
                assert isinstance(instruction, EndMember)
                self.end(member)

    def unsent_of(self, member: int) -> list[tuple[int, int, int, str]]:
        return [(to, m, s, name) for m, to, s, name in self.unsent if m == member]

    def end(self, member: int) -> None:
        """As if it had died."""
        self.die(member)
        self.lose(member)

    def die(self, member: int) -> None:
        self.dead.add(member)

    def lose(self, member: int) -> None:
        """The others notice."""

    # Servers.
    def serve(self, server: int, frame: Any, payload: Any) -> None:
        if isinstance(frame, Contribution):
            if frame.view == self.repairs[server]._view.number and payload is not None:
                self.summed[server][frame.slice][frame.member] = payload
        elif isinstance(frame, Average):
            self.given[server, frame.slice] = payload
        for instruction in self.repairs[server].handle(frame):
            if isinstance(instruction, CloseRound):
                self.close(server, instruction)
            elif isinstance(instruction, EmptyResidual):
                self.kept[server, instruction.slice] = 0
                self.tenures[server, instruction.slice] += 1
            elif isinstance(instruction, SettleResidual):
                encoded_last = self.open[server, instruction.slice]
                assert encoded_last.round == instruction.round
                if instruction.counted:
                    self.kept[server, instruction.slice] = encoded_last.after
            else:
                assert isinstance(instruction, SendTo)
                sent = None
                if isinstance(instruction.frame, Average):
                    sent = self.given[server, instruction.frame.slice]
                for worker in instruction.members:
                    self.to_worker[server, worker].append((instruction.frame, sent))

    def close(self, server: int, closed: CloseRound) -> None:
        slice_, round_, number, counted, workers, having = closed
        view = self.repairs[server]._view
        assert (number, counted) == (view.number, view.counting(round_[0]))
        assert having == tuple(m for m in counted if (m, slice_, round_) not in self.unused)
        assert workers == sum(m % SLOTS + 1 for m in counted)
        pushes = [self.summed[server][slice_][m] for m in having]
        assert all(push.round == round_ for push in pushes), "another round's push is counted"
        before, exact = self.kept.get((server, slice_), 0), sum(push.value for push in pushes)
        about: dict[str, Any] = {"counted": counted, "has_gradient": bool(having)}
        about["tenure"] = server, self.tenures[server, slice_]
        average = encoded(round_, exact, before, REPLY_UNIT, **about)
        if having:
            self.open[server, slice_] = average
        else:
            average = average._replace(value=0, after=before)
        for worker in counted:
            frame = Average(server, number, slice_, round_)
            self.to_worker[server, worker].append((frame, average))

    # Views.
    def leave(self, member: int) -> None:
        self.views[member] = None
        self.tell_worker(member, LeaveView(0))

    def enter(self, member: int, view: View) -> None:
        self.views[member] = view
        if member == self.newcomer and not self.got_step:
            self.got_step = self.begun[member] = view.since[view.members.index(member)] - 1
        self.unsent = {s for s in self.unsent if s[0] != member or s[1] in view.members}
        event = ViewEntered(view)
        for server in view.members:
            if slices_of(server, view, self.homes):  # the others do nothing
                self.to_server[member, server].append((event, None))
        self.tell_worker(member, event)
        self.tell_transfer(member, event)
        self.check_alike(member)
        self.compute_all()

    # What must hold.
    def check_alike(self, member: int) -> None:
        """Who is in one view has the same averages, and at most one round more or less."""
        view = self.views[member]
        for other in view.members if view else ():
            if self.views.get(other) != view or other == member:
                continue
            for slice_ in self.homes:
                mine, theirs = self.stories[member][slice_], self.stories[other][slice_]
                if not mine or not theirs:
                    continue  # a newcomer's
                assert abs(len(mine) - len(theirs)) <= 1, "more than one round apart"
                assert all(map(_same, mine, theirs)), (mine, theirs)

    def check_end(self, members: Collection[int]) -> None:
        """Who is left has all averages, and no bit of a gradient was lost or counted twice.

        Who was lost has made no round that is another than theirs, but the last it had pushed.
        """
        for member in members:
            for slice_ in self.homes:
                story = self.stories[member][slice_]
                assert [each.round for each in story] == list(self.rounds), f"deadlock: {member}"
                self.check_residuals(self.pushes[member][slice_])
                by_tenure: dict[tuple[int, int], list[Sent]] = {}
                for sent in story:
                    by_tenure.setdefault(sent.tenure, []).append(sent)
                for sents in by_tenure.values():
                    self.check_residuals(sents)
                for average in story:
                    self.check_sum(slice_, average)
                for other in self.views.keys() - set(members):
                    theirs = self.stories[other][slice_]
                    assert list(theirs[:-1]) == [each for each in story if each in theirs[:-1]]

    def check_residuals(self, sents: Sequence[Sent]) -> None:
        """What one round left out, the next begins with, if it counted."""
        due = 0
        for sent in sents:
            assert sent.before == due
            assert sent.exact + sent.before == sent.value + sent.after or not sent.has_gradient
            if self.last_rounds[sent.round[0]] == sent.round:
                due = sent.after

    def check_sum(self, slice_: int, average: Sent) -> None:
        pushes = [
            push.value
            for member in average.counted
            for push in self.pushes[member][slice_]
            if push.round == average.round
        ]
        assert average.exact == sum(pushes)

    def data_state(self) -> tuple[Any, ...]:
        machines = [self.retentions, self.repairs]
        machines += [self.transfers] if self.newcomer else []
        links = self.to_server, self.to_worker, self.parts
        data = self.stories, self.pushes, self.residuals, self.updated, self.summed, self.given
        servers = self.open, self.kept, self.tenures, self.unsent, self.installed
        ends = self.dead, self.gone, self.views, self.begun, self.got_step
        return tuple(freeze(each) for each in (*machines, *links, *data, *servers, *ends))


def _same(one: Sent, other: Sent) -> bool:
    return one == other


_EMPTY: deque[Any] = deque()


def freeze(value: Any) -> Any:
    """To be compared and hashed."""
    if isinstance(value, tuple | int | str | frozenset):
        return value
    if isinstance(value, dict):
        return frozenset([(key, freeze(each)) for key, each in value.items() if each != _EMPTY])
    if isinstance(value, list | deque):
        return tuple(value)
    if isinstance(value, set):
        return frozenset(value)
    if hasattr(value, "__slots__"):
        return tuple([freeze(getattr(value, name)) for name in value.__slots__])
    return tuple([freeze(each) for each in vars(value).values()]) if value else None


class OracleWorld(RepairWorld):
    """Attempts follow each loss and each newcomer; a view is formed when its members have voted.

    What `core.views` promises, and nothing more: a member that has voted for a later attempt enters
    no earlier one, and a view that is formed may be entered by some and never by others.
    """

    def __init__(self, members: int, **about: Any) -> None:
        super().__init__(members, **about)
        first = first_view(range(members))
        self.attempts: list[tuple[int, ...]] = [first.members]
        """By number."""
        self.voted: dict[int, int] = dict.fromkeys(self.views, 0)
        self.votes: dict[int, dict[int, int]] = {0: dict.fromkeys(first.members, 0)}
        """By number and member: the step that it had begun."""
        self.formed: dict[int, View] = {0: first}
        self.entered = dict.fromkeys(self.views, 0)
        self.joins = self.newcomer is not None

    def state(self) -> tuple[Any, ...]:
        own = self.attempts, self.voted, self.votes, self.formed, self.entered, self.losses
        return (*self.data_state(), *map(freeze, own), self.joins)

    def choices(self) -> list[Choice]:
        found = self.data_choices()
        if self.losses:
            found.append(("lose",))
        if (
            self.joins
            and self.newcomer not in self.gone
            and all(view for m, view in self.views.items() if m in self.attempts[-1])
        ):
            found.append(("join",))
        number = len(self.attempts) - 1
        for member in self.attempts[-1]:
            if member in self.gone:
                continue
            if self.voted[member] < number:
                found.append(("vote", member))
        for member in self.alive:
            voted = self.voted[member]
            if member not in self.gone and voted > self.entered[member] and self.is_formed(voted):
                found.append(("enter", member))
        return found

    def is_formed(self, number: int) -> bool:
        return self.votes[number].keys() == set(self.attempts[number])

    def happen(self, choice: Choice) -> None:
        what, *who = choice
        if what == "lose":
            member = self.losses.pop(0)
            if member in self.gone:
                return
            if not self.silenced:
                self.die(member)
            self.lose(member)
        elif what == "join":
            self.joins = False
            assert self.newcomer is not None
            self.attempts.append((*self.attempts[-1], self.newcomer))
        elif what == "vote":
            number = self.voted[who[0]] = len(self.attempts) - 1
            self.votes.setdefault(number, {})[who[0]] = self.begun[who[0]]
            if self.views[who[0]] is not None:
                self.leave(who[0])
        elif what == "enter":
            view = self.view_of(self.voted[who[0]])
            self.entered[who[0]] = view.number
            self.enter(who[0], view)
        else:
            self.happen_data(choice)

    def lose(self, member: int) -> None:
        if member not in self.gone:
            self.gone.add(member)
            self.attempts.append(tuple(m for m in self.attempts[-1] if m != member))

    def view_of(self, number: int) -> View:
        if number not in self.formed:
            members = self.attempts[number]
            after = max(each for m, each in self.entered.items() if m in members)
            base = self.formed[after]
            known = dict(zip(base.members, base.since, strict=True))
            first = max(self.votes[number].values()) + LEAST_LEAD_STEPS
            since = tuple(known.get(member, first) for member in members)
            self.formed[number] = View(number, after, members, since)
        return self.formed[number]

    def finish(self) -> None:
        """Nothing can happen any more."""
        last = [member for member in self.attempts[-1] if member not in self.gone]
        for member in last:
            assert self.views[member] is not None, "deadlock"
        step = self.rounds[-1][0]
        view = self.views[last[0]] if last else None
        counted = [m for m in last if view and m in view.counting(step)]
        self.check_end(counted)


def explore_repair(members: int, **about: Any) -> int:
    """How many states there are; `OracleWorld` looks at each, and at the end."""

    def visit(world: OracleWorld) -> Sequence[Choice]:
        choices = world.choices()
        if not choices:
            world.finish()
        return choices

    return explore_states(OracleWorld(members, **about), visit)

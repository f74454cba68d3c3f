"""Members that agree on views, over links that lose, and whose processes die, stop and are cut off.

What happens next is chosen outside. A link is a queue in order, one for each direction of two
members. When a process dies, what it had sent arrives up to some point; then the other end hears
of the death. Over a cut nothing arrives, death included: both sides find silence.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from foreprop.core.views import (
    AdmissionAsked,
    EndMember,
    EnterView,
    LeaveView,
    MemberDied,
    MemberSilent,
    SendTo,
    StepBegun,
    View,
    ViewMachine,
    first_view,
)

Choice = tuple[Any, ...]


class ViewWorld:
    """``kills``: so many may die, at any moment, of ``mortal`` ones. ``accusations``: those that
    somebody may make of a member that is only slow. ``cut``: at some moment these are cut off from
    the others. ``newcomer``: it asks the member with the lowest number, once. ``steps``: that all
    make meanwhile.
    """

    def __init__(
        self,
        members: int,
        *,
        kills: int = 0,
        mortal: Sequence[int] | None = None,
        accusations: Sequence[tuple[int, int]] = (),
        cut: Sequence[int] = (),
        newcomer: int | None = None,
        steps: int = 0,
    ) -> None:
        first = first_view(range(members))
        everybody = [*first.members, *([] if newcomer is None else [newcomer])]
        self.kills, self.mortal = kills, everybody if mortal is None else list(mortal)
        self.accusations, self.steps = list(accusations), steps
        self.accusations_made = 0
        self.cut, self.is_cut = frozenset(cut), False
        self.newcomer, self.has_asked = newcomer, False
        self.machines = {m: ViewMachine(m, first if m != newcomer else None) for m in everybody}
        self.links = {(a, b): deque[Any]() for a in everybody for b in everybody if a != b}
        self.closed: set[tuple[int, int]] = set()
        """Links whose receiver has closed its end."""
        self.dead: set[int] = set()
        self.killed: set[int] = set()
        self.noticed: set[tuple[int, int]] = set()
        """Who has died, and who knows of it."""
        self.views: dict[int, View | None] = {
            m: first if m in first.members else None for m in everybody
        }
        """In which each is; None: it has left the one before."""
        self.heard: set[int] = set()
        """Who knows the newcomer's first step."""
        self.step = dict.fromkeys(everybody, 0)
        self.formed = {0: first}
        self.active = first
        """The last view in which all members were at one time."""
        self.ends: dict[int, str] = {}

    @property
    def alive(self) -> list[int]:
        return [member for member in self.machines if member not in self.dead]

    def state(self) -> tuple[Any, ...]:
        """All that what may follow depends on."""
        machines = [
            tuple(_hashable(value) for value in vars(machine).values())
            for machine in self.machines.values()
        ]
        links = [tuple(queue) for queue in self.links.values()]
        budget = self.kills, tuple(self.accusations), self.is_cut, self.has_asked
        ends = (
            frozenset(self.dead),
            frozenset(self.noticed),
            frozenset(self.closed),
            frozenset(self.heard),
        )
        own = self.active, tuple(self.views.values()), tuple(self.step.values())
        return (*machines, *links, budget, ends, own)

    # What may happen.
    def is_apart(self, a: int, b: int) -> bool:
        return self.is_cut and (a in self.cut) != (b in self.cut)

    def choices(self) -> list[Choice]:
        found = self.pressing()
        if found or self.is_settled():
            return found + self.mishaps()
        # whoever waits for a vote for ever says so, when nothing else happens
        return self.mishaps() + [("stalled", m) for m in self.alive if self.machines[m].awaited]

    def pressing(self) -> list[Choice]:
        found: list[Choice] = []
        for (a, b), queue in self.links.items():
            if b in self.dead or self.is_apart(a, b) or (a, b) in self.closed:
                continue
            if queue:
                found.append(("deliver", a, b))
            if a in self.dead and (a, b) not in self.noticed:
                found.append(("notice", a, b))
        for a in self.alive:
            base = self.machines[a].base
            for b in base.members if base else ():
                if self.is_apart(a, b) and (a, b) not in self.machines[a]._silent:
                    found.append(("silent", a, b))
        found += [("begin", member) for member in self.alive if self._may_begin(member)]
        asked = [member for member in self.alive if self.may_ask(member)]
        return found + ([("ask", asked[0])] if asked else [])

    def may_ask(self, member: int) -> bool:
        """Of the newcomer, which asks the first that it may."""
        if self.newcomer in (None, member) or self.newcomer in self.dead:
            return False
        return not self.has_asked and self.views[member] is not None

    def _may_begin(self, member: int) -> bool:
        """Averages of its step need a push of everybody in its view."""
        base, step = self.machines[member].base, self.step[member]
        if base is None or step >= self.steps:
            return False
        if self.views[member] is None:
            return False
        return all(self.step[other] >= step for other in base.counting(step))

    def mishaps(self) -> list[Choice]:
        found: list[Choice] = []
        if self.kills:
            found += [("kill", member) for member in self.mortal if member not in self.dead]
        if self.cut and not self.is_cut:
            found.append(("cut",))
        for a, b in self.accusations:
            found += [("accuse", a, b)] if a in self.alive else []
        return found

    def happen(self, choice: Choice) -> None:
        what, *who = choice
        if what == "deliver":
            a, b = who
            self.tell(b, self.links[a, b].popleft())
        elif what == "notice":
            a, b = who
            self.noticed.add((a, b))
            self.links[a, b].clear()
            self.tell(b, MemberDied(a))
        elif what == "silent":
            self.tell(who[0], MemberSilent(who[1]))
        elif what == "accuse":
            self.accusations.remove((who[0], who[1]))
            self.accusations_made += 1
            self.tell(who[0], MemberSilent(who[1]))
        elif what == "stalled":
            self.tell(who[0], MemberSilent(self.machines[who[0]].awaited[0]))
        elif what == "begin":
            self.step[who[0]] += 1
            self.tell(who[0], StepBegun(self.step[who[0]]))
        elif what == "ask":
            self.has_asked = True
            assert self.newcomer is not None
            self.tell(who[0], AdmissionAsked(self.newcomer))
        elif what == "kill":
            self.kills -= 1
            self.killed.add(who[0])
            self.die(who[0])
        else:
            self.is_cut = True
            for (a, b), queue in self.links.items():
                if self.is_apart(a, b):
                    queue.clear()
        self.check()

    def die(self, member: int) -> None:
        self.dead.add(member)
        for (_, b), queue in self.links.items():
            if b == member:
                queue.clear()

    def run(self, chance: random.Random, *, length: int = 60) -> None:
        """To the end, by priorities that are drawn, and change now and then.

        So some links and members are much slower than others, which finds more than a draw for
        each event (Burckhardt et al., A randomized scheduler with probabilistic guarantees of
        finding bugs, 2010). ``length``: about so many events there are.
        """
        changes, ranks, happened = chance.sample(range(length), 4), dict[Choice, float](), 0
        while choices := self.choices():
            if not (len(choices) > len(self.mishaps()) or chance.random() < 0.5):
                return  # what may go wrong need not
            for choice in choices:
                ranks.setdefault(choice, chance.random())
            first = max(choices, key=ranks.__getitem__)
            if happened in changes:
                ranks[first] = -chance.random()
            self.happen(first)
            happened += 1
            assert happened < 50 * length, "it never ends"

    # What machines say.
    def tell(self, member: int, event: Any) -> None:
        for instruction in self.machines[member].handle(event):
            if isinstance(instruction, SendTo):
                for other in instruction.members:
                    self.send(member, other, instruction.frame)
            elif isinstance(instruction, LeaveView):
                view = self.views[member]
                assert view is not None
                assert view.number == instruction.number
                self.leave(member)
            elif isinstance(instruction, EnterView):
                self.enter(member, instruction)
            else:
                assert isinstance(instruction, EndMember)
                self.ends[member] = instruction.reason
                self.die(member)

    def send(self, a: int, b: int, frame: Any) -> None:
        if b not in self.dead and not self.is_apart(a, b) and (a, b) not in self.closed:
            self.links[a, b].append(frame)

    def leave(self, member: int) -> None:
        self.views[member] = None

    def enter(self, member: int, entered: EnterView) -> None:
        view = entered.view
        same = self.formed.setdefault(view.number, view)
        assert same == view or self.dead.issuperset(same.members), "two views of one number"
        self.formed[view.number] = view
        for other in entered.lost:
            self.closed.add((other, member))
            self.links[other, member].clear()
        self.views[member] = view
        first = dict(zip(view.members, view.since, strict=True)).get(self.newcomer, 0)
        if first and member not in self.heard:
            self.heard.add(member)
            if member == self.newcomer:
                self.step[member] = first - 1
            assert self.step[member] < first, "it reads data, and has not heard"

    # What must hold.
    def check(self) -> None:
        """Who trains, trains in the same view: one that goes on from the one before."""
        views = {view for m, view in self.views.items() if view is not None and m not in self.dead}
        there = [view for view in views if all(self._is_in(m, view) for m in view.members)]
        assert len(there) <= 1, f"two halves: {there}"
        for view in there:
            if view != self.active:
                before = set(self.active.members)
                chain = view  # of views that some have entered, and not all at one time
                while chain.number > self.active.number:
                    chain = self.formed[chain.after]
                is_next = view.number > self.active.number
                follows = is_next and (before & set(view.members) or chain == self.active)
                assert follows or before <= self.dead, (self.active, view)
                self.active = view

    def _is_in(self, member: int, view: View) -> bool:
        return member not in self.dead and self.views[member] == view

    def is_settled(self) -> bool:
        """Those who live are in one view, which has nobody else."""
        alive = [m for m in self.alive if m != self.newcomer or self.views[m]]
        return all(self._is_in(m, View(*self._view_of(alive))) for m in alive)

    def _view_of(self, alive: Iterable[int]) -> Any:
        found = next((self.views[member] for member in alive), None)
        return found or (-1, -1, (), ())

    def check_agreed(self) -> None:
        assert self.is_settled(), f"deadlock: {self.views}, dead {self.dead}, ends {self.ends}"
        alive = [m for m in self.alive if self.views[m]]
        if alive:
            assert list(self._view_of(alive).members) == sorted(alive)


def _hashable(value: Any) -> Any:
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, dict):
        return frozenset(value.items())
    return tuple(value) if isinstance(value, list) else value

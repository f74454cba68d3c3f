"""Views, what is kept, and repair together: `view_world` and `repair_world` as one."""

from __future__ import annotations

from typing import Any

from foreprop.core.views import SLOTS, EnterView, StepBegun, View
from tests.unit.repair_world import Choice, RepairWorld
from tests.unit.view_world import ViewWorld


class MembersWorld(ViewWorld, RepairWorld):
    """Of ``members``, which agree on their views; the rest as of the two worlds."""

    def __init__(
        self,
        members: int,
        *,
        kills: int = 0,
        accusations: Any = (),
        cut: Any = (),
        newcomer: int | None = None,
        mortal: Any = None,
        **about: Any,
    ) -> None:
        ViewWorld.__init__(
            self,
            members,
            kills=kills,
            mortal=mortal,
            accusations=accusations,
            cut=cut,
            newcomer=newcomer,
        )
        RepairWorld.__init__(self, members, newcomer=newcomer, **about)

    # What may happen.
    def pressing(self) -> list[Choice]:
        return ViewWorld.pressing(self) + [c for c in self.data_choices() if self.is_open(c)]

    def is_open(self, choice: Choice) -> bool:
        """Nothing crosses a cut, and who has closed a connection gets nothing of it."""
        what, a, *rest = choice
        if what in ("serve", "answer", "part"):
            return not (self.is_apart(a, rest[0]) or (a, rest[0]) in self.closed)
        return True

    def may_ask(self, member: int) -> bool:
        """The newcomer asks until it is heard, and its slot is free."""
        machine, newcomer = self.machines[member], self.newcomer
        if newcomer is None or newcomer in self.dead or self.machines[newcomer].base:
            return False
        if machine.base is None or newcomer in machine._joining:
            return False
        return all(each % SLOTS != newcomer % SLOTS for each in machine.base.members)

    def happen(self, choice: Choice) -> None:
        if choice[0] in ("serve", "answer", "part", "left", "ready"):
            self.happen_data(choice)
        else:
            ViewWorld.happen(self, choice)

    def step_begun(self, member: int, event: StepBegun) -> None:
        self.step[member] = event.step
        self.tell(member, event)

    def die(self, member: int) -> None:
        ViewWorld.die(self, member)

    def leave(self, member: int) -> None:
        RepairWorld.leave(self, member)

    def enter(self, member: int, entered: EnterView) -> None:
        view: Any = entered.view
        ViewWorld.enter(self, member, entered)
        RepairWorld.enter(self, member, view)

    def finish(self) -> View | None:
        """Nothing can happen any more: returns the last view."""
        self.check_agreed()
        there = [view for m, view in self.views.items() if m not in self.dead and view]
        if there:
            counted = there[0].counting(self.rounds[-1][0])
            RepairWorld.check_end(self, counted)
        return there[0] if there else None

"""Views, retention, repair and newcomers together, in random orders of what may happen."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from foreprop.core.views import SLOTS
from tests.tiers import long_cases
from tests.unit.members_world import MembersWorld

SCRIPTS = [
    ((1, 0), (2, 0), (3, 0)),
    ((1, 0), (2, 0), (2, 1), (3, 0), (4, 0)),
    ((1, 0), (1, 1), (1, 2), (2, 0), (3, 0), (4, 0), (5, 0)),
]
"""Rounds: with further passes or skipped steps, too."""
MISHAPS = ["deaths", "newcomer", "comes again", "accusations", "cut"]


def world_of(chance: random.Random, mishap: str) -> MembersWorld:
    members = chance.choice([2, 3, 3, 4])
    about: dict[str, Any] = {
        "homes": (*range(members), *chance.choice([(), (0,)])),
        "rounds": chance.choice(SCRIPTS),
        "kills": chance.choice([0, 1]),
        "unused": {(0, 0, (2, 0)), *((m, 1, (1, 0)) for m in range(members))},
        "prompt": chance.random() < 0.8,
    }
    if mishap == "deaths":
        about["kills"] = chance.choice([1, 2])
    elif mishap == "newcomer":
        about["newcomer"] = SLOTS + members
    elif mishap == "comes again":
        slot = chance.randrange(members)
        about |= {"newcomer": SLOTS + slot, "kills": chance.choice([1, 2]), "mortal": (slot, 0)}
    elif mishap == "accusations":
        pairs = [(0, 1), (1, 0), (members - 1, 0)]
        about["accusations"] = chance.sample(pairs, chance.choice([1, 2]))
    else:
        about["cut"] = chance.sample(range(members), chance.randrange(1, members))
    return MembersWorld(members, **about)


def check(world: MembersWorld) -> bool:
    """How it ended: returns whether anybody is left."""
    view = world.finish()
    blameless = not (world.accusations_made or world.is_cut)
    assert not blameless or world.ends.keys() <= {world.newcomer}, "a death ends nobody else"
    return view is not None


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mishap", MISHAPS)
@pytest.mark.parametrize("seeds", [12, *long_cases(300)])
def test_seeded_mishaps(mishap: str, seeds: int) -> None:
    found: Counter[str] = Counter()
    for seed in range(seeds):
        chance = random.Random(f"{mishap} {seed}")
        world = world_of(chance, mishap)
        world.run(chance, length=300)
        found["left"] += check(world)
        found["ended"] += bool(world.ends)
        counted = [view.members for view in world.formed.values()]
        found["views"] += len(counted) - 1
        found["joined"] += any(world.newcomer in members for members in counted)
    assert found["left"] > seeds / 2
    assert found["views"] > seeds / 3
    if mishap in ("newcomer", "comes again"):
        assert found["joined"] > seeds / 6


class AnyOrder(RuleBasedStateMachine):
    """Hypothesis chooses what happens in the beginning, mishaps included; then a seed does."""

    world: MembersWorld

    @initialize(seed=st.integers(0, 2**16), mishap=st.sampled_from(MISHAPS))
    def begin(self, seed: int, mishap: str) -> None:
        self.world = world_of(random.Random(seed), mishap)

    @rule(number=st.integers(0, 2**10))
    def happen(self, number: int) -> None:
        choices = self.world.choices()
        if choices:
            self.world.happen(choices[number % len(choices)])

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run(random.Random(0))
            check(self.world)


AnyOrder.TestCase.settings = settings(max_examples=25, stateful_step_count=60, deadline=None)
test_any_order = AnyOrder.TestCase

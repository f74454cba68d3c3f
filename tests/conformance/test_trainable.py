"""`requires_grad` must be alike on all ranks, at the start and whenever it changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import foreprop
from foreprop.engine.world import World
from foreprop.errors import ForepropError, HandshakeError, TrainingLoopError
from tests.cluster import run_cluster
from tests.conformance.counting_runs import make_step
from tests.conformance.parity import (
    batches_of,
    build_seeded,
    servers_only,
    small_model,
    with_sgd,
)
from tests.tiers import long_cases

pytestmark = servers_only  # each test names the architecture that it needs

STEPS = 6
TURNED = 3
"""After this step some rank does as it should not."""


def bias(model: nn.Module) -> nn.Parameter:
    return dict(model.named_parameters())["0.bias"]


class Turning:
    """By rank, whether its bias is trained up to the step `TURNED`, and from then on."""

    def __init__(self, *by_rank: tuple[bool, bool], **settings: Any) -> None:
        self.by_rank = by_rank
        self.settings = {"step_timeout_s": 60.0, **settings}
        self.errors: list[ForepropError | None] = [None] * len(by_rank)

    def run(self, *, local_size: int = 1) -> Turning:
        batches = batches_of(len(self.by_rank), count=STEPS)

        def work(world: World) -> torch.Tensor | None:
            before, after = self.by_rank[world.rank]
            model, optimizer = build_seeded(with_sgd(), seed=world.rank)
            bias(model).requires_grad_(before)
            try:
                with foreprop.parallelize(
                    model, optimizer, world=world, **self.settings
                ) as session:
                    for step, batch in enumerate(batches[world.rank], 1):
                        if step == TURNED:
                            bias(model).requires_grad_(after)
                        make_step(model, optimizer, batch)
                    session.flush()
                    return bias(model).detach().clone()
            except ForepropError as error:
                self.errors[world.rank] = error
                return None

        self.found = run_cluster(len(self.by_rank), work, local_size=local_size)
        return self


PLACES: list[Any] = [{}, *long_cases({"update": "servers"}, {"order": "fifo"})]


@pytest.mark.parametrize("settings", [{}, *long_cases({"update": "servers"})])
def test_another_parameter_is_frozen_from_the_start(settings: dict[str, Any]) -> None:
    turning = Turning((True, True), (False, False), **settings).run()
    for error in turning.errors:
        assert isinstance(error, HandshakeError), error
        assert "(0.bias).requires_grad: rank 0 has True, rank 1 has False" in str(error)


@pytest.mark.parametrize("settings", PLACES)
@pytest.mark.parametrize(
    ("begun", "who", "told"),
    [
        (True, 1, "rank 0 has changed nothing, and rank 1 has frozen 0.bias"),
        (False, 1, "rank 0 has changed nothing, and rank 1 has unfrozen 0.bias"),
        (True, 0, "rank 0 has frozen 0.bias, and rank 1 has changed nothing"),
    ],
)
def test_one_rank_turns_a_parameter(
    begun: bool, who: int, told: str, settings: dict[str, Any]
) -> None:
    by_rank = [(begun, begun != (rank == who)) for rank in range(2)]
    turning = Turning(*by_rank, **settings).run()
    for error in turning.errors:
        assert isinstance(error, TrainingLoopError), error
        assert f"step {TURNED}: {told} since the step before: set requires_grad" in str(error)


@pytest.mark.parametrize("begun", [True, False])
def test_one_rank_of_a_ring_turns_a_parameter(begun: bool) -> None:
    turning = Turning((begun, begun), (begun, not begun), architecture="ring").run()
    for error in turning.errors:
        assert isinstance(error, TrainingLoopError), error
        assert (
            f"step {TURNED + 1}: requires_grad of 0.bias is as at the start on rank 0 and"
            f" {not begun} on rank 1: every rank must set the same value"
        ) in str(error)


@pytest.mark.parametrize("update", ["workers", *long_cases("servers")])
def test_one_rank_of_a_node_turns_a_parameter(update: str) -> None:
    """Its relay says so: sums of a node are of all its workers."""
    by_rank = [(True, True), (True, True), (True, True), (True, False)]
    turning = Turning(*by_rank, update=update).run(local_size=2)
    for error in turning.errors:
        assert isinstance(error, TrainingLoopError), error
        assert "rank 2 has changed nothing, and rank 3 has frozen 0.bias" in str(error)


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
@pytest.mark.parametrize(
    ("settings", "local_size"),
    [
        ({}, 1),
        ({"update": "servers"}, 1),
        ({"elastic": True}, 1),
        ({"architecture": "ring"}, 1),
        pytest.param({}, 2, marks=pytest.mark.long),
        pytest.param({"update": "servers"}, 2, marks=pytest.mark.long),
    ],
)
def test_all_ranks_turn_it_alike(
    before: bool, after: bool, settings: dict[str, Any], local_size: int
) -> None:
    turning = Turning((before, after), (before, after), **settings).run(local_size=local_size)
    assert turning.errors == [None, None]
    torch.testing.assert_close(turning.found[0], turning.found[1], rtol=0, atol=0)


def test_what_is_as_before_at_the_end_of_a_step_has_not_changed() -> None:
    """Frozen for a forward pass only, as a GAN's other half is: nothing has changed at `step()`."""

    def work(world: World) -> None:
        model, optimizer = build_seeded(small_with_sgd, seed=0)
        with foreprop.parallelize(model, optimizer, world=world):
            for batch in batches_of(2, count=STEPS)[world.rank]:
                if world.rank:
                    for parameter in model.parameters():
                        parameter.requires_grad_(False)
                    model(batch[0])
                    for parameter in model.parameters():
                        parameter.requires_grad_(True)
                make_step(model, optimizer, batch)

    run_cluster(2, work)


def small_with_sgd() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small_model()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

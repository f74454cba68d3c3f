"""Real models against plain PyTorch (issue point 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import foreprop
from tests.cluster import run_cluster, worlds
from tests.conformance.averaging_by_hand import Average, check_alike, run_averaged, run_by_hand
from tests.conformance.matrices import few
from tests.conformance.parity import (
    Batch,
    batches_of,
    build_seeded,
    check_both,
    check_close,
    check_same_bits,
    check_world_of_one,
    check_world_of_two,
    make_batches,
    run_plain,
    small_model,
    train_classifier,
    with_sgd,
)
from tests.conformance.sequence_models import Attention, Recurrent, Tied, Transformer, UsedElsewhere
from tests.tiers import long_cases


def _tokens(ranks: int, count: int = 3, seed: int = 5) -> list[list[Batch]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            (
                torch.randint(11, (4, 6), generator=generator),
                torch.randint(11, (4, 6), generator=generator),
            )
            for _ in range(count)
        ]
        for _ in range(ranks)
    ]


def _train_tokens(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]
) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "make", [Tied, Transformer, Recurrent, *long_cases(UsedElsewhere, Attention)]
)
def test_sequence_models(make: Any) -> None:
    check_both(with_sgd(make), _train_tokens, _tokens(2))


def test_parameters_made_by_a_parametrization() -> None:
    def make() -> nn.Module:
        model = small_model()
        nn.utils.parametrizations.weight_norm(model[0])
        return model

    check_both(with_sgd(make), train_classifier, batches_of(2))


def test_functional_call_and_grad_of_func() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            scores = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
            F.cross_entropy(scores, y).backward()
            optimizer.step()

    check_both(with_sgd(), loop, batches_of(2))


# Frozen and unused parameters.
def test_frozen_from_the_start_and_unfrozen_later() -> None:
    def make() -> nn.Module:
        model = small_model()
        model[0].requires_grad_(False)
        return model

    def loop(model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for number, batch in enumerate(batches):
            if number == 2:
                model[0].requires_grad_(True)
            if number == 5:
                model[0].requires_grad_(False)
                model[2].requires_grad_(False)
            train_classifier(model, optimizer, [batch])

    check_both(with_sgd(make, weight_decay=0.01), loop, batches_of(2, count=7))


def test_parameters_that_the_optimizer_does_not_have_come_from_rank_zero() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small_model()
        model[0].requires_grad_(False)
        return model, torch.optim.SGD(model[2:].parameters(), lr=0.1)

    check_both(build, train_classifier, batches_of(2))


class Branches(nn.Module):
    """Which branch is used is told by the data's first number."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 4)
        self.left = nn.Linear(4, 3)
        self.right = nn.Linear(4, 3)
        self.never = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        return getattr(self, branch)(torch.tanh(self.stem(x)))


def _train_branches(pattern: Sequence[str]) -> Any:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for (x, y), branch in zip(batches, pattern, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x, branch), y).backward()
            optimizer.step()

    return loop


ALTERNATING = ["left", "left", "right", "left", "right", "right"]


def test_unused_in_some_steps_on_all_ranks() -> None:
    """Untouched then: no weight decay, no momentum."""
    build = with_sgd(Branches, weight_decay=0.1)
    check_both(build, _train_branches(ALTERNATING), batches_of(2, count=6))


@pytest.mark.parametrize("preset", ["p3", "kvstore", "tensorflow"])
def test_unused_on_some_ranks_counts_as_zeros(preset: str) -> None:
    patterns = [ALTERNATING, ["right", "left", "right", "right", "left", "left"]]
    by_rank = batches_of(2, count=6)
    build = with_sgd(Branches, weight_decay=0.1)

    # the twin: both halves of the batch in one process, each through its own branch
    model, optimizer = build_seeded(build)
    for step in range(6):
        optimizer.zero_grad()
        for rank in range(2):
            x, y = by_rank[rank][step]
            (F.cross_entropy(model(x, patterns[rank][step]), y) / 2).backward()
        optimizer.step()

    def work(world: Any) -> dict[str, torch.Tensor]:
        ours, ours_optimizer = build_seeded(build, world.rank)
        with foreprop.parallelize(ours, ours_optimizer, world=world, preset=preset):
            _train_branches(patterns[world.rank])(ours, ours_optimizer, by_rank[world.rank])
            return {k: v.clone() for k, v in ours.state_dict().items()}

    results = run_cluster(2, work)
    check_same_bits(results[1], results[0])
    check_close(results[0], model.state_dict())
    torch.testing.assert_close(results[0]["never.weight"], model.never.weight, rtol=0, atol=0)


# BatchNorm.
def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def test_batch_norm_world_of_one() -> None:
    def loop(
        model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]
    ) -> list[float]:
        scores = []
        for batch in batches:
            train_classifier(model, optimizer, [batch])
            model.eval()
            with torch.no_grad():
                scores.append(model(batch[0]).sum().item())
            model.train()
        return scores

    check_world_of_one(with_sgd(_normed), loop, make_batches())


def test_an_evaluation_between_a_forward_pass_and_its_backward_pass() -> None:
    """It shows rank 0's running averages, which the graph has kept and does not read."""

    def loop(model: nn.Module, optimizer: Any, batches: Sequence[Batch], average: Average) -> Any:
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
            loss.backward()
            average(model)
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    by_rank = batches_of(2, count=4)
    (wanted, _), found = (
        run_by_hand(with_sgd(_normed), loop, by_rank),
        run_averaged(with_sgd(_normed), loop, by_rank),
    )
    for rank in found:
        check_alike(rank.result, wanted.result, 0.0)


def test_batch_norm_buffers_are_local_in_training_and_rank_zeros_in_evaluation() -> None:
    by_rank = batches_of(2)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(9))

    def work(world: Any) -> tuple[Any, ...]:
        model, optimizer = build_seeded(with_sgd(_normed), world.rank)
        with foreprop.parallelize(model, optimizer, world=world):
            train_classifier(model, optimizer, by_rank[world.rank][:3])
            local = model[1].running_mean.clone()
            model.eval()
            with torch.no_grad():
                scores = model(x)
            evaluated = model[1].running_mean.clone()
            model.train()
            train_classifier(model, optimizer, by_rank[world.rank][3:])
            after = model[1].running_mean.clone()
            return local, scores, evaluated, after, dict(model.state_dict())

    (local0, scores0, mean0, after0, saved0), (local1, scores1, mean1, after1, saved1) = (
        run_cluster(2, work)
    )
    assert not torch.equal(local0, local1)
    assert torch.equal(scores0, scores1)
    assert torch.equal(mean0, mean1)
    assert torch.equal(mean0, local0)
    assert not torch.equal(after0, after1)
    check_same_bits(saved1, saved0)
    assert torch.equal(saved0["1.running_mean"], after0)
    assert saved0["1.num_batches_tracked"] == 4


def test_buffers_come_from_rank_zero_at_the_start_and_may_be_replaced() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)
            self.register_buffer("offset", torch.randn(3))
            self.register_buffer("count", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.count = self.count + 1  # another tensor in its place
            return self.layer(x) + self.offset

    check_both(with_sgd(Counting), train_classifier, batches_of(2))


# Types, layouts, shapes.
@pytest.mark.parametrize("name", ["SGD", "Adam"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_types(dtype: torch.dtype, name: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small_model().to(dtype)
        if name == "SGD":
            return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        train_classifier(model, optimizer, [(x.to(dtype), y) for x, y in batches])

    check_world_of_one(build, loop, make_batches(), slice_elems=7)
    if dtype == torch.float64:
        check_world_of_two(build, loop, batches_of(2))


def test_half_precision_sums_in_float32() -> None:
    """Each rank's update in bfloat16, but the mean of the gradients is not rounded in between."""
    by_rank = batches_of(2, count=1)

    def work(world: Any) -> list[torch.Tensor]:
        model, optimizer = build_seeded(with_sgd(lambda: small_model().bfloat16(), momentum=0.0))
        before = [p.detach().clone() for p in model.parameters()]
        with foreprop.parallelize(model, optimizer, world=world):
            x, y = by_rank[world.rank][0]
            F.cross_entropy(model(x.bfloat16()), y).backward()
            gradients = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            return [before, gradients, [p.detach().clone() for p in model.parameters()]]

    (before, first, after), (_, second, after1) = run_cluster(2, work)
    for old, a, b, new, new1 in zip(before, first, second, after, after1, strict=True):
        mean = ((a.float() + b.float()) / 2).bfloat16()
        assert torch.equal(new, new1)
        assert torch.equal(new, old.add(mean, alpha=-0.1))


def test_mixed_types_in_one_model() -> None:
    def make() -> nn.Module:
        model = small_model()
        model[2].to(torch.float64)
        return model

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model[3:](model[2](model[:2](x).double()).float())

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(forward(model, x), y).backward()
            optimizer.step()

    check_both(with_sgd(make), loop, batches_of(2))


def _images(ranks: int) -> list[list[Batch]]:
    generator = torch.Generator().manual_seed(3)
    return [
        [
            (
                torch.randn(4, 2, 6, 6, generator=generator),
                torch.randint(3, (4,), generator=generator),
            )
            for _ in range(3)
        ]
        for _ in range(ranks)
    ]


def _convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(12, 3)
    )


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_memory_layouts(layout: torch.memory_format) -> None:
    def make() -> nn.Module:
        return _convolutional().to(memory_format=layout)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        train_classifier(model, optimizer, [(x.to(memory_format=layout), y) for x, y in batches])
        assert model[0].weight.is_contiguous(memory_format=layout)

    check_both(with_sgd(make), loop, _images(2))


class _OddShapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.rand(()))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.transposed = nn.Parameter(torch.randn(3, 3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) @ self.transposed * self.scale + self.nothing.sum()


@pytest.mark.parametrize("preset", ["p3", *long_cases("kvstore", "tensorflow")])
def test_zero_dimensional_empty_and_transposed_parameters(preset: str) -> None:
    build = with_sgd(_OddShapes)
    batches = make_batches()
    plain = run_plain(build, train_classifier, batches)
    model, optimizer = build_seeded(build)
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0], preset=preset):
        train_classifier(model, optimizer, batches)
        check_same_bits(model.state_dict(), plain.model)
        assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())
    check_world_of_two(build, train_classifier, batches_of(2), preset=preset)


def test_state_of_a_zero_dimensional_parameter_is_loaded_back() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = _OddShapes()
        del model.nothing
        model.register_buffer("nothing", torch.zeros(1))
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for batch in batches:
            train_classifier(model, optimizer, [batch])
            optimizer.load_state_dict(optimizer.state_dict())

    check_world_of_one(build, loop, make_batches())


# Recomputation.
class _Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool, shared: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(6, 6)
        self.third = self.second if shared else nn.Linear(6, 6)
        self.output = nn.Linear(6, 3)
        self._use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for layer in (self.second, self.third):
            x = torch.tanh(checkpoint(layer, x, use_reentrant=self._use_reentrant))
        return self.output(x)


@pytest.mark.parametrize(("use_reentrant", "shared"), few([False, True], [False, True]))
def test_activation_checkpointing(use_reentrant: bool, shared: bool) -> None:
    def make() -> nn.Module:
        return _Checkpointed(use_reentrant, shared)

    check_both(with_sgd(make), train_classifier, batches_of(2))


# Afterwards.
def test_training_goes_on_with_plain_pytorch_after_close() -> None:
    batches = make_batches(6)
    plain = run_plain(with_sgd(), train_classifier, batches)
    model, optimizer = build_seeded(with_sgd())
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        train_classifier(model, optimizer, batches[:3])
        state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    train_classifier(model, optimizer, batches[3:])
    check_same_bits(model.state_dict(), plain.model)


def test_a_second_session_after_the_first() -> None:
    batches = make_batches(6)
    plain = run_plain(with_sgd(momentum=0.0), train_classifier, batches)
    model, optimizer = build_seeded(with_sgd(momentum=0.0))
    for part in (batches[:2], batches[2:3], batches[3:]):
        with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
            train_classifier(model, optimizer, part)
    check_same_bits(model.state_dict(), plain.model)


def test_an_optimizer_of_a_closed_session_is_pytorchs_own_again() -> None:
    model, optimizer = build_seeded(with_sgd())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    session = foreprop.parallelize(model, optimizer, world=worlds(1)[0])
    train_classifier(model, optimizer, make_batches(1))
    scheduler.step()
    session.close()
    session.close()
    train_classifier(model, optimizer, make_batches(2))
    scheduler.step()
    assert optimizer.state_dict()["state"]

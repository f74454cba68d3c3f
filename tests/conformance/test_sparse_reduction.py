"""Mean or sum of sparse and of dense gradients apart, against one process with the whole batch.

The sum of N ranks' gradients of a mean loss is N times the whole batch's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.errors import ConfigError
from tests.cluster import worlds
from tests.conformance import scaler_runs
from tests.conformance.aggregation_runs import Edit, Values, alone, check_each_step, together
from tests.conformance.matrices import few
from tests.conformance.parity import (
    Batch,
    build_seeded,
    check_same_bits,
    servers_only,
    train_classifier,
)
from tests.conformance.scaler_runs import BAD_STEP
from tests.conformance.sparse_models import Bags, Pairs, Two, Words, ranks, with_optimizer, words_of
from tests.tiers import long_cases

pytestmark = servers_only  # each test names the architecture that it needs

ARCHITECTURES = ("p2p", "hybrid", "ring", "auto")
RANKS = 3
CHOICES = [("mean", "sum"), ("sum", "mean"), ("sum", "sum"), ("mean", "mean")]
LIMIT = 0.1


def multiplied(reduction: str, sparse_reduction: str, *, clip: float | None = None) -> Edit:
    factors = {"mean": 1, "sum": RANKS}

    def edit(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            parameter.grad *= factors[sparse_reduction if "table" in name else reduction]
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)

    return edit


def dense(make: Callable[..., nn.Module], cls: Any = torch.optim.SGD) -> Any:
    return with_optimizer(lambda: make(sparse=False), cls, lr=0.1)


@pytest.mark.usefixtures("told_links")
@pytest.mark.parametrize(
    ("make", "choice", "architecture"),
    few([Words, *long_cases(Bags, Pairs)], CHOICES, ARCHITECTURES),
)
def test_each_kind_by_itself(
    make: Callable[..., nn.Module], choice: tuple[str, str], architecture: str
) -> None:
    reduction, sparse_reduction = choice
    by_rank = ranks(RANKS)
    wanted = alone(dense(make), by_rank, multiplied(reduction, sparse_reduction))
    settings = {"reduction": reduction, "sparse_reduction": sparse_reduction}
    got = together(with_optimizer(make, lr=0.1), by_rank, architecture=architecture, **settings)
    check_each_step(got, wanted)
    if reduction != sparse_reduction:
        other = alone(dense(make), by_rank, multiplied(sparse_reduction, reduction))
        with pytest.raises(AssertionError):
            check_each_step(got, other)


@pytest.mark.usefixtures("told_links")
@pytest.mark.parametrize(("choice", "architecture"), few(CHOICES[:2], ARCHITECTURES))
def test_the_norm_is_of_what_comes_out(choice: tuple[str, str], architecture: str) -> None:
    reduction, sparse_reduction = choice
    by_rank = ranks(RANKS)
    edit = multiplied(reduction, sparse_reduction, clip=LIMIT)
    wanted = alone(dense(Words), by_rank, edit)
    settings = {"reduction": reduction, "sparse_reduction": sparse_reduction}
    got = together(
        with_optimizer(Words, lr=0.1),
        by_rank,
        architecture=architecture,
        clip_grad_norm=LIMIT,
        **settings,
    )
    check_each_step(got, wanted)
    with pytest.raises(AssertionError):
        check_each_step(got, alone(dense(Words), by_rank, multiplied("mean", "mean", clip=LIMIT)))


@pytest.mark.parametrize("architecture", ["hybrid", *long_cases("p2p", "ring")])
def test_with_a_scaler(architecture: str) -> None:
    """A step that one rank's loss spoils is skipped; the others are as without a scaler."""
    by_rank = ranks(RANKS)
    kept = [[batch for step, batch in enumerate(rank) if step != BAD_STEP] for rank in by_rank]
    wanted = alone(dense(Words), kept, multiplied("mean", "sum"))
    got, _, _ = scaler_runs.together(
        with_optimizer(Words, lr=0.1),
        by_rank,
        bad_rank=1,
        architecture=architecture,
        sparse_reduction="sum",
    )
    check_same_bits(got[BAD_STEP], got[BAD_STEP - 1])
    check_each_step([v for step, v in enumerate(got) if step != BAD_STEP], wanted)


@pytest.mark.parametrize("sparse", [False, *long_cases(True)])
def test_where_a_table_is_held_makes_no_difference(sparse: bool) -> None:
    """Sparse is what the model says."""
    by_rank = ranks(RANKS)

    def train(**settings: Any) -> Values:
        build = with_optimizer(lambda: Words(sparse=sparse), torch.optim.Adagrad)
        return together(build, by_rank, sparse_reduction="sum", **settings)

    wanted = train(architecture="ring")
    places: list[dict[str, Any]] = [
        {"architecture": "hybrid", "dense_parameters": "table.*"},
        {"architecture": "hybrid", "sparse_parameters": "table.*"},
        {"architecture": "p2p", "dense_parameters": "table.*"},
        {"architecture": "p2p", "sparse_parameters": "table.*"},
    ]
    for place in places:
        check_each_step(train(**place), wanted)


@pytest.mark.usefixtures("told_links")
@pytest.mark.parametrize(
    "sparse", [(True, False), *long_cases((True, True), (False, True), (False, False))]
)
def test_what_auto_chooses_makes_no_difference(sparse: tuple[bool, bool]) -> None:
    by_rank = [words_of(seed, 8) for seed in range(2)]

    def make() -> nn.Module:
        model = Two(sparse=sparse)
        model.norm = nn.Identity()
        return model

    def train(architecture: str) -> Values:
        build = with_optimizer(make, lr=0.1)
        return together(build, by_rank, architecture=architecture, sparse_reduction="sum")

    check_each_step(train("auto"), train("ring"))


class Tied(nn.Module):
    """The table's gradient is dense: it is used for more than look-ups."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 3, sparse=sparse)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return F.linear(self.table(words).mean(1), self.table.weight[:3])


class Functional(nn.Module):
    """Nothing in the model says that the gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(40, 3))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return F.embedding(words, self.weights, sparse=True).mean(1)


@pytest.mark.parametrize("architecture", ["p2p", "ring"])
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: Tied(sparse=True),
            r"gradient of table\.weight is dense, .*: say sparse=False",
        ),
        (Functional, r"gradient of weights is sparse, but it is not the weight .*: make it one"),
    ],
)
def test_the_other_kind_of_gradient_is_an_error(
    make: Callable[[], nn.Module], match: str, architecture: str
) -> None:
    settings: dict[str, Any] = {"architecture": architecture, "dense_parameters": "table.*"}

    def train(batches: Sequence[Batch], **more: Any) -> None:
        model, optimizer = build_seeded(with_optimizer(make))
        with foreprop.parallelize(model, optimizer, world=worlds(1)[0], **settings, **more):
            train_classifier(model, optimizer, batches)

    train(words_of(0))
    with pytest.raises(ConfigError, match=match):
        train(words_of(0), sparse_reduction="sum")

"""``check_finite``: a gradient that is not finite is an error with rank, parameter and step."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import foreprop
from foreprop.engine.native import maybe_library
from foreprop.engine.world import World
from foreprop.errors import ForepropError, TrainingLoopError
from foreprop.params.finite import check_finite, is_finite
from tests.cluster import run_cluster
from tests.conformance.matrices import few
from tests.tiers import long_cases

pytestmark = pytest.mark.timeout(60)


class Words(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(9, 4, sparse=sparse)
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.table(x))
        return result


def train(
    world: World | None, bad: dict[int, str], *, sparse: bool = False, **settings: Any
) -> None:
    """In step 3 the ranks in ``bad`` have an odd gradient of that parameter."""
    torch.manual_seed(0)
    model = Words(sparse=sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = settings.pop("scaler", None)
    with foreprop.parallelize(model, optimizer, world=world, scaler=scaler, **settings) as session:
        for step in range(1, 6):
            optimizer.zero_grad()
            loss = model(torch.randint(9, (3, 2))).sum()
            if step == 3 and session.rank in bad:
                loss = spoil(model, bad[session.rank], loss)
            if scaler is not None:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
        session.flush()


def spoil(model: Words, name: str, loss: torch.Tensor) -> torch.Tensor:
    if name == "out.weight":
        return loss + model.out.weight[1, 2] * float("nan")
    if name == "out.bias":
        return loss + model.out.bias[0] * float("inf")
    return loss + model.table(torch.tensor([[3]])).sum() * float("nan")


LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "p2p": ({"architecture": "p2p"}, 1),
    "notify": ({"preset": "kvstore"}, 1),
    "ring": ({"architecture": "ring"}, 1),
    "relays": ({"architecture": "p2p"}, 2),
    "half": ({"architecture": "p2p", "wire_dtype": "bfloat16"}, 1),
    "norm": ({"architecture": "p2p", "clip_grad_norm": 1.0}, 1),
    "hybrid": ({"architecture": "hybrid", "sparse": True}, 1),
    "rows": ({"architecture": "p2p", "sparse": True}, 1),
    "rows through relays": ({"architecture": "p2p", "sparse": True}, 2),
}


DENSE, ROWS = list(LAYOUTS)[:6], list(LAYOUTS)[6:]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *few(["out.weight", "out.bias", "table.weight"], DENSE),
        *few(["table.weight", *long_cases("out.weight", "out.bias")], ROWS),
    ],
)
def test_rank_parameter_and_step_are_named(name: str, layout: str) -> None:
    settings, local_size = LAYOUTS[layout]

    def work(world: World) -> str:
        with pytest.raises(ForepropError) as raised:
            train(world, {2: name}, check_finite=True, stall_report_s=0.5, **settings)
        return f"{type(raised.value).__name__}: {raised.value}"

    wanted = "rank 2: the gradient of "
    if layout in ("norm", "p2p"):
        wanted += f"{name} is not finite in step 3"
    for text in run_cluster(3, work, local_size=local_size):
        assert text.startswith("TrainingLoopError: "), text
        assert wanted in text
        # a spoilt table spoils nothing else; a spoilt output's gradient may be first as well
        assert re.search(r"the gradient of \S+ is not finite in step 3: \d+ of", text), text


@pytest.mark.skipif(maybe_library() is None, reason="the plane was not built")
@pytest.mark.parametrize("wire_dtype", [None, "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_both_planes_say_the_same(dtype: torch.dtype, wire_dtype: str | None) -> None:
    """The gradient is looked at as it leaves its rank, where some are too large for a half."""
    largest = min(1e30, torch.finfo(dtype).max)
    gradients = {
        "some": [1.0, float("inf"), -float("inf"), 2.0],
        "nan": [float("nan"), 0.0, -float("inf"), largest],
        "large": [largest, -largest, 65_520.0, 65_519.0],
    }

    def work(world: World, odd: list[float], plane: str) -> str:
        weight = nn.Parameter(torch.zeros(4, dtype=dtype))
        model = nn.ParameterList([weight])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings: dict[str, Any] = {"plane": plane, "wire_dtype": wire_dtype}
        try:
            with foreprop.parallelize(
                model, optimizer, world=world, check_finite=True, **settings
            ) as session:
                gradient = torch.tensor(odd if world.rank else [0.5] * 4, dtype=dtype)
                (weight * gradient).sum().backward()
                optimizer.step()
                session.flush()
        except TrainingLoopError as error:
            return str(error)
        return ""

    for name, odd in gradients.items():
        said = [
            text
            for plane in ("native", "python")
            for text in run_cluster(2, lambda world, odd=odd, plane=plane: work(world, odd, plane))
        ]
        assert len(set(said)) == 1, said
        assert bool(said[0]) or name == "large", said


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", ["out.weight", "out.bias", "table.weight"])
def test_in_a_world_of_one(name: str, sparse: bool) -> None:
    with pytest.raises(
        TrainingLoopError, match=r"rank 0: the gradient of \S+ is not finite in step 3"
    ):
        train(None, {0: name}, sparse=sparse, check_finite=True)
    train(None, {0: name}, sparse=sparse)


def test_it_is_off_by_default() -> None:
    run_cluster(2, lambda world: train(world, {1: "out.bias"}))


@pytest.mark.parametrize("architecture", ["p2p", "ring"])
def test_with_a_scaler_it_is_no_error(architecture: str) -> None:
    def work(world: World) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        settings: dict[str, Any] = {"architecture": architecture, "check_finite": True}
        train(world, {1: "out.bias"}, scaler=scaler, **settings)
        assert scaler.get_scale() == 2.0  # the step was left out on all ranks

    run_cluster(2, work)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_every_element_counts(dtype: torch.dtype, odd: float) -> None:
    for place in (0, 4, 9):
        gradient = torch.full((10,), 2.0, dtype=dtype)
        assert is_finite(gradient)
        gradient[place] = odd
        assert not is_finite(gradient)
    assert not is_finite(torch.tensor([float("inf"), float("-inf")], dtype=dtype))
    assert is_finite(torch.empty(0, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_finite_elements_with_a_sum_that_is_not(dtype: torch.dtype) -> None:
    assert is_finite(torch.full((10,), torch.finfo(dtype).max, dtype=dtype))


def test_what_is_said() -> None:
    gradient = torch.tensor([1.0, float("nan"), float("inf")], dtype=torch.float16)
    text = (
        r"rank 1: the gradient of w is not finite in step 7: 2 of 3 elements looked at \(float16\)"
        r" are not, some NaN \(check_finite\)"
    )
    with pytest.raises(TrainingLoopError, match=text):
        check_finite(gradient, "rank 1", "w", 7)

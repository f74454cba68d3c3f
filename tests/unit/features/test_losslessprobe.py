"""What lossless leaves of a training's own gradients and of the moves of its values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foreprop.core.codec import Place
from foreprop.features.compression.lossless import Lossless
from foreprop.plan.stepprobe import LosslessProbe


def watched(index: int, values: torch.Tensor) -> Any:
    return SimpleNamespace(
        index=index, name=f"p{index}", parameter=torch.nn.Parameter(values), touched_rows=0
    )


def step(probe: LosslessProbe, parameters: list[Any]) -> None:
    """Half of a gradient is zeros, and a value moves by a thousandth."""
    probe.begin()
    for parameter in parameters:
        tensor = parameter.parameter
        tensor.grad = torch.relu(torch.randn(tensor.shape)) * 1e-3
        probe.ready(parameter)
        tensor.data.mul_(1.001)


def left_of(values: torch.Tensor) -> int:
    return min(4 * values.numel(), len(Lossless().encode(values.flatten(), {}, Place(0, 0, 0))))


def test_the_mean_of_both_ways_in_the_step_that_is_asked_for() -> None:
    torch.manual_seed(0)
    small, embedding = watched(0, torch.randn(40, 50)), watched(1, torch.randn(30))
    probe = LosslessProbe([small, embedding], at=2)
    step(probe, [small, embedding])
    before = small.parameter.detach().clone()
    step(probe, [small])  # the other has no gradient this time
    bits = before.view(torch.int32) ^ small.parameter.detach().view(torch.int32)
    left = left_of(small.parameter.grad) + left_of(bits.view(torch.float32))
    assert probe.shares() == {"p0": pytest.approx(left / (8 * 2000))}
    assert probe.shares()["p0"] < 0.8


def test_where_workers_update_averages_shrink_as_gradients_do() -> None:
    torch.manual_seed(0)
    parameter = watched(0, torch.randn(40, 50))
    probe = LosslessProbe([parameter], at=1, by_workers=True)
    step(probe, [parameter])
    left = left_of(parameter.parameter.grad)
    assert probe.shares() == {"p0": pytest.approx(left / (4 * 2000))}


def test_raw_answers_are_values_by_themselves() -> None:
    torch.manual_seed(0)
    parameter = watched(0, torch.randn(40, 50))
    probe = LosslessProbe([parameter], at=1, raw_answers=True)
    step(probe, [parameter])
    left = left_of(parameter.parameter.grad) + left_of(parameter.parameter.detach())
    assert probe.shares() == {"p0": pytest.approx(left / (8 * 2000))}


def test_of_large_ones_a_part_from_the_middle() -> None:
    values = torch.zeros(200_000)
    values[75_000:125_000] = torch.randn(50_000)
    parameter = watched(0, values)
    probe = LosslessProbe([parameter], at=1)
    probe.begin()
    parameter.parameter.grad = values.clone()
    probe.ready(parameter)
    noise = left_of(values[75_000:125_000].clone())
    share = probe.shares()["p0"]  # of values that have not moved next to nothing is left
    assert noise / 400_000 <= share < noise / 400_000 + 0.01


def test_rows_that_nobody_looks_up_cost_next_to_nothing() -> None:
    parameter = watched(0, torch.randn(1000, 50))
    probe = LosslessProbe([parameter], at=1)
    probe.begin()
    parameter.parameter.grad = torch.zeros(1000, 50)
    parameter.parameter.grad[::50] = torch.randn(20, 50)
    probe.ready(parameter)
    parameter.parameter.data[::50] += 1e-3
    assert probe.shares()["p0"] < 0.05


def test_half_precision_and_sparse_gradients_are_left_out() -> None:
    half, rows = watched(0, torch.randn(8).bfloat16()), watched(1, torch.randn(4, 4))
    probe = LosslessProbe([half, rows], at=1)
    probe.begin()
    half.parameter.grad = torch.ones(8, dtype=torch.bfloat16)
    rows.parameter.grad = torch.ones(4, 4).to_sparse()
    probe.ready(half)
    probe.ready(rows)
    assert probe.shares() == {}

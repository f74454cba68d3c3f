"""Values and gradients of emulated layers: their shapes, sizes, and what codecs find in them."""

from __future__ import annotations

import math

import pytest
import torch

from foreprop.core.codec import Place
from foreprop.features.compression.lossless import Lossless
from foreprop_lab.lab.accelerator import DrawnArray, shape_like


@pytest.mark.parametrize(
    ("elems", "shape", "expected"),
    [
        (588, (64, 3, 7, 7), (14, 42)),  # a 16th of 64 x 147: about 16 x 37
        (4, (64,), (4,)),
        (550_144, (17_192, 512), (4298, 128)),
        (13, (26, 8), (13, 1)),  # a prime number
        (1, (4, 4), (1, 1)),
    ],
)
def test_a_scaled_array_keeps_its_proportions(
    elems: int, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert shape_like(elems, shape) == expected
    assert math.prod(expected) == elems


def rms(tensor: torch.Tensor) -> float:
    return float(tensor.square().mean().sqrt())


@pytest.mark.parametrize("shape", [(400, 300), (50_000,)])
def test_gradients_are_about_a_250th_of_the_values(shape: tuple[int, ...]) -> None:
    array = DrawnArray(shape, seed=3)
    first, second = array.gradient(), array.gradient()
    assert first.shape == second.shape == array.values.shape == shape
    assert not torch.equal(first, second)
    for gradient in (first, second):
        assert 0.4 < rms(gradient) / (4e-3 * rms(array.values)) < 2.5


def test_ranks_have_their_own_gradients_of_the_same_values() -> None:
    one, other, again = (DrawnArray((20, 30), seed=1, rank=rank) for rank in (0, 1, 0))
    assert torch.equal(one.values, other.values)
    gradients = [array.gradient() for array in (one, other, again)]
    assert torch.equal(gradients[0], gradients[2])
    assert not torch.equal(gradients[0], gradients[1])


def test_gradients_have_a_low_rank_as_of_few_samples() -> None:
    gradient = DrawnArray((60, 80), seed=5).gradient()
    assert int(torch.linalg.matrix_rank(gradient)) <= 8


def test_lossless_leaves_what_it_leaves_of_real_layers() -> None:
    """Not the 84 % of normal numbers, nor the few bytes of a constant."""
    gradient = DrawnArray((200, 250), seed=5).gradient().flatten()
    left = len(Lossless().encode(gradient, {}, Place(0, 0, 0))) / (4 * gradient.numel())
    assert 0.5 < left < 0.95


def test_only_the_touched_rows_of_an_embedding() -> None:
    gradient = DrawnArray((2000, 10), seed=5, touched=0.1).gradient()
    assert 0.07 < float((gradient != 0).any(1).float().mean()) < 0.13

"""QSGD and TernGrad: right on average, within the paper's variance, and drawn by place alone."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from codec_runs import noise, there_and_back

from foreprop.core.codec import Place
from foreprop.errors import ConfigError, RemoteProtocolError
from foreprop.features.compression.codecs import make
from foreprop.features.compression.quantisers import BlockQuantiser
from foreprop_lab.codecs.drawn import Qsgd, TernGrad
from tests.tiers import long_cases

ELEMS, DRAWS = 512, 800
NAMES = ("qsgd:7", "terngrad", "qsgd", "qsgd:1")
MOST_SQUARES = ELEMS + 6 * math.sqrt(2 * ELEMS)
"""Of chi-squared with so many degrees of freedom, six standard deviations above the mean."""


def expected_and_scale(name: str, values: torch.Tensor) -> tuple[torch.Tensor, float]:
    """What must come on average, and the distance of two levels, from the papers' formulas."""
    wide = values.double()
    if name == "terngrad":
        sigma = math.sqrt(sum(x * x for x in wide.tolist()) / len(values))
        clipped = wide.clamp(-2.5 * sigma, 2.5 * sigma)
        return clipped, float(clipped.abs().max())
    levels = int(name.partition(":")[2] or 127)
    return wide, math.sqrt(sum(x * x for x in wide.tolist())) / levels


@functools.cache
def noise_and_draws(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    values = noise(ELEMS)
    return values, draws(make(name), values)


def draws(codec: Any, values: torch.Tensor) -> torch.Tensor:
    """float64 (DRAWS, elems), each of another step."""
    rows = [there_and_back(codec, values, {}, Place(step, 3, 0)) for step in range(DRAWS)]
    return torch.stack(rows).double()


def squares(found: torch.Tensor, name: str, values: torch.Tensor) -> float:
    """Sum of squared z-scores of the elements' averages."""
    expected, scale = expected_and_scale(name, values)
    parts = expected / scale - (expected / scale).floor()
    deviation = scale * (parts * (1 - parts)).sqrt() / math.sqrt(DRAWS)
    tiny = 1e-6 * scale
    return float((((found.mean(0) - expected) / (deviation + tiny)) ** 2).sum())


@pytest.mark.parametrize("name", NAMES)
def test_on_average_nothing_is_lost(name: str) -> None:
    values, found = noise_and_draws(name)
    assert squares(found, name, values) < MOST_SQUARES


@pytest.mark.parametrize("name", [*NAMES[:2], *long_cases(*NAMES[2:])])
def test_a_bias_would_be_seen(name: str) -> None:
    """Rounding to the nearest, and a noise that is 4 % too small, do not pass that test."""
    values, found = noise_and_draws(name)
    levels = 1 if name == "terngrad" else int(name.partition(":")[2] or 127)
    own = TernGrad() if name == "terngrad" else Qsgd(str(levels))
    nearest = BlockQuantiser(name, levels, ELEMS, own.limits_of)
    assert squares(draws(nearest, values), name, values) > MOST_SQUARES
    _, scale = expected_and_scale(name, values)
    assert squares(found - 0.04 * scale, name, values) > MOST_SQUARES


@pytest.mark.parametrize("name", NAMES)
def test_each_element_is_one_of_the_two_levels_beside_it(name: str) -> None:
    values = noise(ELEMS)
    expected, scale = expected_and_scale(name, values)
    found = there_and_back(make(name), values).double() / scale
    assert torch.allclose(found, found.round(), atol=1e-4)
    assert bool(((found - expected / scale).abs() < 1 + 1e-4).all())


@pytest.mark.parametrize("levels", [7, *long_cases(1, 127)])
def test_the_variance_of_qsgd_is_within_the_papers_bound(levels: int) -> None:
    """Lemma 3.1, and not far below it: of a vector whose elements lie between two levels."""
    values, found = noise_and_draws(f"qsgd:{levels}")
    variance = float(((found - values.double()) ** 2).sum(1).mean())
    bound = min(ELEMS / levels**2, math.sqrt(ELEMS) / levels) * float(values.double().norm()) ** 2
    assert 0.05 * bound < variance < bound


def test_terngrad_clips_at_two_and_a_half_sigmas() -> None:
    values = torch.full((1000,), 1.0)
    values[7] = 1000.0
    sigma = math.sqrt((999 + 1000.0**2) / 1000)
    out = there_and_back(make("terngrad"), values)
    assert float(out[7]) == pytest.approx(2.5 * sigma, rel=1e-6)
    constant = torch.full((1000,), 3.0)
    assert torch.equal(there_and_back(make("terngrad"), constant), constant)
    assert float(there_and_back(make("terngrad"), constant[:1])) == 3.0


@pytest.mark.parametrize("name", NAMES)
def test_draws_depend_on_step_slice_and_rank(name: str) -> None:
    codec, values = make(name), noise(ELEMS)
    places = [Place(1, 1, 1), Place(2, 1, 1), Place(1, 2, 1), Place(1, 1, 2), Place(2, 1, 0)]
    found = {bytes(codec.encode(values, {}, place)) for place in places}
    assert len(found) == len(places)
    assert codec.encode(values, {}, Place(1, 1, 1)) == codec.encode(values, {}, Place(1, 1, 1))


@pytest.mark.parametrize("levels", ["0", "128", "1.5", "", "-3"])
def test_levels_that_cannot_be_are_refused(levels: str) -> None:
    with pytest.raises(ConfigError, match=f"'qsgd:{levels}'; Qsgd: it takes levels from 1 to 127"):
        make(f"qsgd:{levels}")


@pytest.mark.parametrize("name", ["qsgd:1", "qsgd:7", "qsgd:9"])
def test_codes_and_scales_that_cannot_be_are_refused(name: str) -> None:
    codec, out = make(name), torch.empty(3)
    sent = bytearray(codec.encode(noise(3), {}, Place(0, 0, 0)))
    wrong = [(4, 0xFF, "a code is none"), (3, 0xBF, "a scale is negative or infinite")]
    for position, byte, told in wrong:
        bad = sent.copy()
        bad[position] = byte
        with pytest.raises(RemoteProtocolError, match=f"{name}: .*{told}"):
            codec.decode(memoryview(bad), out, Place(0, 0, 0))

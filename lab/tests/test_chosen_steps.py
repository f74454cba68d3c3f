"""Steps with what ``auto`` chooses by the model, beside those with simulated choices."""

from __future__ import annotations

import pytest

from foreprop.plan.profile import load_profile
from foreprop_lab.benchmarks.chosen_steps import compare, simulated_choice
from foreprop_lab.simulate.setting import SimulatedSetting
from tests.tiers import long_cases

MOST = 1.02
"""What is allowed of the step with the simulated choice; lab/docs/model.md has the whole grid."""

Case = tuple[str, int, float, float]
"""Model, nodes, Gbit/s, balance."""


@pytest.mark.parametrize(
    "case",
    [
        ("resnet110_cifar", 2, 1, 0.7),
        ("resnet50", 4, 5, 1.5),
        *long_cases(
            ("resnet50", 2, 25, 0.7),
            ("resnet50", 16, 5, 1.5),
            ("resnet110_cifar", 16, 1, 1.5),
            ("inceptionv3", 8, 25, 1.5),
            ("vgg19", 4, 25, 0.7),
            ("sockeye", 4, 1, 0.7),
        ),
    ],
)
def test_slices_are_as_good_as_simulated_ones(case: Case) -> None:
    assert compare("slices", *case)["ratio"] <= MOST


@pytest.mark.parametrize(
    "case",
    [
        ("resnet50", 2, 1, 1.5),
        *long_cases(
            ("resnet50", 4, 25, 4.0),
            ("resnet50", 16, 1, 1.5),
            ("resnet110_cifar", 4, 1, 4.0),
            ("vgg19", 4, 1, 1.5),
        ),
    ],
)
def test_codecs_are_as_good_as_simulated_ones(case: Case) -> None:
    point = compare("codecs", *case)
    assert point["ratio"] <= MOST
    assert "lossless" in point["modelled"] or "bf16" in point["modelled"]


def test_of_equally_good_sizes_the_one_that_suits_the_rate_is_picked() -> None:
    """By the rule that was there before the model's, which points are compared with."""
    simulated = SimulatedSetting(
        profile=load_profile("resnet50"), systems=("p3",), rate_bits_per_s=1e9, compute_s=1.0
    )
    tried = {12_500: 1.002, 25_000: 1.0, 50_000: 1.001, 100_000: 1.1}
    assert simulated_choice(simulated, tried) == 25_000
    assert simulated_choice(simulated, tried | {50_000: 0.9}) == 50_000

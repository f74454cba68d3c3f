"""``architecture="auto"``, ``slice_elems="auto"``: steps are watched, and nothing else changes."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from foreprop.plan import planning
from foreprop.plan.linkprobe import exchange_reports
from foreprop.plan.planning import MEASURED_STEPS, Outlook
from tests.conformance.parity import (
    Batch,
    batches_of,
    check_same_bits,
    check_world_of_one,
    check_world_of_two,
    run_foreprop,
    servers_only,
    small_model,
    train_classifier,
    with_sgd,
)
from tests.conformance.plans import use_plan
from tests.tiers import long_cases

pytestmark = [
    servers_only,  # each test names the architecture that it needs
    pytest.mark.usefixtures("told_links"),
]

AUTOMATIC: list[dict[str, Any]] = [
    {"architecture": "auto", "slice_elems": "auto"},
    {"architecture": "auto"},
    {"architecture": "p2p", "slice_elems": "auto"},
]


@pytest.mark.parametrize("settings", [AUTOMATIC[0], *long_cases(*AUTOMATIC[1:])])
def test_the_plan_is_told_and_what_it_predicted_beside_what_came(
    settings: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    steps = MEASURED_STEPS + Outlook.STEPS + 3
    check_world_of_two(with_sgd(), train_classifier, batches_of(2, count=steps), **settings)
    told = capfd.readouterr().err
    assert told.count("foreprop: a step computes for ") == 1
    assert told.count(" goes on with ") == 1
    assert told.count("foreprop: 50 steps took ") == 1


@pytest.mark.parametrize(
    "decided",
    [
        {"architecture": "p2p", "slice_elems": 7},
        {"architecture": "ring"},
        {"architecture": "hybrid"},
    ],
)
def test_whatever_is_decided_training_goes_on_where_it_was(
    decided: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_plan(monkeypatch, **decided)
    settings = {"architecture": "auto", "slice_elems": "auto"}
    trained = check_world_of_two(with_sgd(), train_classifier, batches_of(2, count=9), **settings)
    assert trained[0].stats["steps"] == 9


def test_an_optimizer_that_servers_cannot_apply_stays_with_the_workers(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small_model()
        return model, torch.optim.Adafactor(model.parameters(), lr=0.01)

    settings = {"architecture": "auto", "slice_elems": "auto"}
    check_world_of_two(build, train_classifier, batches_of(2, count=7), **settings)
    assert "goes on with ring, predicted" in capfd.readouterr().err


def test_other_slices_are_really_used(monkeypatch: pytest.MonkeyPatch) -> None:
    use_plan(monkeypatch, slice_elems=7)
    counts = []
    for steps in (MEASURED_STEPS, MEASURED_STEPS + 1):
        batches = batches_of(2, count=steps)
        settings = {"architecture": "p2p", "slice_elems": "auto"}
        trained = run_foreprop(with_sgd(), train_classifier, batches, **settings)
        counts.append(trained[0].stats["pushes"])
    sizes = [parameter.numel() for parameter in small_model().parameters()]
    assert counts[1] - counts[0] == sum(-(-size // 7) for size in sizes)


def embedded() -> nn.Module:
    """With a table that is held row by row beside the slices."""
    return nn.Sequential(nn.Embedding(7, 5, sparse=True), small_model())


def train_embedded(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x.abs().sum(1).to(torch.int64) % 7), y).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("make", "loop"), [(small_model, train_classifier), (embedded, train_embedded)]
)
def test_other_slices_keep_what_the_wires_type_rounds_off(
    make: Any, loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are so small that many of them make one in bfloat16."""
    use_plan(monkeypatch, slice_elems=7)
    build, batches = with_sgd(make, lr=1e-3, momentum=0), batches_of(2, count=12)
    settings = {"architecture": "p2p", "wire_dtype": "bfloat16"}
    whole, anew = (
        run_foreprop(build, loop, batches, slice_elems=slice_elems, **settings)
        for slice_elems in (7, "auto")
    )
    for ours, theirs in zip(anew, whole, strict=True):
        check_same_bits(ours.model, theirs.model)


def test_on_one_machine_nothing_is_planned_and_that_is_told(
    capfd: pytest.CaptureFixture[str],
) -> None:
    batches = batches_of(2, count=6)
    settings = {"architecture": "auto", "slice_elems": "auto"}
    run_foreprop(with_sgd(), train_classifier, batches, local_size=2, **settings)
    told = capfd.readouterr().err
    assert told.count("foreprop: all workers are on one machine, so there is nothing to plan") == 1
    assert "goes on with" not in told


def test_a_world_of_one_has_nothing_to_plan() -> None:
    for settings in AUTOMATIC:
        check_world_of_one(with_sgd(), train_classifier, batches_of(1, count=6)[0], **settings)


class Slow(nn.Module):
    """Uses its layers in another order than they were made in, and takes its time with one."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)
        self.first = nn.Linear(5, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        time.sleep(0.03)
        result: torch.Tensor = self.last(x)
        return result


def load_slowly(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]
) -> None:
    for x, y in batches:
        time.sleep(0.02)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_what_is_measured_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = use_plan(monkeypatch)
    monkeypatch.setattr(planning, "exchange_reports", exchange_reports)  # with links as they are
    batches = batches_of(2, count=MEASURED_STEPS)
    began_s = time.monotonic()
    run_foreprop(with_sgd(Slow), load_slowly, batches, architecture="auto")
    took_s = time.monotonic() - began_s
    (setting,) = asked
    assert (setting.nodes, setting.workers_per_node) == (2, 1)
    profile = setting.profile
    names = ["first.weight", "first.bias", "last.weight", "last.bias"]
    assert [array.name for array in profile.arrays] == names
    assert profile.before_first_use_s >= 0.02
    in_forward = {array.name: array.forward_s or 0.0 for array in profile.arrays}
    assert in_forward["first.weight"] + in_forward["first.bias"] >= 0.03
    assert 0.05 <= setting.compute_s < took_s / 2
    assert setting.rate_bits_per_s > 1e6
    assert 0 < setting.latency_s < took_s / 10


def test_passes_that_belong_to_one_step_are_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = use_plan(monkeypatch)

    def accumulate(
        model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]
    ) -> None:
        for first in range(0, len(batches), 2):
            optimizer.zero_grad()
            for x, y in batches[first : first + 2]:
                time.sleep(0.02)
                (F.cross_entropy(model(x), y) / 2).backward()
            optimizer.step()

    batches = batches_of(2, count=2 * MEASURED_STEPS + 4)
    check_world_of_two(with_sgd(), accumulate, batches, architecture="auto")
    assert asked[0].compute_s >= 0.04


def test_values_changed_by_hand_while_steps_are_watched() -> None:
    def clamp(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            for parameter in model.parameters():
                parameter.data.clamp_(-0.2, 0.2)

    check_world_of_two(with_sgd(), clamp, batches_of(2, count=7), architecture="auto")


@pytest.mark.parametrize("codecs", ["*=lossless", None])
def test_codecs_are_chosen_after_some_steps(
    codecs: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_plan(monkeypatch, compression=codecs)
    steps = MEASURED_STEPS + 3
    settings = {"architecture": "p2p", "compression": "auto:lossless"}
    trained = check_world_of_two(
        with_sgd(), train_classifier, batches_of(2, count=steps), **settings
    )
    assert ("raw_pushed_bytes" in trained[0].stats) == (codecs is not None)


def test_links_that_are_fast_enough_need_no_codec(capfd: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"architecture": "p2p", "compression": "auto"}
    settings["link_rate_bits_per_s"] = 1e13
    steps = MEASURED_STEPS + 3
    check_world_of_two(with_sgd(), train_classifier, batches_of(2, count=steps), **settings)
    said = capfd.readouterr().err
    assert "compression: all of the bytes as they are" in said
    left = re.search(r"lossless leaves (\d+)% of the bytes measured", said)
    assert left is not None  # rank 0 has seen gradients, and values move
    assert 40 < int(left[1]) <= 100

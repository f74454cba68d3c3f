"""DGC in a session: step by step what the paper's algorithm gives, and what it refuses."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.engine.world import World
from foreprop.errors import ConfigError
from tests.cluster import run_cluster, worlds
from tests.conformance.aggregation_runs import Values, values_of
from tests.conformance.matrices import few
from tests.conformance.parity import (
    Batch,
    Build,
    batches_of,
    build_seeded,
    check_same_bits,
    servers_only,
    with_sgd,
)
from tests.conformance.scaler_runs import BAD_STEP, together
from tests.tiers import long_cases

pytestmark = servers_only

LR, MOMENTUM = 0.05, 0.9


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def with_lr(**options: Any) -> Build:
    return with_sgd(two_layers, lr=LR, momentum=MOMENTUM, **options)


def count_at(step: int, share: float, warmup_steps: int, elems: int) -> int:
    """Section 3.3: 25 %, 6.25 %, 1.5625 %, ... until the share is reached."""
    if warmup_steps:
        share = max(share, 0.25 ** (step // warmup_steps + 1))
    return max(1, math.ceil(share * elems - 1e-9))


def only_largest(values: torch.Tensor, count: int) -> torch.Tensor:
    flat = values.reshape(-1)
    mask = torch.zeros_like(flat)
    mask[flat.abs().topk(min(count, len(flat))).indices] = 1
    return mask.view(values.shape)


def emulate(
    by_rank: Sequence[Sequence[Batch]],
    share: float,
    warmup_steps: int,
    *,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> Values:
    """Algorithm 4 by hand: matrices by u and v of each rank, biases by torch's momentum."""
    master, _ = build_seeded(with_lr())
    image, ranks = copy.deepcopy(master), len(by_rank)
    dense = torch.optim.SGD(
        [p for p in master.parameters() if p.dim() == 1],
        lr=LR,
        momentum=MOMENTUM,
        nesterov=nesterov,
        weight_decay=weight_decay,
    )
    zeros = [[torch.zeros_like(p) for p in master.parameters()] for _ in range(2 * ranks)]
    u, v = zeros[:ranks], zeros[ranks:]
    values: Values = []
    clipped = 0
    for step, batches in enumerate(zip(*by_rank, strict=True), start=1):
        sums = [torch.zeros_like(p) for p in master.parameters()]
        for rank, (x, y) in enumerate(batches):
            image.zero_grad()
            F.cross_entropy(image(x), y).backward()
            for number, parameter in enumerate(image.parameters()):
                grad = parameter.grad
                assert grad is not None
                if grad.dim() == 1:
                    sums[number] += grad
                    continue
                grad = grad + weight_decay * parameter.detach()
                if clip_norm is not None:  # of the mean, so the sum's is N times as large
                    limit = ranks * clip_norm / ranks**0.5
                    limit *= math.sqrt(grad.numel() / (5 * 8 + 8 * 3))
                    clipped += float(grad.norm()) > limit
                    grad = grad * min(1.0, limit / float(grad.norm()))
                if clip_value is not None:
                    clipped += float(grad.abs().max()) > clip_value
                    grad = grad.clamp(-clip_value, clip_value)
                if nesterov:
                    u[rank][number] = MOMENTUM * (u[rank][number] + grad)
                    v[rank][number] += u[rank][number] + grad
                else:
                    u[rank][number] = MOMENTUM * u[rank][number] + grad
                    v[rank][number] += u[rank][number]
                mask = only_largest(
                    v[rank][number], count_at(step, share, warmup_steps, grad.numel())
                )
                sums[number] += v[rank][number] * mask
                u[rank][number] *= 1 - mask
                v[rank][number] *= 1 - mask
        with torch.no_grad():
            for parameter, total in zip(master.parameters(), sums, strict=True):
                if parameter.dim() == 1:
                    parameter.grad = total / ranks
                else:
                    parameter -= LR * total / ranks
            if clip_norm is not None:
                biases = [p for p in master.parameters() if p.dim() == 1]
                clipped += float(nn.utils.clip_grad_norm_(biases, clip_norm)) > clip_norm
            if clip_value is not None:
                nn.utils.clip_grad_value_(
                    [p for p in master.parameters() if p.dim() == 1], clip_value
                )
            dense.step()
            for shown, full in zip(image.parameters(), master.parameters(), strict=True):
                count = ranks * count_at(step, share, warmup_steps, full.numel())
                if full.dim() == 1 or step == 1 or 2 * count >= full.numel():
                    shown.copy_(full)
                else:
                    shown += (full - shown) * only_largest(full - shown, count)
        values.append(values_of(image))
    assert clip_norm is None or 5 < clipped < 5 * len(values) - 5
    assert clip_value is None or clipped > 5
    return values


def train(
    by_rank: Sequence[Sequence[Batch]], codec: str, reduction: str, options: dict[str, Any]
) -> list[Values]:
    settings: dict[str, Any] = {"compression": codec, "reduction": reduction}
    settings["clip_grad_norm"] = options.pop("clip_norm", None)
    settings["clip_grad_value"] = options.pop("clip_value", None)

    def work(world: World) -> Values:
        model, optimizer = build_seeded(with_lr(**options), seed=world.rank)
        values = []
        with foreprop.parallelize(model, optimizer, world=world, **settings):
            for x, y in by_rank[world.rank]:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                (loss / world.size if reduction == "sum" else loss).backward()
                optimizer.step()
                values.append(values_of(model))
        return values

    return run_cluster(len(by_rank), work)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"nesterov": True},
    {"weight_decay": 0.2},
    {"nesterov": True, "weight_decay": 0.2},
    {"clip_norm": 0.25},
    {"clip_value": 0.2},
]
USUAL = [(0, "mean"), (3, "mean"), (4, "sum"), (5, "sum")]
REST = [(at, kind) for at in range(6) for kind in ("mean", "sum") if (at, kind) not in USUAL]


@pytest.mark.parametrize("case", [*USUAL, *long_cases(*REST)], ids=str)
def test_every_step_is_that_of_the_paper(case: tuple[int, str]) -> None:
    number, reduction = case
    check_every_step("dgc:0.05", 0.05, 0, reduction, **OPTIONS[number])


def test_the_warm_up_sends_less_from_stage_to_stage() -> None:
    check_every_step("dgc:0.05:3", 0.05, 3)


def check_every_step(
    codec: str, share: float, warmup_steps: int, reduction: str = "mean", **options: Any
) -> None:
    by_rank = batches_of(2, count=10)
    wanted = emulate(by_rank, share, warmup_steps, **options)
    first, second = train(by_rank, codec, reduction, options)
    for ours, theirs, expected in zip(first, second, wanted, strict=True):
        check_same_bits(ours, theirs)
        for name, value in expected.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("limit", "local_size"), few(["clip_grad_norm", "clip_grad_value"], [1, 2])
)
def test_a_scaled_loss_is_clipped_at_scaled_limits(limit: str, local_size: int) -> None:
    """Powers of two change no bit of anything else. Relays clip sums."""
    by_rank = batches_of(3, count=6)
    settings: dict[str, Any] = {limit: {"clip_grad_norm": 0.25, "clip_grad_value": 0.05}[limit]}
    settings["compression"] = "dgc:0.05"
    with_scaler = settings | {"update": "servers", "local_size": local_size}
    scaled, scales, _ = together(with_lr(), by_rank, **with_scaler)
    assert scales == [256, 256, 512, 512, 1024, 1024, 2048]

    def work(world: World) -> Values:
        model, optimizer = build_seeded(with_lr(), seed=world.rank)
        values = []
        with foreprop.parallelize(model, optimizer, world=world, **settings):
            for x, y in by_rank[world.rank]:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                values.append(values_of(model))
        return values

    plain = run_cluster(3, work, local_size=local_size)[0]
    for ours, expected in zip(scaled, plain, strict=True):
        check_same_bits(ours, expected)


def test_an_infinity_of_the_scaled_loss_is_seen_where_workers_clip() -> None:
    settings: dict[str, Any] = {"clip_grad_norm": 0.25, "compression": "dgc:0.05"}
    values, scales, _ = together(with_lr(), batches_of(2), bad_rank=1, update="servers", **settings)
    assert scales[BAD_STEP + 1] == scales[BAD_STEP] / 2
    check_same_bits(values[BAD_STEP], values[BAD_STEP - 1])


# Refused.
@pytest.mark.parametrize(
    ("options", "settings", "says"),
    [
        ({"dampening": 0.5}, {}, r"0.weight, whose parameter group has dampening=0.5"),
    ],
)
def test_what_dgc_does_not_go_together_with(options: Any, settings: Any, says: str) -> None:
    model, optimizer = build_seeded(with_lr(**options))
    with pytest.raises(ConfigError, match=says):
        foreprop.parallelize(model, optimizer, world=worlds(1)[0], compression="dgc", **settings)


def test_another_optimizer_is_refused_by_name() -> None:
    model = two_layers()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ConfigError, match=r"the optimizer is Adam; dgc.*use torch.optim.SGD"):
        foreprop.parallelize(model, optimizer, world=worlds(1)[0], compression="dgc")


def test_a_warm_up_of_no_number_is_refused() -> None:
    model, optimizer = build_seeded(with_lr())
    with pytest.raises(ConfigError, match=r"'dgc:0.1:x'; dgc takes a share"):
        foreprop.parallelize(model, optimizer, world=worlds(1)[0], compression="dgc:0.1:x")


def test_momentum_that_changes_ends_the_session() -> None:
    def work(world: World) -> None:
        model, optimizer = build_seeded(with_lr(), seed=world.rank)
        with foreprop.parallelize(model, optimizer, world=world, compression="dgc:0.1"):
            for x, y in batches_of(2)[world.rank]:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.param_groups[0]["momentum"] = 0.8

    with pytest.raises(foreprop.ForepropError, match=r"momentum was 0.9 and is now 0.8"):
        run_cluster(2, work)

"""A loop's own `GradScaler`, which `parallelize` is not told of: as with DDP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from tests.conformance.averaging_by_hand import Average, ReadingLoop, check_contract, made_by
from tests.conformance.matrices import few
from tests.conformance.parity import Batch, servers_only
from tests.conformance.scaler_runs import make_scaler
from tests.tiers import long_cases

CLOSE = 1e-5
SETTINGS: dict[str, dict[str, Any]] = {
    "auto": {},
    "workers": {"update": "workers"},
    "ring": {"update": "workers", "architecture": "ring"},
    "relays": {"ranks": 4, "local_size": 2, "local_aggregation": "on"},
}


def scaled(*, clip: float | None = None, unscale: bool = False) -> ReadingLoop:
    """The loss of some steps is infinite, on one of the ranks or on several."""

    def loop(model: nn.Module, optimizer: Any, batches: Sequence[Batch], average: Average) -> Any:
        scaler = make_scaler()
        scales, told = [], []
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if step and x.sum() > 4:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            average(model)
            if unscale or clip is not None:
                scaler.unscale_(optimizer)
            if clip is not None:
                told.append(clip_grad_norm_(model.parameters(), clip).nan_to_num(-1.0))
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert min(scales) < scales[0] < max(scales)  # steps were left out, and made
        return scales, told

    return loop


LOOPS: dict[str, tuple[ReadingLoop, float]] = {
    "plainly": (scaled(), 0.0),
    "unscaled": (scaled(unscale=True), 0.0),
    "clipped": (scaled(clip=0.5), CLOSE),
}


@pytest.mark.parametrize(
    ("name", "setting", "options"),
    few(
        ["clipped", "plainly", *long_cases("unscaled")],
        [pytest.param(s, marks=servers_only) if s == "relays" else s for s in SETTINGS],
        [{"momentum": 0.9}, {"momentum": 0.9, "fused": True}],
    ),
)
def test_a_step_that_is_bad_on_one_rank_is_left_out_on_all(
    name: str, setting: str, options: dict[str, Any]
) -> None:
    loop, rtol = LOOPS[name]
    build = made_by(lambda parameters: torch.optim.SGD(parameters, lr=0.05, **options))
    check_contract(build, loop, rtol=rtol, steps=8, **SETTINGS[setting])

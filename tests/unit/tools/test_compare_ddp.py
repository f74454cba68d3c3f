"""DDP under a model that stays the script's own, in a world of one."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from foreprop.errors import ConfigError
from foreprop.tools.compare import ddp
from foreprop.tools.compare.ddp import Reduction, check_plain

pytestmark = pytest.mark.leaks_ok(reason="gloo's first group opens its event loop for good")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    gc.freeze()  # the end of a reduction collects garbage: of what the test makes, not of all
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all that was reduced."""
    sizes: list[int] = []

    def count(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        sizes.append(bucket.buffer().numel())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    count.__annotations__.clear()
    monkeypatch.setattr(ddp, "bf16_hook", count)
    return sizes


def step(model: nn.Module, reduction: Reduction, passes: int = 1, *, closure: bool = False) -> None:
    for _ in range(passes):
        loss = model(torch.ones(1, 3)).sum()
        reduction.begin_backward()
        loss.backward()
    reduction.begin_step(has_closure=closure)


def test_a_backward_pass_is_reduced_by_torchs_own_reducer(buckets: list[int]) -> None:
    model = Net()
    reduction = Reduction(model, bf16=True)
    step(model, reduction)
    assert buckets == [8]
    step(model, reduction)
    assert buckets == [8, 8]
    reduction.end()


def test_accumulated_passes_are_reduced_once_from_the_second_step_on(buckets: list[int]) -> None:
    model = Net()
    reduction = Reduction(model, bf16=True)
    step(model, reduction, passes=3)
    assert len(buckets) == 3
    for _ in range(2):
        buckets.clear()
        step(model, reduction, passes=3)
        assert len(buckets) == 1
    reduction.end()


def test_fewer_passes_than_before_are_averaged_all_the_same(
    buckets: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    reduction = Reduction(model, bf16=True)
    averaged: list[int] = []
    monkeypatch.setattr(ddp, "average", lambda found: averaged.append(len(list(found))))
    step(model, reduction, passes=3)
    buckets.clear()
    step(model, reduction, passes=2)
    assert (buckets, averaged) == ([], [2])
    step(model, reduction, passes=2)
    assert (len(buckets), averaged) == (1, [2])
    reduction.end()


def test_passes_between_which_parameters_move_are_all_reduced(buckets: list[int]) -> None:
    """As SAM does, which needs both averages."""
    model = Net()
    reduction = Reduction(model, bf16=True)
    for _ in range(3):
        for _ in range(2):
            loss = model(torch.ones(1, 3)).sum()
            reduction.begin_backward()
            loss.backward()
            with torch.no_grad():
                model.layer.weight.add_(0.1)
        reduction.begin_step(has_closure=False)
    assert len(buckets) == 6
    reduction.end()


def test_passes_of_a_closure_are_all_reduced(buckets: list[int]) -> None:
    model = Net()
    reduction = Reduction(model, bf16=True)
    for _ in range(3):
        step(model, reduction, passes=2, closure=True)
    assert len(buckets) == 6
    reduction.end()


def test_evaluation_is_not_ddps(buckets: list[int]) -> None:
    """One rank may evaluate by itself: nothing of DDP's, which needs all, is called."""
    model = Net()
    reduction = Reduction(model, bf16=True)
    with torch.no_grad():
        model(torch.ones(1, 3))
    model.eval()(torch.ones(1, 3)).sum().backward()
    assert buckets == []
    reduction.end()


def test_hooks_on_the_model_run_once() -> None:
    model, calls = Net(), []
    model.register_forward_hook(lambda *_: calls.append("hook"))
    reduction = Reduction(model)
    model(torch.ones(1, 3))
    assert calls == ["hook"]
    reduction.end()


def test_copies_and_files_have_the_models_own_forward() -> None:
    model = Net()
    reduction = Reduction(model)
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x = torch.ones(1, 3)
    wanted = model(x)
    with torch.no_grad():
        model.layer.weight.zero_()
    assert torch.equal(copied(x), wanted)
    assert torch.equal(loaded(x), wanted)
    reduction.end()


def test_the_model_is_given_back() -> None:
    model = Net()
    before = dict(vars(model))
    Reduction(model).end()
    assert vars(model) == before


def test_what_cannot_be_put_in_ddp_is_refused() -> None:
    with pytest.raises(ConfigError, match="in a DistributedDataParallel already"):
        check_plain(DistributedDataParallel(Net()))
    with pytest.raises(ConfigError, match="remote tables"):
        check_plain(nn.Embedding(4, 2, sparse=True, device="meta"))

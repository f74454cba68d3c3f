"""bf16 and fp16, beside DDP's own hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from codec_runs import PLACE, noise, there_and_back
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from foreprop.features.compression.codecs import make


class Alone:
    """A process group of one, whose all-reduce leaves a tensor as it is."""

    def size(self) -> int:
        return 1


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_the_values_are_those_of_ddps_hook(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(tensor: torch.Tensor, **_: Any) -> Any:
        done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        done.set_result([tensor])
        return type("Work", (), {"get_future": lambda self: done})()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    values = torch.cat([noise(70_001), torch.tensor([1e5, -1e5, 3e38, 1e-9, 1e-40, torch.inf])])
    bucket = (values.clone(),)
    hook: Any = getattr(default_hooks, f"{name}_compress_hook")
    expected = hook(Alone(), bucket).wait()
    assert torch.equal(there_and_back(make(name), values), expected)
    assert not torch.equal(expected, values)


def test_bytes_are_the_casts() -> None:
    values = noise(1001)
    sent = bytes(make("fp16").encode(values, {}, PLACE))
    assert sent == values.half().numpy().tobytes()

"""Which ranks can all-reduce between GPUs, and who is named where they cannot."""

from __future__ import annotations

import pytest
import torch

from foreprop.errors import ConfigError
from foreprop.features.collectives.gpu import NO_GPU, usable_gpu, uses_nccl, why_not_nccl

OWN = {0: "GPU-a", 1: "GPU-b"}


def test_gpus_of_their_own_are_enough() -> None:
    assert why_not_nccl(OWN) is None
    assert uses_nccl("auto", OWN)
    assert uses_nccl("nccl", OWN)


@pytest.mark.parametrize(
    ("gpus", "why"),
    [
        ({**OWN, 2: "GPU-a"}, "ranks 0 and 2 share a GPU"),
        ({**OWN, 2: f"{NO_GPU}has parameters on cpu"}, "rank 2 has parameters on cpu"),
    ],
)
def test_who_keeps_the_ranks_from_it_is_named(gpus: dict[int, str], why: str) -> None:
    assert not uses_nccl("auto", gpus)
    with pytest.raises(ConfigError, match=rf"collectives is 'nccl', but {why}.*='gloo'"):
        uses_nccl("nccl", gpus)


def test_parameters_in_host_memory_have_no_gpu() -> None:
    parameter = torch.zeros(3)
    assert usable_gpu([parameter], "auto") == f"{NO_GPU}has parameters on cpu"
    assert usable_gpu([parameter], "gloo") == f"{NO_GPU}has collectives='gloo'"
    assert usable_gpu([], "nccl") == f"{NO_GPU}has no parameters"

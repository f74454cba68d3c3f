"""Which GPUs can all-reduce among each other, and how the threads of a ring give a device work.

NCCL needs all tensors of a rank on one GPU, and no GPU twice. Every thread that works on sums has
a stream of its own, so that it waits for no kernels but its own. Before it says that something is
done, it waits for its stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from foreprop.config import Collectives
from foreprop.engine.asyncdevice import HOSTS, TorchAccelerator
from foreprop.errors import ConfigError

NO_GPU = "-"
"""What a rank publishes instead of its GPU, followed by the reason."""


def usable_gpu(parameters: Iterable[torch.Tensor], collectives: Collectives) -> str:
    """The GPU that holds all of a rank's parameters, or `NO_GPU` and why there is none."""
    if collectives == "gloo":
        return f"{NO_GPU}has collectives='gloo'"
    devices = {parameter.device for parameter in parameters}
    others = [device for device in devices if device.type != "cuda"]
    if others or not devices:
        return f"{NO_GPU}has parameters on {others[0]}" if others else f"{NO_GPU}has no parameters"
    if len(devices) > 1:
        return f"{NO_GPU}has parameters on {len(devices)} GPUs"
    if not dist.is_nccl_available():
        return f"{NO_GPU}has a torch without NCCL"
    return str(torch.cuda.get_device_properties(devices.pop()).uuid)


def why_not_nccl(gpus: Mapping[int, str]) -> str | None:
    """Why these ranks' GPUs (`usable_gpu`) cannot all-reduce by NCCL; None if they can."""
    owners: dict[str, int] = {}
    for rank, gpu in gpus.items():
        if gpu.startswith(NO_GPU):
            return f"rank {rank} {gpu.removeprefix(NO_GPU)}"
        if gpu in owners:
            return f"ranks {owners[gpu]} and {rank} share a GPU"
        owners[gpu] = rank
    return None


def uses_nccl(collectives: Collectives, gpus: Mapping[int, str]) -> bool:
    """Whether these ranks use NCCL; raises `ConfigError` if it is asked for and cannot be had."""
    obstacle = why_not_nccl(gpus)
    if collectives == "nccl" and obstacle is not None:
        raise ConfigError(
            f"collectives is 'nccl', but {obstacle}; NCCL needs each rank's parameters on a GPU of"
            " its own. Use collectives='gloo'"
        )
    return obstacle is None


class DeviceWork:
    """The work of a ring's threads where gradients are summed in host memory.

    There a call returns when its work is done. Parameters that are on a device are updated there,
    by what a thread queues on its own stream.
    """

    device = torch.device("cpu")  # where gradients are summed
    on_host = True

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        devices = {parameter.device for parameter in parameters}
        found = [TorchAccelerator(device) for device in devices if device.type not in HOSTS]
        self._devices = [device for device in found if device.has_streams]

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[None]:
        """Wrap all that a thread does: give it streams of its own."""
        with contextlib.ExitStack() as streams:
            for device in self._devices:
                streams.enter_context(device.own_stream())
            yield

    def flat(self, part: Any, dtype: torch.dtype) -> torch.Tensor:
        """The elements in a range of a gradient's bytes (`ParameterArrival.take_gradient`)."""
        return torch.frombuffer(part, dtype=dtype)

    def keep(self, gradient: torch.Tensor) -> None:
        """Keep another thread's tensor from being reused until this thread's work on it is done.

        Host memory needs nothing for that: it is not reused while somebody holds it.
        """

    def finish(self) -> None:
        """Block until all work that this thread has begun is done."""
        for device in self._devices:
            device.finish()


class GpuWork(DeviceWork):
    """The same where gradients are summed on a GPU; they are given as tensors of bytes."""

    on_host = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._devices = [TorchAccelerator(device)]

    def keep(self, gradient: torch.Tensor) -> None:
        self._devices[0].keep(gradient)

    def flat(self, part: Any, dtype: torch.dtype) -> torch.Tensor:
        self.keep(part)
        elements: torch.Tensor = part.view(dtype)
        return elements

"""GPUs of the ranks: who can all-reduce between them, and how threads give them work.

Theory of operation. NCCL needs all tensors of a rank on one GPU, and no GPU twice. Every thread
that works on sums has a stream of its own, so that it waits for nobody's kernels but its own;
before it says that something is done, it waits for its stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from foreprop.config import Collectives
from foreprop.errors import ConfigError
from foreprop.path.asyncdevice import HOSTS, TorchAccelerator

NO_GPU = "-"
"""What a rank tells instead of its GPU, followed by the reason."""


def usable_gpu(parameters: Iterable[torch.Tensor], collectives: Collectives) -> str:
    """For the other ranks: which GPU has all of a rank's parameters, or `NO_GPU` and why none."""
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
    """The same on every rank; raises `ConfigError` if NCCL is asked for where it cannot be."""
    obstacle = why_not_nccl(gpus)
    if collectives == "nccl" and obstacle is not None:
        raise ConfigError(
            f"collectives is 'nccl', but {obstacle}; NCCL needs each rank's parameters on a GPU of"
            " its own. Use collectives='gloo'"
        )
    return obstacle is None


class DeviceWork(Protocol):
    """How a thread beside the training one has a device do something."""

    device: torch.device
    """Where gradients are summed."""

    def in_thread(self) -> contextlib.AbstractContextManager[Any]:
        """Around all that a thread does."""

    def flat(self, part: Any, dtype: torch.dtype) -> torch.Tensor:
        """The elements of a part of a gradient (`ParameterMemory.take_gradient`)."""

    def keep(self, gradient: torch.Tensor) -> None:
        """This thread goes on with what another one has made, and may drop it before `finish`."""

    def finish(self) -> None:
        """Block until what this thread has begun is done."""


class HostWork:
    """Gradients in host memory, where a call returns when its work is done.

    Parameters that are on a device are updated there, by what a thread queues on its own stream.
    """

    device = torch.device("cpu")

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        devices = {parameter.device for parameter in parameters}
        found = [TorchAccelerator(device) for device in devices if device.type not in HOSTS]
        self._devices = [device for device in found if device.has_streams]

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[None]:
        with contextlib.ExitStack() as streams:
            for device in self._devices:
                streams.enter_context(device.own_stream())
            yield

    def flat(self, part: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.frombuffer(part, dtype=dtype)

    def keep(self, gradient: torch.Tensor) -> None:
        """Nobody else gets its memory while somebody holds it."""

    def finish(self) -> None:
        for device in self._devices:
            device.finish()


class GpuWork:
    """Gradients on a GPU, given as tensors of bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        accelerator = TorchAccelerator(device)
        self.in_thread = accelerator.own_stream
        self.keep = accelerator.keep
        self.finish = accelerator.finish

    def flat(self, part: Any, dtype: torch.dtype) -> torch.Tensor:
        self.keep(part)
        elements: torch.Tensor = part.view(dtype)
        return elements

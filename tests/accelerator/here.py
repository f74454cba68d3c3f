"""The accelerator that torch finds on this machine, and how to make it late."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from foreprop.engine.asyncdevice import TorchAccelerator

_LONGEST = 4_000_000
"""Clock cycles that a device is kept busy at once: some milliseconds."""


def device_or_skip() -> torch.device:
    """For a whole test file."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        pytest.skip("torch finds no accelerator here", allow_module_level=True)
    return torch.device(found.type, 0)


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """As every rank would in a process of its own, it computes on a stream of its own."""
    with TorchAccelerator(device).own_stream():
        yield


class Delays:
    """Keeps the device busy for a seed's times, before forward passes and copies to the host.

    So the host runs ahead of what is computed, and copies come late. Only CUDA and ROCm have a
    kernel that does nothing else; elsewhere the device is as late as it is.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self._random = random.Random(seed)
        self._drawing = threading.Lock()
        self._sleeps = device.type == "cuda"

    def sleep(self, *_: Any) -> None:
        with self._drawing:
            cycles = int(self._random.random() ** 2 * _LONGEST)
        if self._sleeps:
            torch.cuda._sleep(cycles)

    @contextlib.contextmanager
    def applied(self, *, computing: bool = True) -> Iterator[None]:
        """``computing``: to forward passes, too, which a compiler could not trace."""
        start = TorchAccelerator.start

        def late(device: Any, *given: Any) -> Any:
            with device._module.stream(device._copying):
                self.sleep()
            return start(device, *given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TorchAccelerator, "start", late)
            hook = register_module_forward_pre_hook(self.sleep) if computing else None
            try:
                yield
            finally:
                if hook is not None:
                    hook.remove()

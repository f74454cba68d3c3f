"""One rank's measurement: when its steps end, which losses they have, what leaves the machine.

A step goes from the end of one ``optimizer.step()`` to the end of the next. So what a system waits
for is in it, wherever it waits: in the backward pass, in the step, or in the next forward pass.
"""

from __future__ import annotations

import hashlib
import math
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import psutil
import torch

from foreprop.config import Config, launch_info
from foreprop.path.asyncdevice import HOSTS, TorchAccelerator
from foreprop.run.plan import maybe_address, own_addresses

Number = TypeVar("Number", int, float)
_ANY_PORT = 9
"""Nothing is sent there: a datagram socket is connected to ask for the route."""


class Clock(Protocol):
    """Marks moments; `seconds` are those between them."""

    def mark(self) -> None: ...
    def seconds(self) -> list[float]: ...


class HostClock:
    """Of the training thread."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [later - earlier for earlier, later in pairs]


class EventClock:
    """Of the device: the thread may be ahead of it, and is not held up to look."""

    def __init__(self, device: TorchAccelerator) -> None:
        self._device = device
        self._events: list[Any] = []

    def mark(self) -> None:
        self._events.append(self._device.mark(timed=True))

    def seconds(self) -> list[float]:
        self._device.synchronize()
        pairs = zip(self._events, self._events[1:], strict=False)
        return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairs]


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What counters say; None where this rank does not look."""

    sent_bytes: int | None = None
    waited_s: float | None = None
    cpu_share: float | None = None
    """Of all processors of the machine: how much of the time they were busy."""


class Recorder:
    """The training thread tells it of backward passes and steps.

    ``waited_s``: what foreprop's counters say when they are asked; None where there are none.
    """

    def __init__(
        self,
        *,
        warm_up: int,
        steps: int,
        interface: str,
        waited_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._warm_up, self._wanted = warm_up, warm_up + steps
        self.waited_s = waited_s
        self._interface = interface
        """Whose bytes count; empty if another rank of this machine counts them."""
        self._clock: Clock = HostClock()
        self._losses: list[list[torch.Tensor]] = []
        self._passes: list[torch.Tensor] = []
        self._readings: list[Counted] = []
        self.count = 0

    def use_device(self, device: torch.device) -> None:
        if device.type not in HOSTS and (found := TorchAccelerator(device)).has_events:
            self._clock = EventClock(found)

    def add_loss(self, tensors: Any) -> None:
        """What a backward pass begins with; only a scalar is a loss."""
        roots = tensors if isinstance(tensors, Sequence) else [tensors]
        self._passes += [
            root.detach().clone()
            for root in roots
            if isinstance(root, torch.Tensor) and root.numel() == 1
        ]

    def end_step(self) -> bool:
        """Whether these were all the steps that are wanted."""
        self._clock.mark()
        self.count += 1
        self._losses.append(self._passes)
        self._passes = []
        if self.count in (self._warm_up, self._wanted):
            self._read()
        return self.count >= self._wanted

    def end(self) -> None:
        """There are no more steps, though more were wanted."""
        if self._warm_up < self.count < self._wanted:
            self._read()

    def _read(self) -> None:
        """The counters, where the steps that count begin and end."""
        sent = busy = None
        if self._interface:
            counters = psutil.net_io_counters(pernic=True).get(self._interface)
            sent = None if counters is None else counters.bytes_sent
            busy = psutil.cpu_percent() / 100  # since the last call
        self._readings.append(Counted(sent_bytes=sent, waited_s=self.waited_s(), cpu_share=busy))

    def losses(self) -> list[float]:
        """Of each step the mean over its backward passes."""
        return [
            statistics.fmean(float(loss) for loss in passes) if passes else math.nan
            for passes in self._losses
        ]

    def seconds(self) -> list[float]:
        return self._clock.seconds()

    def counted(self) -> Counted:
        """In the steps that count."""
        if len(self._readings) < 2:
            return Counted()
        before, after = self._readings[0], self._readings[-1]
        return Counted(
            sent_bytes=_since(before.sent_bytes, after.sent_bytes),
            waited_s=_since(before.waited_s, after.waited_s),
            cpu_share=after.cpu_share,
        )


def _since(before: Number | None, after: Number | None) -> Number | None:
    return None if before is None or after is None else after - before


def digest_of(parameters: Iterable[torch.Tensor]) -> str:
    """SHA-256 of their bits."""
    found = hashlib.sha256()
    for parameter in parameters:
        flat = parameter.detach().cpu().contiguous().flatten()
        found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def interface_to(address: str, config: Config) -> str:
    """The network interface that leads to the rendezvous, or that ``interface`` says."""
    names = own_addresses()
    if config.interface is not None:
        wanted = maybe_address(config.interface)
        return config.interface if wanted is None else names.get(wanted, "lo")
    family, kind, _, _, target = socket.getaddrinfo(address, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        own = maybe_address(str(probe.getsockname()[0]).partition("%")[0])
    return names.get(own, "lo") if own is not None else "lo"


def counted_interface(config: Config) -> str:
    """Of the first rank of each machine; empty for the others."""
    info = launch_info()
    return "" if info.local_rank else interface_to(info.master_address, config)

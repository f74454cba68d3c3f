"""One rank's measurement: when its steps end, which losses they have, what leaves the machine.

A step goes from the end of one ``optimizer.step()`` to the end of the next. So what a system waits
for is in it, wherever it waits: in the backward pass, in the step, or in the next forward pass.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import socket
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
import psutil
import torch

from foreprop.config import Config, launch_info
from foreprop.plan.passes import Clock, Mark, clock_of
from foreprop.tools.run.plan import maybe_address, own_addresses

Number = TypeVar("Number", int, float)
_ANY_PORT = 9
"""Nothing is sent to this port: a datagram socket is connected only to ask for the route."""


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """The counters' values over the counted steps; None where this rank does not read them."""

    sent_bytes: int | None = None
    waited_s: float | None = None
    cpu_share: float | None = None
    """How much of the time the machine's processors were busy, on average."""


class Recorder:
    """Records a rank's steps and losses; the training thread calls it.

    ``waited_s`` returns what foreprop's counters say; None where foreprop does not train.
    ``interface`` is the one whose bytes count; empty if another rank of this machine counts them.
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
        self._clock: Clock = Clock()
        self._marks: list[Mark] = []
        self._losses: list[list[torch.Tensor]] = []
        self._passes: list[torch.Tensor] = []
        self._readings: list[Counted] = []
        self.count = 0

    def use_device(self, device: torch.device) -> None:
        """Take the device's clock, before the first step: the thread may be ahead of the device."""
        self._clock = clock_of(device)

    def add_loss(self, tensors: Any) -> None:
        """Note what a backward pass begins with; only a scalar is a loss."""
        roots = tensors if isinstance(tensors, Sequence) else [tensors]
        self._passes += [
            root.detach().clone()
            for root in roots
            if isinstance(root, torch.Tensor) and root.numel() == 1
        ]

    def end_step(self) -> bool:
        """Note the end of a step; whether it was the last one that is wanted."""
        self._marks.append(self._clock.mark())
        self.count += 1
        self._losses.append(self._passes)
        self._passes = []
        if self.count in (self._warm_up, self._wanted):
            self._read()
        return self.count >= self._wanted

    def end(self) -> None:
        """Read the counters if the script ends before it has made all steps."""
        if self._warm_up < self.count < self._wanted:
            self._read()

    def _read(self) -> None:
        sent = busy = None
        if self._interface:
            counters = psutil.net_io_counters(pernic=True).get(self._interface)
            sent = None if counters is None else counters.bytes_sent
            busy = psutil.cpu_percent() / 100  # since the last call
        self._readings.append(Counted(sent_bytes=sent, waited_s=self.waited_s(), cpu_share=busy))

    def losses(self) -> list[float]:
        """Each step's mean over its backward passes."""
        return [
            statistics.fmean(float(loss) for loss in passes) if passes else math.nan
            for passes in self._losses
        ]

    def seconds(self) -> list[float]:
        self._clock.settle()
        return [self._clock.seconds(*pair) for pair in itertools.pairwise(self._marks)]

    def counted(self) -> Counted:
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
    found = hashlib.sha256()
    for parameter in parameters:
        flat = parameter.detach().cpu().contiguous().flatten()
        found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def interface_to(address: str, config: Config) -> str:
    """The network interface on the route to the rendezvous, or that the setting names."""
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
    """The interface whose bytes this rank counts; empty but for a machine's first rank."""
    info = launch_info()
    return "" if info.local_rank else interface_to(info.master_address, config)

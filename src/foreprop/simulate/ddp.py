"""A model of DistributedDataParallel on gloo: buckets, all-reduced as the backward pass fills them.

Not its code, as the presets and ``ring`` are ours: buckets are filled with the arrays in reverse
order until they hold the bound, reduced in that order, two at a time (torch's default number of
threads for gloo), and the backward pass ends when the last one is there. Copies into buckets and
the optimizer are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foreprop.simulate.cluster import Cluster, SimulatedSteps
from foreprop.simulate.collective import Ring
from foreprop.simulate.presets import SEND_BUFFER_BYTES
from foreprop.simulate.setting import SimulatedSetting
from foreprop.workload.buckets import fill_buckets
from foreprop.workload.hosts import Hosts

_IN_FLIGHT = 2


def simulate_ddp(
    setting: SimulatedSetting, cluster: Cluster, hosts: Hosts, *, steps: int, bucket_bytes: int
) -> SimulatedSteps:
    """Train ``steps`` steps after a first forward pass with buckets of ``bucket_bytes``."""
    sizes_elems = [size for layer in setting.layers for size in layer.sizes_elems]
    buckets = fill_buckets(sizes_elems, bucket_bytes)
    ring = Ring(cluster, hosts, buffer_bytes=setting.scaled(SEND_BUFFER_BYTES))
    ranks = [DdpWorker(ring, rank, sizes_elems, buckets) for rank in cluster.ranks]
    return cluster.train(setting, ranks, steps=steps)


class DdpWorker:
    """A rank; see `device.Synchronisation`. Parameters are complete whenever they are used."""

    def __init__(
        self, ring: Ring, rank: int, sizes_elems: Sequence[int], buckets: Sequence[Sequence[int]]
    ) -> None:
        self.look: Callable[[], None] = _no_device
        self.proceed: Callable[[], None] = _no_device
        self._ring = ring
        self._rank = rank
        self._bucket_of = {array: i for i, arrays in enumerate(buckets) for array in arrays}
        self._elems = [sum(sizes_elems[array] for array in arrays) for arrays in buckets]
        self._arrays = [len(arrays) for arrays in buckets]
        self._missing = list(self._arrays)
        self._issued = self._reduced = 0

    def is_complete(self, parameter: int) -> bool:
        del parameter
        return True

    def needed(self, parameter: int) -> None:
        """Is there."""

    def waited(self, seconds: float) -> None:
        """Of no consequence."""

    def start_step(self) -> None:
        """Nothing has to be asked for."""

    def gradient_ready(self, parameter: int, step: int) -> None:
        self._missing[self._bucket_of[parameter]] -= 1
        self._issue(step)

    def end_step(self, step: int) -> bool:
        """The backward pass ends when all buckets are reduced."""
        del step
        return False

    def _issue(self, step: int) -> None:
        while self._issued < len(self._arrays) and self._issued - self._reduced < _IN_FLIGHT:
            bucket = self._issued
            if self._missing[bucket]:
                return
            self._issued += 1
            self._ring.issue(
                self._rank, (bucket, step), self._elems[bucket], lambda: self._after(step)
            )

    def _after(self, step: int) -> None:
        self._reduced += 1
        if self._reduced < len(self._arrays):
            self._issue(step)
            return
        self._missing = list(self._arrays)
        self._issued = self._reduced = 0
        self.proceed()


def _no_device() -> None:
    """Until there is one."""

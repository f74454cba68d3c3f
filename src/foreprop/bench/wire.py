"""The data plane alone: one worker, one server, loopback, no compute, against bare sockets."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from foreprop.bench.bare import BarePair, cpu_seconds
from foreprop.config import Config
from foreprop.engine.launch import ProcessServer
from foreprop.engine.world import World
from foreprop.training.session import Session

_STEP_WARM_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WireResult:
    """``*_bits_per_s`` count payload in one direction; as much flows in the other."""

    slice_elems: int
    slices: int
    steps: int
    foreprop_bits_per_s: float
    bare_bits_per_s: float
    foreprop_cpu_s_per_gb: float
    bare_cpu_s_per_gb: float

    @property
    def ratio(self) -> float:
        return self.foreprop_bits_per_s / self.bare_bits_per_s


class _Vectors(torch.nn.Module):
    """Parameters of eight slices each: enough for several, few enough for many waits."""

    def __init__(self, slices: int, slice_elems: int) -> None:
        super().__init__()
        per_parameter = 8
        self.vectors = torch.nn.ParameterList(
            torch.zeros(slice_elems * min(per_parameter, slices - start))
            for start in range(0, slices, per_parameter)
        )


def lonely_world() -> World:
    """A world of one whose server is a process of its own."""
    store = HashStore()
    return World(rank=0, size=1, local_size=1, host="127.0.0.1", store=store, raw_store=store)


class WirePair:
    """A real session of one worker and one server process, stepped without any model around."""

    def __init__(self, slices: int, config: Config) -> None:
        torch.set_num_threads(1)
        self._model = _Vectors(slices, config.slice_elems)
        optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self.session = Session(self._model, optimizer, lonely_world(), config)
        self._optimizer = optimizer
        for parameter in self._model.parameters():
            parameter.grad = torch.ones_like(parameter)

    @property
    def server_pid(self) -> int:
        handle = self.session._connections.handles[0]
        return handle.pid if isinstance(handle, ProcessServer) else 0

    def step(self) -> float:
        started = time.perf_counter()
        self._optimizer.step()
        self.session.flush()
        return time.perf_counter() - started


def measure_wire(*, slice_elems: int, slices: int, steps: int) -> WireResult:
    """Interleaves steps of foreprop and of bare sockets; medians of ``steps`` each."""
    config = Config.resolve("p3", slice_elems=slice_elems)
    message_bytes = slice_elems * 4
    bare = BarePair(message_bytes, slices, config.unsent_bytes)
    pair = WirePair(slices, config)
    gigabytes = 2 * message_bytes * slices / 1e9  # both directions
    times: dict[str, list[float]] = {"foreprop": [], "bare": []}
    cpu: dict[str, list[float]] = {"foreprop": [], "bare": []}
    try:
        for number in range(steps + _STEP_WARM_UP):
            for name, step, pid in (
                ("bare", bare.step, bare.pid),
                ("foreprop", pair.step, pair.server_pid),
            ):
                before = cpu_seconds(pid)
                seconds = step()
                if number >= _STEP_WARM_UP:
                    times[name].append(seconds)
                    cpu[name].append(cpu_seconds(pid) - before)
    finally:
        pair.session.close()
        bare.close()
    bits = message_bytes * slices * 8
    return WireResult(
        slice_elems=slice_elems,
        slices=slices,
        steps=steps,
        foreprop_bits_per_s=bits / statistics.median(times["foreprop"]),
        bare_bits_per_s=bits / statistics.median(times["bare"]),
        foreprop_cpu_s_per_gb=sum(cpu["foreprop"]) / steps / gigabytes,
        bare_cpu_s_per_gb=sum(cpu["bare"]) / steps / gigabytes,
    )

"""Whole training steps with an emulated accelerator over paced links: is the wire well used?

Layers of a real model's array sizes occupy a *device clock* instead of computing: forward and
backward take their share (1:2) of a chosen time per step, and produce real gradients of the real
shapes. Everything else is the real thing: autograd, waiting parameters, optimizer, sockets.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import psutil
import torch

from foreprop.bench.workers import run_workers
from foreprop.config import Config
from foreprop.training.parallelize import parallelize

_LATE_S = 0.5e-3
_FORWARD_SHARE = 1 / 3
_CONSTANT_SHARE = 0.1  # of the compute, spread evenly: what a layer costs however small it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's arrays (elements of each) and its share of the compute time."""

    name: str
    sizes_elems: tuple[int, ...]
    share: float


def load_profile(model: str, scale: int) -> list[Layer]:
    """A model's layers in forward order, every array divided by ``scale`` (rounded up)."""
    text = resources.files("foreprop.profiles").joinpath(f"{model}.json").read_text()
    arrays = json.loads(text)["arrays_in_forward_order"]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for array in arrays:
        groups.setdefault(array["name"].rpartition(".")[0], []).append(array)
    total = sum(array["forward_flops"] for array in arrays)
    weights = [
        sum(array["forward_flops"] for array in members) / total + _CONSTANT_SHARE / len(groups)
        for members in groups.values()
    ]
    return [
        Layer(
            name=name.replace(".", "_"),
            sizes_elems=tuple(-(-_elems(array["shape"]) // scale) for array in members),
            share=weight / sum(weights),
        )
        for (name, members), weight in zip(groups.items(), weights, strict=True)
    ]


def _elems(shape: Sequence[int]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


class DeviceClock:
    """When the emulated device will be free. Only missing parameters make it idle."""

    def __init__(self) -> None:
        self.free_at = time.monotonic()

    def idle_until_now(self) -> None:
        self.free_at = max(self.free_at, time.monotonic())

    def occupy(self, seconds: float) -> None:
        self.free_at += seconds
        remaining = self.free_at - time.monotonic()
        if remaining > 0:
            time.sleep(remaining)


class _Occupy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: EmulatedLayer, *_: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        layer.clock.occupy(layer.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        layer: EmulatedLayer = ctx.layer
        layer.clock.occupy(layer.backward_s)
        return gradient, None, *(torch.full_like(p, 1e-3) for p in layer.arrays)


class EmulatedLayer(torch.nn.Module):
    """Occupies the clock, touches its parameters when a real layer would, makes gradients."""

    def __init__(self, layer: Layer, clock: DeviceClock, compute_s: float) -> None:
        super().__init__()
        self.arrays = torch.nn.ParameterList(torch.zeros(size) for size in layer.sizes_elems)
        self.clock = clock
        self.forward_s = compute_s * layer.share * _FORWARD_SHARE
        self.backward_s = compute_s * layer.share * (1 - _FORWARD_SHARE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        asked = time.monotonic()
        arrays = [array.view_as(array) for array in self.arrays]  # here a missing one is waited for
        if time.monotonic() - asked > _LATE_S:
            self.clock.idle_until_now()
        result: torch.Tensor = _Occupy.apply(x, self, *arrays)  # type: ignore[no-untyped-call]
        return result


class EmulatedModel(torch.nn.Sequential):
    def __init__(self, layers: Sequence[Layer], compute_s: float) -> None:
        self_clock = DeviceClock()
        super().__init__(*(EmulatedLayer(layer, self_clock, compute_s) for layer in layers))
        self.clock = self_clock


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedSetting:
    model: str = "vgg19"
    scale: int = 16
    workers: int = 4
    compute_s: float = 2.0
    balance: float = 1.0
    steps: int = 6
    warm_up: int = 2
    presets: tuple[str, ...] = ("p3", "slicing", "kvstore")

    @property
    def model_bytes(self) -> int:
        return 4 * sum(sum(layer.sizes_elems) for layer in load_profile(self.model, self.scale))

    @property
    def rate_bits_per_s(self) -> float:
        """The link rate at which the wire takes ``balance`` times as long as the compute."""
        share = 2 * (self.workers - 1) / self.workers
        return share * self.model_bytes * 8 / (self.compute_s * self.balance)

    @property
    def limit_s(self) -> float:
        """What no schedule can beat: the larger of compute and wire time."""
        return self.compute_s * max(1.0, self.balance)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedResult:
    preset: str
    step_s_median: float
    step_s_p10: float
    step_s_p90: float
    over_limit: float
    waited_s: float
    cpu_share: float


def measure_emulated(setting: EmulatedSetting) -> list[EmulatedResult]:
    """Interleave steps of all presets in the same processes; medians over steps of rank 0."""
    psutil.cpu_percent()
    by_rank = run_workers(setting.workers, _work, json.dumps(asdict(setting)))
    cpu_share = psutil.cpu_percent() / 100
    steps: Mapping[str, Any] = by_rank[0]
    results = []
    for preset in setting.presets:
        times = steps[preset]["step_s"]
        deciles = statistics.quantiles(times, n=10) if len(times) > 1 else [times[0]] * 9
        median = statistics.median(times)
        results.append(
            EmulatedResult(
                preset=preset,
                step_s_median=median,
                step_s_p10=deciles[0],
                step_s_p90=deciles[-1],
                over_limit=median / setting.limit_s,
                waited_s=steps[preset]["waited_s"],
                cpu_share=cpu_share,
            )
        )
    return results


class _Run:
    """One preset's model and session in one worker."""

    def __init__(self, preset: str, setting: EmulatedSetting) -> None:
        layers = load_profile(setting.model, setting.scale)
        self.model = EmulatedModel(layers, setting.compute_s)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        config = Config.resolve(
            preset,
            workers_per_node=1,
            servers_per_node=1,
            link_rate_bits_per_s=setting.rate_bits_per_s,
            slice_elems=max(1, 50_000 // setting.scale),
            big_array_elems=max(1, 1_000_000 // setting.scale),
        )
        self.session = parallelize(self.model, self.optimizer, config=config)
        self.step_s: list[float] = []
        self.waited_s = 0.0
        self.model.clock.idle_until_now()
        self._ended = self.model.clock.free_at

    def steps(self, count: int) -> None:
        """Steps from the end of a forward pass to the end of the next, by the device's clock."""
        clock = self.model.clock
        self.session.flush()
        clock.idle_until_now()
        loss = self.model(torch.ones(1, requires_grad=True)).sum()
        self._ended = clock.free_at
        waited_before = self.session.engine.counters.waited_s
        for _ in range(count):
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            loss = self.model(torch.ones(1, requires_grad=True)).sum()
            self.step_s.append(clock.free_at - self._ended)
            self._ended = clock.free_at
        self.waited_s += self.session.engine.counters.waited_s - waited_before


def _work(text: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    fields = json.loads(text)
    setting = EmulatedSetting(**{**fields, "presets": tuple(fields["presets"])})
    runs = {preset: _Run(preset, setting) for preset in setting.presets}
    for run in runs.values():
        run.steps(setting.warm_up)
        run.step_s.clear()
        run.waited_s = 0.0
    for _ in range(2):
        for run in runs.values():
            run.steps((setting.steps + 1) // 2)
    found = {}
    for preset, run in runs.items():
        found[preset] = {"step_s": run.step_s, "waited_s": run.waited_s / len(run.step_s)}
        run.session.close()
    return found

"""The measurements of each figure, and about how long they take: nothing here runs anything."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from foreprop.config import PRESETS
from foreprop.core.slicing import SLICE_ELEMS
from foreprop.errors import ConfigError
from foreprop.plan.profile import load_profile
from foreprop_lab.setting.labsetting import (
    DDP,
    DDP_TUNED,
    MXNET,
    LabSetting,
    rate_for_balance,
    usual_compute_s,
)

BANDWIDTH, UTILISATION, NODES, SLICE_SIZE, TIMELINE = FIGURES = (1, 2, 3, 4, 5)

SCALE = 16
FIXED_RATE_NODES = 4
"""The number of nodes at which the figure over nodes has balance 1."""

_MODELS = ("resnet50", "inceptionv3", "vgg19", "sockeye")
_MXNET_MODELS = ("resnet50", "vgg19")
_PUBLISHED = "p3-2019"
"""The preset of P3 as its authors published it."""
_UTILISED: Mapping[str, tuple[str, ...]] = {
    "vgg19": ("kvstore", DDP, "p3"),
    "resnet50": ("kvstore", "tensorflow", "p3"),
    "sockeye": ("kvstore", "p3"),
    "inceptionv3": ("wfbp",),
}
"""The models and systems whose links are watched, for P3's Figs. 8, 9, 13 and 14.

The first ones have a timeline.
"""
_TYPICAL = {"p3": 1.05, "ring": 1.05, "slicing": 1.2, "kvstore": 1.4, DDP: 1.35, DDP_TUNED: 1.25}
_TYPICAL_OTHER = 1.4
"""A system's step over the limit, roughly: only used to estimate how long all takes."""
_TUNING_STEPS = 18  # that ddp-tuned spends on finding its bucket size
_EXTRA_STEPS = 3  # beside iterations and warm-up: the ones discarded
_START_CPU_S = 2.0  # to start one process
_SLICE_CPU_S = 170e-6  # of one node's worker and server, for each slice of a step
_FEW_ITERATIONS_BELOW_ELEMS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured; compute is `usual_compute_s`."""

    models: tuple[str, ...]
    balances: Mapping[float, int]
    """Figure 1's iterations by balance, the most telling ones first, in case it is stopped."""
    tuned_balances: Collection[float]
    """Balances at which `_PUBLISHED` and ddp-tuned, which tries bucket sizes, are measured too."""
    warm_up: int
    traced_iterations: int
    watched_models: int
    """How many models' links are watched in figure 2."""
    nodes: Mapping[str, Mapping[int, int]]
    """Figure 3's iterations by model and number of nodes."""
    slice_models: tuple[str, ...]
    slice_sizes_elems: tuple[int, ...]
    slice_iterations: int


FULL = Effort(
    models=_MODELS,
    balances={1.0: 20, 0.5: 20, 2.0: 20, 1.5: 5, 0.75: 5},
    tuned_balances=(0.5, 1.0, 2.0),
    warm_up=3,
    traced_iterations=5,
    watched_models=4,
    nodes={
        "resnet50": {2: 8, 4: 8, 8: 8, 16: 5},
        "sockeye": {2: 8, 4: 8, 8: 8, 16: 5},
        "vgg19": {2: 3, 4: 3, 8: 3},  # on 16 nodes a step would take 16 s, for its many slices
    },
    slice_models=("resnet50", "vgg19", "sockeye"),
    slice_sizes_elems=(1_000, 10_000, 50_000, 200_000, 1_000_000, 10_000_000),
    slice_iterations=5,
)
QUICK = Effort(
    models=_MODELS,
    balances={1.0: 3, 0.5: 2},
    tuned_balances=(),
    warm_up=2,
    traced_iterations=4,
    watched_models=1,
    nodes={"resnet50": {2: 2, 4: 2, 8: 2}},
    slice_models=("resnet50",),
    slice_sizes_elems=(5_000, 50_000, 1_000_000),
    slice_iterations=3,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One run of the lab, for one figure or several."""

    figures: tuple[int, ...]
    setting: LabSetting

    @property
    def key(self) -> str:
        """A file name that differs for everything that would be measured differently."""
        setting = self.setting
        described = {
            "arrays": setting.profile.arrays,
            "systems": setting.systems,
            "nodes": setting.nodes,
            "scale": setting.scale,
            "compute_s": setting.compute_s,
            "rate_bits_per_s": round(setting.rate),
            "iterations": setting.iterations,
            "warm_up": setting.warm_up,
            "slice_elems": setting.slice_elems,
            "shape_ingress": setting.shape_ingress,
            "traced": setting.trace is not None,
            "sampled": setting.sample_network,
        }
        if setting.uneven:
            described["uneven"] = setting.uneven
        digest = hashlib.sha256(msgspec.json.encode(described)).hexdigest()[:12]
        return f"{setting.profile.name}-{setting.nodes}-nodes-{digest}"

    @property
    def title(self) -> str:
        setting = self.setting
        undivided = f"{setting.rate * setting.scale / 1e9:.3g} Gbit/s"
        words = [setting.profile.name, f"{setting.nodes} nodes", undivided]
        if setting.slice_elems not in (None, SLICE_ELEMS):
            words.append(f"slices of {setting.slice_elems:,}")
        return ", ".join(words)

    def expected_s(self, *, cores: int | None = None) -> float:
        """About how many seconds the measurement takes."""
        setting, cores = self.setting, cores or os.cpu_count() or 1
        processes = setting.nodes * (1 + sum(name in PRESETS for name in setting.systems))
        steps_s = sum(self._steps(name) * self._step_s(name, cores) for name in setting.systems)
        return processes * _START_CPU_S / cores + steps_s

    def _steps(self, system: str) -> int:
        tuning = _TUNING_STEPS if system == DDP_TUNED else 0
        return self.setting.warm_up + self.setting.iterations + _EXTRA_STEPS + tuning

    def _step_s(self, system: str, cores: int) -> float:
        setting = self.setting
        slices = setting.profile.slices(setting.unscaled_slice_elems)
        busy_s = slices * setting.nodes * _SLICE_CPU_S / cores if system in PRESETS else 0.0
        return max(setting.limit_s * _TYPICAL.get(system, _TYPICAL_OTHER), busy_s)


def plan_measurements(
    effort: Effort,
    *,
    traces: Path,
    only: Collection[int] = FIGURES,
    iterations: int | None = None,
    mxnet_python: Path | None = None,
) -> list[Measurement]:
    """All measurements that the figures in ``only`` need, in the order of the figures.

    ``iterations`` replaces every number of iterations. Raises `ConfigError` for unknown figures.
    """
    unknown = sorted(set(only) - set(FIGURES))
    if unknown or not only:
        raise ConfigError(f"only is {sorted(only)}; there are the figures 1 to {max(FIGURES)}")
    planner = _Planner(effort, traces, iterations, mxnet_python)
    return [m for m in planner.all() if set(m.figures) & set(only)]


@dataclass(frozen=True, slots=True)
class _Planner:
    effort: Effort
    traces: Path
    iterations: int | None
    mxnet_python: Path | None

    def all(self) -> Iterator[Measurement]:
        yield from self.bandwidth()
        yield from self.two_steps()
        yield from self.nodes()
        yield from self.slice_sizes()

    def bandwidth(self) -> Iterator[Measurement]:
        for balance, iterations in self.effort.balances.items():
            for model in self.effort.models:
                tuned = (_PUBLISHED, DDP_TUNED) if balance in self.effort.tuned_balances else ()
                mxnet = MXNET if self.mxnet_python and model in _MXNET_MODELS else ()
                profile = load_profile(model)
                setting = LabSetting(
                    profile=profile,
                    systems=("kvstore", "slicing", "p3", DDP, *tuned, *mxnet),
                    scale=SCALE,
                    compute_s=usual_compute_s(profile, FIXED_RATE_NODES),
                    balance=balance,
                    iterations=self.iterations or iterations,
                    warm_up=self.effort.warm_up,
                    mxnet_python=self.mxnet_python if mxnet else None,
                )
                yield Measurement(figures=(BANDWIDTH,), setting=setting)

    def two_steps(self) -> Iterator[Measurement]:
        for model, systems in islice(_UTILISED.items(), self.effort.watched_models):
            profile = load_profile(model)
            drawn = model == next(iter(_UTILISED))
            setting = LabSetting(
                profile=profile,
                systems=systems,
                scale=SCALE,
                compute_s=usual_compute_s(profile, FIXED_RATE_NODES),
                balance=1.0,
                iterations=self.iterations or self.effort.traced_iterations,
                warm_up=self.effort.warm_up,
                trace=self.traces if drawn else None,
                sample_network=True,
            )
            figures = (UTILISATION, TIMELINE) if drawn else (UTILISATION,)
            yield Measurement(figures=figures, setting=setting)

    def nodes(self) -> Iterator[Measurement]:
        for model, by_nodes in self.effort.nodes.items():
            profile = load_profile(model)
            compute_s = usual_compute_s(profile, max(by_nodes))
            layers = profile.layers(scale=SCALE, compute_s=compute_s)
            rate = rate_for_balance(layers, nodes=FIXED_RATE_NODES, balance=1.0)
            for nodes, iterations in by_nodes.items():
                setting = LabSetting(
                    profile=profile,
                    systems=("kvstore", "p3", DDP),
                    nodes=nodes,
                    scale=SCALE,
                    compute_s=compute_s,
                    rate_bits_per_s=rate,
                    iterations=self.iterations or iterations,
                    warm_up=self.effort.warm_up,
                )
                yield Measurement(figures=(NODES,), setting=setting)

    def slice_sizes(self) -> Iterator[Measurement]:
        for model in self.effort.slice_models:
            for size in self.effort.slice_sizes_elems:
                # So many small slices keep the CPUs busy for long; a few steps show that too.
                few = size < _FEW_ITERATIONS_BELOW_ELEMS
                profile = load_profile(model)
                setting = LabSetting(
                    profile=profile,
                    systems=("p3",),
                    scale=SCALE,
                    compute_s=usual_compute_s(profile, FIXED_RATE_NODES),
                    balance=1.0,
                    iterations=self.iterations or (2 if few else self.effort.slice_iterations),
                    warm_up=1 if few else self.effort.warm_up,
                    slice_elems=size,
                )
                yield Measurement(figures=(SLICE_SIZE,), setting=setting)

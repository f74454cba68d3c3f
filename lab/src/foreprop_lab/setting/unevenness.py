"""How the compute of workers differs from what a profile says: by node, by step and by layer.

The lab, the simulator and the limit take their times from here. A time depends on nothing but the
setting, its seed, the rank, the number of the step, the layer and the pass. So all systems of a run
have the same times in the same step, and a simulation has those of the lab.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreprop.core.staleness import ASYNC, Staleness
from foreprop.errors import ConfigError
from foreprop.plan.profile import Layer

Times = NDArray[np.float64]
"""Seconds, by rank, layer and pass: forward and backward."""
Draw = Callable[[int], Times]
"""A function that gives some ranks' times in the step of this number."""

DISTRIBUTIONS = ("lognormal", "uniform", "exponential")
_MOST_SEED = 2**32 - 1
_MOST_STEP_JITTER = 10.0
"""The most of a step's jitter: exp(10) is 22,000, so one step would take as long as all others."""
_EXAMPLE = "lognormal:0.4"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLengths:
    """A distribution, with mean 1, of how long a worker's steps are, as when sequences differ."""

    distribution: str
    """One of `DISTRIBUTIONS`."""
    spread: float
    """The width of the distribution.

    For lognormal it is the deviation of the logarithm, for uniform the largest share off, for
    exponential the share of a step that is drawn, while the rest is the same in all.
    """

    def __post_init__(self) -> None:
        if self.distribution not in DISTRIBUTIONS:
            raise ConfigError(
                f"step_lengths has {self.distribution!r}; there are {', '.join(DISTRIBUTIONS)}"
            )
        below = math.inf if self.distribution == "lognormal" else 1.0
        if not 0 < self.spread < below:
            allowed = "positive and finite" if below == math.inf else "above 0 and below 1"
            raise ConfigError(
                f"step_lengths has the spread {self.spread:g}; of {self.distribution} it must be"
                f" {allowed}"
            )

    def of(self, first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.distribution == "uniform":
            return 1 + self.spread * (2 * first - 1)
        if self.distribution == "exponential":
            return 1 - self.spread - self.spread * np.log1p(-first)
        return np.exp(self.spread * _normal(first, second) - self.spread**2 / 2)


def parse_step_lengths(text: str) -> StepLengths:
    """Read ``lognormal:0.4``; raises `ConfigError`."""
    distribution, _, number = text.partition(":")
    try:
        spread = float(number)
    except ValueError as error:
        raise ConfigError(
            f"step_lengths is {text!r}; it must be a distribution and its spread, as {_EXAMPLE}"
        ) from error
    return StepLengths(distribution=distribution, spread=spread)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unevenness:
    """The settings of `labsetting.LabSetting` that make compute differ."""

    slow_nodes: int = 0
    slowdown: float = 0.0
    jitter: float = 0.0
    step_jitter: float = 0.0
    step_lengths: StepLengths | None = None
    seed: int = 0

    def check(self, nodes: int) -> None:
        """Raise `ConfigError` for settings that do not suit so many nodes."""
        if not 0 <= self.slow_nodes < nodes:
            raise ConfigError(
                f"slow_nodes is {self.slow_nodes}; it must be at least 0 and below nodes, {nodes}"
            )
        if not 0 <= self.jitter < 1:
            raise ConfigError(f"jitter is {self.jitter}; it must be at least 0 and below 1")
        for name in ("slowdown", "step_jitter"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be finite and at least 0")
        if self.step_jitter > _MOST_STEP_JITTER:
            raise ConfigError(
                f"step_jitter is {self.step_jitter}; it must be at most {_MOST_STEP_JITTER}"
            )
        if not 0 <= self.seed <= _MOST_SEED:
            raise ConfigError(
                f"seed is {self.seed}; it must be at least 0 and at most {_MOST_SEED}"
            )

    @property
    def is_drawn(self) -> bool:
        """Whether steps differ from each other."""
        return bool(self.jitter or self.step_jitter or self.step_lengths)

    @property
    def is_even(self) -> bool:
        """Whether all nodes always take what the profile says."""
        return not self.is_drawn and not (self.slow_nodes and self.slowdown)

    def draw(
        self,
        layers: Sequence[Layer],
        ranks: Sequence[int],
        *,
        nodes: int,
        workers_per_node: int = 1,
    ) -> Draw:
        """The times of these ranks, of the workers of all ``nodes``, in each step."""
        each = np.array([(layer.forward_s, layer.backward_s) for layer in layers])
        node_of = np.asarray(ranks, dtype=np.int64) // workers_per_node
        slowed = np.where(node_of >= nodes - self.slow_nodes, 1 + self.slowdown, 1.0)
        usual = each * slowed[:, None, None]
        if not self.is_drawn:
            return lambda _: usual
        numbers = np.asarray(ranks, dtype=np.int64)
        return lambda step: usual * self._factors(numbers, node_of, step, len(layers))

    def _factors(
        self, ranks: NDArray[np.int64], node_of: NDArray[np.int64], step: int, layers: int
    ) -> Times:
        whole = np.ones(len(ranks))
        if self.step_jitter:
            draws = [_even(self.seed, part, node_of, step) for part in _STEP]
            whole = whole * np.exp(self.step_jitter * _normal(*draws))
        if self.step_lengths is not None:
            draws = [_even(self.seed, part, ranks, step) for part in _LENGTH]
            whole = whole * self.step_lengths.of(*draws)
        factors: Times = np.broadcast_to(whole[:, None, None], (len(ranks), layers, 2))
        if self.jitter:
            places = np.arange(2 * layers, dtype=np.int64)
            drawn = _even(self.seed, _LAYER, ranks[:, None], step, places)
            factors = factors * (1 + self.jitter * (2 * drawn.reshape(factors.shape) - 1))
        return factors


# the mixing of SplitMix64 (Steele, Lea and Flood), chained
_STEP, _LENGTH, _LAYER = (1, 2), (3, 4), 5
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _even(*keys: int | NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers evenly from [0, 1), which only depend on the keys; shapes are broadcast."""
    state = np.zeros(1, dtype=np.uint64)
    for key in keys:
        state = state + np.asarray(key, dtype=np.int64).astype(np.uint64) + _GAMMA
        state = (state ^ (state >> np.uint64(30))) * _FIRST
        state = (state ^ (state >> np.uint64(27))) * _SECOND
        state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _normal(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """Normally distributed numbers, by Box and Muller."""
    normal: NDArray[np.float64] = np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * np.pi * second)
    return normal


def parse_staleness(name: str, text: str) -> Staleness:
    """The staleness in ``0``, ``4`` or ``async``; raises a `ConfigError` about ``name``."""
    if text.strip() == ASYNC:
        return ASYNC
    if not text.strip().isdecimal():
        raise ConfigError(
            f"{name} is {text!r}; it must be a number of steps from 0, or {ASYNC!r} for no bound"
        )
    return int(text)

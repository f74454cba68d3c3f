"""Throughput and loss by staleness, where one worker is slow: `core.staleness` on a clock.

python -m foreprop_lab.benchmarks.stale_training lab/docs/results/stale-training.json

Workers compute and nothing else takes time. They train a logistic regression, each with batches of
its own, and a server updates and answers at once. A worker's step takes 1 s, the last worker's
``slow``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreprop.core.staleness import Staleness, compensate, most_steps_apart
from foreprop.tools.cli.options import writable
from foreprop_lab.experiments.staleloop import StaleLoop

Values = NDArray[np.float64]
Case = dict[str, Any]
BATCH, FEATURES, SAMPLES = 16, 20, 4_000
LEARNING_RATE = 2.0
CASES: list[Case] = [
    {"staleness": staleness, "strength": strength, "workers": 8, "slow": slow, "rounds": 40}
    for slow in (1.0, 2.0, 4.0)
    for staleness in (0, 1, 4, 16, "async")
    for strength in ((0.0,) if staleness == 0 else (0.0, 2.0))
]


def closed_steps(staleness: Staleness, *, workers: int, slow: float, rounds: int) -> float:
    """The steps of all workers together until the slow one has made ``rounds``.

    The others make as many and s more, but no more than they can: slow x rounds. Without a bound
    that is the harmonic sum, rounds x slow x (workers - 1 + 1 / slow).
    """
    others = min(rounds + most_steps_apart(staleness), slow * rounds)
    return (workers - 1) * others + rounds


def main(path: str, cases: Sequence[Case] = CASES) -> list[Case]:
    """Write steps and losses to ``path``, and print each."""
    writable(Path(path).parent)
    done: list[Case] = []
    for case in cases:
        asked = {key: value for key, value in case.items() if key != "strength"}
        trained = train(**case)
        steps, closed = sum(trained.steps), closed_steps(**asked)
        per_s = steps / (case["slow"] * case["rounds"])
        done.append(
            {**case, "steps_per_s": per_s, "closed_form": closed / steps * per_s}
            | {"loss": trained.loss, "most_ahead": trained.most_ahead}
        )
        print(
            f"s {case['staleness']!s:>5}, lambda {case['strength']}, slow {case['slow']:g} s:"
            f" {per_s:.2f} steps/s (closed form {closed / steps * per_s:.2f}), loss"
            f" {trained.loss:.4f}, most ahead {trained.most_ahead}",
            flush=True,
        )
        Path(path).write_text(json.dumps(done, indent=1) + "\n")
    return done


@dataclass
class Data:
    """Two classes that a line parts badly; some features vary much less than others."""

    seed: int = 0
    inputs: Values = field(init=False)
    labels: Values = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        scales = np.geomspace(2.0, 0.1, FEATURES)
        self.inputs = rng.normal(size=(SAMPLES, FEATURES)) * scales
        odds = self.inputs @ rng.normal(size=FEATURES) + 0.5 * rng.normal(size=SAMPLES)
        self.labels = (odds > 0).astype(np.float64)

    def loss(self, values: Values) -> float:
        """Cross entropy over all samples."""
        odds = self.inputs @ values
        return float(np.mean(np.logaddexp(0.0, odds) - self.labels * odds))

    def gradient(self, values: Values, rank: int, step: int) -> Values:
        """The gradient of a worker's batch of this step."""
        chosen = np.random.default_rng((self.seed, rank, step)).integers(SAMPLES, size=BATCH)
        inputs = self.inputs[chosen]
        probable = 1 / (1 + np.exp(-(inputs @ values)))
        gradient: Values = inputs.T @ (probable - self.labels[chosen]) / BATCH
        return gradient


class Training:
    """Workers that read the values and push gradients of them; see `StaleTraining`."""

    def __init__(
        self, *, staleness: Staleness, strength: float, workers: int, slow: float, rounds: int
    ) -> None:
        self._data = Data()
        self._strength, self._workers = strength, workers
        self._slow, self._end_s = slow, slow * rounds
        self._loop = StaleLoop(
            self, elems=FEATURES, workers=workers, staleness=staleness, step_s=self._step_s
        )
        self._values: Values = np.zeros(FEATURES)
        self._read = [self._values] * workers
        self._pushed: dict[int, Values] = {}
        self.steps = [0] * workers
        self.most_ahead = 0

    def _step_s(self, rank: int, step: int) -> float:
        del step
        return self._slow if rank == self._workers - 1 else 1.0

    def run(self) -> Training:
        self._loop.run(lambda next_s: next_s <= self._end_s * (1 + 1e-9))
        return self

    @property
    def loss(self) -> float:
        return self._data.loss(self._values)

    def compute(self, rank: int, step: int) -> None:
        self._pushed[rank] = self._data.gradient(self._read[rank], rank, step)
        self.steps[rank] = step

    def update(self, ranks: Sequence[int], now_s: float) -> None:
        """Plain SGD, each push one worker's share of the mean."""
        del now_s
        total: Values = np.zeros(FEATURES)
        for rank in ranks:
            gradient = self._pushed.pop(rank)
            read = self._read[rank]
            total = total + compensate(gradient, self._values, read, strength=self._strength)
        self._values = self._values - LEARNING_RATE / self._workers * total

    def read(self, rank: int, step: int) -> None:
        self._read[rank] = self._values
        self.most_ahead = max(self.most_ahead, step - min(self.steps))


def train(**case: Any) -> Training:
    return Training(**case).run()


if __name__ == "__main__":
    main(sys.argv[1])

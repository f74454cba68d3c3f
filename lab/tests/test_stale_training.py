"""lab/src/foreprop_lab/benchmarks/stale_training.py: its closed form, and what its losses show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foreprop.core.staleness import Staleness
from foreprop_lab.benchmarks.stale_training import closed_steps, main, train


def test_the_closed_form_by_hand() -> None:
    """4 workers, one of them half as fast, until it has made 10 steps."""
    fields = {"workers": 4, "slow": 2.0, "rounds": 10}
    assert closed_steps(0, **fields) == 40  # type: ignore[arg-type]
    assert closed_steps(3, **fields) == 49  # type: ignore[arg-type]
    assert closed_steps("async", **fields) == 70 == 20 * (3 + 1 / 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("slow", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("staleness", [0, 1, 2, 7, "async"])
def test_as_many_steps_are_made_as_the_closed_form_says(staleness: Staleness, slow: float) -> None:
    trained = train(staleness=staleness, strength=0.0, workers=4, slow=slow, rounds=12)
    closed = closed_steps(staleness, workers=4, slow=slow, rounds=12)
    assert sum(trained.steps) == closed
    # without a bound: what the slow one lacks, and a step that ends at the same moment
    assert trained.most_ahead <= (12 * (slow - 1) + 1 if staleness == "async" else staleness)


def test_what_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "stale.json"
    case = {"staleness": "async", "workers": 3, "slow": 2.0, "rounds": 5}
    made = main(str(path), [{**case, "strength": strength} for strength in (0.0, 2.0)])
    assert json.loads(path.read_text()) == made
    plain, compensated = made
    assert plain["steps_per_s"] == plain["closed_form"] == 2.5
    assert plain["loss"] != compensated["loss"]
    assert 0.1 < plain["loss"] < 0.6931  # log 2 is where it begins

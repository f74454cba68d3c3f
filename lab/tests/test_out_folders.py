"""Studies that take minutes are sure before they begin that their outcome can be written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foreprop.errors import ConfigError
from foreprop_lab.benchmarks import (
    convergence,
    gpu,
    modelled_steps,
    scale,
    simulated_steps,
    stale_training,
    symmetric_steps,
    tcpshares,
)
from foreprop_lab.experiments import compiledstep
from foreprop_lab.experiments.figures import distribution
from foreprop_lab.experiments.papers import baseline, links, parallax, processors
from foreprop_lab.experiments.papers import convergence as convergence_by_time

RESULTS = str(Path(__file__).parents[1] / "docs" / "results" / "results.json")
INTO_A_FOLDER: list[Callable[[str], Any]] = [
    baseline.main,
    links.main,
    parallax.main,
    processors.main,
    distribution.main,
    lambda out: convergence_by_time.main(str(Path(RESULTS).parent), out),
]
TO_A_FILE: list[Callable[[str], Any]] = [
    stale_training.main,
    symmetric_steps.main,
    scale.main,
    convergence.main,
    lambda name: modelled_steps.main(name, RESULTS),
    lambda name: simulated_steps.main(RESULTS, name),
    lambda name: tcpshares.main(["--out", name]),
    lambda name: gpu.main(["--out", name]),
    lambda name: compiledstep.main(1e9, Path(name)),
]


@pytest.mark.parametrize("study", INTO_A_FOLDER)
def test_a_folder_that_cannot_be_is_an_error_before_the_work(
    study: Callable[[str], Any], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="which cannot be written"):
        study(str(tmp_path / "file" / "out"))


@pytest.mark.parametrize("study", TO_A_FILE)
def test_a_file_whose_folder_cannot_be_is_an_error_before_the_work(
    study: Callable[[str], Any], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="which cannot be written"):
        study(str(tmp_path / "file" / "out.json"))


def test_a_folder_that_is_missing_is_made(tmp_path: Path) -> None:
    course = tmp_path / "course.json"
    course.write_text(json.dumps([[1, 30.0], [2, 20.0]]))
    convergence.main(str(tmp_path / "new" / "folder" / "name"), f"one={course}")
    made = {path.name for path in (tmp_path / "new" / "folder").iterdir()}
    assert made == {"name.json", "name.png", "name.svg"}

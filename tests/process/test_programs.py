"""The harness of tests/programs, run on programs of our own: really two ranks, really servers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.programs.compare import EQUAL, REFUSED
from tests.programs.examine import Examination
from tests.programs.own import REDUCED, SOURCES, TINY, WRAPPED
from tests.programs.program import after

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture
def examination(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Examination:
    monkeypatch.setenv("PROGRAMS_DIR", str(SOURCES))
    return Examination(tmp_path / "runs")


def test_a_program_with_two_lines_has_ddps_bits(examination: Examination) -> None:
    examination.run(TINY, 2)
    found = examination.comparisons[0]
    assert found.verdict == EQUAL, found
    assert found.lines == 2
    assert found.step_s and found.ddp_step_s  # noqa: PT018 - both were measured
    assert not examination.failed


def test_what_a_program_says_when_it_fails_is_told(examination: Examination) -> None:
    wrong = after("loader = torch.utils", "foreprop.parallelize(model, 'SGD')")
    examination.run(dataclasses.replace(TINY, foreprop=[wrong]), 2)
    found = examination.comparisons[0]
    assert found.verdict == REFUSED
    assert found.note == "ConfigError: optimizer is a str; it must be a torch.optim.Optimizer"
    assert examination.failed == [found]


def test_ddp_left_in_has_ddps_bits(examination: Examination) -> None:
    """Given to `parallelize`, used around the model that was given, and made afterwards."""
    examination.run(WRAPPED, 2)
    found = examination.comparisons[0]
    assert found.verdict == EQUAL, found


def test_a_script_that_averages_its_gradients_itself(examination: Examination) -> None:
    """The average of averages is the average, however all_reduce is given it."""
    examination.run(REDUCED, 2)
    found = examination.comparisons[0]
    assert found.verdict == EQUAL, found

"""Starts that are allowed and seldom meant are told, each in one line."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import foreprop
from foreprop.config.launchers import promised_ranks
from foreprop.engine.world import World
from foreprop.session.alone import report_promised
from tests.cluster import run_cluster

LAUNCHERS = [
    ("SLURM_NTASKS", "SLURM_PROCID"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("LOCAL_WORLD_SIZE", "LOCAL_RANK"),
    ("WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # without RANK
    ("HOROVOD_SIZE", "HOROVOD_RANK"),
]


@pytest.fixture(autouse=True)
def heard(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    for variables in LAUNCHERS:
        for name in variables:
            monkeypatch.delenv(name, raising=False)
    report_promised.cache_clear()
    with caplog.at_level(logging.WARNING, "foreprop"):
        yield caplog
    report_promised.cache_clear()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def start(world: World | None = None, *, trains: bool = True, optimizer: bool = True) -> None:
    model = nn.Linear(2, 2).requires_grad_(trains)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer else None
    foreprop.parallelize(model, sgd, world=world).close()


@pytest.mark.parametrize(("size", "rank"), LAUNCHERS)
def test_a_world_of_one_whose_launcher_promised_more_is_told_once(
    size: str, rank: str, monkeypatch: pytest.MonkeyPatch, heard: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(size, "4")
    start()
    start()
    (line,) = lines(heard)
    assert line.startswith(f"{size} is 4, but this process trains alone")
    assert "torchrun" in line


@pytest.mark.parametrize(("size", "rank"), LAUNCHERS[:5])
def test_of_a_launcher_s_processes_the_first_one_says_it(
    size: str, rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(size, "4")
    monkeypatch.setenv(rank, "0")
    assert promised_ranks() == (size, 4)
    monkeypatch.setenv(rank, "3")
    assert promised_ranks() is None


@pytest.mark.parametrize("text", ["", "1", "0", "many", "-2"])
def test_a_launcher_of_one_process_promises_nothing(
    text: str, monkeypatch: pytest.MonkeyPatch, heard: pytest.LogCaptureFixture
) -> None:
    for size, _ in LAUNCHERS:
        monkeypatch.setenv(size, text)
    start()
    assert lines(heard) == []


def test_several_ranks_are_what_was_promised(
    monkeypatch: pytest.MonkeyPatch, heard: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "2")
    run_cluster(2, start)
    assert lines(heard) == []


NOTHING = "nothing is trained: Linear has no parameter that requires a gradient"


@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_with_nothing_to_train_is_told_in_one_line(
    ranks: int, optimizer: bool, heard: pytest.LogCaptureFixture
) -> None:
    if ranks == 1:
        start(trains=False, optimizer=optimizer)
    else:
        run_cluster(2, lambda world: start(world, trains=False, optimizer=optimizer))
    assert lines(heard) == [NOTHING]


def test_an_optimizer_with_nothing_to_train_is_named(heard: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    foreprop.parallelize(model, torch.optim.Adam(model[0].parameters())).close()
    assert lines(heard) == [
        "nothing is trained: the optimizer, Adam, has no parameter that requires a gradient"
    ]


def test_a_model_without_parameters_is_told(heard: pytest.LogCaptureFixture) -> None:
    foreprop.parallelize(nn.ReLU()).close()
    assert lines(heard) == ["nothing is trained: ReLU has no parameter that requires a gradient"]


def test_one_parameter_that_trains_is_enough(heard: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    foreprop.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1)).close()
    outside = nn.Parameter(torch.zeros(2))
    frozen = nn.Linear(2, 2).requires_grad_(False)
    foreprop.parallelize(frozen, torch.optim.SGD([outside], lr=0.1)).close()
    assert lines(heard) == []

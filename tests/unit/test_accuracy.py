"""experiments/accuracy.py: what it trains when nothing is lost, and whom it offers."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from experiments.accuracy import (
    BATCH,
    EXACT,
    LR,
    MOMENTUM,
    NAMES,
    RANKS,
    Outcome,
    Row,
    _batches,
    offered,
    perceptron,
    train,
)

STEPS = 3


@pytest.fixture(scope="module")
def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    elems = RANKS * BATCH * STEPS
    labels = torch.randint(10, (elems,), generator=generator)
    images = torch.randn((elems, 784), generator=generator) + labels[:, None] / 5
    return images, labels


def test_exact_is_plain_momentum_sgd_of_the_ranks_mean(
    data: tuple[torch.Tensor, torch.Tensor],
) -> None:
    model = perceptron(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    for batches in _batches(data, 4, 1):
        optimizer.zero_grad()
        for images, labels in batches:
            (cross_entropy(model(images), labels) / RANKS).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        expected = float((model(data[0]).argmax(1) == data[1]).double().mean())
    assert train(EXACT, 4, data, data, 1).accuracy == pytest.approx(expected, abs=0.005)
    assert train("bf16", 4, data, data, 1).accuracy == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("name", NAMES)
def test_every_codec_trains(name: str, data: tuple[torch.Tensor, torch.Tensor]) -> None:
    outcome = train(name, 0, data, data, 1)
    assert outcome == train(name, 0, data, data, 1)
    assert outcome.push_bytes_per_elem <= 2
    assert outcome.reply_bytes_per_elem <= 4


def test_a_codec_is_offered_if_it_is_within_a_deviation_of_exact() -> None:
    def row(*accuracies: float) -> Row:
        return Row("row", [Outcome(accuracy, 4, 4) for accuracy in accuracies])

    exact = row(0.87, 0.88, 0.89)  # a deviation of 0.01
    assert offered(exact, exact)
    assert offered(row(0.90, 0.90, 0.95), exact)
    assert offered(row(0.871, 0.871, 0.871), exact)
    assert not offered(row(0.869, 0.869, 0.869), exact)

"""What each codec does to the accuracy of a perceptron on Fashion-MNIST.

    python -m experiments.accuracy                 # all of `NAMES`, three seeds each
    python -m experiments.accuracy topk:0.05 dgc   # these, and exact beside them

Two ranks and a server in one process, without sockets: gradients and new values pass the codecs as
`foreprop.core.codec` has it, each slice by itself. Prints a table for docs/compression.md. Takes
about two minutes of one core.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks import codecs
from foreprop.compression.codecs import make, make_for_replies
from foreprop.compression.dgc import DgcTraining
from foreprop.compression.onebit import vote
from foreprop.core.codec import Codec, Place, takes
from foreprop.datasets import fashion_mnist

EXACT = "exact"
NAMES = tuple(name for name in codecs.NAMES if name != "fp16")
SEEDS = (0, 1, 2)
RANKS, BATCH, EPOCHS, HIDDEN = 2, 100, 1, 128
SLICE_ELEMS = 50_000
LR, MOMENTUM = 0.05, 0.9
SIGN_LR = 1e-4
"""A vote has the size 1, whatever the gradients have."""
Split = tuple[torch.Tensor, torch.Tensor]
"""Images float32 (n, 784) and labels int64 (n,)."""


class Outcome(NamedTuple):
    accuracy: float
    push_bytes_per_elem: float
    reply_bytes_per_elem: float


def perceptron(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(784, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, 10),
    )


class _Slice:
    """A run of one parameter: what the ranks hold of it, and the server."""

    def __init__(self, number: int, image: torch.Tensor, codecs: Sequence[Codec[torch.Tensor]]):
        self.number = number
        self.image = image
        """A view of the model's parameter: all ranks have this one."""
        self.master = nn.Parameter(image.clone())
        self.codecs = codecs
        """For pushes and for replies; none if the slice is sent as it is."""
        self.states: list[Mapping[str, torch.Tensor]] = [
            codecs[0].new_state(len(image)) if codecs else {} for _ in range(RANKS)
        ]
        self.total = torch.zeros_like(image)
        self.sent_bytes = [0, 0]

    def push(self, gradient: torch.Tensor, step: int, rank: int) -> None:
        place = Place(step, self.number, rank)
        self.total += (
            self._through(0, gradient, self.states[rank], place) if self.codecs else gradient
        )

    def answer(self, step: int) -> None:
        if not self.codecs:
            self.image.copy_(self.master.detach())
            return
        difference = self.master.detach() - self.image
        self.image += self._through(1, difference, {}, Place(step, self.number, -1))

    def _through(
        self, way: int, values: torch.Tensor, state: Mapping[str, torch.Tensor], place: Place
    ) -> torch.Tensor:
        data = self.codecs[way].encode(values, state, place)
        self.sent_bytes[way] += len(data)
        decoded = torch.empty_like(values)
        self.codecs[way].decode(data, decoded, place)
        return decoded


def train(name: str, seed: int, data: Split, test: Split, epochs: int = EPOCHS) -> Outcome:
    """The accuracy after so many epochs; the learning rate falls to 0 in a line."""
    model = perceptron(seed)
    steps = epochs * (len(data[1]) // (RANKS * BATCH))
    training = DgcTraining(momentum=MOMENTUM, pushes=RANKS, warmup_steps=max(1, steps // 10))
    slices = [*_slices_of(model, name, training)]
    optimizer = torch.optim.SGD(_groups(name, slices), lr=SIGN_LR if name == "sign" else LR)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for step, batches in enumerate(_batches(data, seed, epochs)):
        for rank, (images, labels) in enumerate(batches):
            model.zero_grad()
            cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            gradients = torch.cat(
                [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            )
            parts = torch.split(gradients, [len(piece.image) for piece in slices])
            for piece, gradient in zip(slices, parts, strict=True):
                piece.push(gradient, step, rank)
        for piece in slices:
            piece.master.grad = vote(piece.total) if name == "sign" else piece.total / RANKS
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for piece in slices:
                piece.answer(step)
                piece.total = torch.zeros_like(piece.image)
    elems = sum(len(piece.image) for piece in slices if piece.codecs)
    pushed, answered = (sum(piece.sent_bytes[way] for piece in slices) for way in (0, 1))
    return Outcome(
        accuracy=_accuracy(model, test),
        push_bytes_per_elem=pushed / (elems * steps * RANKS) if elems else 4.0,
        reply_bytes_per_elem=answered / (elems * steps) if elems else 4.0,
    )


def _slices_of(model: nn.Module, name: str, training: DgcTraining) -> Iterator[_Slice]:
    number = 0
    for parameter in model.parameters():
        codecs: list[Codec[torch.Tensor]] = []
        if name != EXACT and takes(name, parameter.shape):
            codecs = [make(name, training), make_for_replies(name, RANKS, training)]
        for image in torch.split(parameter.detach().view(-1), SLICE_ELEMS):
            yield _Slice(number, image, codecs)
            number += 1


def _groups(name: str, slices: Sequence[_Slice]) -> list[dict[str, object]]:
    """DGC's momentum is on the workers."""
    local = name.startswith("dgc")
    return [
        {
            "params": [piece.master],
            "momentum": 0.0 if local and piece.codecs else MOMENTUM,
        }
        for piece in slices
    ]


def _batches(data: Split, seed: int, epochs: int) -> Iterator[list[Split]]:
    """One for each rank."""
    images, labels = data
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(labels), generator=generator)
        for chosen in torch.split(order, RANKS * BATCH):
            if len(chosen) == RANKS * BATCH:
                yield [(images[part], labels[part]) for part in torch.split(chosen, BATCH)]


def _accuracy(model: nn.Module, test: Split) -> float:
    with torch.no_grad():
        return float((model(test[0]).argmax(1) == test[1]).double().mean())


class Row(NamedTuple):
    name: str
    outcomes: list[Outcome]

    @property
    def mean(self) -> float:
        return statistics.mean(outcome.accuracy for outcome in self.outcomes)

    @property
    def deviation(self) -> float:
        return statistics.stdev(outcome.accuracy for outcome in self.outcomes)


def offered(row: Row, exact: Row) -> bool:
    """Whether ``auto`` may offer the codec: its mean is not more than a deviation below exact's."""
    return row.mean >= exact.mean - exact.deviation


def line_of(row: Row, exact: Row) -> str:
    accuracies = [100 * outcome.accuracy for outcome in row.outcomes]
    _, pushed, answered = row.outcomes[0]
    verdict = "yes" if offered(row, exact) else "no"
    return (
        f"| {row.name} | {pushed:.3f} | {answered:.3f} | {100 * row.mean:.2f} |"
        f" {min(accuracies):.2f} to {max(accuracies):.2f} |"
        f" {100 * (row.mean - exact.mean):+.2f} | {verdict} |"
    )


def main(names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    data, test = (_loaded(split) for split in ("train", "test"))
    exact = Row(EXACT, [train(EXACT, seed, data, test) for seed in SEEDS])
    print(f"exact: standard deviation {100 * exact.deviation:.2f} points of {len(SEEDS)} seeds\n")
    print("| codec | push, bytes per element | reply | accuracy, % | range | to exact | offered |")
    print("|---|---|---|---|---|---|---|")
    print(line_of(exact, exact), flush=True)
    for name in names:
        row = Row(name, [train(name, seed, data, test) for seed in SEEDS])
        print(line_of(row, exact), flush=True)


def _loaded(split: str) -> Split:
    images, labels = fashion_mnist("train" if split == "train" else "test").tensors
    return images.flatten(1), labels


if __name__ == "__main__":
    main(sys.argv[1:] or NAMES)

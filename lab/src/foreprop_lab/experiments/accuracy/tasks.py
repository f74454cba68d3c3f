"""The tasks that are trained: models, their data, and how their score is computed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad, relu

from foreprop.errors import ConfigError
from foreprop_lab.datasets import fashion_mnist
from foreprop_lab.experiments.cifar10 import cifar10
from foreprop_lab.experiments.wikitext import wikitext2

Examples = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets; the first dimension of each counts examples."""

TYPES = 10_000
"""The language model's types: the most frequent words; all others share the last number."""
LENGTH = 35
"""The words of a sequence."""
TRAINED_WORDS, TESTED_WORDS = 700_000, 70_000
MOST_PERPLEXITY = 1e6
"""The score of a model that has diverged: a hundred times the perplexity of guessing."""
_TEST_BATCH = 500


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model with its data, and the setting of its training."""

    title: str
    unit: str
    build: Callable[[], nn.Module]
    load: Callable[[], tuple[Examples, Examples]]
    """Loads the examples to train with, and those to test with."""
    score: Callable[[nn.Module, Examples], float]
    lower_is_better: bool = False
    batch: int
    """The examples of a rank's step."""
    epochs: int
    lr: float
    sign_lr: float = 1e-4
    """The learning rate with the codec ``sign``, whose votes always have the size 1."""
    momentum: float = 0.9

    def loss(self, model: nn.Module, examples: Examples) -> torch.Tensor:
        """The mean cross entropy over all predictions of the examples."""
        return cross_entropy(model(examples[0]).flatten(0, -2), examples[1].flatten())


def load_part(task: Task, part: float, *, least: int) -> tuple[Examples, Examples]:
    """The first examples to train with, as many as ``part`` says, and all of those to test with.

    Raises `ConfigError` for fewer than ``least``, and for a part that is not from 0 to 1.
    """
    if not 0 <= part <= 1:
        raise ConfigError(f"part is {part}; it must be from 0 to 1")
    (inputs, labels), test = task.load()
    count = int(part * len(labels))
    if count < least:
        raise ConfigError(
            f"part is {part}: {count} of {len(labels):,} examples; a step has {least}, so at least"
            f" {math.ceil(1e4 * least / len(labels)) / 1e4}"
        )
    return (inputs[:count], labels[:count]), test


def accuracy(model: nn.Module, test: Examples) -> float:
    """The share of right answers, in per cent."""
    right = 0
    model.eval()
    with torch.no_grad():
        for inputs, labels in zip(*(torch.split(each, _TEST_BATCH) for each in test), strict=True):
            right += int((model(inputs).argmax(1) == labels).sum())
    model.train()
    return 100 * right / len(test[1])


def perplexity(model: nn.Module, test: Examples) -> float:
    """The exponential of a word's mean cross entropy.

    It is `MOST_PERPLEXITY` at most, and if it is not a number.
    """
    total = 0.0
    with torch.no_grad():
        for inputs, words in zip(*(torch.split(each, _TEST_BATCH) for each in test), strict=True):
            logits = model(inputs).flatten(0, 1)
            total += float(cross_entropy(logits, words.flatten(), reduction="sum"))
    mean = total / test[1].numel()
    return math.exp(mean) if mean < math.log(MOST_PERPLEXITY) else MOST_PERPLEXITY


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


class _Block(nn.Module):
    """Two convolutions beside a shortcut without parameters (He et al. 2016, option A)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride = outputs // inputs
        self.added = outputs - inputs
        self.first = nn.Conv2d(inputs, outputs, 3, self.stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x
        if self.added:
            shortcut = pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.added))
        y = relu(self.first_norm(self.first(x)))
        return relu(shortcut + self.second_norm(self.second(y)))


class ResNet(nn.Module):
    """A ResNet for 32 x 32 images (He et al. 2016, 4.2): 6 n + 2 layers, n blocks a stage."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        widths = [16] * blocks + [32] * blocks + [64] * blocks
        self.first = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(
            *(_Block(*pair) for pair in zip([16, *widths], widths, strict=False))
        )
        self.last = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.blocks(relu(self.norm(self.first(images))))
        logits: torch.Tensor = self.last(x.mean((2, 3)))
        return logits


class LanguageNet(nn.Module):
    """An LSTM between an embedding and a softmax that share their matrix."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.words = nn.Embedding(TYPES, width)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(TYPES))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.words(words))
        logits: torch.Tensor = hidden @ self.words.weight.t() + self.bias
        return logits


def _fashion() -> tuple[Examples, Examples]:
    (train, labels), (test, test_labels) = (
        fashion_mnist(split).tensors for split in ("train", "test")
    )
    return (train.flatten(1), labels), (test.flatten(1), test_labels)


def _cifar() -> tuple[Examples, Examples]:
    return cifar10("train"), cifar10("test")


def _words() -> tuple[Examples, Examples]:
    numbers, _ = wikitext2()
    numbers = numbers.clamp(max=TYPES - 1)
    return _sequences(numbers[:TRAINED_WORDS]), _sequences(numbers[-TESTED_WORDS:])


def _sequences(words: torch.Tensor) -> Examples:
    count = (len(words) - 1) // LENGTH
    inputs, targets = (words[first : first + count * LENGTH] for first in (0, 1))
    return inputs.view(count, LENGTH), targets.view(count, LENGTH)


TASKS: Mapping[str, Task] = {
    "fashion": Task(
        title="Fashion-MNIST, perceptron (784, 128, 128, 10)",
        unit="accuracy, %",
        build=perceptron,
        load=functools.cache(_fashion),
        score=accuracy,
        batch=100,
        epochs=5,
        lr=0.05,
    ),
    "cifar": Task(
        title="CIFAR-10, ResNet-8",
        unit="accuracy, %",
        build=lambda: ResNet(1),
        load=functools.cache(_cifar),
        score=accuracy,
        batch=64,
        epochs=2,
        lr=0.1,
    ),
    "wikitext": Task(
        title=f"WikiText-2's first {TRAINED_WORDS:,} words, LSTM of 128",
        unit="perplexity",
        build=LanguageNet,
        load=functools.cache(_words),
        score=perplexity,
        lower_is_better=True,
        batch=10,
        epochs=1,
        lr=1.0,
    ),
}

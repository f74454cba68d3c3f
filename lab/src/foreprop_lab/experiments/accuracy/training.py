"""Train with ranks and a server in one process, without sockets, step by step.

Gradients and new values pass the codecs as `foreprop.core.codec` says, each slice by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import torch
from torch import nn

from foreprop.core.codec import Codec, Place, takes
from foreprop.features.compression.codecs import (
    make,
    make_for_replies,
    maybe_for_averages,
    traits_of,
)
from foreprop.features.compression.dgc import DgcTraining
from foreprop.features.compression.images import vote
from foreprop_lab.experiments.accuracy.tasks import Examples, Task

EXACT = "exact"
SLICE_ELEMS = 50_000
_WARM_UP_STAGES = 4
WARM_UP = 0.1
"""The share of DGC's steps that warm up."""


class Point(msgspec.Struct, frozen=True, array_like=True):
    """A score in the course of a training."""

    epoch: float
    time_s: float
    """The time on the simulated clock; 0 without one."""
    score: float


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of one training.

    Bytes are those of arrays that have a codec, or float32's 4 where none has one.
    """

    course: list[Point]
    """Scores by time; the last one is of the trained model."""
    push_bytes_per_elem: float = 4.0
    reply_bytes_per_elem: float = 4.0

    @property
    def score(self) -> float:
        return self.course[-1].score


class _Slice:
    """A slice of one parameter: the state that the ranks have of it, and the server's."""

    def __init__(
        self,
        number: int,
        image: torch.Tensor,
        codecs: Sequence[Codec[torch.Tensor]],
        ranks: int,
        *,
        averages: bool,
    ) -> None:
        self.number = number
        self.averages = averages and bool(codecs)
        """Whether the server answers with averages of gradients."""
        self._kept = codecs[1].new_state(len(image)) if self.averages else {}
        self.image = image
        """A view of the model's parameter: all ranks have this one."""
        self.master = nn.Parameter(image.clone())
        self.codecs = codecs
        """The codecs for pushes and for replies; none if the slice is sent unencoded."""
        self.states: list[Mapping[str, torch.Tensor]] = [
            codecs[0].new_state(len(image)) if codecs else {} for _ in range(ranks)
        ]
        self.total = torch.zeros_like(image)
        self.sent_bytes = [0, 0]

    def push(self, gradient: torch.Tensor, step: int, rank: int) -> None:
        place = Place(step, self.number, rank)
        self.total += (
            self._through(0, gradient, self.states[rank], place) if self.codecs else gradient
        )

    def shown(self, average: torch.Tensor, step: int) -> torch.Tensor:
        """The average as the workers that update with it have it."""
        if not self.averages:
            return average
        return self._through(1, average, self._kept, Place(step, self.number, -1))

    def answer(self, step: int) -> None:
        if not self.codecs or self.averages:
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


def train(
    task: Task,
    name: str,
    seed: int,
    *,
    ranks: int = 2,
    scores: int = 1,
    step_s: float = 0.0,
    averages: bool = False,
) -> Outcome:
    """Train with the codec ``name``; the learning rate falls linearly to 0 over the task's epochs.

    With ``averages``, workers update, and the server answers with gradients' averages.
    """
    data, test = task.load()
    torch.manual_seed(seed)
    model = task.build()
    order = order_of(task, len(data[1]), seed, ranks)
    steps = len(order)
    training = DgcTraining(
        momentum=task.momentum,
        pushes=ranks,
        warmup_steps=max(1, int(WARM_UP * steps / _WARM_UP_STAGES)),
    )
    slices = [*_slices_of(model, name, training, ranks, averages=averages)]
    votes = name != EXACT and traits_of(name).votes
    lr = task.sign_lr if votes else task.lr
    optimizer = torch.optim.SGD(_groups(name, slices, task), lr=lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    course = []
    scored = scored_steps(steps, scores)
    for step, batches in enumerate(order):
        for rank, chosen in enumerate(batches):
            gradients = gradient_of(task, model, (data[0][chosen], data[1][chosen]))
            parts = torch.split(gradients, [len(piece.image) for piece in slices])
            for piece, gradient in zip(slices, parts, strict=True):
                piece.push(gradient, step, rank)
        for piece in slices:
            average = vote(piece.total) if votes else piece.total / ranks
            piece.master.grad = piece.shown(average, step)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for piece in slices:
                piece.answer(step)
                piece.total = torch.zeros_like(piece.image)
        if step + 1 in scored:
            epoch = (step + 1) * task.epochs / steps
            course.append(Point(epoch, (step + 1) * step_s, task.score(model, test)))
    elems = sum(len(piece.image) for piece in slices if piece.codecs)
    if not elems:
        return Outcome(course)
    pushed, answered = (sum(piece.sent_bytes[way] for piece in slices) for way in (0, 1))
    return Outcome(course, pushed / (elems * steps * ranks), answered / (elems * steps))


def order_of(task: Task, examples: int, seed: int, ranks: int) -> torch.Tensor:
    """The numbers of examples by step, int64 (steps, ranks, batch), shuffled anew in each epoch."""
    generator = torch.Generator().manual_seed(seed)
    steps = examples // (ranks * task.batch)
    epochs = [
        torch.randperm(examples, generator=generator)[: steps * ranks * task.batch]
        for _ in range(task.epochs)
    ]
    return torch.cat(epochs).view(-1, ranks, task.batch)


def scored_steps(steps: int, scores: int) -> set[int]:
    """The steps after which the model is scored, at equal distances; the last step is one."""
    return {round(steps * number / scores) for number in range(1, scores + 1)}


def gradient_of(task: Task, model: nn.Module, examples: Examples) -> torch.Tensor:
    """The mean loss's gradient of all parameters, in their order, in one row."""
    model.zero_grad()
    task.loss(model, examples).backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _slices_of(
    model: nn.Module, name: str, training: DgcTraining, ranks: int, *, averages: bool
) -> Iterator[_Slice]:
    number = 0
    for parameter in model.parameters():
        codecs: list[Codec[torch.Tensor]] = []
        if name != EXACT and takes(name, parameter.shape):
            answers = maybe_for_averages(name, ranks) if averages else None
            replies = answers or make_for_replies(name, ranks, training)
            codecs = [make(name, training), replies]
        for image in torch.split(parameter.detach().view(-1), SLICE_ELEMS):
            yield _Slice(number, image, codecs, ranks, averages=averages)
            number += 1


def _groups(name: str, slices: Sequence[_Slice], task: Task) -> list[dict[str, object]]:
    """The optimizer's parameter groups; with DGC, the workers have the momentum."""
    local = name.startswith("dgc")
    return [
        {
            "params": [piece.master],
            "momentum": 0.0 if local and piece.codecs else task.momentum,
        }
        for piece in slices
    ]

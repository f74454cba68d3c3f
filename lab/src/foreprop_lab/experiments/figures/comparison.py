"""Speed-ups: what the lab measured beside what the paper reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from foreprop_lab.setting.labsetting import SYSTEMS
from foreprop_lab.setting.records import Record

SUBJECT = "p3"

_SHOWN = (
    *("p3", "p3-2019", "ring", "slicing", "kvstore"),
    *("ddp", "ddp-tuned", "mxnet-kvstore", "mxnet-p3"),
)
_MODELS = {
    "resnet50": "ResNet-50",
    "inceptionv3": "InceptionV3",
    "vgg19": "VGG-19",
    "sockeye": "Sockeye",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """P3's best speed-up over MXNet's KVStore in the paper's bandwidth sweep."""

    speed_up: float
    where: str


PAPER: Mapping[str, Reported] = {
    "resnet50": Reported(speed_up=1.26, where="at 4 Gbit/s, Fig. 7(a)"),
    "inceptionv3": Reported(speed_up=1.18, where="Fig. 7(b)"),
    "vgg19": Reported(speed_up=1.66, where="at 15 Gbit/s, Fig. 7(c)"),
    "sockeye": Reported(speed_up=1.38, where="Fig. 7(d)"),
}
"""P3 section 5.3: four machines, one GPU each, links limited to between 1 and 30 Gbit/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """All systems in one setting; ``by_system`` has the order in which they are shown."""

    model: str
    nodes: int
    rate_bits_per_s: float
    balance: float
    limit_s: float
    by_system: Mapping[str, Record]

    def maybe_speed_up(self, other: str) -> float | None:
        """How many times p3's steps ``other``'s take; None if one is missing or CPU-bound."""
        ours, theirs = self.by_system.get(SUBJECT), self.by_system.get(other)
        if ours is None or theirs is None or ours.cpu_bound or theirs.cpu_bound:
            return None
        return theirs.iteration_s.median / ours.iteration_s.median


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The largest speed-up of a sweep, and the balance at which it was found."""

    speed_up: float
    balance: float


def model_name(model: str) -> str:
    """The model's name as the paper writes it."""
    return _MODELS.get(model, model)


def in_order(systems: Iterable[str]) -> list[str]:
    """Systems in the order in which tables and legends show them."""
    order = [*_SHOWN, *(name for name in SYSTEMS if name not in _SHOWN)]
    return sorted(set(systems), key=order.index)


def points_of(runs: Iterable[Sequence[Record]]) -> list[Point]:
    """One point for each run's records."""
    return [_point({record.system: record for record in run}) for run in runs if run]


def _point(by_system: Mapping[str, Record]) -> Point:
    any_ = next(iter(by_system.values()))
    return Point(
        model=any_.model,
        nodes=any_.nodes,
        rate_bits_per_s=any_.rate_bits_per_s,
        balance=any_.balance,
        limit_s=any_.limit_s,
        by_system={name: by_system[name] for name in in_order(by_system)},
    )


def maybe_best(points: Iterable[Point], model: str, other: str) -> Best | None:
    """The best speed-up of p3 over ``other`` for the model, CPU-bound runs left out."""
    found = [
        Best(speed_up=speed_up, balance=point.balance)
        for point in points
        if point.model == model and (speed_up := point.maybe_speed_up(other)) is not None
    ]
    return max(found, key=lambda best: best.speed_up, default=None)

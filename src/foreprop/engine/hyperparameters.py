"""The optimizer's numbers, as every rank announces them and all must agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from foreprop.core.manifest import Hyperparameters
from foreprop.errors import RemoteProtocolError, TrainingLoopError

SCALE = "grad_scale"
"""What a loss is multiplied by: the one number of a group of its own, after the others."""

_GROUPS = msgspec.json.Decoder(tuple[Hyperparameters, ...])


class HyperparameterHistory:
    """The optimizer's numbers by step, as each rank announced them."""

    def __init__(self, world_size: int) -> None:
        self._by_rank: list[list[tuple[int, tuple[Hyperparameters, ...]]]] = [
            [] for _ in range(world_size)
        ]
        self._agreed: dict[int, tuple[Hyperparameters, ...]] = {}

    def announce(self, rank: int, step: int, groups: tuple[Hyperparameters, ...]) -> None:
        history = self._by_rank[rank]
        history.append((step, groups))
        del history[:-4]

    def at(self, step: int) -> tuple[Hyperparameters, ...]:
        """What all ranks agree on for this step; raises `ForepropError` if they do not."""
        agreed = self._agreed.get(step)
        if agreed is None:
            agreed = self._latest(0, step)
            for rank in range(1, len(self._by_rank)):
                theirs = self._latest(rank, step)
                if theirs != agreed:
                    raise TrainingLoopError(describe_groups(step, rank, agreed, theirs))
            self._agreed = {s: g for s, g in self._agreed.items() if s >= step - 2}
            self._agreed[step] = agreed
        return agreed

    def _latest(self, rank: int, step: int) -> tuple[Hyperparameters, ...]:
        for announced, groups in reversed(self._by_rank[rank]):
            if announced <= step:
                return groups
        raise RemoteProtocolError(f"rank {rank} pushed before it sent hyperparameters")


def with_scale(
    groups: Sequence[Hyperparameters], scale: float | None
) -> tuple[Hyperparameters, ...]:
    return tuple(groups) if scale is None else (*groups, {SCALE: scale})


def scale_of(groups: Sequence[Mapping[str, Any]]) -> float:
    return float(groups[-1].get(SCALE, 1.0)) if groups else 1.0


def describe_groups(
    step: int, rank: int, zero: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]
) -> str:
    """How a rank's settings differ from rank 0's; by parameter group."""
    for number, (a, b) in enumerate(zip(zero, theirs, strict=False)):
        for name in a:
            if a[name] != b.get(name):
                whose = "" if name == SCALE else f" of parameter group {number}"
                return (
                    f"step {step}: {name}{whose} is {a[name]} on rank 0 and"
                    f" {b.get(name)} on rank {rank}: every rank must set the same value"
                )
    return f"step {step}: ranks 0 and {rank} have different parameter groups"


def decode_groups(
    payload: memoryview, expected: Sequence[Hyperparameters]
) -> tuple[Hyperparameters, ...]:
    try:
        groups = _GROUPS.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"not hyperparameters: {error}") from error
    if [sorted(g) for g in groups] != [sorted(g) for g in expected]:
        raise RemoteProtocolError("hyperparameters have other names than at the start")
    return groups

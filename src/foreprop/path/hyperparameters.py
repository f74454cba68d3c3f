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
    """The optimizer's numbers by step, as each peer of a server announced them.

    ``ranks`` are the peers' (of relays their first workers'), for messages.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._by_peer: list[list[tuple[int, tuple[Hyperparameters, ...]]]] = [[] for _ in ranks]
        self._agreed: dict[int, tuple[Hyperparameters, ...]] = {}

    def announce(self, peer: int, step: int, groups: tuple[Hyperparameters, ...]) -> None:
        history = self._by_peer[peer]
        history.append((step, groups))
        del history[:-4]

    def at(self, step: int) -> tuple[Hyperparameters, ...]:
        """What all ranks agree on for this step; raises `ForepropError` if they do not."""
        agreed = self._agreed.get(step)
        if agreed is None:
            agreed = self._latest(0, step)
            for peer in range(1, len(self._ranks)):
                theirs = self._latest(peer, step)
                if theirs != agreed:
                    ranks = (self._ranks[0], self._ranks[peer])
                    raise TrainingLoopError(describe_groups(step, ranks, agreed, theirs))
            self._agreed = {s: g for s, g in self._agreed.items() if s >= step - 2}
            self._agreed[step] = agreed
        return agreed

    def _latest(self, peer: int, step: int) -> tuple[Hyperparameters, ...]:
        for announced, groups in reversed(self._by_peer[peer]):
            if announced <= step:
                return groups
        rank = self._ranks[peer]
        raise RemoteProtocolError(f"rank {rank} pushed before it sent hyperparameters")


def with_scale(
    groups: Sequence[Hyperparameters], scale: float | None
) -> tuple[Hyperparameters, ...]:
    return tuple(groups) if scale is None else (*groups, {SCALE: scale})


def scale_of(groups: Sequence[Mapping[str, Any]]) -> float:
    return float(groups[-1].get(SCALE, 1.0)) if groups else 1.0


def describe_groups(
    step: int,
    ranks: tuple[int, int],
    ours: Sequence[Mapping[str, Any]],
    theirs: Sequence[Mapping[str, Any]],
) -> str:
    """How the second rank's settings differ from the first's; by parameter group."""
    first, rank = ranks
    for number, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        for name in a:
            if a[name] != b.get(name):
                whose = "" if name == SCALE else f" of parameter group {number}"
                return (
                    f"step {step}: {name}{whose} is {a[name]} on rank {first} and"
                    f" {b.get(name)} on rank {rank}: every rank must set the same value"
                )
    return f"step {step}: ranks {first} and {rank} have different parameter groups"


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

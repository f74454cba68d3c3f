"""The updates that a server makes, with the optimizer's numbers on which all ranks agree.

Each slice has a real ``torch.optim`` optimizer of its own, `PartOptimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from foreprop.core.manifest import Hyperparameters, Manifest
from foreprop.core.wire import Header, Kind
from foreprop.errors import RemoteProtocolError, TrainingLoopError
from foreprop.link.connection import Connection, bounded
from foreprop.path.executor import Executor
from foreprop.path.optimizer import describe_groups, with_scale
from foreprop.path.tensors import DTYPES


class PartOptimizer:
    """The optimizer of one slice; made for its first update, with the group of that."""

    __slots__ = ("_cls", "_group", "_made", "_options", "_parameter", "_received")

    def __init__(
        self, cls: type[torch.optim.Optimizer], parameter: torch.nn.Parameter, **options: Any
    ) -> None:
        self._cls = cls
        self._parameter = parameter
        self._options = options
        self._made: torch.optim.Optimizer | None = None
        self._group: Hyperparameters | None = None
        self._received: dict[str, Any] | None = None  # a state, to be used from the next update

    def prepare(self, group: Hyperparameters) -> torch.optim.Optimizer:
        """For an update with these numbers, and with a state that has been received since."""
        if self._made is None:
            self._made = self._cls([self._parameter], **optimizer_arguments(group), **self._options)
        elif self._group is not group:
            self._made.param_groups[0].update(optimizer_arguments(group))
        self._group = group
        if self._received is not None:
            self._made.state[self._parameter] = self._received
            self._received = None
        return self._made

    @property
    def state(self) -> Mapping[str, Any]:
        """As the next update will find it."""
        if self._received is not None:
            return self._received
        return {} if self._made is None else self._made.state.get(self._parameter, {})

    def replace_state(self, state: dict[str, Any]) -> None:
        """From the next update on; an empty one is an optimizer's own at its start."""
        self._received = state or None
        if self._received is None:
            self._made = None


def optimizer_arguments(group: Hyperparameters) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, value in group.items():
        key, _, dtype = name.partition(" ")
        if dtype:  # the user gave a tensor, see `hyperparameters`
            arguments[key] = torch.tensor(value, dtype=DTYPES[dtype])
        else:
            arguments[key] = tuple(value) if isinstance(value, list) else value
    return arguments


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


HYPERPARAMETERS_LIMIT_BYTES = 1 << 20


class AnnouncedNumbers:
    """Owns the optimizer's numbers, as each peer announces them.

    ``pass_on`` is a relay's: called with what its first worker says.
    """

    kinds = frozenset({Kind.HYPERPARAMETERS})

    def __init__(
        self,
        manifest: Manifest,
        executor: Executor,
        *,
        pass_on: Callable[[Header, memoryview], None] | None = None,
    ) -> None:
        scale = 1.0 if manifest.knobs.aggregation.skip_nonfinite else None
        self._groups = with_scale(manifest.optimizer.groups, scale)
        """What the numbers look like."""
        self._history = HyperparameterHistory([ranks.start for ranks in executor.peers.ranks])
        self._lock = executor.lock
        self._pass_on = pass_on
        self.at = self._history.at
        """What all agree on for a step; raises `ForepropError`. Called with the lock held."""

    def room(self, peer: Connection, header: Header) -> memoryview:
        return bounded(header, HYPERPARAMETERS_LIMIT_BYTES)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        groups = decode_groups(payload, self._groups)
        with self._lock:
            self._history.announce(peer.number, header.step, groups)
        if self._pass_on is not None and peer.number == 0:
            self._pass_on(header, payload)

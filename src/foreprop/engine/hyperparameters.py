"""The optimizer's numbers (lr, ...) on a server or relay, as each peer announces them.

A worker announces them when they change, before it pushes the first gradient that they are for. An
update goes by what those peers agree on whose gradients it is made of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence

import msgspec

from foreprop.core.agreement import describe_groups
from foreprop.core.codec import is_exact
from foreprop.core.manifest import SCALE, Hyperparameters, Manifest, Number
from foreprop.core.wire import Header, Kind, decoded
from foreprop.engine.connection import BoundedService, Connection
from foreprop.engine.executor import Executor
from foreprop.engine.optimizer import scale_of, with_scale
from foreprop.errors import RemoteProtocolError, TrainingLoopError

Groups = tuple[Hyperparameters, ...]

_LIMIT_BYTES = 1 << 20
_KEPT = 4
"""How many announcements of a peer are kept: it may be steps ahead of the slowest slice."""
_GROUPS = msgspec.json.Decoder(tuple[Hyperparameters, ...])


class HyperparameterHistory:
    """The optimizer's numbers by step, as peers have announced them. Not thread-safe.

    ``ranks`` are the peers' (of relays their first workers'), for messages. All must agree. But
    where not all count, as ``newcomers`` says, only those must whose gradients make the update; and
    a newcomer that says something else is wrong. Where ranks are steps ``apart``, an update goes by
    its rank's own numbers, which must be those of all others that have come so far; but the scale
    of a rank's losses is its own.
    """

    def __init__(
        self, ranks: Sequence[int], *, newcomers: Collection[int] | None = None, apart: bool = False
    ) -> None:
        self.unlike: dict[int, str] = {}
        """Newcomers whose numbers differ from the others', and in what."""
        self._ranks = ranks
        self._newcomers = newcomers
        self._apart = apart
        self._everybody = range(len(ranks))
        self._announced: list[list[tuple[int, Groups]]] = [[] for _ in ranks]
        """What each peer has announced, and from which step on it holds."""
        self._announced_up_to = [0] * len(ranks)
        """The step up to which each peer has announced all."""
        self._agreed: dict[tuple[int, Sequence[int]], Groups] = {}
        self._most_kept = _KEPT * len(ranks) if apart else _KEPT

    def announce(self, peer: int, step: int, groups: Groups) -> None:
        said = self._announced[peer]
        said.append((step, groups))
        self._announced_up_to[peer] = max(self._announced_up_to[peer], step)
        slowest = min(self._announced_up_to) if self._apart else step
        while len(said) > _KEPT and said[_KEPT - 1][0] <= slowest:
            del said[0]

    def at(self, step: int, ranks: Sequence[int] = ()) -> Groups:
        """What holds for an update of this step by these ranks' gradients.

        Raises `TrainingLoopError` if they do not agree; `RemoteProtocolError` if none are known.
        """
        newcomers = self._newcomers
        key = (step, ranks if self._apart or newcomers is not None else ())
        if (agreed := self._agreed.get(key)) is not None:
            return agreed
        whose: Sequence[int] = self._everybody
        if newcomers is not None:
            whose = sorted(ranks, key=lambda rank: (rank in newcomers, rank))
        elif self._apart:
            for rank in ranks:
                self._announced_up_to[rank] = max(self._announced_up_to[rank], step)
            whose = [peer for peer in self._everybody if self._announced_up_to[peer] >= step]
        said: list[Groups] = []
        for peer in whose:
            for announced, groups in reversed(self._announced[peer]):
                if announced <= step:
                    said.append(groups)
                    break
            else:
                rank = self._ranks[peer]
                raise RemoteProtocolError(f"rank {rank} pushed before it sent hyperparameters")
            first, last = said[0], said[-1]
            # alone each rank's own scaler may have its scale, where ranks are apart
            in_scale = self._apart and SCALE in first[-1] and first[:-1] == last[:-1]
            if first != last and not in_scale:
                ranks_apart = (self._ranks[whose[0]], self._ranks[peer])
                text = describe_groups(step, ranks_apart, first, last)
                if self._newcomers is None or peer not in self._newcomers:
                    raise TrainingLoopError(text)
                self.unlike[peer] = text
        agreed = said[whose.index(ranks[0]) if self._apart and ranks else 0]
        self._agreed[key] = agreed
        if len(self._agreed) > self._most_kept:
            del self._agreed[next(iter(self._agreed))]
        return agreed

    def said(self, peer: int, step: int) -> Groups:
        """What one peer has announced up to this step; empty if nothing yet."""
        known = [groups for announced, groups in self._announced[peer] if announced <= step]
        return known[-1] if known else ()


def decode_groups(
    payload: memoryview, expected: Sequence[Hyperparameters]
) -> tuple[Hyperparameters, ...]:
    groups = decoded(_GROUPS, payload, "hyperparameters")
    if [sorted(g) for g in groups] != [sorted(g) for g in expected]:
        raise RemoteProtocolError("hyperparameters have other names than at the start")
    for group, begun_with in zip(groups, expected, strict=True):
        for name, number in group.items():
            if not _are_alike(number, begun_with[name]):
                raise RemoteProtocolError(
                    f"hyperparameters: {name} is {str(number)[:40]}, and was {begun_with[name]}"
                )
    return groups


def _are_alike(number: Number, other: Number) -> bool:
    """Whether an optimizer that takes the one number takes the other, too."""
    if isinstance(number, list):
        return isinstance(other, list) and len(number) == len(other)
    if number is None or other is None:
        return number is other
    # a whole number may be larger than any other
    return not isinstance(other, list) and abs(number) <= sys.float_info.max


class AnnouncedNumbers(BoundedService):
    """Owns announcements of the optimizer's numbers; ``pass_on`` hears the first peer's, too."""

    kinds = frozenset({Kind.HYPERPARAMETERS})
    limit_bytes = _LIMIT_BYTES

    def __init__(
        self,
        manifest: Manifest,
        executor: Executor,
        *,
        newcomers: Collection[int] | None = None,
        pass_on: Callable[[Header, memoryview], None] | None = None,
    ) -> None:
        begun_with, knobs = manifest.optimizer.groups, manifest.knobs
        told = not begun_with and not is_exact(knobs.compression)  # by `PushCodecs.tell_scale`
        scale = 1.0 if told or knobs.aggregation.skip_nonfinite else None
        self._groups = with_scale(begun_with, scale)
        """The numbers at the start; later ones must look like them."""
        ranks = [ranks.start for ranks in executor.peers.ranks]
        apart = bool(manifest.knobs.staleness)
        self.history = HyperparameterHistory(ranks, newcomers=newcomers, apart=apart)
        self._lock = executor.lock
        self._pass_on = pass_on
        self.at = self.history.at
        """Gives the numbers of a step; raises `ForepropError`. With the lock held."""

    def scale_at(self, step: int) -> float:
        """The scale of the first peer's loss: others' loops may not show theirs."""
        with self._lock:
            return scale_of(self.history.said(0, step))

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        groups = decode_groups(payload, self._groups)
        with self._lock:
            self.history.announce(peer.number, header.step, groups)
        if self._pass_on is not None and peer.number == 0:
            self._pass_on(header, payload)

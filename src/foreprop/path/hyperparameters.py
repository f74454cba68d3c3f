"""The optimizer's numbers (lr, ...) on a server or relay, as each peer announces them.

A worker says them when they change, before it pushes the first gradient that they are for. An
update goes by what those agree on whom it is about.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence

import msgspec

from foreprop.core.agreement import describe_groups
from foreprop.core.codec import is_exact
from foreprop.core.decoding import decoded
from foreprop.core.manifest import Hyperparameters, Manifest, Number
from foreprop.core.wire import Header, Kind
from foreprop.errors import RemoteProtocolError, TrainingLoopError
from foreprop.link.connection import Connection, bounded
from foreprop.path.executor import Executor
from foreprop.path.optimizer import scale_of, with_scale

Groups = tuple[Hyperparameters, ...]

_LIMIT_BYTES = 1 << 20
_KEPT = 4
"""A peer may have announced its next steps' while slices of the steps before are updated."""
_GROUPS = msgspec.json.Decoder(tuple[Hyperparameters, ...])


class HyperparameterHistory:
    """The optimizer's numbers by step. Not thread-safe.

    ``ranks`` are the peers' (of relays their first workers'), for messages. All must agree. But
    where not all count, as ``newcomers`` says, only those whose gradients an update is by; and of
    them the newcomers are wrong, if others say something else. Where ranks are steps ``apart``, an
    update goes by its rank's own, which are those of all others that have come so far.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        newcomers: Collection[int] | None = None,
        apart: bool = False,
    ) -> None:
        self.unlike: dict[int, str] = {}
        """Newcomers whose numbers are not the others', and in what."""
        self._ranks = ranks
        self._newcomers = newcomers
        self._apart = apart
        self._everybody = range(len(ranks))
        self._said: list[list[tuple[int, Groups]]] = [[] for _ in ranks]
        """By peer: from which step on it has announced what."""
        self._reached = [0] * len(ranks)
        """By peer: up to this step it has announced all."""
        self._agreed: dict[tuple[int, Sequence[int]], Groups] = {}
        self._most_kept = _KEPT * len(ranks) if apart else _KEPT

    def announce(self, peer: int, step: int, groups: Groups) -> None:
        said = self._said[peer]
        said.append((step, groups))
        self._reached[peer] = max(self._reached[peer], step)
        slowest = min(self._reached) if self._apart else step
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
                self._reached[rank] = max(self._reached[rank], step)
            whose = [peer for peer in self._everybody if self._reached[peer] >= step]
        said: list[Groups] = []
        for peer in whose:
            for announced, groups in reversed(self._said[peer]):
                if announced <= step:
                    said.append(groups)
                    break
            else:
                rank = self._ranks[peer]
                raise RemoteProtocolError(f"rank {rank} pushed before it sent hyperparameters")
            if said[-1] != said[0]:
                self._differ(step, (whose[0], peer), said[0], said[-1])
        self._agreed[key] = said[0]
        if len(self._agreed) > self._most_kept:
            del self._agreed[next(iter(self._agreed))]
        return said[0]

    def said(self, peer: int, step: int) -> Groups:
        """What this peer has said up to this step, whatever others say; nothing yet: none."""
        known = [groups for announced, groups in self._said[peer] if announced <= step]
        return known[-1] if known else ()

    def _differ(self, step: int, peers: tuple[int, int], first: Groups, second: Groups) -> None:
        ranks = (self._ranks[peers[0]], self._ranks[peers[1]])
        text = describe_groups(step, ranks, first, second)
        if self._newcomers is None or peers[1] not in self._newcomers:
            raise TrainingLoopError(text)
        self.unlike[peers[1]] = text


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
    """Whether an optimizer can be told the one where it was told the other."""
    if isinstance(number, list):
        return isinstance(other, list) and len(number) == len(other)
    if number is None or other is None:
        return number is other
    # a whole number may be larger than any other
    return not isinstance(other, list) and abs(number) <= sys.float_info.max


class AnnouncedNumbers:
    """Owns the optimizer's numbers; ``pass_on`` is a relay's, told what its first worker says."""

    kinds = frozenset({Kind.HYPERPARAMETERS})

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
        """What the numbers look like."""
        ranks = [ranks.start for ranks in executor.peers.ranks]
        apart = bool(manifest.knobs.staleness)
        self.history = HyperparameterHistory(ranks, newcomers=newcomers, apart=apart)
        self._lock = executor.lock
        self._pass_on = pass_on
        self.at = self.history.at
        """What holds for a step; raises `ForepropError`. Called with the lock held."""

    def scale_at(self, step: int) -> float:
        """The loss's, as the first peer has it: others' loops may not show theirs."""
        with self._lock:
            return scale_of(self.history.said(0, step))

    def room(self, peer: Connection, header: Header) -> memoryview:
        return bounded(header, _LIMIT_BYTES)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        groups = decode_groups(payload, self._groups)
        with self._lock:
            self.history.announce(peer.number, header.step, groups)
        if self._pass_on is not None and peer.number == 0:
            self._pass_on(header, payload)

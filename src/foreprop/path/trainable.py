"""Words of `requires_grad`: what a worker has frozen, and a server that compares the workers'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from foreprop.core.decoding import decoded
from foreprop.core.freezing import TrainableWords, Turned
from foreprop.core.wire import Header, Kind
from foreprop.errors import Failure, RemoteProtocolError
from foreprop.link.connection import Connection, bounded
from foreprop.path.executor import Executor

_LIMIT_BYTES = 1 << 24
_TURNED = msgspec.json.Decoder(Turned)


def what_turned(before: Sequence[bool | None], now: Sequence[bool]) -> Turned:
    """Between the ends of two steps, of `requires_grad` by parameter; None: nobody knows."""
    changed = [n for n in range(len(now)) if before[n] is not None and now[n] != before[n]]
    frozen = tuple(number for number in changed if before[number])
    return Turned(frozen, tuple(number for number in changed if now[number]))


class TrainableNotices:
    """Owns workers' words. ``begins``: a push of a step that a peer had not pushed before.

    ``pass_on`` is a relay's: called with what its first worker says.
    """

    kinds = frozenset({Kind.TRAINABLE})

    def __init__(
        self,
        names: Sequence[str],
        executor: Executor,
        connections: Mapping[int, Connection],
        watch: Callable[[Callable[[Connection, int], None]], None],
        *,
        compares: Callable[[], bool] = lambda: True,
        pass_on: Callable[[Header, memoryview], None] | None = None,
    ) -> None:
        """``watch`` has pushes told from then on; ``compares``: all have been here all along."""
        self._words = TrainableWords(names)
        self._count = len(names)
        self._executor = executor
        self._connections = connections
        self._watch = watch
        self._compares = compares
        self._pass_on = pass_on

    def room(self, peer: Connection, header: Header) -> memoryview:
        return bounded(header, _LIMIT_BYTES)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        turned = decoded(_TURNED, payload, "word of requires_grad")
        if not all(0 <= number < self._count for part in turned for number in part):
            raise RemoteProtocolError(f"word of requires_grad of one of {self._count} parameters")
        with self._executor.lock:
            self._words.tell(peer.number, header.step, turned)
            self._watch(self.begins)
            ahead = [each for each in self._connections.values() if each.last_step > header.step]
        for other in ahead:
            self.begins(other, header.step + 1)
        if self._pass_on is not None and peer.number == 0:
            self._pass_on(header, payload)

    def begins(self, peer: Connection, step: int) -> None:
        """A peer has begun a step, and so said all of the one before."""
        if not self._compares() or peer.left:
            return
        with self._executor.lock:
            here = [number for number, each in self._connections.items() if not each.left]
            found = self._words.differing(peer.number, step, here)
            if found is None:
                return
            after, other = found
            both = [(number, self._executor.peers.name(number)) for number in (other, peer.number)]
            reason = self._words.describe(after, sorted(both))
        self._executor.host.fail(Failure(kind="TrainingLoopError", message=reason, step=after))

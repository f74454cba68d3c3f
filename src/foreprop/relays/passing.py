"""What a relay does not sum passes through: rank 0's word, and answers to whoever has asked.

Frames to its server pass the same machine and outbox as those to its workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from foreprop.core.frames import SERVER
from foreprop.core.manifest import Manifest
from foreprop.core.norm import ENCODED_BYTES
from foreprop.core.relay_machine import PassedUpwards
from foreprop.core.wire import Header, Kind
from foreprop.errors import RemoteProtocolError
from foreprop.link.connection import EMPTY, Connection, bounded, exactly, nothing
from foreprop.numerics.norms import NORM_BYTES
from foreprop.path.calls import Blobs, Waits, which_blob
from foreprop.path.executor import Executor
from foreprop.path.tensors import state_limit_bytes
from foreprop.relays.rows import RelayRows
from foreprop.tables.parts import KEPT_PULL_BYTES

_ANSWER_TO = {Kind.STATE_PULL: Kind.STATE_REPLY, Kind.TABLE_PULL: Kind.TABLE_REPLY}
_STATUS_LIMIT_BYTES = 65_536
_STATUS_S = 1.0
"""How long a worker's question may take to leave."""


def check_rank_zero(peer: Connection, header: Header) -> None:
    if peer.rank != 0:
        kind = Kind(header.kind).name
        raise RemoteProtocolError(f"rank {peer.rank} sent {kind}; only rank 0 may")


class Upward:
    """Passes frames on to the server, and knows who has asked for an answer."""

    def __init__(self, executor: Executor) -> None:
        self.has_rank_zero = executor.peers.first_rank(0) == 0
        self.executor = executor
        self._askers: dict[tuple[int, int, int], deque[Connection]] = {}
        """By kind of the answer, slice and step."""

    def pass_on(self, header: Header, payload: memoryview) -> None:
        place = (header.step, header.priority, header.slice)
        self.executor.send(SERVER, header.kind, *place, payload, header.flags)

    def ask(self, answer: Kind, peer: Connection, header: Header) -> None:
        """This worker is to get the server's answer about this slice and step."""
        with self.executor.lock:
            self._askers.setdefault((answer, header.slice, header.step), deque()).append(peer)

    def asker(self, header: Header) -> Connection:
        """Who has asked for this answer: the first of those that have not got theirs."""
        with self.executor.lock:
            askers = self._askers.get((header.kind, header.slice, header.step))
            if not askers:
                raise RemoteProtocolError(
                    f"server {self.executor.host.index} sent {Kind(header.kind).name} of slice"
                    f" {header.slice}, which nobody has asked for"
                )
            return askers.popleft()


class PassedStates:
    """Owns optimizer state and the rows of remote tables: the server has them."""

    kinds = frozenset({Kind.STATE, Kind.TABLE, *_ANSWER_TO, *_ANSWER_TO.values()})

    def __init__(self, manifest: Manifest, upward: Upward, rows: RelayRows) -> None:
        slices = manifest.slices()
        self._elems = [piece.elems for piece in slices]
        self._elems += [shard.elems for shard in manifest.shards(len(slices))]
        self._upward = upward
        self._rows = rows

    def room(self, peer: Connection, header: Header) -> memoryview:
        kind = header.kind
        if kind in (Kind.STATE, Kind.STATE_REPLY):
            if header.slice >= len(self._elems):
                raise RemoteProtocolError(f"there is no slice {header.slice}")
            return bounded(header, state_limit_bytes(self._elems[header.slice]))
        if kind == Kind.STATE_PULL:
            return nothing(header)
        if kind == Kind.TABLE_PULL:
            return exactly(header, KEPT_PULL_BYTES)
        return bounded(header, self._rows.kept_limit_bytes(header.slice))

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        kind = header.kind
        if kind in _ANSWER_TO.values():
            asker = self._upward.asker(header)
            self._upward.executor.answer(asker.number, kind, header, payload)
            return
        if kind in (Kind.STATE, Kind.TABLE):
            check_rank_zero(peer, header)
        else:
            self._upward.ask(_ANSWER_TO[Kind(kind)], peer, header)
        self._upward.pass_on(header, payload)


class PassedBlobs:
    """Owns blobs: rank 0's go to the server, and every worker gets its own copy here."""

    kinds = frozenset({Kind.BLOB, Kind.BLOB_PULL, Kind.BLOB_REPLY})

    def __init__(self, manifest: Manifest, upward: Upward) -> None:
        executor = upward.executor
        readers = executor.peers.count - upward.has_rank_zero
        self._blobs = Blobs(manifest, executor, readers=readers)
        self._manifest = manifest
        self._upward = upward
        self._asked: set[tuple[int, int]] = set()  # which, step

    def room(self, peer: Connection, header: Header) -> memoryview:
        if header.kind == Kind.BLOB_REPLY:
            return bounded(header, self._manifest.blob_bytes[which_blob(header, self._manifest)])
        return self._blobs.room(peer, header)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.BLOB_PULL:
            self._on_pull(peer, header)
            return
        if header.kind == Kind.BLOB:
            check_rank_zero(peer, header)
            self._upward.pass_on(header, payload)
        with self._upward.executor.lock:
            self._asked.discard((header.slice, header.step))
            self._blobs.hand_out(header, payload)

    def _on_pull(self, peer: Connection, header: Header) -> None:
        """The node's first to ask asks the server, unless rank 0 is here and will say it."""
        key = (header.slice, header.step)
        with self._upward.executor.lock:
            found = self._blobs.pull(peer, header)
            asks = not (found or self._upward.has_rank_zero or key in self._asked)
            if asks:
                self._asked.add(key)
        if asks:
            self._upward.pass_on(header, EMPTY)


class PassedNorms:
    """Owns the norm of all gradients and its parts."""

    kinds = frozenset({Kind.NORM, Kind.NORM_PART})

    def __init__(self, passed: PassedUpwards, upward: Upward, *, parts: int) -> None:
        self._passed = passed
        self._upward = upward
        self._executor = upward.executor
        self._limit_bytes = max(1, parts) * ENCODED_BYTES

    def room(self, peer: Connection, header: Header) -> memoryview:
        if header.kind == Kind.NORM_PART:
            return bounded(header, self._limit_bytes)
        return exactly(header, NORM_BYTES) if peer.joined else bounded(header, NORM_BYTES)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if peer.joined:
            self._on_word_of_rank_zero(peer, header, payload)
        elif header.kind == Kind.NORM_PART and self._passed.measures:
            self._executor.answer_all(Kind.NORM_PART, header, payload)
        elif header.kind == Kind.NORM_PART and self._upward.has_rank_zero:
            self._executor.answer(0, Kind.NORM_PART, header, payload)
        elif header.kind == Kind.NORM and not self._upward.has_rank_zero:
            self._executor.answer_all(Kind.NORM, header, payload)
        else:
            raise RemoteProtocolError(f"server {peer.rank} sent {Kind(header.kind).name}")

    def _on_word_of_rank_zero(self, peer: Connection, header: Header, payload: memoryview) -> None:
        check_rank_zero(peer, header)
        self._upward.pass_on(header, payload)
        if self._executor.host.index == 0:
            for other in range(1, self._executor.peers.count):
                self._executor.answer(other, Kind.NORM, header, payload)


class PassedStatuses:
    """Owns the question what something waits for: what has been passed on, the server knows."""

    kinds = frozenset({Kind.STATUS_PULL, Kind.STATUS_REPLY})

    def __init__(
        self,
        upward: Upward,
        waits: Waits,
        link: Connection,
        has_pushed: Callable[[int, int], bool],
        *,
        needs_norm: bool,
    ) -> None:
        self._upward = upward
        self._waits = waits
        self._link = link
        self._has_pushed = has_pushed
        self._needs_norm = needs_norm

    def room(self, peer: Connection, header: Header) -> memoryview:
        if header.kind == Kind.STATUS_PULL:
            return nothing(header)
        return bounded(header, _STATUS_LIMIT_BYTES)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        place = {"step": header.step, "slice_": header.slice}
        if header.kind == Kind.STATUS_REPLY:
            data = bytes(payload) + self._also_here()
            self._upward.asker(header).send_past_queue(Kind.STATUS_REPLY, data, **place)
            return
        with self._upward.executor.lock:
            passed_on = self._has_pushed(header.slice, header.step)
            text = "" if passed_on else self._waits.describe(header.slice, header.step)
        if passed_on:
            self._upward.ask(Kind.STATUS_REPLY, peer, header)
            question = self._link.start_sending_past_queue(
                "foreprop-relay-ask", Kind.STATUS_PULL, step=header.step, slice_=header.slice
            )
            question.join(_STATUS_S)
        else:
            peer.send_past_queue(Kind.STATUS_REPLY, text.encode(), **place)

    def _also_here(self) -> bytes:
        """What waits for the norm waits for all others, of which the server knows only sums."""
        if self._needs_norm:
            with self._upward.executor.lock:
                for _, _, text in self._waits.incomplete():
                    return f"; on this node {text}".encode()
        return b""

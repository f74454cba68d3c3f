"""What a relay does not sum passes through: what rank 0 alone may say, and questions with answers.

Frames to its server pass the same machine and outbox as those to its workers. An answer goes to the
worker that has asked; where several have asked the same, to the first that has not got its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from foreprop.core.frames import SERVER
from foreprop.core.manifest import Manifest
from foreprop.core.norm import ENCODED_BYTES
from foreprop.core.relay_machine import PassedUpwards
from foreprop.core.wire import Header, Kind
from foreprop.engine.calls import Blobs, Waits, which_blob
from foreprop.engine.connection import EMPTY, Connection, bounded, exactly, nothing
from foreprop.engine.executor import Executor
from foreprop.engine.tensors import state_limit_bytes
from foreprop.errors import RemoteProtocolError
from foreprop.features.nodes.rows import RelayRows
from foreprop.features.tables.parts import KEPT_PULL_BYTES
from foreprop.params.norms import NORM_BYTES

_ANSWER_TO = {Kind.STATE_PULL: Kind.STATE_REPLY, Kind.TABLE_PULL: Kind.TABLE_REPLY}
_STATUS_LIMIT_BYTES = 65_536
_STATUS_S = 1.0
"""How long a worker's question about a wait may take to leave."""


def check_rank_zero(peer: Connection, header: Header) -> None:
    if peer.rank != 0:
        kind = Kind(header.kind).name
        raise RemoteProtocolError(f"rank {peer.rank} sent {kind}; only rank 0 may")


class Uplink:
    """Passes frames on to the server, and knows who has asked for an answer."""

    def __init__(self, executor: Executor) -> None:
        self.has_rank_zero = executor.peers.first_rank(0) == 0
        self.executor = executor
        # workers that have asked, by kind of the answer, slice and step
        self._askers: dict[tuple[int, int, int], deque[Connection]] = {}

    def pass_on(self, header: Header, payload: memoryview) -> None:
        kind, step, priority = header.kind, header.step, header.priority
        self.executor.send(SERVER, kind, step, priority, header.slice, payload, header.flags)

    def ask(self, answer: Kind, peer: Connection, header: Header) -> None:
        """Note that a worker is to get the server's answer about this slice and step."""
        with self.executor.lock:
            self._askers.setdefault((answer, header.slice, header.step), deque()).append(peer)

    def asker(self, header: Header) -> Connection:
        """The worker that is to get this answer."""
        with self.executor.lock:
            askers = self._askers.get((header.kind, header.slice, header.step))
            if not askers:
                raise RemoteProtocolError(
                    f"server {self.executor.host.index} sent {Kind(header.kind).name} of slice"
                    f" {header.slice}, which nobody has asked for"
                )
            return askers.popleft()


class PassedStates:
    """Passes on optimizer state and the rows of remote tables, which the server keeps."""

    kinds = frozenset({Kind.STATE, Kind.TABLE, *_ANSWER_TO, *_ANSWER_TO.values()})

    def __init__(self, manifest: Manifest, uplink: Uplink, rows: RelayRows) -> None:
        slices = manifest.slices()
        self._elems = [piece.elems for piece in slices]
        self._elems += [shard.elems for shard in manifest.shards(len(slices))]
        self._uplink = uplink
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
            asker = self._uplink.asker(header)
            self._uplink.executor.answer(asker.number, kind, header, payload)
            return
        if kind in (Kind.STATE, Kind.TABLE):
            check_rank_zero(peer, header)
        else:
            self._uplink.ask(_ANSWER_TO[Kind(kind)], peer, header)
        self._uplink.pass_on(header, payload)


class PassedBlobs:
    """Passes rank 0's blobs on to the server, and gives every worker of the node its copy."""

    kinds = frozenset({Kind.BLOB, Kind.BLOB_PULL, Kind.BLOB_REPLY})

    def __init__(self, manifest: Manifest, uplink: Uplink) -> None:
        executor = uplink.executor
        readers = executor.peers.count - uplink.has_rank_zero
        self._blobs = Blobs(manifest, executor, readers=readers)
        self._manifest = manifest
        self._uplink = uplink
        self._asked: set[tuple[int, int]] = set()  # which, step

    def room(self, peer: Connection, header: Header) -> memoryview:
        if header.kind == Kind.BLOB_REPLY:
            return bounded(header, self._manifest.blob_bytes[which_blob(header, self._manifest)])
        return self._blobs.room(peer, header)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.BLOB_PULL:
            # the node's first to ask asks the server, unless rank 0 is here and will say it
            key = (header.slice, header.step)
            with self._uplink.executor.lock:
                found = self._blobs.pull(peer, header)
                asks = not (found or self._uplink.has_rank_zero or key in self._asked)
                if asks:
                    self._asked.add(key)
            if asks:
                self._uplink.pass_on(header, EMPTY)
            return
        if header.kind == Kind.BLOB:
            check_rank_zero(peer, header)
            self._uplink.pass_on(header, payload)
        with self._uplink.executor.lock:
            self._asked.discard((header.slice, header.step))
            self._blobs.hand_out(header, payload)


class PassedNorms:
    """Passes on the norm of all gradients and its parts."""

    kinds = frozenset({Kind.NORM, Kind.NORM_PART})

    def __init__(self, passed: PassedUpwards, uplink: Uplink, *, parts: int) -> None:
        self._passed = passed
        self._uplink = uplink
        self._executor = uplink.executor
        self._limit_bytes = max(1, parts) * ENCODED_BYTES

    def room(self, peer: Connection, header: Header) -> memoryview:
        if header.kind == Kind.NORM_PART:
            return bounded(header, self._limit_bytes)
        return exactly(header, NORM_BYTES) if peer.joined else bounded(header, NORM_BYTES)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if peer.joined:
            check_rank_zero(peer, header)
            self._uplink.pass_on(header, payload)
            if self._executor.host.index == 0:
                for other in range(1, self._executor.peers.count):
                    self._executor.answer(other, Kind.NORM, header, payload)
        elif header.kind == Kind.NORM_PART and self._passed.measures:
            self._executor.answer_all(Kind.NORM_PART, header, payload)
        elif header.kind == Kind.NORM_PART and self._uplink.has_rank_zero:
            self._executor.answer(0, Kind.NORM_PART, header, payload)
        elif header.kind == Kind.NORM and not self._uplink.has_rank_zero:
            self._executor.answer_all(Kind.NORM, header, payload)
        else:
            raise RemoteProtocolError(f"server {peer.rank} sent {Kind(header.kind).name}")


class PassedStatuses:
    """Answers what something waits for, or asks the server, if it has been passed on."""

    kinds = frozenset({Kind.STATUS_PULL, Kind.STATUS_REPLY})

    def __init__(
        self,
        uplink: Uplink,
        waits: Waits,
        link: Connection,
        has_pushed: Callable[[int, int], bool],
        *,
        needs_norm: bool,
    ) -> None:
        self._uplink = uplink
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
            data = bytes(payload)
            if self._needs_norm:  # then what waits here all wait for; servers know only of sums
                with self._uplink.executor.lock:
                    for _, _, waits in self._waits.incomplete():
                        data += f"; on this node {waits}".encode()
                        break
            self._uplink.asker(header).send_past_queue(Kind.STATUS_REPLY, data, **place)
            return
        with self._uplink.executor.lock:
            passed_on = self._has_pushed(header.slice, header.step)
            text = "" if passed_on else self._waits.describe(header.slice, header.step)
        if passed_on:
            self._uplink.ask(Kind.STATUS_REPLY, peer, header)
            question = self._link.start_sending_past_queue(
                "foreprop-relay-ask", Kind.STATUS_PULL, step=header.step, slice_=header.slice
            )
            question.join(_STATUS_S)
        else:
            peer.send_past_queue(Kind.STATUS_REPLY, text.encode(), **place)

"""What a worker asks of servers beside slices: blobs, optimizer state, what something waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from foreprop.config import Config
from foreprop.core.frames import CONTROL_PRIORITY, LAST_PRIORITY
from foreprop.core.manifest import Manifest
from foreprop.core.slicing import Shard, Slice
from foreprop.core.wire import Header, Kind
from foreprop.link.connection import Connection
from foreprop.path.progress import Progress
from foreprop.path.services import bounded
from foreprop.path.tensors import state_limit_bytes


class SendMessage(Protocol):
    def __call__(
        self,
        server: int,
        kind: Kind,
        step: int,
        priority: int,
        data: bytes,
        *,
        slice_: int = 0,
        flags: int = 0,
    ) -> None:
        """Queue a frame for a server."""


class Requests:
    """Owns blobs and optimizer state, as they come back; ``pieces`` are all slices and shards."""

    kinds = frozenset({Kind.BLOB_REPLY, Kind.STATE_REPLY})

    def __init__(
        self,
        manifest: Manifest,
        pieces: Sequence[Slice | Shard],
        send: SendMessage,
        progress: Progress,
        config: Config,
    ) -> None:
        self._pieces = pieces
        self._blob_bytes = manifest.blob_bytes
        self._send = send
        self._progress = progress
        self._config = config
        self._blobs: dict[int, memoryview] = {}
        self._states: dict[int, bytes] = {}

    def room(self, peer: Connection, header: Header) -> memoryview:
        number, limit_bytes = header.slice, 0
        if header.kind == Kind.BLOB_REPLY:
            if number < len(self._blob_bytes):
                limit_bytes = self._blob_bytes[number]
        elif number < len(self._pieces):
            limit_bytes = state_limit_bytes(self._pieces[number].elems)
        return bounded(header, limit_bytes)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.BLOB_REPLY:
            self._blobs[header.slice] = payload
        else:
            self._states[header.slice] = bytes(payload)
        self._progress.notify()

    def publish_blob(self, which: int, step: int, data: bytes) -> None:
        """Rank 0: leave a blob (see `Manifest.blob_bytes`) with server 0 for whoever asks."""
        self._send(0, Kind.BLOB, step, LAST_PRIORITY, data, slice_=which)

    def fetch_blob(self, which: int, step: int) -> memoryview:
        """Rank 0's blob of this step; blocks until it is there."""
        self._blobs.pop(which, None)
        self._send(0, Kind.BLOB_PULL, step, CONTROL_PRIORITY, b"", slice_=which)
        what = "frozen parameters" if which else "buffers"
        self._progress.wait_until(
            lambda: which in self._blobs,
            self._config.step_timeout_s,
            lambda: f"rank 0's {what} of step {step}",
        )
        return self._blobs.pop(which)

    def send_state(self, number: int, step: int, data: bytes, *, flags: int = 0) -> None:
        """Rank 0: replace the optimizer state of a slice or shard, from this step on.

        With ``Flag.AVERAGES`` its moving average.
        """
        about = (Kind.STATE, step, CONTROL_PRIORITY, data)
        self._send(self._pieces[number].server, *about, slice_=number, flags=flags)

    def fetch_states(
        self, numbers: Sequence[int], step: int, *, flags: int = 0
    ) -> dict[int, bytes]:
        """The optimizer state of these slices and shards, or what the flags say instead."""
        about = (Kind.STATE_PULL, step, CONTROL_PRIORITY, b"")
        for number in numbers:
            self._send(self._pieces[number].server, *about, slice_=number, flags=flags)
        self._progress.wait_until(
            lambda: all(number in self._states for number in numbers),
            self._config.step_timeout_s,
            lambda: f"the optimizer state after step {step}",
        )
        return {number: self._states.pop(number) for number in numbers}

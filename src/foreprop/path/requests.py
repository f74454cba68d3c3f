"""What a worker asks of servers beside slices: blobs, optimizer state, what something waits for.

`Inquiry` says in words what it waits for: what it knows itself, and what the servers say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from foreprop.core.frames import CONTROL_PRIORITY, LAST_PRIORITY, Stage
from foreprop.core.shards import Shard
from foreprop.core.slicing import Slice
from foreprop.core.wire import Header, Kind
from foreprop.core.worker_machine import WorkerMachine
from foreprop.link.connection import Connection, bounded
from foreprop.path.progress import NOTHING
from foreprop.path.tensors import state_limit_bytes

if TYPE_CHECKING:
    from foreprop.path.worker import WorkerEngine


class Requests:
    """Owns blobs and optimizer state, as they come back, by slice or shard."""

    kinds = frozenset({Kind.BLOB_REPLY, Kind.STATE_REPLY})

    def __init__(self, engine: WorkerEngine) -> None:
        self._engine = engine
        self._pieces: list[Slice | Shard] = [*engine.slices, *engine.shards]
        self._blob_bytes = engine.manifest.blob_bytes
        self._send = engine.send_message
        self._progress = engine.progress
        self._timeout_s = engine.config.step_timeout_s
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
        return self.await_blob(which, step, "rank 0")

    def await_blob(self, which: int, step: int, whose: str) -> memoryview:
        """A blob that is on its way, from a rank in words."""
        what = "frozen parameters" if which else "buffers"
        self._progress.wait_until(
            lambda: which in self._blobs,
            self._timeout_s,
            lambda: f"{whose}'s {what} of step {step}",
        )
        return self._blobs.pop(which)

    def send_state(self, number: int, step: int, data: bytes, *, flags: int = 0) -> None:
        """Rank 0: replace the optimizer state of a slice or shard, from this step on.

        With ``Flag.AVERAGES`` its moving average.
        """
        about = (Kind.STATE, step, CONTROL_PRIORITY, data)
        self._send(self._owner_of(number), *about, slice_=number, flags=flags)

    def _owner_of(self, number: int) -> int:
        slices = self._engine.slices
        if number < len(slices):
            return self._engine.machine.owner_of(number)
        return self._pieces[number].server

    def fetch_states(
        self, numbers: Sequence[int], step: int, *, flags: int = 0
    ) -> dict[int, bytes]:
        """The optimizer state of these slices and shards, or what the flags say instead."""
        about = (Kind.STATE_PULL, step, CONTROL_PRIORITY, b"")
        for number in numbers:
            self._send(self._owner_of(number), *about, slice_=number, flags=flags)
        self._progress.wait_until(
            lambda: all(number in self._states for number in numbers),
            self._timeout_s,
            lambda: f"the optimizer state after step {step}",
        )
        return {number: self._states.pop(number) for number in numbers}


_STATUS_LIMIT_BYTES = 65_536


class Outside(Protocol):
    """Parameters that no server has, but for which those wait that servers have."""

    def describe(self) -> str:
        """What they wait for, in words."""

    def look_around(self) -> None:
        """Nothing goes on: say so to others, and raise what they have said. Training thread."""


class Inquiry:
    """Owns what servers say that slices and shards wait for; ``servers`` are their names."""

    kinds = frozenset({Kind.STATUS_REPLY})

    def __init__(
        self,
        engine: WorkerEngine,
        machine: WorkerMachine,
        connections: Sequence[Connection],
        servers: Sequence[str],
        sending_to: Callable[[], Sequence[int]],
    ) -> None:
        self.outside: Outside | None = None
        self._needs_norm = engine.manifest.needs_norm
        self._names = [info.name for info in engine.parameters]
        self._shards = engine.shards
        self._machine = machine
        self._lock = engine.lock
        self._connections = connections
        self._servers = servers
        self._progress = engine.progress
        self._sending_to = sending_to
        self._answers: dict[int, bytes] = {}  # by slice or shard

    def room(self, peer: Connection, header: Header) -> memoryview:
        return bounded(header, _STATUS_LIMIT_BYTES)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        self._answers[header.slice] = bytes(payload)
        self._progress.notify()

    def ask(self, asked: Mapping[int, int], step: int) -> None:
        """By server, what this slice or shard waits for. The answers come some time, or never."""
        for server, number in asked.items():
            self._answers.pop(number, None)
            # past the queue, whose head may be what everybody waits for; nobody waits for this
            self._connections[server].start_sending_past_queue(
                "foreprop-ask", Kind.STATUS_PULL, step=step, slice_=number
            )
        if self.outside is not None:
            self.outside.look_around()

    def describe(self, asked: Mapping[int, int]) -> list[str]:
        """What servers have said about these slices or shards, by server."""
        parts = []
        for server, number in sorted(asked.items()):
            status = self._answers.get(number)
            parts.append(
                f"server {server} says: {status.decode(errors='replace')}"
                if status is not None
                else f"{self._servers[server]} has not answered"
            )
        return parts + ([self.outside.describe()] if self.outside is not None else [])

    def ask_about(self, parameter: int) -> None:
        self.ask(self._whom_to_ask(parameter), self._machine.step_of(parameter))

    def describe_last(self, parameter: int) -> tuple[int, str]:
        """The step and what it waits for, of a parameter or of none."""
        step = self._machine.step_of(max(0, parameter))
        if parameter == NOTHING:
            return step, f"nothing; step {step} was complete"
        return step, self.describe_wait(parameter, step)

    def describe_wait(self, parameter: int, step: int) -> str:
        name = self._names[parameter]
        with self._lock:
            missing = self._machine.missing_slices(parameter)
        if not missing:
            return f"parameter {name}, step {step}"
        queued = [piece for piece, sent in missing if not sent]
        text = (
            f"parameter {name}, step {step}, stage "
            f"{(Stage.PUSH_QUEUED if queued else Stage.REPLY_RECEIVED).value}:"
            f" {len(missing)} of its slices are missing"
        )
        if queued:
            text += f", {len(queued)} of them not yet sent"
        sending_to = self._sending_to()
        if sending_to:
            text += f"; it is sending to {', '.join(self._servers[peer] for peer in sending_to)}"
        return "; ".join([text, *self.describe(self._whom_to_ask(parameter))])

    def _whom_to_ask(self, parameter: int) -> dict[int, int]:
        """By server, a slice that the parameter waits for: its own, or any that the norm needs."""
        with self._lock:
            missing = self._machine.missing_slices(parameter)
        return self.with_all_servers({piece.server: piece.number for piece, _ in missing[::-1]})

    def with_all_servers(self, asked: dict[int, int]) -> dict[int, int]:
        """Also the other servers, if what waits for its update waits for the norm."""
        if not self._needs_norm:
            return asked
        for awaited in range(len(self._names)):
            with self._lock:
                missing = self._machine.missing_slices(awaited)
            for piece, _ in missing:
                asked.setdefault(piece.server, piece.number)
        for shard in self._shards:
            asked.setdefault(shard.server, shard.number)
        return asked

    def describe_incomplete(self) -> str:
        """What the first parameter that is not complete waits for."""
        waiting = self.incomplete()
        return self.describe_wait(waiting[0], self._machine.step_of(waiting[0])) if waiting else ""

    def ask_about_incomplete(self) -> None:
        for parameter in self.incomplete()[:1]:
            self.ask(self._whom_to_ask(parameter), self._machine.step_of(parameter))

    def incomplete(self) -> list[int]:
        return [p for p in range(len(self._names)) if not self._machine.is_complete(p)]

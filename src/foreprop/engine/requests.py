"""A worker's questions beside slices: blobs, optimizer state, what something waits for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from foreprop.core.frames import CONTROL_PRIORITY, LAST_PRIORITY, Stage
from foreprop.core.manifest import Manifest
from foreprop.core.slicing import Shard, Slice
from foreprop.core.wire import Header, Kind
from foreprop.core.worker_machine import WorkerMachine
from foreprop.engine.connection import Connection, bounded
from foreprop.engine.executor import Executor
from foreprop.engine.progress import NOTHING, Progress
from foreprop.engine.tensors import state_limit_bytes

_STATUS_LIMIT_BYTES = 65_536


class Requests:
    """Owns the servers' answers about blobs, optimizer state and what something waits for.

    ``pieces`` are all slices and shards, by number. ``servers`` are names, for messages. ``send``
    is `WorkerEngine.send_message`.
    """

    kinds = frozenset({Kind.BLOB_REPLY, Kind.STATE_REPLY, Kind.STATUS_REPLY})

    def __init__(
        self,
        manifest: Manifest,
        pieces: Sequence[Slice | Shard],
        machine: WorkerMachine,
        executor: Executor,
        connections: Sequence[Connection],
        servers: Sequence[str],
        progress: Progress,
        *,
        send: Callable[..., None],
        timeout_s: float,
    ) -> None:
        self._pieces = pieces
        self._blob_bytes = manifest.blob_bytes
        self._needs_norm = manifest.needs_norm
        self._names = [info.name for info in manifest.parameters]
        self._machine = machine
        self._executor = executor
        self._lock = executor.lock
        self._connections = connections
        self._servers = servers
        self._progress = progress
        self._send = send
        self._timeout_s = timeout_s
        self._describe_outside: Callable[[], str] | None = None
        self._look_outside: Callable[[], None] = lambda: None
        self._blobs: dict[int, memoryview] = {}
        self._states: dict[int, bytes] = {}  # by slice or shard
        self._answers: dict[int, bytes] = {}  # to what a slice or shard waits for

    def room(self, peer: Connection, header: Header) -> memoryview:
        number, limit_bytes = header.slice, 0
        if header.kind == Kind.STATUS_REPLY:
            limit_bytes = _STATUS_LIMIT_BYTES
        elif header.kind == Kind.BLOB_REPLY:
            if number < len(self._blob_bytes):
                limit_bytes = self._blob_bytes[number]
        elif number < len(self._pieces):
            limit_bytes = state_limit_bytes(self._pieces[number].elems)
        return bounded(header, limit_bytes)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.BLOB_REPLY:
            self._blobs[header.slice] = payload
        elif header.kind == Kind.STATE_REPLY:
            self._states[header.slice] = bytes(payload)
        else:
            self._answers[header.slice] = bytes(payload)
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
        """Wait for a blob that is on its way; ``whose`` names its rank in words."""
        what = "frozen parameters" if which else "buffers"
        self._progress.wait_until(
            lambda: which in self._blobs,
            self._timeout_s,
            lambda: f"{whose}'s {what} of step {step}",
        )
        return self._blobs.pop(which)

    def send_state(self, number: int, step: int, data: bytes, *, flags: int = 0) -> None:
        """Rank 0: replace the optimizer state of a slice or shard, from this step on.

        With ``Flag.AVERAGES`` that is its moving average.
        """
        about = (Kind.STATE, step, CONTROL_PRIORITY, data)
        self._send(self._owner_of(number), *about, slice_=number, flags=flags)

    def _owner_of(self, number: int) -> int:
        piece = self._pieces[number]
        return piece.server if isinstance(piece, Shard) else self._machine.owner_of(number)

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

    # What something waits for, in words: what is known here, and what the servers say.
    def add_outside(self, describe: Callable[[], str], look_around: Callable[[], None]) -> None:
        """Add parameters that no server has, but for which those wait that servers have.

        ``describe`` says in words what they wait for. ``look_around`` says to others that nothing
        goes on, and raises what they have said. Training thread.
        """
        self._describe_outside, self._look_outside = describe, look_around

    def ask(self, asked: Mapping[int, int], step: int) -> None:
        """Ask each server what this slice or shard waits for. Answers come later, or never."""
        for server, number in asked.items():
            self._answers.pop(number, None)
            # past the queue, whose head may be what everybody waits for; nobody waits for this
            self._connections[server].start_sending_past_queue(
                "foreprop-ask", Kind.STATUS_PULL, step=step, slice_=number
            )
        self._look_outside()

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
        return parts + ([] if self._describe_outside is None else [self._describe_outside()])

    def ask_about(self, parameter: int) -> None:
        self.ask(self._awaited_slices(parameter), self._machine.step_of(parameter))

    def describe_last(self, parameter: int) -> tuple[int, str]:
        """The step and what a parameter waits for; of `NOTHING` the first that waits."""
        if parameter == NOTHING:
            parameter = next(iter(self.incomplete()), NOTHING)
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
        if missing[0][1] is None:
            text += ", for its gradient is still copied from the device"
        elif queued:
            text += f", {len(queued)} of them not yet sent"
        sending_to = self._executor.sending_to()
        if sending_to:
            text += f"; it is sending to {', '.join(self._servers[peer] for peer in sending_to)}"
        return "; ".join([text, *self.describe(self._awaited_slices(parameter))])

    def _awaited_slices(self, parameter: int) -> dict[int, int]:
        """A slice that the parameter waits for, by server; any that the norm needs, too."""
        with self._lock:
            missing = self._machine.missing_slices(parameter)
        return self.with_all_servers({piece.server: piece.number for piece, _ in missing[::-1]})

    def with_all_servers(self, asked: dict[int, int]) -> dict[int, int]:
        """Add the other servers, if what waits for its update waits for the norm."""
        if not self._needs_norm:
            return asked
        for awaited in range(len(self._names)):
            with self._lock:
                missing = self._machine.missing_slices(awaited)
            for piece, _ in missing:
                asked.setdefault(piece.server, piece.number)
        for each in self._pieces:
            if isinstance(each, Shard):
                asked.setdefault(each.server, each.number)
        return asked

    def describe_incomplete(self) -> str:
        waiting = self.incomplete()
        return self.describe_wait(waiting[0], self._machine.step_of(waiting[0])) if waiting else ""

    def ask_about_incomplete(self) -> None:
        for parameter in self.incomplete()[:1]:
            self.ask(self._awaited_slices(parameter), self._machine.step_of(parameter))

    def incomplete(self) -> list[int]:
        return [p for p in range(len(self._names)) if not self._machine.is_complete(p)]

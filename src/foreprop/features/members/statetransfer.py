"""What a newcomer gets from the members: the model and its optimizer's state, buffers.

Theory of operation. A newcomer counts from step J on. Where workers update, members give it values
and state. All that it gets is as after step J - 1, which is as it is when a member's first gradient
of J is about to leave. From then on nothing of it changes before the newcomer has all: no round of
J ends without the newcomer's push. So what lies in host memory is not copied, and a member that
gives may be lost: the others give its share.

*Parts* are the slices' values in the order of use, then each parameter's optimizer state, then the
optimizer's numbers. They are dealt out among the members. A member sends its share to the server of
its node, where that has slices, and servers forward it. A part that comes twice is the same; the
second one is not looked at, for the newcomer may be training by then.

*Blobs* are a member's buffers and frozen parameters, wherever updates are made. The lowest rank
that was here before sends its own. Its frozen parameters leave when it hears of the newcomer, its
buffers when it has ended step J - 1; both with the lowest priority. Every member keeps a copy of
its buffers from then on, until it has ended step J + 1. That it ends with values that count the
newcomer, which by then has all. If the lowest rank is lost meanwhile the next one sends its own. A
server forwards the first that comes. Buffers are small: averages of activations. Frozen parameters
are sent as they lie in memory.

A member that ends its session before J gives all that it has for J when it ends.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from foreprop.core.frames import LAST_PRIORITY
from foreprop.core.manifest import BUFFERS_BLOB, FROZEN_BLOB
from foreprop.core.slicing import Slice
from foreprop.core.wire import MAX_PAYLOAD_BYTES, Header, Kind
from foreprop.engine.connection import Connection, bounded, exactly
from foreprop.engine.memory import bytes_of
from foreprop.engine.worker import WorkerEngine
from foreprop.errors import RemoteProtocolError, TrainingLoopError
from foreprop.params.addedsteps import AddedSteps
from foreprop.params.modelhooks import ModelBuffers, pack
from foreprop.params.servedparameter import ServedValues
from foreprop.params.waiting import make_wait

_Numbers = list[dict[str, Any]]


class GivenModel:
    """Gives parts of the model on a member, and receives them on a newcomer.

    ``members`` returns the ranks that are here, with their first steps. ``node_server`` is the
    server of this rank's node.
    """

    kinds = frozenset({Kind.GIVEN})

    def __init__(
        self,
        engine: WorkerEngine,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        members: Callable[[], Mapping[int, int]],
        node_server: int,
    ) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._parameters = parameters
        self._members = members
        self._node_server = node_server
        self._values = len(engine.slices)
        self._parts = self._values + len(parameters) + 1
        self._coming: dict[int, int] = {}  # the first step of each newcomer, by rank
        # by first steps for which this member's share is on its way: the optimizer's numbers then
        self._numbers: dict[int, bytes] = {}
        self._missing = set(range(self._parts)) if engine.config.join is not None else set()
        self._states: dict[int, bytes] = {}
        self._averages: dict[torch.nn.Parameter, torch.Tensor] = {}  # a newcomer's, at its start
        self._added: AddedSteps | None = None
        self._expected: _Numbers | None = None  # the others' for a newcomer's first step

    # Giving.
    def hear_joined(self, rank: int, server: int, step: int) -> None:
        with self._engine.lock:  # any server's notice will do
            if rank != self._engine.rank and step > self._engine.steps:
                self._coming[rank] = step

    def hear_left(self, rank: int) -> None:
        """Give for a member that has left, or forget a newcomer. In a receiving thread."""
        with self._engine.lock:
            self._coming.pop(rank, None)
        self.give_again()

    def give_again(self) -> None:
        """Send this member's share once more: some of it, or of another's, may be lost."""
        with self._engine.lock:
            firsts = self._numbers.keys() & self._coming.values()
        for first in firsts:
            self._give(first)

    def begin_step(self, step: int, settle: Callable[[], None]) -> None:
        """Give, before the first gradient of a step leaves, to newcomers that count from it on.

        ``settle`` makes the updates of the step before.
        """
        if self._expected is not None:
            self._compare_numbers(step)
        if not self._coming or step in self._numbers:
            return
        with self._engine.lock:
            gives = step in self._coming.values() and not self._missing
        if gives:
            settle()
            self._move_averages()
            with self._engine.lock:
                self._numbers[step] = _dump(_numbers_of(self._optimizer))
            self._give(step)

    def end_step(self, done: int) -> None:
        """Forget newcomers that count from before this step on: they have pushed, so have all."""
        if self._coming:
            with self._engine.lock:
                self._coming = {rank: step for rank, step in self._coming.items() if step >= done}
                self._numbers = {step: data for step, data in self._numbers.items() if step >= done}

    def end(self, firsts: Sequence[int]) -> None:
        """Give to newcomers of these steps, before which this member ends."""
        if firsts and not self._missing:
            self._move_averages()
            for first in firsts:
                self._give(first)

    def _move_averages(self) -> None:
        if self._added is not None:
            self._added.move_averages()

    def _give(self, first: int) -> None:
        machine, send = self._engine.machine, self._engine.executor.send
        givers = sorted(rank for rank, since in self._members().items() if since < first)
        if self._engine.rank not in givers:
            return
        servers = sorted({machine.owner_of(piece.number) for piece in self._engine.slices})
        own = self._node_server
        for part in range(givers.index(self._engine.rank), self._parts, len(givers)):
            server = own if own in servers else servers[part % len(servers)]
            priority = LAST_PRIORITY
            if part < self._values:
                priority = machine.priority_of(self._engine.slices[part].parameter)
            data = self._part(part, first)
            send(server, Kind.GIVEN, first - 1, priority, part, data)

    def _part(self, part: int, first: int) -> bytes | memoryview:
        if part < self._values:
            return self._value_bytes(part)
        number = part - self._values
        if number == len(self._parameters):
            return self._numbers.get(first) or _dump(_numbers_of(self._optimizer))
        parameter = self._parameters[number]
        state = dict.get(self._optimizer.state, parameter, {})
        plain = {  # tensors by themselves, not with all that lies in the same storage
            key: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for key, value in state.items()
        }
        average = None
        if self._added is not None and self._added.keeps_averages:
            (average,) = self._added.averages_as_moved([parameter])
        return _dump((plain, average))

    def _value_bytes(self, slice_: int) -> memoryview:
        piece = self._engine.slices[slice_]
        with torch._C.DisableTorchFunctionSubclass():  # it may wait for what the newcomer pushes
            parameter = self._parameters[piece.parameter].detach()
            if parameter.is_contiguous():
                part = parameter.view(-1)[piece.start_elems : piece.stop_elems]
            else:
                part = parameter[_indices(parameter, piece)]
            return bytes_of(part.cpu())

    # Receiving.
    def room(self, peer: Connection, header: Header) -> memoryview:
        part = header.slice
        if part >= self._parts or self._engine.config.join is None:
            raise RemoteProtocolError(f"server {peer.number} gave part {part}")
        if part >= self._values:
            return bounded(header, MAX_PAYLOAD_BYTES)
        piece = self._engine.slices[part]
        size = self._parameters[piece.parameter].element_size()
        return exactly(header, piece.elems * size)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        part = header.slice
        with self._engine.lock:
            if part not in self._missing:
                return
            if part < self._values:
                self._take_value(part, payload)
            else:
                self._states[part - self._values] = bytes(payload)
            self._missing.remove(part)
        self._engine.progress.notify()

    def _take_value(self, slice_: int, payload: memoryview) -> None:
        piece = self._engine.slices[slice_]
        parameter = self._parameters[piece.parameter]
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            part = torch.frombuffer(payload, dtype=parameter.dtype)
            if parameter.is_contiguous():
                parameter.view(-1)[piece.start_elems : piece.stop_elems].copy_(part)
            else:
                parameter[_indices(parameter, piece)] = part.to(parameter.device)

    @property
    def is_complete(self) -> bool:
        return not self._missing

    def install_state(self) -> None:
        """Load the optimizer's state, on a newcomer that has all of it."""
        state = {}
        for number, parameter in enumerate(self._parameters):
            its, average = _load(self._states.pop(number))
            if its:
                state[parameter] = its
            if average is not None:
                self._averages[parameter] = average
        self._expected = _load(self._states.pop(len(self._parameters)))
        numbers: dict[int, int] = {}
        groups = []
        for group in self._optimizer.param_groups:
            own = {id(p): numbers.setdefault(id(p), len(numbers)) for p in group["params"]}
            groups.append({**group, "params": list(own.values())})
        by_number = {numbers[id(p)]: its for p, its in state.items() if id(p) in numbers}
        self._optimizer.load_state_dict({"state": by_number, "param_groups": groups})

    def keeps_averages(self, added: AddedSteps) -> None:
        """Say what keeps moving averages; a newcomer's go there."""
        self._added = added
        if self._averages:
            added.put_averages(list(self._averages), list(self._averages.values()))
            self._averages.clear()

    def _compare_numbers(self, step: int) -> None:
        """Raise `TrainingLoopError` if this newcomer's next update would not be the others'."""
        theirs, self._expected = self._expected, None
        ours = _numbers_of(self._optimizer)
        if ours != theirs:
            difference = _describe_difference(ours, theirs or [])
            raise TrainingLoopError(
                f"rank {self._engine.rank} joins at step {step} with the optimizer's numbers"
                f" {difference}: let its scheduler go as far as the others' has"
                " (docs/elastic.md)"
            )


def _indices(parameter: torch.Tensor, piece: Slice) -> tuple[torch.Tensor, ...]:
    """The indices of a slice's elements, which may lie apart, so that not the whole is copied."""
    flat = torch.arange(piece.start_elems, piece.stop_elems, device=parameter.device)
    return torch.unravel_index(flat, parameter.shape)


def _numbers_of(optimizer: torch.optim.Optimizer) -> _Numbers:
    return [
        {
            name: value.item() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params" and (not isinstance(value, torch.Tensor) or value.numel() == 1)
        }
        for group in optimizer.param_groups
    ]


def _describe_difference(ours: _Numbers, theirs: _Numbers) -> str:
    for number, (own, other) in enumerate(zip(ours, theirs, strict=False)):
        for name in sorted(own.keys() | other.keys()):
            if own.get(name) != other.get(name):
                rest = f"the others have {name}={other.get(name)}"
                return f"{name}={own.get(name)} in group {number}, and {rest}"
    return f"of {len(ours)} groups, and the others have {len(theirs)}"


def _dump(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _load(data: bytes) -> Any:
    """What `_dump` was given; raises `RemoteProtocolError` for more than tensors and numbers."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise RemoteProtocolError(f"optimizer state that cannot be read: {error}") from error


class GivenBlobs:
    """Gives a member's buffers and frozen parameters to newcomers.

    ``members`` returns the ranks that are here, with their first steps.
    """

    def __init__(
        self,
        engine: WorkerEngine,
        members: Callable[[], Mapping[int, int]],
        buffers: ModelBuffers,
        frozen: Sequence[torch.Tensor],
    ) -> None:
        self.has_own = engine.config.join is None
        """Whether this rank's are the session's: a newcomer has to get them first."""
        self._engine = engine
        self._members = members
        self._buffers = buffers
        self._frozen = frozen
        # The first step of each newcomer, until this rank has ended the step after it; by first
        # step the buffers, and the steps for which this rank's frozen parameters have left.
        self._coming: dict[int, int] = {}
        self._packed: dict[int, bytes] = {}
        self._given: set[int] = set()

    @property
    def _carrier(self) -> int:
        """The server that forwards blobs.

        It has slices, so it has told of a newcomer before the step before that one's first can end.
        """
        machine = self._engine.machine
        return min((machine.owner_of(piece.number) for piece in self._engine.slices), default=0)

    # In receiving threads.
    def hear_joined(self, rank: int, server: int, step: int) -> None:
        with self._engine.lock:
            if server == self._carrier and step > self._engine.steps:
                self._coming[rank] = step
                self._given.discard(step)  # another one may come at the same step
                self._give()

    def hear_left(self, rank: int) -> None:
        """Send, if this is the lowest rank now, what the one before may not have sent."""
        with self._engine.lock:
            self._coming.pop(rank, None)
            self.give_again()

    def give_again(self) -> None:
        """Send everything once more: a server is lost, or the member that was to give."""
        with self._engine.lock:
            self._given.clear()
            self._give(anew=True)

    # In the training thread.
    def end_step(self, done: int) -> None:
        with self._engine.lock:
            if not self._coming:
                return
            self._coming = {rank: step for rank, step in self._coming.items() if step >= done}
            self._packed = {step: data for step, data in self._packed.items() if step >= done}
            self._given = {step for step in self._given if step >= done}
            if done + 1 in self._coming.values():
                self._pack(done + 1)
                self._give(anew=True)

    def end(self, coming: Collection[int]) -> None:
        """Give all to newcomers of these steps, before which this member ends."""
        with self._engine.lock:
            for first in sorted(set(coming)) if self.has_own else ():
                self._pack(first)
                self._given.discard(first)
                for server in range(len(self._engine.connections)):
                    self._send(server, first)  # not all of them may count the newcomer yet

    def _pack(self, first: int) -> None:
        if len(self._buffers):
            self._buffers.check_size()
            self._packed[first] = pack(self._buffers.now())

    def _give(self, *, anew: bool = False) -> None:
        """Send, from the lowest rank that was here before; ``anew``: buffers, too."""
        members = self._members()
        for first in sorted(set(self._coming.values())):
            here = (rank for rank, since in members.items() if since < first)
            if self.has_own and self._engine.rank == min(here, default=-1):
                self._send(self._carrier, first, buffers=anew)
                self._given.add(first)

    def _send(self, server: int, first: int, *, buffers: bool = True) -> None:
        blobs: dict[int, bytes | memoryview] = {}
        if first not in self._given:
            plain = (tensor.detach().cpu().contiguous() for tensor in self._frozen)
            blobs |= enumerate(map(bytes_of, plain), FROZEN_BLOB)
        if buffers and first in self._packed:
            blobs[BUFFERS_BLOB] = self._packed[first]
        for which, data in blobs.items():
            self._engine.executor.send(server, Kind.BLOB, first - 1, LAST_PRIORITY, which, data)


def make_pending(arrival: ServedValues, step: int) -> None:
    """Have the first use wait for an answer, as if a gradient of this step had been pushed."""
    tensor = arrival.owner.parameter
    with torch._C.DisableTorchFunctionSubclass():
        increment_version(tensor)  # whoever saved the old value must not use it
        empty = not tensor.numel()
    arrival.value.note()
    arrival.gradient.pushed_step = step
    if not empty:
        make_wait(tensor, arrival.owner)

"""What a newcomer gets where workers update: values and optimizer state, from the members.

Theory of operation. A newcomer counts from step J on. All that it gets is as after step J - 1, and
as it is when a member's first gradient of J is about to leave. From then on nothing of it changes
before the newcomer has all: no round of J ends without the newcomer's push. So nothing is copied
that lies in host memory, and who gives may be lost: the others give its share.

*Parts* are the slices' values in the order of use, then each parameter's optimizer state, then the
optimizer's numbers. They are dealt out among the members, and pass a server. A part that comes
twice is the same; the second one is not looked at, for the newcomer may be training by then.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from foreprop.core.frames import LAST_PRIORITY
from foreprop.core.slicing import Slice
from foreprop.core.wire import MAX_PAYLOAD_BYTES, Header, Kind
from foreprop.errors import RemoteProtocolError, TrainingLoopError
from foreprop.link.connection import Connection, bounded, exactly
from foreprop.path.memory import bytes_of
from foreprop.path.worker import WorkerEngine

_Numbers = list[dict[str, Any]]


class MovingAverages(Protocol):
    """Who keeps those of a session, if it has any."""

    @property
    def keeps_averages(self) -> bool: ...
    def averages_of(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]: ...
    def put_averages(
        self, parameters: Sequence[torch.nn.Parameter], averages: Sequence[torch.Tensor]
    ) -> None: ...


class GivenModel:
    """Owns parts, on a newcomer; and gives them, on a member. ``parameters`` by number.

    ``members``: the ranks that are here, with the first steps of newcomers; ``settle`` makes the
    updates of the last step.
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
        self._coming: dict[int, int] = {}
        """By rank: its first step."""
        self._giving: set[int] = set()
        """First steps for which this member's share is on its way."""
        self._missing = set(range(self._parts)) if engine.config.join is not None else set()
        self._states: dict[int, bytes] = {}
        self._averages: dict[torch.nn.Parameter, torch.Tensor] = {}
        """Moving ones, that this newcomer begins with."""
        self._added: MovingAverages | None = None
        self._expected: _Numbers | None = None
        """Of a newcomer: the others' numbers for its first step."""

    # Giving.
    def hear_joined(self, rank: int, server: int, step: int) -> None:
        """Any server's word of it will do."""
        with self._engine.lock:
            if rank != self._engine.rank and step > self._engine.steps:
                self._coming[rank] = step

    def hear_left(self, rank: int) -> None:
        """A member, which may have given nothing yet, or a newcomer. In a receiving thread."""
        with self._engine.lock:
            self._coming.pop(rank, None)
        self.give_again()

    def give_again(self) -> None:
        """Something of it may be lost."""
        with self._engine.lock:
            firsts = self._giving & set(self._coming.values())
        for first in firsts:
            self._give(first)

    def begin_step(self, step: int, settle: Callable[[], None]) -> None:
        """The first gradient of a step is about to leave."""
        if self._expected is not None:
            self._compare_numbers(step)
        if not self._coming or step in self._giving:
            return
        with self._engine.lock:
            gives = step in self._coming.values() and not self._missing
        if gives:
            settle()
            with self._engine.lock:
                self._giving.add(step)
            self._give(step)

    def end_step(self, done: int) -> None:
        """All newcomers that were to come by then have all, or are gone."""
        if self._coming:
            with self._engine.lock:
                self._coming = {rank: step for rank, step in self._coming.items() if step > done}
                self._giving &= set(self._coming.values())

    def end(self, firsts: Sequence[int]) -> None:
        """This member ends before these steps of others."""
        for first in firsts if not self._missing else ():
            self._give(first)

    def _give(self, first: int) -> None:
        """This member's share, to be passed on by its node's server where that has slices."""
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
            data = self._part(part)
            send(server, Kind.GIVEN, first - 1, priority, part, data)

    def _part(self, part: int) -> bytes | memoryview:
        if part < self._values:
            return self._value_bytes(part)
        number = part - self._values
        if number == len(self._parameters):
            return _saved(_numbers(self._optimizer))
        parameter = self._parameters[number]
        state = dict.get(self._optimizer.state, parameter, {})
        plain = {key: _apart(value) for key, value in state.items()}
        average = None
        if self._added is not None and self._added.keeps_averages:
            (average,) = self._added.averages_of([parameter])
        return _saved((plain, average))

    def _value_bytes(self, slice_: int) -> memoryview:
        piece = self._engine.slices[slice_]
        parameter = self._parameters[piece.parameter].detach()
        with torch._C.DisableTorchFunctionSubclass():
            if parameter.is_contiguous():
                part = parameter.view(-1)[piece.start_elems : piece.stop_elems]
            else:
                part = parameter[_places(parameter, piece)]
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
                parameter[_places(parameter, piece)] = part.to(parameter.device)

    @property
    def is_complete(self) -> bool:
        return not self._missing

    def install_state(self) -> None:
        """Of a newcomer that has all: the optimizer's state, where the optimizer expects it."""
        state = {}
        for number, parameter in enumerate(self._parameters):
            its, average = _loaded(self._states.pop(number))
            if its:
                state[parameter] = its
            if average is not None:
                self._averages[parameter] = average
        self._expected = _loaded(self._states.pop(len(self._parameters)))
        numbers: dict[int, int] = {}
        groups = []
        for group in self._optimizer.param_groups:
            own = {id(p): numbers.setdefault(id(p), len(numbers)) for p in group["params"]}
            groups.append({**group, "params": list(own.values())})
        by_number = {numbers[id(p)]: its for p, its in state.items() if id(p) in numbers}
        self._optimizer.load_state_dict({"state": by_number, "param_groups": groups})

    def keeps_averages(self, added: MovingAverages) -> None:
        """The moving ones, if there are any, are kept there."""
        self._added = added
        if self._averages:
            added.put_averages(list(self._averages), list(self._averages.values()))
            self._averages.clear()

    def _compare_numbers(self, step: int) -> None:
        """Raises `TrainingLoopError` if this newcomer's next update would be another one."""
        theirs, self._expected = self._expected, None
        ours = _numbers(self._optimizer)
        if ours != theirs:
            raise TrainingLoopError(
                f"rank {self._engine.rank} joins at step {step} with the optimizer's numbers"
                f" {_unlike(ours, theirs or [])}: let its scheduler go as far as the others' has"
                " (docs/elastic.md)"
            )


def _places(parameter: torch.Tensor, piece: Slice) -> tuple[torch.Tensor, ...]:
    """The indices of a slice's elements, for the slice lies apart: not the whole is copied."""
    flat = torch.arange(piece.start_elems, piece.stop_elems, device=parameter.device)
    return torch.unravel_index(flat, parameter.shape)


def _numbers(optimizer: torch.optim.Optimizer) -> _Numbers:
    """Of each group: what is no parameter, and can be compared."""
    return [
        {
            name: value.item() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params" and (not isinstance(value, torch.Tensor) or value.numel() == 1)
        }
        for group in optimizer.param_groups
    ]


def _unlike(ours: _Numbers, theirs: _Numbers) -> str:
    for number, (own, other) in enumerate(zip(ours, theirs, strict=False)):
        for name in sorted(own.keys() | other.keys()):
            if own.get(name) != other.get(name):
                rest = f"the others have {name}={other.get(name)}"
                return f"{name}={own.get(name)} in group {number}, and {rest}"
    return f"of {len(ours)} groups, and the others have {len(theirs)}"


def _apart(value: Any) -> Any:
    """A tensor by itself, not with all that lies in the same storage."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _loaded(data: bytes) -> Any:
    """Raises `RemoteProtocolError` for what is more than tensors and numbers."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise RemoteProtocolError(f"optimizer state that cannot be read: {error}") from error

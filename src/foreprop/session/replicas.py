"""A check that all ranks have the same parameters, every so many steps.

It is a net below everything else: whatever makes ranks drift apart (a parameter that no session
has, a loop that does other things on each rank, a bit that has flipped in memory), the run ends
with the parameter's name before it has gone on for long. Each step adds up the bits of an equal
share of all parameters, before the first gradient leaves, when their values are the last step's on
every rank. A *window* of such steps covers everything once. What a rank has added up goes to the
store, and is compared two steps later, when every rank's is there. A thread asks the store, whose
host may be gone or cut off: no step waits for it. The first window is the first step alone, for
what is wrong from the start.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from foreprop.config import LOGGER
from foreprop.engine.rendezvous import decode_entry
from foreprop.errors import ForepropError, TrainingLoopError
from foreprop.session.training import Training

_PUBLISHED_AFTER, _COMPARED_AFTER = 2, 4
_PATIENCE_S = 0.02
"""A store that can be reached has answered by then, so an error is raised in the step itself."""


class _Sums(NamedTuple):
    window: int
    scale: float | None  # the factor of the rank's loss, if a scaler has one
    sums: list[int]


class _Piece(NamedTuple):
    number: int  # the parameter's
    start: int  # bytes
    stop: int


class ReplicaCheck:
    """The check of one connection. Training thread, in which autograd's hooks may run."""

    def __init__(self, training: Training) -> None:
        self._training = training.reference()
        self._steps = training.config.check_replicas or 0
        self._names: list[str] = []
        self._tensors: list[torch.Tensor] = []
        for name, parameter in _replicated(training):
            self._names.append(name)
            self._tensors.append(parameter)
        self._managed = {id(each.parameter): each for each in training.parameters}
        self._board = training.board("replicas")
        self._round = -1
        self._window = _Window(0, self._share(steps=1), len(self._names))
        self._last: _Window | None = None
        self._said = _Sums(-1, None, [])
        self._asking: threading.Thread | None = None
        self._found: TrainingLoopError | None = None
        self._is_over = False  # the store is gone

    def _share(self, steps: int) -> list[list[_Piece]]:
        # all bytes, in parts of about the same size, each from a multiple of eight on
        sizes = [tensor.numel() * tensor.element_size() for tensor in self._tensors]
        whole = sum(size + -size % 8 for size in sizes)
        each = -(-max(1, whole) // steps)
        each += -each % 8
        shares: list[list[_Piece]] = [[] for _ in range(steps)]
        at = 0
        for number, size in enumerate(sizes):
            start = 0
            while start < size:
                share, used = divmod(at, each)
                stop = min(size, start + each - used)
                shares[share].append(_Piece(number, start, stop))
                at += stop - start
                start = stop
            at += -at % 8
        return shares

    def look(self, round_: int) -> None:
        """Add up a share, before the first gradient of a round leaves."""
        if round_ == self._round:
            return
        self._round = round_
        window, last = self._window, self._last
        training = self._training()
        window.looks += 1
        window.last = training.completed_before + training.completed + 1
        window.first = window.first or window.last
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for piece in window.shares[window.looks - 1]:
                self._add(piece)
        if last is not None and window.looks == _PUBLISHED_AFTER:
            averaging = training.averaging
            factor = None if averaging is None else averaging.unscaled_by
            scale = None if factor is None else 1 / float(factor)
            self._said = said = _Sums(last.number, scale, last.sums.all())
            self._ask(lambda: self._board.publish(f"sums/{self._board.rank}", json.dumps(said)))
        elif last is not None and window.looks == _COMPARED_AFTER:
            said = self._said
            self._ask(lambda: self._compare(last, said))
        if self._found is not None:
            training.life.give_up(self._found)
            raise self._found
        if window.looks == len(window.shares):
            window.sums.leave()
            shares = window.shares if last is not None else self._share(self._steps)
            self._last = window
            self._window = _Window(window.number + 1, shares, len(self._names))

    def _add(self, piece: _Piece) -> None:
        tensor = self._tensors[piece.number]
        managed = self._managed.get(id(tensor))
        if managed is not None:
            managed.arrival.settle()
        size = tensor.element_size()
        flat = tensor.detach()
        is_dense = torch._prims_common.is_non_overlapping_and_dense_or_false  # 50 calls of Python
        flat = flat if flat.is_contiguous() or is_dense(flat) else flat.contiguous()
        flat = flat.as_strided((flat.numel(),), (1,))  # in the order in which it lies
        part = flat.view(torch.uint8)[piece.start : piece.stop]
        whole = part.numel() - part.numel() % 8
        if (flat.storage_offset() * size + piece.start) % 8:
            part = part.clone()
        total = part[:whole].view(torch.int64).sum()
        if whole < part.numel():
            total += part[whole:].sum(dtype=torch.int64)
        self._window.sums.add(piece.number, total)

    def _ask(self, do: Callable[[], None]) -> None:
        # asks the store nothing while it has not answered what it was asked before
        if self._is_over or (self._asking is not None and self._asking.is_alive()):
            return

        def ask() -> None:
            try:
                do()
            except ForepropError as error:
                self._is_over = True
                text = "rank %d compares parameters with others no more (check_replicas): %s"
                LOGGER.warning(text, self._board.rank, error)

        self._asking = threading.Thread(target=ask, name="foreprop-replicas", daemon=True)
        self._asking.start()
        self._asking.join(_PATIENCE_S)

    def _compare(self, window: _Window, mine: _Sums) -> None:
        # with the lowest rank whose sums are there
        for rank in range(self._board.rank):
            found = self._board.peek(f"sums/{rank}")
            if found is None:
                continue
            theirs: _Sums = decode_entry(found, _Sums, f"rank {rank}'s sums of parameters")
            if theirs.window != mine.window:  # it is not there any more
                continue
            pairs = zip(self._names, mine.sums, theirs.sums, strict=True)
            differing = [name for name, own, other in pairs if own != other]
            if differing:
                steps = f"step {window.first}"
                if window.last != window.first:
                    steps = f"steps {window.first} to {window.last}"
                self._found = TrainingLoopError(
                    f"parameter {differing[0]} is not the same on rank {rank} and rank"
                    f" {self._board.rank}, as compared in {steps} ({len(differing)} of"
                    f" {len(self._names)} parameters differ): something changes it on one rank"
                    " only. Set check_replicas=None if that is meant"
                )
            elif mine.scale != theirs.scale:
                self._found = TrainingLoopError(
                    f"the loss is scaled by {theirs.scale} on rank {rank} and by {mine.scale} on"
                    f" rank {self._board.rank}: make the GradScaler alike on every rank"
                )
            return


class _Window:
    def __init__(self, number: int, shares: list[list[_Piece]], parameters: int) -> None:
        self.number = number
        self.shares = shares
        self.sums = _DeviceSums(parameters)
        self.looks = 0
        self.first = self.last = 0  # steps


class _DeviceSums:
    """Each parameter's sum, on the device where the parameter is; read steps after it is made."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._by_device: dict[torch.device, torch.Tensor] = {}
        self._events: list[Any] = []

    def add(self, number: int, total: torch.Tensor) -> None:
        device = total.device
        if device not in self._by_device:
            self._by_device[device] = torch.zeros(self._count, dtype=torch.int64, device=device)
        self._by_device[device][number] += total

    def leave(self) -> None:
        """Begin to copy the sums to the host: nothing more is added."""
        for device, sums in self._by_device.items():
            if device.type == "cuda":
                host = torch.empty(self._count, dtype=torch.int64, pin_memory=True)
                self._by_device[device] = host.copy_(sums, non_blocking=True)
                event: Any = torch.Event(device)
                event.record(torch.cuda.current_stream(device))
                self._events.append(event)

    def all(self) -> list[int]:
        for event in self._events:
            event.synchronize()
        columns = [sums.tolist() for sums in self._by_device.values()]
        return [sum(column) for column in zip(*columns, strict=True)]


def _replicated(training: Training) -> Iterator[tuple[str, torch.nn.Parameter]]:
    # what is to be the same on all ranks: managed parameters by number, then the others
    rows = {table.owner.index for table in training.tables}
    seen = {id(training.user.named[number][1]) for number in rows}
    managed = ((name, parameter) for name, parameter, _ in training.user.named)
    for name, parameter in itertools.chain(managed, training.user.model.named_parameters()):
        tensor: Any = parameter
        plain = tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)
        has_bits = plain and not tensor.is_meta and tensor.numel()
        if id(parameter) not in seen and has_bits:  # else they cannot be looked at here
            seen.add(id(parameter))
            yield name, parameter

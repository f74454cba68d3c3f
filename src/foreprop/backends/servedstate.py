"""What servers keep beside the values, for checkpoints: optimizer state, averages, masters.

It is fetched piece by piece, slices and shards, and joined to whole tensors; and it is sent back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from foreprop.core.slicing import Shard, Slice
from foreprop.core.wire import Flag
from foreprop.engine.sums import start_average
from foreprop.engine.tensors import (
    AVERAGE,
    DTYPES,
    GRADIENT,
    IMAGE,
    MASTER,
    decode_state,
    encode_state,
)
from foreprop.engine.worker import WorkerEngine
from foreprop.params.setup import Setup

_NUMBERS_OF_A_PARAMETER = frozenset({"step", "mu_product", "eta", "mu"})
"""Tensors of optimizers' states that belong to a parameter, not to each of its elements."""


class ServedState:
    """The optimizer state of one backend, as the user's optimizer shows it. Training thread."""

    def __init__(
        self,
        setup: Setup,
        engine: WorkerEngine,
        lossy: Collection[int],
        settle_rows: Callable[[], None],
    ) -> None:
        """``lossy`` has the parameters whose codecs lose something."""
        manifest = engine.manifest
        self._setup = setup
        self._engine = engine
        self._lossy = lossy
        self._settle_rows = settle_rows
        self._optimizer = setup.optimizer
        self._by_workers = setup.by_workers
        self._servers = manifest.knobs.servers
        self._wire_dtypes = [
            DTYPES[on_wire] if on_wire != info.dtype else None
            for on_wire, info in zip(manifest.wire_dtypes(), manifest.parameters, strict=True)
        ]
        """The types in which parameters travel that are cast."""
        self._loaded: dict[Any, Any] | None = None
        self._loaded_after = -1
        """The step after which state was loaded, which counts until the next one."""
        self._loaded_averages: Sequence[torch.Tensor] = ()
        self._averages_loaded_after = -1

    @property
    def _shards(self) -> list[Shard]:
        """The shards of tables that workers have, too."""
        return [shard for shard in self._engine.shards if not shard.remote]

    @property
    def _slices(self) -> Sequence[Slice]:
        """The slices that servers update."""
        engine = self._engine
        return [piece for piece in engine.slices if engine.manifest.is_served(piece)]

    @property
    def _pieces(self) -> Sequence[Slice | Shard]:
        return [*self._slices, *self._shards]

    def pull(self, step: int) -> None:
        """Fetch the optimizer state that single-process training would have."""
        if self._loaded is not None and self._loaded_after == step:
            self._optimizer.state.update(self._loaded)
            return
        self._settle_rows()
        for number, state in self._joined(step).items():
            parameter, info = self._setup.parameters[number], self._setup.infos[number]
            if state:
                own = state if info.rows else _moved(state, parameter.device)
                self._optimizer.state[parameter] = own

    def _joined(self, step: int, flags: int = 0) -> dict[int, dict[str, Any]]:
        """The states of each parameter's pieces after ``step``, joined to its shape."""
        joined: dict[int, dict[str, Any]] = {}
        for piece, state in self._fetch(self._pieces, step, flags):
            whole = joined.setdefault(piece.parameter, {})
            shape = self._setup.parameters[piece.parameter].shape
            for key, value in state.items():
                if not _has_shape(value):
                    whole.setdefault(key, value)
                    continue
                if key not in whole:
                    whole[key] = torch.empty(shape, dtype=value.dtype)
                part = self._own_part(piece, whole[key])
                part.copy_(value.view(part.shape))
        return joined

    def _fetch(
        self, pieces: Sequence[Slice | Shard], step: int, flags: int
    ) -> Iterator[tuple[Slice | Shard, dict[str, Any]]]:
        """Each piece's state after ``step``, or what the flags say instead."""
        numbers = [piece.number for piece in pieces]
        answers = self._engine.requests.fetch_states(numbers, step, flags=flags)
        for piece in pieces:
            yield piece, decode_state(memoryview(answers[piece.number]), elems=piece.elems)

    def _own_part(self, piece: Slice | Shard, whole: torch.Tensor) -> torch.Tensor:
        """The piece's elements of a parameter's values, which are contiguous."""
        if isinstance(piece, Slice):
            return whole.view(-1)[piece.start_elems : piece.stop_elems]
        return whole[piece.server :: self._servers]

    def drop(self) -> None:
        """Drop the state of what servers update: they have it."""
        if not self._by_workers:
            self._optimizer.state.clear()
        for shard in self._engine.shards:
            self._optimizer.state.pop(self._setup.parameters[shard.parameter], None)

    def replace(self, step: int) -> None:
        """Have rank 0's state count from the next step on.

        Until then every rank keeps what it has loaded, for rank 0's may still be on its way.
        """
        if self._setup.world.rank == 0:
            self._settle_rows()  # the updates so far go by the old state
            self.send(step + 1)
        self._loaded, self._loaded_after = dict(self._optimizer.state), step
        self._forget_after_a_step()
        self.drop()

    def _forget_after_a_step(self) -> None:
        """Drop what was loaded when servers have gone on with it."""

        def forget() -> None:
            self._loaded, self._loaded_averages = None, ()
            self._averages_loaded_after = -1

        self._engine.after_step(forget)

    def send(self, step: int) -> None:
        """Rank 0: have the state of the user's optimizer count from this step on."""
        state = self._optimizer.state
        for piece in self._slices:
            parameter = self._setup.parameters[piece.parameter]
            part = _cut_state(state.get(parameter, {}), parameter, piece[2], piece[3])
            self._engine.requests.send_state(piece.number, step, encode_state(part))
        for shard in self._shards:
            parameter = self._setup.parameters[shard.parameter]
            own = {
                key: value[shard.server :: self._servers] if _has_shape(value) else value
                for key, value in state.get(parameter, {}).items()
            }
            self._engine.requests.send_state(shard.number, step, encode_state(own))

    def pull_gradient(self, parameter: int, step: int) -> torch.Tensor:
        pieces = [piece for piece in self._engine.slices if piece.parameter == parameter]
        states = self._fetch(pieces, step, Flag.GRADIENT)
        return torch.cat([state[GRADIENT] for _, state in states])

    # The servers' copy of the values.
    def pull_masters(self, step: int) -> Sequence[torch.Tensor]:
        parameters, cast = self._setup.parameters, self._wire_dtypes
        if step == 0 or not (any(cast) or self._lossy):  # all ranks have started in full
            return parameters
        pieces = [
            piece
            for piece in self._pieces
            if cast[piece.parameter] is not None or piece.parameter in self._lossy
        ]
        layout = torch.contiguous_format
        found = [
            parameter if parameter.is_meta else parameter.detach().cpu().clone(memory_format=layout)
            for parameter in parameters
        ]
        for piece, state in self._fetch(pieces, step, Flag.MASTER):
            shown = self._own_part(piece, found[piece.parameter])
            master = state[MASTER].view(shown.shape)
            image = state[IMAGE].view(shown.shape) if IMAGE in state else None
            if image is None:
                image = master.to(cast[piece.parameter])
            same = shown == image
            shown.copy_(torch.where(same, master, shown))  # others were changed by hand since
        return found

    # Moving averages.
    def pull_averages(self, step: int) -> Sequence[torch.Tensor]:
        if self._averages_loaded_after == step:
            return self._loaded_averages
        if step == 0:  # rank 0's values may still be on their way to the servers
            return [start_average(parameter) for parameter in self._setup.parameters]
        found = self._joined(step, Flag.AVERAGES)
        return [
            # an empty one has no slices
            found[number][AVERAGE] if number in found else start_average(parameter)
            for number, parameter in enumerate(self._setup.parameters)
        ]

    def replace_averages(self, step: int, averages: Sequence[torch.Tensor]) -> None:
        """Have rank 0's averages count, and each rank's own until then, as `replace` does."""
        if self._setup.world.rank == 0:
            for piece in self._pieces:
                part = self._own_part(piece, averages[piece.parameter].contiguous())
                data = encode_state({AVERAGE: part.reshape(-1)})
                self._engine.requests.send_state(piece.number, step + 1, data, flags=Flag.AVERAGES)
        self._loaded_averages, self._averages_loaded_after = averages, step
        self._forget_after_a_step()


def _moved(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {
        key: value.to(device)
        if isinstance(value, torch.Tensor) and _is_elementwise(key, value)
        else value
        for key, value in state.items()
    }


def _has_shape(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _cut_state(
    state: dict[str, Any], parameter: torch.Tensor, start: int, stop: int
) -> dict[str, Any]:
    return {
        key: value.detach().reshape(-1)[start:stop]
        if isinstance(value, torch.Tensor) and _is_elementwise(key, value)
        else value
        for key, value in state.items()
    }


def _is_elementwise(key: str, value: torch.Tensor) -> bool:
    """Whether a tensor has a number for each element of the parameter; its name may tell."""
    return value.dim() > 0 or key not in _NUMBERS_OF_A_PARAMETER

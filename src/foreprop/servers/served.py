"""The backend of parameter servers: they hold the optimizer's state and apply the updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from foreprop.core.manifest import BUFFERS_BLOB, NO_GROUP, Hyperparameters, Manifest
from foreprop.core.norm import SquareSum
from foreprop.core.slicing import Shard, Slice
from foreprop.core.wire import Flag
from foreprop.hooks import buffers
from foreprop.path.memory import Memory, MemoryFactory
from foreprop.path.optimizer import check_elementwise, check_groups, hyperparameters, with_scale
from foreprop.path.tensors import (
    AVERAGE,
    DTYPES,
    GRADIENT,
    MASTER,
    decode_state,
    encode_state,
    start_average,
)
from foreprop.path.worker import WorkerEngine
from foreprop.servers.backend import Setup, Starting, describe_wire_dtype
from foreprop.servers.framelimits import check_frames
from foreprop.servers.launch import Connections
from foreprop.servers.workers import Worker

if TYPE_CHECKING:
    from foreprop.numerics.norms import WorkerNorm

if TYPE_CHECKING:
    from foreprop.tables.exchange import RowExchange

_FROZEN = BUFFERS_BLOB + 1  # the number of the first frozen parameter's blob
_NUMBERS_OF_A_PARAMETER = frozenset({"step", "mu_product", "eta", "mu"})
"""In optimizers' states: tensors that belong to a parameter, not to each of its elements."""


class ServedBackend:
    """Servers sum the gradients, apply the optimizer and send the parameters back."""

    def __init__(self, setup: Setup) -> None:
        served = [info for info in setup.infos if info.group != NO_GROUP]
        self._serves = bool(served)
        """Whether servers apply the optimizer to anything."""
        if not all(info.rows for info in served):
            check_elementwise(setup.optimizer)
        if self._serves:
            check_groups(setup.optimizer)
        self._setup = setup
        self._by_workers = setup.by_workers
        self._optimizer = setup.optimizer
        self._memory_factory = MemoryFactory()
        self._loaded: dict[Any, Any] | None = None
        self._loaded_after = -1
        """Optimizer state that was loaded, and after which step: it counts until the next one."""
        self._loaded_averages: Sequence[torch.Tensor] = ()
        self._averages_loaded_after = -1
        self.connections = Connections(setup.world, setup.config, setup.part)
        manifest = self._manifest()
        check_frames(manifest)
        self._wire_dtypes = [
            DTYPES[on_wire] if on_wire != info.dtype else None
            for on_wire, info in zip(manifest.wire_dtypes(), manifest.parameters, strict=True)
        ]
        """Of the parameters that are cast."""
        self.connections.open()
        self.session_id = self.connections.session_id
        self._worker = Worker(
            msgspec.structs.replace(manifest, session=self.session_id),
            setup.memory,
            self.connections.streams,
            rank=setup.world.rank,
            config=setup.config,
            trace=setup.make_trace(self.session_id),
            servers=self.connections.server_names(),
        )
        self._engine = self._worker.engine

    @property
    def _shards(self) -> list[Shard]:
        """Those of tables that workers have, too."""
        return [shard for shard in self._engine.shards if not shard.remote]

    @property
    def _slices(self) -> Sequence[Slice]:
        """Those that servers update."""
        return () if self._by_workers else self._engine.slices

    @property
    def _pieces(self) -> Sequence[Slice | Shard]:
        return [*self._slices, *self._shards]

    def _manifest(self) -> Manifest:
        """Without the session's id."""
        knobs = self._setup.config.knobs(self.connections.servers)
        return self._setup.manifest(
            msgspec.structs.replace(knobs, aggregation=self._setup.aggregation),
            groups=self._hyperparameters(),
            workers_per_push=self.connections.workers_per_push,
        )

    @property
    def engine(self) -> WorkerEngine:
        return self._engine

    def rows_of(self, parameter: int) -> tuple[RowExchange, int]:
        return self._worker.rows, parameter

    @property
    def norm(self) -> WorkerNorm:
        """For whoever has another part in it."""
        return self._worker.norm

    # The start.
    def start(self, parameters: Sequence[Starting]) -> None:
        rank_zero = self.engine.is_rank_zero
        if not rank_zero:
            self._engine.await_values()  # before the servers know us: values may come at once
        self._engine.join(self.connections.board.check_failed)
        self.connections.settled()
        shared = [[frozen] for frozen in self._setup.frozen]
        if rank_zero:
            for parameter in parameters:
                parameter.before_offering()
            if self._serves:
                self._send_state(0)  # first: who has the values may ask for it
            self._engine.offer_values()
            for number, info in enumerate(self._setup.infos):
                if info.rows and info.init is None:
                    table = self._setup.parameters[number].detach()
                    self._worker.rows.send_row_values(number, 0, table)
            if self._setup.world.size > 1:
                for number, tensors in enumerate(shared, _FROZEN):
                    self.engine.publish_blob(number, 0, buffers.pack(tensors))
        else:
            for parameter in parameters:
                parameter.receive_initial_value()
            for number, tensors in enumerate(shared, _FROZEN):
                buffers.unpack_into(tensors, self.engine.fetch_blob(number, 0))
        self._forget_state()

    def memory_of(self, parameter: torch.Tensor) -> Memory:
        return self._memory_factory.memory_of(parameter)

    # The optimizer's numbers and state.
    def numbers(self) -> tuple[Hyperparameters, ...]:
        own, scale = self._hyperparameters(), self._setup.loss_scale
        return own if scale is None else with_scale(own, scale.factor)

    def _hyperparameters(self) -> tuple[Hyperparameters, ...]:
        return hyperparameters(self._optimizer) if self._serves else ()

    def announce(self, step: int) -> None:
        self._engine.announce_hyperparameters(step, msgspec.json.encode(self.numbers()))

    def pull_state(self, step: int) -> None:
        """Fetch what single-process training would have."""
        if self._loaded is not None and self._loaded_after == step:
            self._optimizer.state.update(self._loaded)
            return
        self._settle_rows()
        for number, state in self._pull(step).items():
            parameter, info = self._setup.parameters[number], self._setup.infos[number]
            if state:
                own = state if info.rows else _moved(state, parameter.device)
                self._optimizer.state[parameter] = own

    def _settle_rows(self) -> None:
        if self._engine.shards:
            self._worker.rows.settle_rows()

    def _pull(self, step: int, flags: int = 0) -> dict[int, dict[str, Any]]:
        """By parameter: its pieces' states after ``step``, joined to its shape."""
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
        return whole[piece.server :: self.connections.servers]

    def drop_state(self) -> None:
        self._forget_state()

    def _forget_state(self) -> None:
        """Of what servers update, they have the state."""
        if not self._by_workers:
            self._optimizer.state.clear()
        for shard in self._shards:
            self._optimizer.state.pop(self._setup.parameters[shard.parameter], None)

    def leave_updates(self) -> None:
        """In the first step: from now on the workers update, and have the state."""
        if not self._by_workers:
            self.pull_state(0)
            self._by_workers = True
            self._forget_state()

    def replace_state(self, step: int) -> None:
        """From the next step on rank 0's counts.

        Until then every rank keeps what it has loaded, for rank 0's may still be on its way.
        """
        if self.engine.is_rank_zero:
            self._settle_rows()  # the updates so far go by the old state
            self._send_state(step + 1)
        self._loaded, self._loaded_after = dict(self._optimizer.state), step
        self._forget_state()

    def _send_state(self, step: int) -> None:
        state = self._optimizer.state
        if not state and step == 0:
            return
        for piece in self._slices:
            parameter = self._setup.parameters[piece.parameter]
            part = _cut_state(state.get(parameter, {}), parameter, piece[2], piece[3])
            self._engine.requests.send_state(piece.number, step, encode_state(part))
        for shard in self._shards:
            parameter = self._setup.parameters[shard.parameter]
            own = {
                key: value[shard.server :: self.connections.servers] if _has_shape(value) else value
                for key, value in state.get(parameter, {}).items()
            }
            self._engine.requests.send_state(shard.number, step, encode_state(own))

    def pull_gradient(self, parameter: int, step: int) -> torch.Tensor:
        pieces = [piece for piece in self._engine.slices if piece.parameter == parameter]
        states = self._fetch(pieces, step, Flag.GRADIENT)
        return torch.cat([state[GRADIENT] for _, state in states])

    can_measure = True

    def square_sums(self, round_: int) -> Sequence[SquareSum]:
        return self.norm.square_sums(round_)

    # The servers' copy of the values.
    def pull_masters(self, step: int) -> Sequence[torch.Tensor]:
        parameters, cast = self._setup.parameters, self._wire_dtypes
        if step == 0 or not any(cast):  # all ranks have started in full
            return parameters
        pieces = [piece for piece in self._pieces if cast[piece.parameter] is not None]
        layout = torch.contiguous_format
        found = [
            parameter if parameter.is_meta else parameter.detach().cpu().clone(memory_format=layout)
            for parameter in parameters
        ]
        for piece, state in self._fetch(pieces, step, Flag.MASTER):
            shown = self._own_part(piece, found[piece.parameter])
            master = state[MASTER].view(shown.shape)
            same = shown == master.to(cast[piece.parameter])
            shown.copy_(torch.where(same, master, shown))  # others were changed by hand since
        return found

    # Moving averages.
    def pull_averages(self, step: int) -> Sequence[torch.Tensor]:
        if self._averages_loaded_after == step:
            return self._loaded_averages
        if step == 0:  # rank 0's values may still be on their way to the servers
            return [start_average(parameter) for parameter in self._setup.parameters]
        found = self._pull(step, Flag.AVERAGES)
        return [
            # an empty one has no slices
            found[number][AVERAGE] if number in found else start_average(parameter)
            for number, parameter in enumerate(self._setup.parameters)
        ]

    def replace_averages(self, step: int, averages: Sequence[torch.Tensor]) -> None:
        """As with the optimizer's state, rank 0's count, and its own for every rank until then."""
        if self.engine.is_rank_zero:
            for piece in self._pieces:
                part = self._own_part(piece, averages[piece.parameter].contiguous())
                data = encode_state({AVERAGE: part.reshape(-1)})
                self._engine.requests.send_state(piece.number, step + 1, data, flags=Flag.AVERAGES)
        self._loaded_averages, self._averages_loaded_after = averages, step

    # The end.
    def refuse(self, error: BaseException) -> None:
        self.connections.board.publish_failure(error)

    def close(self, *, failed: bool) -> None:
        self._memory_factory.stop()

    def see_off(self, *, failed: bool) -> None:
        self.connections.close(kill=failed)

    def forget_in_child(self) -> None:
        self.connections.forget_in_child()

    def describe(self) -> str:
        config, connections = self._setup.config, self.connections
        kind = "dedicated" if config.dedicated_servers else "beside the workers"
        relayed = ", local aggregation" if connections.workers_per_push > 1 else ""
        return (
            f"{self._setup.world.size} workers on {connections.nodes} node(s),"
            f" {connections.servers} server(s) {kind}{relayed}; granularity={config.granularity}"
            f" order={config.order} reply={config.reply} placement={config.placement}"
            f" slice_elems={config.cut_elems(connections.servers)}{describe_wire_dtype(config)};"
            f" address {connections.address}"
        )


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
    """One number per element of the parameter; of one without dimensions, the name tells."""
    return value.dim() > 0 or key not in _NUMBERS_OF_A_PARAMETER

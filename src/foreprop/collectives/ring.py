"""The backend of all-reduce: gradients are summed by collectives, every rank updates by itself."""

from __future__ import annotations

import io
import json
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from foreprop.cluster.rendezvous import agree_on_session
from foreprop.collectives.engine import RingEngine
from foreprop.collectives.gpu import DeviceWork, GpuWork, HostWork, usable_gpu, uses_nccl
from foreprop.collectives.gradientsums import MOST_RANKS
from foreprop.collectives.group import Group
from foreprop.collectives.local_update import LocalUpdater, comparable, settings_of
from foreprop.core.manifest import (
    RingKnobs,
    RingManifest,
    WireDtype,
    decode_ring_manifest,
    describe_mismatch,
)
from foreprop.core.norm import SquareSum
from foreprop.errors import ConfigError, HandshakeError, InternalError
from foreprop.numerics.moving_average import LocalAverages
from foreprop.path.memory import Memory, MemoryFactory, Ready
from foreprop.path.optimizer import check_groups, with_scale
from foreprop.path.tensors import DTYPES
from foreprop.servers.backend import Setup, Starting, describe_wire_dtype

if TYPE_CHECKING:
    from foreprop.tables.exchange import RowExchange

_NO_VALUES = memoryview(b"")


class RingBackend:
    """Collectives of torch.distributed in a planned order, updates on the workers."""

    def __init__(self, setup: Setup) -> None:
        if not setup.by_workers:
            _check_optimizer(setup.optimizer)
        _check_wire_dtype(setup.config.wire_dtype, setup.world.size)
        self._setup = setup
        decay = setup.config.ema
        self._averages = LocalAverages(setup.parameters, decay) if decay is not None else None
        self._updater = LocalUpdater(
            setup.optimizer, setup.parameters, self._averages, memory=setup.memory
        )
        self._by_workers = setup.by_workers
        self._group = Group(setup.world, setup.config)
        try:
            self._device = self._meet()
            self._memory_factory = MemoryFactory(stays=self._device.device.type != "cpu")
            self._engine = RingEngine(
                setup.infos,
                setup.memory,
                self._updater,
                self._group,
                config=setup.config,
                trace=setup.make_trace(self.session_id),
                aggregation=setup.aggregation,
                send_sum=setup.send_sum,
                device=self._device,
            )
        except BaseException as error:
            self.refuse(error)
            raise

    def _meet(self) -> DeviceWork:
        shape = {
            "world size": self._setup.world.size,
            "architecture": "ring",
        }
        group = self._group
        self.session_id = agree_on_session(
            group.joining, self._setup.config, secrets.token_hex(8), shape
        )
        ours = self._manifest()
        if group.rank == 0:
            group.board.publish_bytes("manifest", ours.encode())
        else:
            found = group.board.lookup_bytes("manifest", "rank 0's manifest")
            theirs = decode_ring_manifest(found)
            mine = f"rank {group.rank}"
            difference = describe_mismatch(theirs, ours, us="rank 0", them=mine)
            if difference:
                raise HandshakeError(f"rank 0 and {mine} do not agree: {difference}")
        collectives, parameters = self._setup.config.collectives, self._setup.parameters
        gpus = group.gpus(usable_gpu(parameters, collectives))
        if group.size > 1 and uses_nccl(collectives, gpus):
            group.open(parameters[0].device)
            return GpuWork(parameters[0].device)
        group.open()
        return HostWork()

    def _manifest(self) -> RingManifest:
        config = self._setup.config
        knobs = RingKnobs(
            chunk_elems=config.chunk_elems,
            chunks_in_flight=config.chunks_in_flight,
            aggregation=self._setup.aggregation,
            wire_dtype=config.wire_dtype,
            settings=tuple(json.loads(self._settings())),
        )
        return self._setup.manifest(knobs, session=self.session_id)

    @property
    def engine(self) -> RingEngine:
        return self._engine

    def rows_of(self, parameter: int) -> tuple[RowExchange, int]:
        raise InternalError("collectives have no rows")

    # The start.
    def start(self, parameters: Sequence[Starting]) -> None:
        if self._group.size > 1:
            for tensor in (*self._setup.parameters, *self._setup.frozen):
                self._group.broadcast(tensor)
            self._share_state()
        for parameter in parameters:
            parameter.receive_initial_value()
        if not self._by_workers:
            self._updater.take_state()
        if self._averages is not None:
            self._averages.start()

    def _share_state(self) -> None:
        """Rank 0's optimizer state becomes everybody's."""
        state = self._setup.optimizer.state
        numbers = {id(p): number for number, p in enumerate(self._setup.parameters)}
        if self._group.rank == 0:
            data = io.BytesIO()
            own_states = {numbers[id(p)]: dict(s) for p, s in state.items() if id(p) in numbers}
            torch.save(own_states, data)
            self._group.board.publish_bytes("optimizer", data.getvalue())
            return
        found = self._group.board.lookup_bytes("optimizer", "rank 0's optimizer state")
        state.clear()
        theirs = torch.load(io.BytesIO(found), map_location="cpu", weights_only=True)
        for number, own in theirs.items():
            parameter = self._setup.parameters[number]
            state[parameter] = {
                name: value.to(parameter.device)
                if isinstance(value, torch.Tensor) and value.dim()
                else value
                for name, value in own.items()
            }

    def memory_of(self, parameter: torch.Tensor) -> Memory:
        return OutgoingMemory(self._memory_factory.memory_of(parameter))

    # The optimizer's numbers and state.
    def numbers(self) -> Any:
        return with_scale(comparable(settings_of(self._setup.optimizer)), self._setup.scale)

    def announce(self, step: int) -> None:
        self._updater.announce(step)
        scale = self._setup.scale
        self._engine.announce_hyperparameters(
            step, self._settings(), 1.0 if scale is None else scale
        )

    def _settings(self) -> str:
        """The numbers as JSON, to be compared with other ranks'."""
        return json.dumps(self.numbers(), default=repr)

    def pull_state(self, step: int) -> None:
        if not self._by_workers:
            self._updater.show_state()

    def drop_state(self) -> None:
        """It stays where it is: on every rank."""

    def leave_updates(self) -> None:
        self.pull_state(0)
        self._by_workers = True

    def replace_state(self, step: int) -> None:
        """Every rank goes on from what it has loaded itself."""
        if not self._by_workers:
            self._updater.take_state()

    def pull_gradient(self, parameter: int, step: int) -> torch.Tensor:
        return self._engine.aggregated(parameter)

    can_measure = False

    def square_sums(self, round_: int) -> Sequence[SquareSum]:
        raise InternalError("collectives do not tell sums of squares")

    def pull_masters(self, step: int) -> Sequence[torch.Tensor]:
        return self._setup.parameters

    # Moving averages: every rank has its own, which are alike.
    def pull_averages(self, step: int) -> Sequence[torch.Tensor]:
        return self._averages.values if self._averages is not None else ()

    def replace_averages(self, step: int, averages: Sequence[torch.Tensor]) -> None:
        if self._averages is not None:
            self._averages.values = list(averages)

    # The end.
    def refuse(self, error: BaseException) -> None:
        self._group.board.publish_failure(error)

    def close(self, *, failed: bool) -> None:
        self._memory_factory.stop()
        if not failed:
            self.pull_state(0)

    def see_off(self, *, failed: bool) -> None:
        """There is nobody else: the ranks have parted."""

    def forget_in_child(self) -> None:
        """Nothing is held that a child could keep alive."""

    def describe(self) -> str:
        config, group = self._setup.config, self._group
        by = "gloo" if self._device.device.type == "cpu" else "NCCL"
        return (
            f"{group.size} workers, architecture=ring (all-reduce by {by}, updates on the workers);"
            f" chunk_elems={config.chunk_elems} chunks_in_flight={config.chunks_in_flight}"
            f"{describe_wire_dtype(config)}; address {group.address}"
        )


class OutgoingMemory:
    """A parameter whose gradient goes out, and whose values are updated in place."""

    values = _NO_VALUES
    receives_values = False

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def stage_gradient(self, gradient: torch.Tensor, ready: Ready) -> None:
        self._memory.stage_gradient(gradient, ready)

    def await_staged(self) -> None:
        self._memory.await_staged()

    def before_sending_values(self) -> None:
        pass

    def land(self) -> None:
        pass


_REFUSED = {
    torch.optim.LBFGS: "evaluates the model several times in one step",
    torch.optim.SparseAdam: "needs sparse gradients",
}


def _check_wire_dtype(wire_dtype: WireDtype | None, ranks: int) -> None:
    """What is counted beside the gradients must be exact."""
    if wire_dtype is not None and ranks > MOST_RANKS[DTYPES[wire_dtype]]:
        raise ConfigError(
            f"wire_dtype is {wire_dtype!r} with {ranks} ranks; architecture='ring' allows it for at"
            f" most {MOST_RANKS[DTYPES[wire_dtype]]}"
        )


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Any optimizer will do that treats each parameter by itself."""
    for cls, why in _REFUSED.items():
        if isinstance(optimizer, cls):
            raise ConfigError(f"optimizer is {type(optimizer).__name__}, which {why}; use another")
    check_groups(optimizer)

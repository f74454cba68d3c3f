"""The backend of all-reduce: gradients are summed by collectives, every rank updates by itself."""

from __future__ import annotations

import io
import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch

from foreprop.backends.describing import describe_wire_dtype
from foreprop.config.combinations import check_combinations
from foreprop.core.agreement import REQUIRES_GRAD, decode_ring_manifest, describe_mismatch
from foreprop.core.freezing import Turned
from foreprop.core.manifest import RingKnobs, RingManifest
from foreprop.engine.asyncdevice import describe_devices
from foreprop.engine.memory import Memory, Ready
from foreprop.engine.optimizer import check_groups, with_scale
from foreprop.engine.rendezvous import agree_on_session
from foreprop.engine.tensors import DTYPES
from foreprop.errors import ConfigError, HandshakeError
from foreprop.features.collectives.engine import RingEngine
from foreprop.features.collectives.gpu import DeviceWork, GpuWork, usable_gpu, uses_nccl
from foreprop.features.collectives.gradientsums import (
    MOST_RANKS,
    LocalState,
    LocalUpdater,
    comparable,
    settings_of,
)
from foreprop.features.collectives.group import Group
from foreprop.params.parameter import Parameter
from foreprop.params.setup import MemoryFactory, Setup
from foreprop.quantities import counted

_REFUSED = {
    torch.optim.LBFGS: "evaluates the model several times in one step",
    torch.optim.SparseAdam: "needs sparse gradients",
}


class RingBackend:
    """The backend of torch.distributed's collectives, made in a planned order."""

    def __init__(self, setup: Setup) -> None:
        if not setup.by_workers:  # any optimizer will do that treats each parameter by itself
            for cls, why in _REFUSED.items():
                if isinstance(setup.optimizer, cls):
                    name = type(setup.optimizer).__name__
                    raise ConfigError(f"optimizer is {name}, which {why}; use another")
            check_groups(setup.optimizer)
        wire_dtype, ranks = setup.config.wire_dtype, setup.world.size
        # what is counted beside the gradients must be exact
        if wire_dtype is not None and ranks > MOST_RANKS[DTYPES[wire_dtype]]:
            raise ConfigError(
                f"wire_dtype is {wire_dtype!r} with {ranks} ranks; architecture='ring' allows it"
                f" for at most {MOST_RANKS[DTYPES[wire_dtype]]}"
            )
        self._setup = setup
        self._trainable_changes: dict[str, bool] = {}
        """The parameters that are not as at the start, frozen or not."""
        self._updater = LocalUpdater(setup)
        self._group = Group(setup.world, setup.config)
        try:
            self._device = self._meet()
            stays = self._device.device.type != "cpu"
            self._memory_factory = MemoryFactory(setup.config, stays=stays)
            self.engine = RingEngine(
                setup, self._updater, self._group, self._device, self.session_id
            )
            self.codecs, self.packs = self.engine.codecs, self.engine.sums.packs
            self.state = LocalState(setup, self._updater, self.engine.sums)
        except BaseException as error:
            self.refuse(error)
            raise

    def _meet(self) -> DeviceWork:
        shape = {"world size": self._setup.world.size, "architecture": "ring"}
        group = self._group
        self.session_id = agree_on_session(
            group.start_board, self._setup.config, secrets.token_hex(8), shape
        )
        ours = self._manifest()
        if ours.knobs.compression:
            from foreprop.features.collectives.codedsums import check_summed

            check_summed(ours.knobs.compression, ours.parameters)
        if group.rank == 0:
            group.board.publish_bytes("manifest", ours.encode())
        else:
            found = group.start_board.lookup_bytes("manifest", "rank 0's manifest")
            theirs = decode_ring_manifest(found)
            mine = f"rank {group.rank}"
            difference = describe_mismatch(theirs, ours, us="rank 0", them=mine)
            if difference:
                raise HandshakeError(f"rank 0 and {mine} do not agree: {difference}")
        collectives, parameters = self._setup.config.collectives, self._setup.parameters
        mine = usable_gpu(parameters, collectives)
        gpus = dict(enumerate(group.start_board.exchange("gpu", mine, "device")))
        if group.size > 1 and uses_nccl(collectives, gpus):
            check_combinations(self._setup.config, {"nccl": "collectives are NCCL's"})
            group.open(self.session_id, parameters[0].device)
            return GpuWork(parameters[0].device)
        group.open(self.session_id)
        return DeviceWork(parameters)

    def _manifest(self) -> RingManifest:
        config = self._setup.config
        knobs = RingKnobs(
            chunk_elems=config.chunk_elems,
            chunks_in_flight=config.chunks_in_flight,
            aggregation=self._setup.aggregation,
            wire_dtype=config.wire_dtype,
            settings=tuple(json.loads(json.dumps(self.numbers(), default=repr))),
            compression=config.codecs,
            packs=self._setup.packs(config.chunk_elems),
        )
        return self._setup.manifest(knobs, session=self.session_id)

    # The start.
    def start(self, parameters: Sequence[Parameter]) -> None:
        if self._group.size > 1:
            for tensor in (*self._setup.parameters, *self._setup.frozen):
                self._group.broadcast(tensor)
            self._share_state()
        for parameter in parameters:
            parameter.arrival.receive_initial_value()
        self.state.replace(0)
        if self._updater.averages is not None:
            self._updater.averages.start()

    def _share_state(self) -> None:
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

    # The optimizer's numbers.
    def numbers(self) -> Any:
        return with_scale(comparable(settings_of(self._setup.optimizer)), self._setup.scale)

    def announce(self, step: int) -> None:
        self._updater.announce(step)
        self._announce_settings(step)

    def _announce_settings(self, step: int) -> None:
        turned = {
            f"{REQUIRES_GRAD} of {name}": on for name, on in sorted(self._trainable_changes.items())
        }
        numbers = [] if self._setup.by_workers else self.numbers()  # each rank's own step
        settings, scale = json.dumps([*numbers, turned], default=repr), self._setup.scale
        self.engine.settings.announce(step, settings, 1.0 if scale is None else scale)

    def tell_trainable(self, step: int, turned: Turned) -> None:
        """Have this rank's part in parameters' collectives tell which are frozen."""
        for number in (*turned.frozen, *turned.unfrozen):
            info, on = self._setup.infos[number], number in turned.unfrozen
            self._trainable_changes.pop(info.name, None)
            if on != info.requires_grad:
                self._trainable_changes[info.name] = on
        self._announce_settings(step + 1)

    straggler = None
    """Nobody can tell who is late: a collective takes as long for all."""
    measures_norm = False

    def ask_for_norm(self) -> None:
        """Nothing: every rank takes it of the sums that it has."""

    # The end.
    def refuse(self, error: BaseException) -> None:
        self._group.board.publish_failure(error)
        self._group.close()

    def close(self, *, failed: bool) -> None:
        self._memory_factory.stop()
        if not failed:
            self.state.pull(0)

    def part(self, failure: BaseException | None) -> None:
        self.engine.close(failure=failure)

    def forget_in_child(self) -> None:
        self._group.forget_in_child()

    def describe(self) -> str:
        config, group = self._setup.config, self._group
        by = "gloo" if self._device.device.type == "cpu" else "NCCL"
        codecs = "" if self.codecs is None else self.codecs.describe()
        return (
            f"{counted(group.size, 'worker')}, architecture=ring (all-reduce by {by}, updates on"
            " the workers);"
            f" chunk_elems={config.chunk_elems} chunks_in_flight={config.chunks_in_flight}"
            f"{describe_wire_dtype(config)}{codecs}; address {group.address}"
            f"{describe_devices(self._setup.parameters)}"
        )


class OutgoingMemory(Memory):
    """A parameter whose gradient goes out, and whose values are updated in place."""

    receives_values = False
    is_staged = True  # landing marks what the update has made of the parameter

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.accelerator = memory.accelerator

    def stage_gradient(self, gradient: torch.Tensor, ready: Ready) -> None:
        self._memory.stage_gradient(gradient, ready)

    def pass_by(self, ready: Callable[[], None]) -> None:
        self._memory.pass_by(ready)

    def await_staged(self) -> None:
        self._memory.await_staged()

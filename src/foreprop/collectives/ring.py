"""The backend of all-reduce: gradients are summed by collectives, every rank updates by itself."""

from __future__ import annotations

import io
import json
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from foreprop.cluster.manyparts import lookup_bytes, publish_bytes
from foreprop.cluster.rendezvous import agree_on_session
from foreprop.collectives.engine import RingEngine
from foreprop.collectives.gpu import DeviceWork, GpuWork, HostWork, usable_gpu, uses_nccl
from foreprop.collectives.gradientsums import MOST_RANKS
from foreprop.collectives.group import Group
from foreprop.collectives.local_update import LocalState, LocalUpdater, comparable, settings_of
from foreprop.config.combinations import check_combinations
from foreprop.core.agreement import REQUIRES_GRAD, decode_ring_manifest, describe_mismatch
from foreprop.core.freezing import Turned
from foreprop.core.manifest import RingKnobs, RingManifest, WireDtype
from foreprop.errors import ConfigError, HandshakeError
from foreprop.path.asyncdevice import describe_devices
from foreprop.path.memory import Memory, MemoryFactory
from foreprop.path.optimizer import check_groups, with_scale
from foreprop.path.tensors import DTYPES
from foreprop.quantities import counted
from foreprop.servers.describing import describe_wire_dtype
from foreprop.servers.setup import Setup

if TYPE_CHECKING:
    from foreprop.path.managedparameter import ManagedParameter


class RingBackend:
    """Collectives of torch.distributed in a planned order, updates on the workers."""

    def __init__(self, setup: Setup) -> None:
        if not setup.by_workers:
            _check_optimizer(setup.optimizer)
        _check_wire_dtype(setup.config.wire_dtype, setup.world.size)
        self._setup = setup
        self._turned: dict[str, bool] = {}
        """Which parameters are not as at the start, frozen or not."""
        self._updater = LocalUpdater(setup)
        self._group = Group(setup.world, setup.config)
        try:
            self._device = self._meet()
            stays = self._device.device.type != "cpu"
            self._memory_factory = MemoryFactory(setup.config, stays=stays)
            self.engine = RingEngine(
                setup, self._updater, self._group, self._device, self.session_id
            )
            self.codecs = self.engine.codecs
            self.state = LocalState(setup, self._updater, self.engine.sums)
        except BaseException as error:
            self.refuse(error)
            raise

    def _meet(self) -> DeviceWork:
        shape = {"world size": self._setup.world.size, "architecture": "ring"}
        group = self._group
        self.session_id = agree_on_session(
            group.joining, self._setup.config, secrets.token_hex(8), shape
        )
        ours = self._manifest()
        if ours.knobs.compression:
            from foreprop.collectives.codedsums import check_summed

            check_summed(ours.knobs.compression, ours.parameters)
        if group.rank == 0:
            publish_bytes(group.board, "manifest", ours.encode())
        else:
            found = lookup_bytes(group.joining, "manifest", "rank 0's manifest")
            theirs = decode_ring_manifest(found)
            mine = f"rank {group.rank}"
            difference = describe_mismatch(theirs, ours, us="rank 0", them=mine)
            if difference:
                raise HandshakeError(f"rank 0 and {mine} do not agree: {difference}")
        collectives, parameters = self._setup.config.collectives, self._setup.parameters
        mine = usable_gpu(parameters, collectives)
        gpus = dict(enumerate(group.joining.exchange("gpu", mine, "device")))
        if group.size > 1 and uses_nccl(collectives, gpus):
            check_combinations(self._setup.config, {"nccl": "collectives are NCCL's"})
            group.open(self.session_id, parameters[0].device)
            return GpuWork(parameters[0].device)
        group.open(self.session_id)
        return HostWork(parameters)

    def _manifest(self) -> RingManifest:
        config = self._setup.config
        knobs = RingKnobs(
            chunk_elems=config.chunk_elems,
            chunks_in_flight=config.chunks_in_flight,
            aggregation=self._setup.aggregation,
            wire_dtype=config.wire_dtype,
            settings=tuple(json.loads(json.dumps(self.numbers(), default=repr))),
            compression=config.codecs,
        )
        return self._setup.manifest(knobs, session=self.session_id)

    # The start.
    def start(self, parameters: Sequence[ManagedParameter]) -> None:
        if self._group.size > 1:
            for tensor in (*self._setup.parameters, *self._setup.frozen):
                self._group.broadcast(tensor)
            self._share_state()
        for parameter in parameters:
            parameter.receive_initial_value()
        self.state.replace(0)
        if self._updater.averages is not None:
            self._updater.averages.start()

    def _share_state(self) -> None:
        """Rank 0's optimizer state becomes everybody's."""
        state = self._setup.optimizer.state
        numbers = {id(p): number for number, p in enumerate(self._setup.parameters)}
        if self._group.rank == 0:
            data = io.BytesIO()
            own_states = {numbers[id(p)]: dict(s) for p, s in state.items() if id(p) in numbers}
            torch.save(own_states, data)
            publish_bytes(self._group.board, "optimizer", data.getvalue())
            return
        found = lookup_bytes(self._group.board, "optimizer", "rank 0's optimizer state")
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
        scale = self._setup.scale
        self.engine.settings.announce(step, self._settings(), 1.0 if scale is None else scale)

    def _settings(self) -> str:
        """The numbers as JSON, to be compared with other ranks'."""
        turned = {f"{REQUIRES_GRAD} of {name}": on for name, on in sorted(self._turned.items())}
        numbers = [] if self._setup.by_workers else self.numbers()  # each rank's own step
        return json.dumps([*numbers, turned], default=repr)

    def tell_trainable(self, step: int, turned: Turned) -> None:
        """A rank takes part in each parameter's collective, frozen or not, and tells it there."""
        for number in (*turned.frozen, *turned.unfrozen):
            info, on = self._setup.infos[number], number in turned.unfrozen
            self._turned.pop(info.name, None)
            if on != info.requires_grad:
                self._turned[info.name] = on
        self._announce_settings(step + 1)

    straggler = None
    """A collective takes as long for all: nobody can tell who is late."""
    measures_norm = False

    def ask_for_norm(self) -> None:
        """Sums are everywhere: it is taken of them."""

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
        """Whoever listens hears of the parent alone."""
        self._group.forget_in_child()

    def describe(self) -> str:
        config, group = self._setup.config, self._group
        by = "gloo" if self._device.device.type == "cpu" else "NCCL"
        return (
            f"{counted(group.size, 'worker')}, architecture=ring (all-reduce by {by}, updates on"
            " the workers);"
            f" chunk_elems={config.chunk_elems} chunks_in_flight={config.chunks_in_flight}"
            f"{describe_wire_dtype(config)}{self._describe_codecs()}; address {group.address}"
            f"{describe_devices(self._setup.parameters)}"
        )

    def _describe_codecs(self) -> str:
        if self.codecs is None:
            return ""
        from foreprop.compression.choosing import describe

        return describe(self._setup.config.codecs)


class OutgoingMemory:
    """A parameter whose gradient goes out, and whose values are updated in place."""

    values = memoryview(b"")
    receives_values = False

    def __init__(self, memory: Memory) -> None:
        self.stage_gradient = memory.stage_gradient
        self.pass_by = memory.pass_by
        self.is_staged = True  # landing marks what the update has made of the parameter
        self.await_staged = memory.await_staged
        self.accelerator = getattr(memory, "accelerator", None)

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

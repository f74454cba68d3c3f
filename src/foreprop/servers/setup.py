"""What a session hands to its backends, and what all ranks must agree on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch

from foreprop.cluster.world import World
from foreprop.config import Config
from foreprop.core.manifest import (
    ITEMSIZE_BYTES,
    Aggregation,
    AnyKnobs,
    AnyManifest,
    Hyperparameters,
    Knobs,
    Manifest,
    OptimizerInfo,
    ParameterInfo,
)
from foreprop.core.packs import Packs, plan_packs
from foreprop.core.wire import MAX_PAYLOAD_BYTES
from foreprop.errors import ConfigError
from foreprop.hooks.modelhooks import packed_bytes
from foreprop.path.memory import ParameterMemory
from foreprop.version import __version__

if TYPE_CHECKING:  # what a training loads that uses it
    from foreprop.core.norm import SquareSum
    from foreprop.hooks.modelhooks import ModelBuffers
    from foreprop.numerics.loss_scale import LossScale
    from foreprop.observe.trace import TraceRecorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a session hands to its backend. Parameters are in the order of their numbers."""

    world: World
    config: Config
    optimizer: torch.optim.Optimizer
    parameters: Sequence[torch.nn.Parameter]
    infos: Sequence[ParameterInfo]
    frozen: Sequence[torch.nn.Parameter]
    """The model's parameters that the optimizer does not have."""
    buffers: ModelBuffers
    memory: Sequence[ParameterMemory]
    """Of the parameters; filled between the backend's construction and its start."""
    make_trace: Callable[[str], TraceRecorder | None]
    """For the session of that id."""
    part: str = ""
    """Of a session that has several backends: what this one is called."""
    loss_scale: LossScale | None = None
    """Of a scaler whose work servers do."""
    has_scaler: bool = False
    look: Callable[[], None] | None = None
    """Called now and then while a result is waited for; raises why none will come."""
    steps_before: int = 0
    """That the session has made with other backends."""
    by_workers: bool = False
    """Nobody but the workers updates, but for tables by rows."""
    send_sum: Callable[[int, SquareSum], None] | None = None
    """For collectives, if other parameters have a part in the global norm: see `RingEngine`."""

    @property
    def aggregation(self) -> Aggregation:
        """What all ranks must do alike with aggregated gradients."""
        return msgspec.structs.replace(self.config.aggregation, skip_nonfinite=self.has_scaler)

    def manifest(
        self,
        knobs: AnyKnobs,
        *,
        session: str = "",
        groups: tuple[Hyperparameters, ...] = (),
        workers_per_push: int = 1,
    ) -> AnyManifest[AnyKnobs]:
        """What this rank and all others must agree on."""
        return AnyManifest(
            foreprop=__version__,
            torch=torch.__version__.partition("+")[0],
            byteorder=sys.byteorder,
            session=session,
            world_size=self.world.size,
            knobs=knobs,
            optimizer=OptimizerInfo(name=type(self.optimizer).__name__, groups=groups),
            parameters=tuple(self.infos),
            blob_bytes=(
                self.buffers.size_bytes,
                *(packed_bytes([parameter]) for parameter in self.frozen),
            ),
            workers_per_push=workers_per_push,
        )

    def packs(self, knobs: Knobs) -> Packs:
        """Which parameters share a slice: where workers update, and servers do nothing but average.

        They are alike on the host, and the optimizer has them.
        """
        config = self.config
        if (
            not self.by_workers
            or config.granularity != "slice"
            or config.codecs
            or config.wire_dtype is not None
            or config.check_finite
            or config.counts_some
            or config.staleness
        ):
            return ()
        own = {id(p) for group in self.optimizer.param_groups for p in group["params"]}

        def kind_of(parameter: torch.Tensor, info: ParameterInfo) -> tuple[str, bool] | None:
            alone = info.rows or info.sparse or parameter.device.type != "cpu"
            return None if alone or id(parameter) not in own else (info.dtype, info.requires_grad)

        kinds = map(kind_of, self.parameters, self.infos)
        sizes = [info.elems for info in self.infos]
        return plan_packs(sizes, list(kinds), knobs.slice_elems, servers=knobs.servers)

    @property
    def scale(self) -> float | None:
        """What the loss is multiplied by, if there is a scaler."""
        return self.loss_scale.factor if self.loss_scale is not None else None


def check_frames(manifest: Manifest) -> None:
    """Raise `ConfigError` for what is too large for a frame, with what to do about it."""
    if max(manifest.blob_bytes) > MAX_PAYLOAD_BYTES:
        raise ConfigError(
            f"a frozen parameter (or all buffers) of {max(manifest.blob_bytes)} bytes is larger"
            f" than a frame of {MAX_PAYLOAD_BYTES}"
        )
    slices = manifest.slices()
    if shards := manifest.shards(len(slices)):
        from foreprop.servers.shardframes import check_shards

        check_shards(manifest, shards)
    for piece in slices:
        info = manifest.parameters[piece.parameter]
        size_bytes = piece.elems * ITEMSIZE_BYTES[info.dtype]
        if size_bytes > MAX_PAYLOAD_BYTES:
            raise ConfigError(
                f"parameter {info.name} would be sent in a frame of {size_bytes} bytes; a frame"
                f" holds {MAX_PAYLOAD_BYTES}: use granularity='slice'"
            )

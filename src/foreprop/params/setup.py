"""What a session, its parameters and its backends know of each other.

A session hands a `Setup` to its backends, from which comes what all ranks must agree on. Parameters
ask their session as a `SessionState`, and whatever synchronises them as an `Engine`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch

from foreprop.config import Config
from foreprop.core.manifest import (
    BUFFERS_BLOB,
    ITEMSIZE_BYTES,
    Aggregation,
    AnyKnobs,
    AnyManifest,
    Hyperparameters,
    Manifest,
    OptimizerInfo,
    ParameterInfo,
)
from foreprop.core.slicing import Packs, plan_packs
from foreprop.core.wire import MAX_PAYLOAD_BYTES
from foreprop.engine.memory import DirectMemory, Memory
from foreprop.engine.world import World
from foreprop.errors import ConfigError
from foreprop.params.modelhooks import ModelBuffers, pack, packed_bytes, unpack_into
from foreprop.params.parameter import Parameter, ParameterArrival
from foreprop.version import __version__

if TYPE_CHECKING:  # what a training loads that uses it
    from foreprop.core.norm import SquareSum
    from foreprop.engine.gpumemory import Stager
    from foreprop.engine.trace import TraceRecorder
    from foreprop.params.loss_scale import LossScale
    from foreprop.params.stalereaders import StaleReaders


class Engine(Protocol):
    """One rank's part in the synchronisation of parameters, by the engine's number and step."""

    lends: bool
    """Whether gradients are read, where they are, until their averages are here."""

    def push(self, parameter: int, step: int, *, flags: int = 0, with_value: bool = False) -> None:
        """A parameter's gradient may be taken, or there is none in this step. Any thread."""

    @property
    def is_ahead(self) -> bool:
        """Whether averages come so late that room for them need not be kept until then."""

    def is_complete(self, parameter: int) -> bool: ...
    def wait(self, parameter: int, step: int) -> None:
        """Block until the parameter's update is in; raises what went wrong meanwhile."""

    # Rank 0's bytes for whoever asks, and blocks until they are there.
    def publish_blob(self, which: int, step: int, data: bytes) -> None: ...
    def fetch_blob(self, which: int, step: int) -> memoryview: ...


class SessionState(Protocol):
    """What parameters ask of their session."""

    world: World
    infos: Sequence[ParameterInfo]  # what the parameters were at `parallelize`, by number
    completed: int  # steps that `optimizer.step()` has ended
    every_parameter: bool  # each step needs word of each, also of one without gradients
    just_frozen: frozenset[int]  # since the last step; the others still wait for their gradients
    leaves_rows: bool  # nobody wants all rows of a table now
    reduces_by_kind: bool  # other things are made of sparse gradients than of dense ones
    keeps_averages: bool  # as they land, and gradients as they leave: others may need them
    note_use: Callable[[int], None] | None  # called at each use that waits
    stale_readers: StaleReaders | None  # with ``check_stale``
    fixed_passes: int | None  # backward passes per step as configured; None: to be learned

    @property
    def eager(self) -> bool:
        """Whether gradients are pushed during the backward pass, not only at step()."""

    def engine_of(self, parameter: int) -> tuple[Engine, int]:
        """Who synchronises it, and its number there."""

    def memory_of(self, parameter: torch.Tensor) -> Memory:
        """Where the parameter's bytes are for the engine."""

    def check_layout(self, parameter: int, layout: torch.layout) -> None:
        """Raise `ConfigError` if a gradient of this layout cannot be taken."""

    # A gradient has been computed; the step's first push is about to leave; somebody reads or edits
    # gradients that are this rank's own, so that all are to be averaged.
    def gradient_ready(self, parameter: Parameter) -> None: ...
    def begin_pushing(self) -> None: ...
    def gradients_read(self) -> None: ...

    # An operation with a watched parameter begins, and returns: whether it was its first use.
    def first_use_begins(self, parameter: Parameter) -> None: ...
    def is_first_use(self, parameter: Parameter, result: Any) -> bool: ...

    def aggregated_gradient(self, parameter: int) -> torch.Tensor:
        """What the last update of the parameter was made with, flat, from who made it."""

    def square_sums(self, round_: int) -> Sequence[SquareSum]:
        """Sums of squares of a round's averages, by parameter; blocks until they are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A session's parameters, in the order of their numbers, and what goes with them."""

    world: World
    config: Config
    optimizer: torch.optim.Optimizer
    parameters: Sequence[torch.nn.Parameter]
    infos: Sequence[ParameterInfo]
    frozen: Sequence[torch.nn.Parameter]
    """The model's parameters that the optimizer does not have."""
    buffers: ModelBuffers
    memory: Sequence[ParameterArrival]
    """The memory of the parameters; filled between the backend's construction and its start."""
    make_trace: Callable[[str], TraceRecorder | None]
    """Makes the trace of a session, by its id."""
    part: str = ""
    """The backend's name, if its session has several."""
    loss_scale: LossScale | None = None
    """A scaler's work that servers do."""
    has_scaler: bool = False
    look: Callable[[], None] | None = None
    """Called now and then while a result is waited for; raises why none will come."""
    steps_before: int = 0
    """Steps that the session has made with other backends."""
    by_workers: bool = False
    """Whether the workers update all but tables by rows."""
    send_sum: Callable[[int, SquareSum], None] | None = None
    """Takes `RingEngine`'s part of a global norm that others have a part in."""

    @property
    def aggregation(self) -> Aggregation:
        return msgspec.structs.replace(self.config.aggregation, skip_nonfinite=self.has_scaler)

    def manifest(
        self,
        knobs: AnyKnobs,
        *,
        session: str = "",
        groups: tuple[Hyperparameters, ...] = (),
        workers_per_push: int = 1,
    ) -> AnyManifest[AnyKnobs]:
        """What all ranks must agree on."""
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

    def packs(self, most_elems: int, *, servers: int = 1) -> Packs:
        """Which parameters travel as one; only where workers update.

        These are parameters on the host, of one type, that the optimizer has: of at most
        ``most_elems`` elements together, the length of a slice or of a collective's chunk.
        """
        config = self.config
        if (
            not self.by_workers
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
        return plan_packs(sizes, list(kinds), most_elems, servers=servers)

    @property
    def scale(self) -> float | None:
        return self.loss_scale.factor if self.loss_scale is not None else None


class MemoryFactory:
    """Chooses each parameter's memory; owns the threads that some of it needs.

    ``stays``: on the GPU, for collectives between GPUs.
    """

    def __init__(self, config: Config, *, stays: bool = False) -> None:
        self._pinned_bytes, self._stays = config.pinned_bytes, stays
        self._stagers: dict[torch.device, Stager] = {}

    def memory_of(self, parameter: torch.Tensor) -> Memory:
        if parameter.device.type == "cpu" and parameter.is_contiguous():
            return DirectMemory(parameter)
        from foreprop.engine.gpumemory import staged_memory_of

        pinned_bytes, stays = self._pinned_bytes, self._stays
        return staged_memory_of(parameter, self._stagers, stays=stays, pinned_bytes=pinned_bytes)

    def stop(self) -> None:
        for stager in self._stagers.values():
            stager.stop()
        self._stagers.clear()


class SharedBuffers:
    """Rank 0's buffers of each step, left with a server and fetched by whoever shows them.

    Buffers (BatchNorm's running statistics) are local while training, and rank 0's when it matters:
    in a forward pass in evaluation mode and in ``state_dict()`` every rank shows rank 0's of the
    last completed step. No rank has to do anything at the same time as another.

    ``keeps_own``: every rank's are its own, and rank 0's are not shown. ``have_come``: a newcomer
    has had them together with the values.
    """

    def __init__(self, buffers: ModelBuffers, engine: Engine, world: World) -> None:
        self._buffers = buffers
        self._engine = engine
        self._rank = world.rank
        self.publishes = world.rank == 0 and world.size > 1
        self.keeps_own = self.have_come = False
        self._shown_step = 0

    def forget_shown(self) -> None:
        """Have the next evaluation show rank 0's, for others have been loaded."""
        self._shown_step = -1

    def publish(self, step: int) -> None:
        """Leave rank 0's buffers after ``step``."""
        self._buffers.check_size()
        if tensors := self._buffers.now():
            self._engine.publish_blob(BUFFERS_BLOB, step, pack(tensors))

    def show(self, step: int) -> None:
        """Make the local buffers rank 0's after ``step``."""
        if self._rank != 0 and self._shown_step != step and not self.keeps_own:
            self._buffers.check_size()
            self.fetch(step)
            self._shown_step = step

    def fetch(self, step: int) -> None:
        if not self.have_come and (tensors := self._buffers.now()):
            unpack_into(tensors, self._engine.fetch_blob(BUFFERS_BLOB, step))


def check_frames(manifest: Manifest) -> None:
    """Raise `ConfigError` for what is too large for a frame, with what to do about it."""
    if max(manifest.blob_bytes) > MAX_PAYLOAD_BYTES:
        raise ConfigError(
            f"a frozen parameter (or all buffers) of {max(manifest.blob_bytes)} bytes is larger"
            f" than a frame of {MAX_PAYLOAD_BYTES}"
        )
    for piece in manifest.slices():
        info = manifest.parameters[piece.parameter]
        size_bytes = piece.elems * ITEMSIZE_BYTES[info.dtype]
        if size_bytes > MAX_PAYLOAD_BYTES:
            raise ConfigError(
                f"parameter {info.name} would be sent in a frame of {size_bytes} bytes; a frame"
                f" holds {MAX_PAYLOAD_BYTES}: use granularity='slice'"
            )

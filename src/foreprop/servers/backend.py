"""What differs between parameter servers and collectives, as a session sees it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch

from foreprop.cluster.world import World
from foreprop.config import Config
from foreprop.core.manifest import (
    Aggregation,
    AnyKnobs,
    AnyManifest,
    Hyperparameters,
    OptimizerInfo,
    ParameterInfo,
)
from foreprop.core.norm import SquareSum
from foreprop.hooks.buffers import packed_bytes
from foreprop.observe.trace import TraceRecorder
from foreprop.path.engines import Engine
from foreprop.path.memory import Memory, ParameterMemory
from foreprop.version import __version__

if TYPE_CHECKING:  # what a training loads that uses it
    from foreprop.hooks.buffers import ModelBuffers
    from foreprop.numerics.loss_scale import LossScale
    from foreprop.tables.exchange import RowExchange


class Starting(Protocol):
    """What a backend needs of a parameter at the start."""

    def before_offering(self) -> None: ...
    def receive_initial_value(self) -> None: ...


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
    by_workers: bool = False
    """Nobody but the workers updates, but for tables by rows."""
    send_sum: Callable[[int, SquareSum], None] | None = None
    """For collectives, if other parameters have a part in the global norm: see `RingEngine`."""

    @property
    def aggregation(self) -> Aggregation:
        """What all ranks must do alike with aggregated gradients."""
        skip = self.loss_scale is not None
        return msgspec.structs.replace(self.config.aggregation, skip_nonfinite=skip)

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

    @property
    def scale(self) -> float | None:
        """What the loss is multiplied by, if there is a scaler."""
        return self.loss_scale.factor if self.loss_scale is not None else None


class Backend(Protocol):
    """One architecture's part of a session: connections, engine, the optimizer's state.

    Its construction connects this rank to the others.
    """

    session_id: str

    @property
    def engine(self) -> Engine: ...

    def rows_of(self, parameter: int) -> tuple[RowExchange, int]:
        """Where a row-wise parameter's rows come from, and its number there."""

    def start(self, parameters: Sequence[Starting]) -> None:
        """Make everybody's parameters, buffers and optimizer state rank 0's."""

    def memory_of(self, parameter: torch.Tensor) -> Memory:
        """Where the parameter's bytes are for the engine."""

    def numbers(self) -> Any:
        """The optimizer's numbers (lr, ...) as they are now, to be compared."""

    def announce(self, step: int) -> None:
        """From ``step`` on they count as they are now."""

    def pull_state(self, step: int) -> None:
        """Before ``optimizer.state_dict()``, when the updates of ``step`` are in."""

    def drop_state(self) -> None:
        """After it."""

    def leave_updates(self) -> None:
        """In the first step: from now on the workers update, and have the state."""

    def replace_state(self, step: int) -> None:
        """After ``optimizer.load_state_dict()``: what was loaded counts after ``step``."""

    def pull_gradient(self, parameter: int, step: int) -> torch.Tensor:
        """The aggregated gradient of the parameter's last update, flat."""

    can_measure: bool
    """Whether it tells `square_sums`."""

    def square_sums(self, round_: int) -> Sequence[SquareSum]:
        """By parameter, of the averaged gradients of a round that was measured; blocks."""

    def pull_masters(self, step: int) -> Sequence[torch.Tensor]:
        """The parameters in full after ``step``, which they show as they came over the wire."""

    def pull_averages(self, step: int) -> Sequence[torch.Tensor]:
        """The parameters' moving averages after ``step``, flat or not, by number."""

    def replace_averages(self, step: int, averages: Sequence[torch.Tensor]) -> None:
        """Go on from these; they count after ``step``. Every rank calls it alike."""

    def refuse(self, error: BaseException) -> None:
        """Tell the others that this rank does not take part."""

    def close(self, *, failed: bool) -> None:
        """The training thread's part of the end: nothing is under way, and nothing follows."""

    def see_off(self, *, failed: bool) -> None:
        """After the engine's close: end the processes that this rank has started. Any thread."""

    def forget_in_child(self) -> None:
        """In a forked child: let go of what only the parent may keep alive."""

    def describe(self) -> str:
        """Who synchronises, and how, for the line that is printed at the start."""


def describe_wire_dtype(config: Config) -> str:
    """For the line that is printed at the start, if it is not the parameters' own."""
    return f" wire_dtype={config.wire_dtype}" if config.wire_dtype is not None else ""


def part(engine: Engine, backend: Backend, failure: BaseException | None = None) -> None:
    """Leave the session together with the other ranks, or tell them why not. Any thread."""
    failed = failure is not None or engine.failed
    try:
        engine.close(failure=failure)
    except BaseException:
        failed = True
        raise
    finally:
        backend.see_off(failed=failed)

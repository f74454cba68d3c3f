"""One slice's tensors on a server: its values, their copies, its pushes, and its optimizer.

The optimizer is a real ``torch.optim`` one of a part of a parameter, with numbers that workers
announce.

Where ranks may be in different steps, answers never carry memory that an update may be writing to.
After each update the values are copied, one pass over the slice's bytes, and answers carry the copy
(a *version*). What a rank was sent last is what it has read: by that edits by hand are found, and
gradients compensated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from foreprop.core.manifest import Hyperparameters, Manifest
from foreprop.core.slicing import Slice
from foreprop.core.staleness import compensate
from foreprop.engine.memory import bytes_of
from foreprop.engine.sums import GradientBuffer, extent_of, sum_dtype
from foreprop.engine.tensors import DTYPES
from foreprop.errors import RemoteProtocolError, TrainingLoopError

_MAKE_STATE = ("initial_accumulator_value",)
"""The numbers from which a class makes its state when it is constructed: Adagrad's."""


Step = Callable[[Any], object]
"""A class's ``step()``, without what torch puts around it."""


class PartOptimizer:
    """The optimizer of one slice, made for its first update with the group of that."""

    __slots__ = ("_cls", "_options", "_parameter", "_received", "group", "made")

    def __init__(
        self, cls: type[torch.optim.Optimizer], parameter: torch.nn.Parameter, **options: Any
    ) -> None:
        self._cls = cls
        self._parameter = parameter
        self._options = options
        self._received: dict[str, Any] | None = None  # a state, to be used from the next update
        self.made: torch.optim.Optimizer | None = None
        self.group: Hyperparameters | None = None
        """The group with which ``made`` can step as it is; None if with none."""

    def update(self, step: Step, group: Hyperparameters, name: str) -> None:
        """Update by the parameter's gradient, with the numbers of ``group``.

        Raises `TrainingLoopError` if a state that has been received is not for it; ``name`` is the
        parameter's.
        """
        if self.made is None:
            self.made = begin_optimizer(self._cls, self._parameter, group, **self._options)
        else:
            self.made.param_groups[0].update(optimizer_arguments(group))
        self.group = group
        received, self._received = self._received, None
        if received is not None:
            self.made.state[self._parameter] = received
        try:
            step(self.made)
        except Exception as error:  # whatever torch makes of a state that is another optimizer's
            if received is None:
                raise
            raise TrainingLoopError(
                f"parameter {name}: the optimizer state that rank 0 has loaded does not fit"
                f" {self._cls.__name__} ({type(error).__name__}: {error}): load the state of the"
                " same optimizer"
            ) from error

    @property
    def state(self) -> Mapping[str, Any]:
        """The state as the next update will find it."""
        if self._received is not None:
            return self._received
        return {} if self.made is None else self.made.state.get(self._parameter, {})

    def replace_state(self, state: dict[str, Any]) -> None:
        """Use this state from the next update on; an empty one is that of the start."""
        self._received, self.group = state or None, None
        if self._received is None:
            self.made = None


def one_by_one(cls: type[torch.optim.Optimizer]) -> dict[str, bool]:
    """The options for an optimizer's plain loop; a user's may have no other."""
    is_torchs = cls.__module__.startswith("torch.")
    has_choice = is_torchs or "foreach" in inspect.signature(cls.__init__).parameters
    return {"foreach": False} if has_choice else {}


def begin_optimizer(
    cls: type[torch.optim.Optimizer],
    parameter: torch.nn.Parameter,
    group: Hyperparameters,
    **options: Any,
) -> torch.optim.Optimizer:
    """An optimizer with the state of its start.

    A schedule may set numbers that the class would refuse: ``lr`` below 0, no momentum yet with
    ``nesterov``. So it gets them as it gets all later ones.
    """
    arguments = optimizer_arguments(group)
    first = {name: arguments[name] for name in _MAKE_STATE if name in arguments}
    made = cls([parameter], **first, **options)
    made.param_groups[0].update(arguments)
    return made


def optimizer_arguments(group: Hyperparameters) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, value in group.items():
        key, _, dtype = name.partition(" ")
        if dtype:  # the user gave a tensor, see `hyperparameters`
            arguments[key] = torch.tensor(value, dtype=DTYPES[dtype])
        else:
            arguments[key] = tuple(value) if isinstance(value, list) else value
    return arguments


class SliceTensors:
    """What a server has of one slice, and `slicestore.SliceStore` fills."""

    __slots__ = (
        "average",
        "dtype",
        "extent",
        "gradient_bytes",
        "gradients",
        "holds_values",
        "kept",
        "optimizer",
        "parameter",
        "piece",
        "shown",
        "staged",
        "sum_dtype",
        "total",
        "value_bytes",
        "view",
        "wire_dtype",
    )

    def __init__(
        self,
        piece: Slice,
        parameter_elems: int,
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
        optimizer: type[torch.optim.Optimizer],
        *,
        workers: int,
        holds_values: bool,
    ) -> None:
        """Values are only handed on without ``holds_values``: then the workers have them."""
        self.piece = piece
        self.extent = extent_of(piece, parameter_elems)
        self.holds_values = holds_values
        values = self.extent.zeros(dtype) if holds_values else torch.empty(0, dtype=dtype)
        self.parameter = torch.nn.Parameter(values)
        self.dtype, self.wire_dtype = dtype, wire_dtype
        is_cast = wire_dtype != dtype  # what follows the sum is done in float32, too
        self.sum_dtype = sum_dtype(wire_dtype, workers=2 if is_cast else workers)
        self.gradient_bytes = piece.elems * wire_dtype.itemsize
        self.value_bytes = piece.elems * dtype.itemsize
        self.shown: torch.Tensor | None = None  # the parameter as cast for the last replies
        self.view = bytes_of(self.extent.part(self.parameter))  # what replies carry
        self.gradients: dict[int, GradientBuffer] = {}
        self.kept: GradientBuffer | None = None  # the aggregated gradient, or what replies carry
        self.staged: GradientBuffer | None = None
        self.average: torch.Tensor | None = None  # moving, if there is one
        self.total: torch.Tensor | None = None  # the gradients' sum, if made before the update
        # the plain loop is what one tensor gets by default, without looking into it each time
        self.optimizer = PartOptimizer(optimizer, self.parameter, **one_by_one(optimizer))


class Version(NamedTuple):
    """A slice's values after a step."""

    step: int
    values: torch.Tensor
    """The values with their padding, which nobody writes to."""
    data: memoryview
    """The bytes of the slice's own values."""


class Versions:
    """The versions of one server's slices. Locking as in `SliceStore`; any thread reads answers."""

    def __init__(self, manifest: Manifest) -> None:
        self._strength = manifest.knobs.delay_compensation
        self._setting = "staleness" if manifest.knobs.staleness else "backup_workers"
        self._newest: dict[int, Version] = {}
        self._read: dict[tuple[int, int], torch.Tensor] = {}
        """What each rank was sent last of each slice.

        This is kept of rank 0, whose edits are found by it, and with delay compensation of all.
        """

    def add(self, tensors: SliceTensors, step: int, *, changed: bool) -> None:
        """Add the values after an update, or those that all ranks begin from, rank 0 too."""
        number, newest = tensors.piece.number, self._newest.get(tensors.piece.number)
        if newest is not None and not changed:
            self._newest[number] = newest._replace(step=step)
            return
        values = (tensors.parameter if tensors.shown is None else tensors.shown).detach().clone()
        self._newest[number] = Version(step, values, bytes_of(tensors.extent.part(values)))
        if newest is None:
            self._read[0, number] = values

    def read(self, slice_: int, ranks: Sequence[int]) -> Version:
        """What these ranks are sent now."""
        newest = self._newest[slice_]
        for rank in ranks:
            if self._strength or not rank:
                self._read[rank, slice_] = newest.values
        return newest

    def check_unedited(
        self, tensors: SliceTensors, pushed: torch.Tensor, name: str, step: int
    ) -> None:
        """Check that rank 0's later values are what it has read, to the bit.

        It sends them if somebody has used ``.data``. Raises `TrainingLoopError` if they are not.
        """
        part, values = tensors.extent.part, self._read.get((0, tensors.piece.number))
        if values is None:
            raise RemoteProtocolError(
                f"rank 0 sent values of {name} of step {step} before those of the start"
            )
        read = part(values).to(tensors.parameter.dtype)
        if not torch.equal(part(pushed).view(torch.uint8), read.view(torch.uint8)):
            raise TrainingLoopError(
                f"{name} was changed by hand by rank 0 (step {step}), but with {self._setting}"
                " other ranks may be in another step: change parameters before parallelize(), or"
                " close the session first and begin another"
            )

    def compensated(
        self, tensors: SliceTensors, ranks: Sequence[int], total: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """One rank's gradient as it would be at the values of now; both are times ``scale``."""
        if not self._strength:
            return total
        now = tensors.parameter.detach().to(total.dtype)
        then = self._read[ranks[0], tensors.piece.number].to(total.dtype)
        return compensate(total, now, then, strength=self._strength / scale)

    def refuse_gradient(self, name: str) -> TrainingLoopError:
        """The error for reading an update's gradient, which nobody can."""
        return TrainingLoopError(
            f"the gradient of {name} was read after step(), which is the ranks' average: with"
            f" {self._setting} there is none; read each rank's own in hooks"
            f" (Tensor.register_hook), or leave {self._setting} out"
        )

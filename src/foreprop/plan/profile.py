"""A model as a plan sees it: its arrays' sizes, and the device's time for each layer.

Times were measured array by array, or they are shared out by FLOPs.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from foreprop.core.manifest import ITEMSIZE_BYTES
from foreprop.errors import ConfigError

_FORWARD_SHARE = 1 / 3  # forward : backward = 1 : 2
_CONSTANT_SHARE = 0.1  # of the compute, spread evenly: what a layer costs however small it is
_ELEM_BYTES = 4  # what the lab trains is in float32
_TEXT_WIDTH = 110

_Times = tuple[str, float, float]  # a layer's name, its forward and its backward pass, seconds


class ProfiledArray(msgspec.Struct, frozen=True, omit_defaults=True):
    """One array of a profile file: its shape in elements, and what its use costs.

    That is given as ``forward_flops`` of one forward pass, or as measured times: ``forward_s`` is
    from its first use to the next array's, or to the end of the forward pass; ``backward_s`` from
    when all later arrays have their gradients until it has its own, too. A step touches the share
    ``alpha`` of its rows (Parallax, section 3.2); None: not counted.
    """

    name: str
    shape: tuple[int, ...]
    forward_flops: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    alpha: float | None = None
    dtype: str = "float32"

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def row_elems(self) -> int:
        return -(-math.prod(self.shape[1:]) * ITEMSIZE_BYTES[self.dtype] // _ELEM_BYTES)


class ProfileFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form of a profile file; arrays stand in the order of their first use."""

    model: str
    arrays_in_forward_order: list[ProfiledArray]
    note: str = ""
    before_first_use_s: float = 0.0
    after_last_gradient_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A module's arrays and the device's time for it per step.

    Sizes are in elements of 4 bytes. A layer may have no arrays: it is only computed.
    """

    name: str
    sizes_elems: tuple[int, ...]
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model's arrays; ``name`` is the file's own, ``note`` says where the numbers come from.

    If times were measured, every array has them, and the two fields here hold the rest: what is
    computed in the forward pass before any array is used, and in the backward pass after the
    last gradient.
    """

    name: str
    arrays: tuple[ProfiledArray, ...]
    note: str = ""
    before_first_use_s: float = 0.0
    after_last_gradient_s: float = 0.0

    def slices(self, slice_elems: int) -> int:
        return sum(math.ceil(math.prod(array.shape) / slice_elems) for array in self.arrays)

    @property
    def measured_s(self) -> float | None:
        if self.arrays[0].forward_s is None:
            return None
        return self.forward_s + self.backward_s

    @property
    def forward_s(self) -> float:
        """The measured forward pass; 0 if only FLOPs are known."""
        return self.before_first_use_s + sum(array.forward_s or 0.0 for array in self.arrays)

    @property
    def backward_s(self) -> float:
        """The measured backward pass; 0 if only FLOPs are known."""
        return self.after_last_gradient_s + sum(array.backward_s or 0.0 for array in self.arrays)

    def layers(
        self,
        *,
        scale: int,
        compute_s: float,
        counted: Callable[[ProfiledArray], float] = lambda array: 1.0,
    ) -> list[Layer]:
        """The layers in forward order; every array is divided by ``scale``, rounded up.

        ``counted`` gives the share of an array's elements that counts; with 0 only its times do.

        Measured times are stretched so that a step computes for ``compute_s``. The arrays of an
        operation are a layer, after one without arrays for what is computed before the first.
        Without times the compute is shared out over the modules by FLOPs, with a small constant for
        each, and 1 : 2 between forward and backward pass.
        """
        if self.measured_s is None:
            times = self._times_by_flops(compute_s)
        else:
            times = self._measured_times(compute_s / self.measured_s)
        return [
            Layer(
                name=name.replace(".", "_"),
                sizes_elems=tuple(_scaled_elems(a, scale, counted(a)) for a in own if counted(a)),
                forward_s=forward_s,
                backward_s=backward_s,
            )
            for (name, forward_s, backward_s), own in zip(
                times, self.arrays_by_layer(), strict=True
            )
        ]

    def arrays_by_layer(self) -> list[tuple[ProfiledArray, ...]]:
        """The arrays of each of `layers`."""
        if self.measured_s is None:
            return list(self._modules().values())
        outside = self.before_first_use_s or self.after_last_gradient_s
        return [()] * bool(outside) + [(first, *more) for first, *more in self._timed()]

    def _timed(self) -> list[list[ProfiledArray]]:
        """The arrays by operation: one that has its times, and those of its module without.

        These follow it, or are the first of their module.
        """
        groups: list[list[ProfiledArray]] = []
        for array in self.arrays:
            before = groups[-1] if groups else []
            known = before and _module(array.name) == _module(before[-1].name)
            if known and not (_is_timed(array) and any(map(_is_timed, before))):
                before.append(array)
            else:
                groups.append([array])
        return groups

    def _measured_times(self, factor: float) -> Iterator[_Times]:
        before_s, after_s = self.before_first_use_s, self.after_last_gradient_s
        if before_s or after_s:
            yield "input", before_s * factor, after_s * factor
        for arrays in self._timed():
            array = next(filter(_is_timed, arrays), arrays[0])
            forward_s, backward_s = array.forward_s or 0.0, array.backward_s or 0.0
            yield array.name, forward_s * factor, backward_s * factor

    def _modules(self) -> dict[str, tuple[ProfiledArray, ...]]:
        members: dict[str, tuple[ProfiledArray, ...]] = {}
        for array in self.arrays:
            members[_module(array.name)] = (*members.get(_module(array.name), ()), array)
        return members

    def _times_by_flops(self, compute_s: float) -> Iterator[_Times]:
        members = self._modules()
        flops = {
            name: sum(a.forward_flops or 0.0 for a in arrays) for name, arrays in members.items()
        }
        total = sum(flops.values())
        weights = {
            name: (flops[name] / total if total else 0.0) + _CONSTANT_SHARE / len(members)
            for name in members
        }
        seconds = compute_s / sum(weights.values())
        for name in members:
            layer_s = weights[name] * seconds
            yield name, layer_s * _FORWARD_SHARE, layer_s * (1 - _FORWARD_SHARE)

    def save(self, path: str | Path) -> None:
        """Write a file for `read_profile` and ``--profile``; `ConfigError` if that fails."""
        head = {
            "model": self.name,
            "note": self.note,
            "before_first_use_s": self.before_first_use_s,
            "after_last_gradient_s": self.after_last_gradient_s,
        }
        arrays = b",\n".join(map(msgspec.json.encode, self.arrays))
        start = msgspec.json.encode(head).removesuffix(b"}")
        try:
            Path(path).write_bytes(start + b', "arrays_in_forward_order": [\n' + arrays + b"\n]}\n")
        except OSError as error:
            raise ConfigError(
                f"path is {path}, which cannot be written: {error.strerror}"
            ) from error

    def table(self) -> Table:
        """A row for each array, in forward order, and the totals."""
        shown = Table(title=self.name, caption=self.note or None, show_footer=True)
        size_bytes = sum(_size_bytes(array) for array in self.arrays)
        shown.add_column("array", footer=f"{len(self.arrays)} arrays")
        shown.add_column("shape")
        shown.add_column("MB", footer=f"{size_bytes / 1e6:.2f}", justify="right")
        columns = [column for column in _COLUMNS if any(map(column.value, self.arrays))]
        for column in columns:
            shown.add_column(column.heading, footer=column.total(self), justify="right")
        if self.measured_s is not None:
            outside = (self.before_first_use_s, self.after_last_gradient_s)
            shown.add_row("(no array)", "", "", *(f"{1e3 * seconds:.3f}" for seconds in outside))
        for array in self.arrays:
            shown.add_row(
                array.name,
                " x ".join(map(str, array.shape)),
                f"{_size_bytes(array) / 1e6:.2f}",
                *(column.value(array) for column in columns),
            )
        return shown

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=_TEXT_WIDTH)
        with console.capture() as captured:
            console.print(self.table())
        return captured.get()


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the table; it is left out if no array has a value for it."""

    heading: str
    value: Callable[[ProfiledArray], str]
    total: Callable[[Profile], str] = lambda _: ""


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3f}"


_COLUMNS = (
    _Column(
        "forward ms",
        lambda array: _milliseconds(array.forward_s),
        lambda p: _milliseconds(p.forward_s),
    ),
    _Column(
        "backward ms",
        lambda array: _milliseconds(array.backward_s),
        lambda p: _milliseconds(p.backward_s),
    ),
    _Column(
        "forward MFLOP",
        lambda array: "" if array.forward_flops is None else f"{array.forward_flops / 1e6:.3f}",
    ),
    _Column("rows touched", lambda array: "" if array.alpha is None else f"{array.alpha:.2%}"),
)


def _size_bytes(array: ProfiledArray) -> int:
    return math.prod(array.shape) * ITEMSIZE_BYTES[array.dtype]


def _scaled_elems(array: ProfiledArray, scale: int, share: float) -> int:
    whole_bytes = _size_bytes(array) if share == 1 else math.ceil(share * _size_bytes(array))
    return -(-whole_bytes // (_ELEM_BYTES * scale))


def _is_timed(array: ProfiledArray) -> bool:
    return bool(array.forward_s or array.backward_s)


def _module(array: str) -> str:
    """The module that an array belongs to: ``a.weight`` and ``a.bias``, also ``a_weight``."""
    for separator in (".", "_"):
        head, found, _ = array.rpartition(separator)
        if found and head:
            return head
    return array


def profile_names() -> list[str]:
    folder = resources.files("foreprop.plan.profiles")
    return sorted(
        p.name.removesuffix(".json") for p in folder.iterdir() if p.name.endswith(".json")
    )


def load_profile(model: str) -> Profile:
    """The profile of a model that comes with the package; `ConfigError` names all of these."""
    if model not in profile_names():
        raise ConfigError(f"model is {model!r}; there are {', '.join(profile_names())}")
    return _decode(resources.files("foreprop.plan.profiles").joinpath(f"{model}.json").read_bytes())


def read_profile(path: Path) -> Profile:
    """The profile in a file; `ConfigError` says what is wrong with it."""
    try:
        return _decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"profile is {path}, which cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"profile is {path}, which is not a profile: {error}") from error


def _decode(data: bytes) -> Profile:
    file = msgspec.json.decode(data, type=ProfileFile)
    arrays = file.arrays_in_forward_order
    if not arrays:
        raise msgspec.ValidationError("arrays_in_forward_order is empty")
    for array in arrays:
        _check(array)
    for name in ("before_first_use_s", "after_last_gradient_s"):
        _check_amount(getattr(file, name), name)
    measured = [array.forward_s is not None for array in arrays]
    if any(measured) and not all(measured):
        raise msgspec.ValidationError(
            f"{arrays[measured.index(True)].name} has forward_s and"
            f" {arrays[measured.index(False)].name} has not: all arrays must have times, or none"
        )
    profile = Profile(
        name=file.model,
        arrays=tuple(arrays),
        note=file.note,
        before_first_use_s=file.before_first_use_s,
        after_last_gradient_s=file.after_last_gradient_s,
    )
    if profile.measured_s == 0:
        raise msgspec.ValidationError("forward_s and backward_s are 0 for all arrays")
    return profile


def _check(array: ProfiledArray) -> None:
    if math.prod(array.shape) < 1 or any(extent < 1 for extent in array.shape):
        raise msgspec.ValidationError(f"shape of {array.name} is {list(array.shape)}")
    if array.dtype not in ITEMSIZE_BYTES:
        raise msgspec.ValidationError(
            f"dtype of {array.name} is {array.dtype!r}; it must be one of {sorted(ITEMSIZE_BYTES)}"
        )
    if (array.forward_s is None) != (array.backward_s is None):
        raise msgspec.ValidationError(
            f"{array.name} has only one of forward_s and backward_s; give both or none"
        )
    if array.forward_flops is None and array.forward_s is None:
        raise msgspec.ValidationError(
            f"{array.name} has neither forward_flops nor forward_s and backward_s"
        )
    for name in ("forward_flops", "forward_s", "backward_s"):
        _check_amount(getattr(array, name) or 0.0, f"{name} of {array.name}")
    if array.alpha is not None and not 0 <= array.alpha <= 1:
        raise msgspec.ValidationError(
            f"alpha of {array.name} is {array.alpha}; it is a share, from 0 to 1"
        )
    if array.alpha is not None and not array.shape:
        raise msgspec.ValidationError(f"alpha of {array.name} is given, but it has no rows")


def _check_amount(value: float, what: str) -> None:
    if value < 0:
        raise msgspec.ValidationError(f"{what} is {value}; it must not be negative")

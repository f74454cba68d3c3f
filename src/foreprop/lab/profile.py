"""A model as the lab sees it: its arrays' sizes, and the device's time for each layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import msgspec

from foreprop.errors import ConfigError

_FORWARD_SHARE = 1 / 3  # forward : backward = 1 : 2
_CONSTANT_SHARE = 0.1  # of the compute, spread evenly: what a layer costs however small it is


class ProfiledArray(msgspec.Struct, frozen=True):
    """One array of a profile file: shape in elements, FLOPs of its use in one forward pass."""

    name: str
    shape: tuple[int, ...]
    forward_flops: float


class ProfileFile(msgspec.Struct, frozen=True):
    """The form of a profile file; arrays stand in the order of their first use."""

    model: str
    arrays_in_forward_order: list[ProfiledArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A module's arrays (elements of each) and the device's time for it per step."""

    name: str
    sizes_elems: tuple[int, ...]
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model's arrays; ``name`` is the file's own."""

    name: str
    arrays: tuple[ProfiledArray, ...]

    def layers(self, *, scale: int, compute_s: float) -> list[Layer]:
        """Layers in forward order; every array divided by ``scale``, rounded up.

        A step's compute is shared out by FLOPs, with a small constant per layer, and 1 : 2
        between forward and backward pass.
        """
        members: dict[str, list[ProfiledArray]] = {}
        for array in self.arrays:
            members.setdefault(_module(array.name), []).append(array)
        flops = {name: sum(a.forward_flops for a in arrays) for name, arrays in members.items()}
        total = sum(flops.values())
        weights = {
            name: (flops[name] / total if total else 0.0) + _CONSTANT_SHARE / len(members)
            for name in members
        }
        seconds = compute_s / sum(weights.values())
        return [
            Layer(
                name=name.replace(".", "_"),
                sizes_elems=tuple(-(-math.prod(array.shape) // scale) for array in arrays),
                forward_s=weights[name] * seconds * _FORWARD_SHARE,
                backward_s=weights[name] * seconds * (1 - _FORWARD_SHARE),
            )
            for name, arrays in members.items()
        ]


def _module(array: str) -> str:
    """The module that an array belongs to: ``a.weight`` and ``a.bias``, also ``a_weight``."""
    for separator in (".", "_"):
        head, found, _ = array.rpartition(separator)
        if found and head:
            return head
    return array


def profile_names() -> list[str]:
    """The models that come with the package."""
    folder = resources.files("foreprop.profiles")
    return sorted(
        p.name.removesuffix(".json") for p in folder.iterdir() if p.name.endswith(".json")
    )


def load_profile(model: str) -> Profile:
    """A profile that comes with the package; `ConfigError` names those that there are."""
    if model not in profile_names():
        raise ConfigError(f"model is {model!r}; there are {', '.join(profile_names())}")
    return _decode(resources.files("foreprop.profiles").joinpath(f"{model}.json").read_bytes())


def read_profile(path: Path) -> Profile:
    """A profile from a file of the same form; `ConfigError` says what is wrong with it."""
    try:
        return _decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"profile is {path}, which cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"profile is {path}, which is not a profile: {error}") from error


def _decode(data: bytes) -> Profile:
    file = msgspec.json.decode(data, type=ProfileFile)
    if not file.arrays_in_forward_order:
        raise msgspec.ValidationError("arrays_in_forward_order is empty")
    for array in file.arrays_in_forward_order:
        if math.prod(array.shape) < 1 or any(extent < 1 for extent in array.shape):
            raise msgspec.ValidationError(f"shape of {array.name} is {list(array.shape)}")
        if not array.forward_flops >= 0:
            raise msgspec.ValidationError(f"forward_flops of {array.name} is negative")
    return Profile(name=file.model, arrays=tuple(file.arrays_in_forward_order))

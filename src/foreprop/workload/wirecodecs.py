"""Which codec each array of a profile goes by, as `core.codec.choices_of` reads it; for model and
simulator.

DGC leaves biases and norms, arrays of one dimension, exact itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from foreprop.core.codec import (
    NONE,
    Choice,
    choices_of,
    choices_text,
    codec_of,
    matches,
    pattern_of,
    takes,
)
from foreprop.core.codecfacts import KnownCodec, allowed_by, codec_named
from foreprop.core.justenough import Need
from foreprop.errors import ConfigError
from foreprop.workload.profile import Layer, Profile, ProfiledArray

_LARGE_ELEMS = 1_000_000
"""No bias has so many, nor a norm."""
HOOKS = "fp16, powersgd:RANK"
"""Of torch's DistributedDataParallel, what runs over gloo; its bf16 hook needs NCCL."""


def powersgd_rank(text: str | None) -> int | None:
    """Of ``powersgd:2``; None of ``fp16`` and none. Raises `ConfigError` for other hooks."""
    if text is None or text == "fp16":
        return None
    name, _, rank = text.partition(":")
    if name != "powersgd" or not rank.isdecimal() or not int(rank):
        raise ConfigError(f"systems has ddp+{text}; after ddp+ comes one of torch's hooks: {HOOKS}")
    return int(rank)


def check_codecs(profile: Profile, text: str | None) -> None:
    """Raises `ConfigError` for codecs that there are not, and names that no array has."""
    if text is not None and allowed_by(text) is None:
        codecs_by_array(profile, choices_of(text))


def codecs_by_array(profile: Profile, choices: Sequence[Choice]) -> list[KnownCodec]:
    """Of `arrays_in_order`. Raises `ConfigError` for a pattern that no name matches, or a codec."""
    arrays = arrays_in_order(profile)
    for pattern, codec in choices:
        codec_named(codec)
        if not any(matches(array.name, pattern) for array in arrays):
            raise ConfigError(
                f"compression has the pattern {pattern!r}, which no array of {profile.name}"
                f" matches; there are {_some_names(arrays)}"
            )
    chosen = [(codec_of(array.name, choices), array.shape) for array in arrays]
    return [codec_named(codec if takes(codec, shape) else NONE) for codec, shape in chosen]


def patterns_text(names: Sequence[str], codecs: Sequence[KnownCodec]) -> str:
    """As `choices_of` reads it: the names of what does not go as it is."""
    pairs = zip(names, codecs, strict=True)
    return choices_text(
        (pattern_of(name), codec.name) for name, codec in pairs if codec.name != NONE
    )


def session_compression(text: str, profile: Profile, names: Sequence[str]) -> str | dict[str, str]:
    """The setting of a session whose parameters, in the order of the arrays, have these names."""
    if allowed_by(text) is not None:
        return text
    choices = choices_of(text)
    if {pattern for pattern, _ in choices} == {"*"}:
        return codec_named(choices[0][1]).session_name
    pairs = zip(names, codecs_by_array(profile, choices), strict=True)
    return {pattern_of(name): codec.session_name for name, codec in pairs}


def is_flat(array: ProfiledArray) -> bool:
    """A bias, or what a norm multiplies with; not all of a network's weights in one vector."""
    return len(array.shape) < 2 and math.prod(array.shape) < _LARGE_ELEMS


def _some_names(arrays: Sequence[ProfiledArray]) -> str:
    names = [array.name for array in arrays[:3]]
    return ", ".join(names) + ", ..." * (len(arrays) > 3)


def arrays_in_order(profile: Profile) -> list[ProfiledArray]:
    """As the layers have them."""
    return [array for arrays in profile.arrays_by_layer() for array in arrays]


def needs_of(
    layers: Sequence[Layer],
    arrays: Sequence[ProfiledArray],
    lossless: Mapping[str, float] = MappingProxyType({}),
) -> list[Need]:
    """When each of the layers' arrays is ready and needed; biases and norms stay exact.

    ``lossless``: by name, what share of the bytes that codec has left.
    """
    backward_s = sum(layer.backward_s for layer in layers)
    forward_s, ready_s = 0.0, backward_s
    known = iter([(is_flat(array), lossless.get(array.name)) for array in arrays])
    needs = []
    for layer in layers:
        needed_s = backward_s + forward_s
        needs += [Need(size, ready_s, needed_s, *next(known)) for size in layer.sizes_elems]
        forward_s += layer.forward_s
        ready_s -= layer.backward_s
    return needs

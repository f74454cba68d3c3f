"""Which codec each array of a profile goes by, as `core.codec.choices_of` reads it; for model and
simulator.

DGC leaves biases and norms, arrays of one dimension, exact itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from foreprop.core.codec import (
    NONE,
    Choice,
    choices_text,
    codec_of,
    matches,
    pattern_of,
    takes,
)
from foreprop.core.codecfacts import KnownCodec, codec_named
from foreprop.core.justenough import Need
from foreprop.errors import ConfigError
from foreprop.workload.profile import Layer, Profile, ProfiledArray


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


def is_flat(array: ProfiledArray) -> bool:
    """A bias, or what a norm multiplies with."""
    return len(array.shape) < 2


def _some_names(arrays: Sequence[ProfiledArray]) -> str:
    names = [array.name for array in arrays[:3]]
    return ", ".join(names) + ", ..." * (len(arrays) > 3)


def arrays_in_order(profile: Profile) -> list[ProfiledArray]:
    """As the layers have them."""
    return [array for arrays in profile.arrays_by_layer() for array in arrays]


def needs_of(layers: Sequence[Layer], arrays: Sequence[ProfiledArray]) -> list[Need]:
    """When each of the layers' arrays is ready and needed; biases and norms stay exact."""
    backward_s = sum(layer.backward_s for layer in layers)
    forward_s, ready_s = 0.0, backward_s
    flat = map(is_flat, arrays)
    needs = []
    for layer in layers:
        needed_s = backward_s + forward_s
        needs += [Need(size, ready_s, needed_s, next(flat)) for size in layer.sizes_elems]
        forward_s += layer.forward_s
        ready_s -= layer.backward_s
    return needs

"""Which codec each array of a profile goes by, as somebody writes it; for model and simulator.

``int8`` is for all, ``*.weight=int8,head.*=none`` by patterns of names, the first that matches.
What matches none goes as it is. DGC leaves biases and norms, arrays of one dimension, exact itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType

from foreprop.core.codec import AUTO, NONE, choices_text, takes
from foreprop.core.codecfacts import KnownCodec, allowed_by, codec_named
from foreprop.core.justenough import Need
from foreprop.errors import ConfigError
from foreprop.workload.profile import Layer, Profile, ProfiledArray

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
        codecs_by_array(profile, parse_compression(text))


def parse_compression(text: str) -> dict[str, str]:
    """Codecs by pattern; not of ``auto``. Raises `ConfigError`."""
    patterns: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        pattern, equals, name = part.rpartition("=")
        if equals and not pattern:
            raise ConfigError(f"compression has {part!r}; in front of = stands a pattern of names")
        patterns.setdefault(pattern if equals else "*", name)
        codec_named(name)
    if not patterns:
        raise ConfigError(
            f"compression is {text!r}; it must be a codec, {AUTO}, or PATTERN=CODEC separated by"
            " commas"
        )
    return patterns


def codecs_by_array(profile: Profile, patterns: Mapping[str, str]) -> list[KnownCodec]:
    """Of `arrays_in_order`. Raises `ConfigError` for a pattern that no name matches."""
    arrays = arrays_in_order(profile)
    for pattern in patterns:
        if not any(_matches(array, pattern) for array in arrays):
            raise ConfigError(
                f"compression has the pattern {pattern!r}, which no array of {profile.name}"
                f" matches; there are {_some_names(arrays)}"
            )
    return [codec_named(_codec_of(array, patterns)) for array in arrays]


def _matches(array: ProfiledArray, pattern: str) -> bool:
    return array.name == pattern or fnmatchcase(array.name, pattern)


def _codec_of(array: ProfiledArray, patterns: Mapping[str, str]) -> str:
    for pattern, name in patterns.items():
        if _matches(array, pattern):
            return name if takes(name, array.shape) else NONE
    return NONE


def patterns_text(names: Sequence[str], codecs: Sequence[KnownCodec]) -> str:
    """As `parse_compression` reads it: the names of what does not go as it is."""
    pairs = zip(names, codecs, strict=True)
    return choices_text((name, codec.name) for name, codec in pairs if codec.name != NONE)


def session_compression(text: str, profile: Profile, names: Sequence[str]) -> str | dict[str, str]:
    """The setting of a session whose parameters, in the order of the arrays, have these names."""
    if allowed_by(text) is not None:
        return text
    patterns = parse_compression(text)
    if set(patterns) == {"*"}:
        return codec_named(patterns["*"]).session_name
    pairs = zip(names, codecs_by_array(profile, patterns), strict=True)
    return {name: codec.session_name for name, codec in pairs}


def is_flat(array: ProfiledArray) -> bool:
    """A bias, or what a norm multiplies with."""
    return len(array.shape) < 2


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

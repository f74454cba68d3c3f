"""Which codec each array of a profile goes by, as `core.codec.choices_of` reads it.

DGC leaves biases and norms, arrays of one dimension, exact itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from foreprop.core.codec import (
    NONE,
    Choice,
    choices_of,
    choices_text,
    codec_of,
    kind_of,
    matches,
    pattern_of,
    takes,
)
from foreprop.core.codecfacts import CODEC_NAMES, KnownCodec, allowed_by, codec_named
from foreprop.errors import ConfigError
from foreprop.plan.compressing import arrays_in_order
from foreprop.plan.profile import Profile

HOOKS = "fp16, powersgd:RANK"
"""The hooks of torch's DistributedDataParallel that run over gloo; its bf16 hook needs NCCL."""


def powersgd_rank(text: str | None) -> int | None:
    """The rank in ``powersgd:2``; None for ``fp16`` and none; `ConfigError` for other hooks."""
    if text is None or text == "fp16":
        return None
    name, _, rank = text.partition(":")
    if name != "powersgd" or not rank.isdecimal() or not int(rank):
        raise ConfigError(f"systems has ddp+{text}; after ddp+ comes one of torch's hooks: {HOOKS}")
    return int(rank)


def check_codecs(profile: Profile, text: str | None) -> None:
    """Raise `ConfigError` for codecs that do not exist, and names that no array has."""
    if text is not None and allowed_by(text) is None:
        codecs_by_array(profile, choices_of(text))


def codecs_by_array(profile: Profile, choices: Sequence[Choice]) -> list[KnownCodec]:
    """The codecs of `arrays_in_order`; raises `ConfigError` for a pattern that no name matches."""
    arrays = arrays_in_order(profile)
    for pattern, codec in choices:
        _check_known(codec)
        if not any(matches(array.name, pattern) for array in arrays):
            some = ", ".join(array.name for array in arrays[:3]) + ", ..." * (len(arrays) > 3)
            raise ConfigError(
                f"compression has the pattern {pattern!r}, which no array of {profile.name}"
                f" matches; there are {some}"
            )
    chosen = [(codec_of(array.name, choices), array.shape) for array in arrays]
    return [codec_named(codec if takes(codec, shape) else NONE) for codec, shape in chosen]


def _check_known(codec: str) -> None:
    # raises `ConfigError` for a codec that is neither ours nor an installed package's
    if kind_of(codec) not in CODEC_NAMES:  # torch is loaded for it
        from foreprop.features.compression.codecs import is_there

        is_there(kind_of(codec))
    codec_named(codec)


def patterns_text(names: Sequence[str], codecs: Sequence[KnownCodec]) -> str:
    """The arrays that have a codec, and which, as `choices_of` reads it."""
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

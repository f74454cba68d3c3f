"""Codecs by name; a codec's module is imported when somebody uses it."""

from __future__ import annotations

import importlib
from typing import cast

import torch

from foreprop.config.environment import did_you_mean
from foreprop.core.codec import Codec
from foreprop.errors import ConfigError

TensorCodec = Codec[torch.Tensor]

_CODECS = {
    "lossless": "lossless:Lossless",
}
"""By name: module of this folder, and class."""


def names() -> list[str]:
    """All codecs, without the parameters that some take."""
    return sorted(_CODECS)


def make(name: str) -> TensorCodec:
    """The codec of this name; raises `ConfigError` for one that is not there, or not installed."""
    known = _CODECS.get(name)
    if known is None:
        raise ConfigError(
            f"compression: no codec is called {name!r}; there are {names()}"
            + did_you_mean(name, names())
        )
    module, _, class_ = known.partition(":")
    found = importlib.import_module(f"foreprop.compression.{module}")
    return cast("TensorCodec", getattr(found, class_)())


def make_for_replies(name: str, world_size: int) -> TensorCodec:
    """What answers pushes in codec ``name`` on so many ranks: always with an empty state."""
    return make(name)

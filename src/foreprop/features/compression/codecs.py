"""Codecs by name, foreprop's and the user's.

A name is a kind, and for some kinds a colon and a parameter. Whoever asks for a name that is not
there gets a `ConfigError`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from foreprop.config.otherwords import advice_on_value
from foreprop.config.plugins import CODECS, HOW, maybe_installed
from foreprop.core.codec import AUTO, NONE, Codec, kind_of
from foreprop.core.codecfacts import LAB_CODECS, declare
from foreprop.errors import INSTALL_LAB, ConfigError
from foreprop.features.compression.dgc import DgcTraining, dgc, dgc_replies
from foreprop.features.compression.kernels import ErrorFeedback
from foreprop.features.compression.lossless import Lossless
from foreprop.features.compression.quantisers import bf16, fp16, int2, int4, int8
from foreprop.features.compression.registered import OwnCodec, Traits, make_registered
from foreprop.features.compression.sparse import SentShare, TopK, parse_share, random_k, top_k

TensorCodec = Codec[torch.Tensor]

_CODECS: Mapping[str, Callable[..., TensorCodec]] = {
    "bf16": bf16,
    "dgc": dgc,
    "fp16": fp16,
    "int2": int2,
    "int4": int4,
    "int8": int8,
    "lossless": Lossless,
    "randomk": random_k,
    "topk": top_k,
}
_registered: dict[str, type[OwnCodec]] = {}
# What may follow a name and a colon.
PARAMETERS = {
    "topk": "a share above 0 and at most 1, as in topk:0.01",
    "randomk": "a share above 0 and at most 1, as in randomk:0.01",
    "dgc": "a share above 0 and at most 1, and steps of a warm-up's stage, as in dgc:0.001:500",
}


def register_codec(codec: type[OwnCodec]) -> type[OwnCodec]:
    """Have ``compression`` know the user's codec by its ``name``; also as a decorator.

    Raises `ConfigError` for a name that is another one's or cannot be in the setting, and for
    methods that are missing. Each process has to call it: see docs/extending.md.
    """
    name = getattr(codec, "name", None)
    missing = [each for each in _METHODS if not callable(getattr(codec, each, None))]
    if missing or not isinstance(codec, type):
        raise ConfigError(f"codec {codec!r} must be a class with {', '.join(_METHODS)}")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in (NONE, AUTO):
        raise ConfigError(f"{codec.__name__}.name is {name!r}; it must be a word of letters")
    known = _registered.get(name)
    theirs = (getattr(known, "__module__", ""), getattr(known, "__qualname__", ""))
    # the same class may come again, of a module that was loaded twice
    same = known is None or theirs == (codec.__module__, codec.__qualname__)
    if name in _CODECS or not same:
        raise ConfigError(f"{codec.__name__}.name is {name!r}, which another codec is called")
    _registered[name] = codec
    declare(name, lambda whole: make_registered(codec, whole).known())
    return codec


_METHODS = ("most_bytes", "encode", "decode")
_NAME = re.compile(r"[A-Za-z0-9][\w-]*", re.ASCII)


def names() -> list[str]:
    """All kinds of codecs, without the parameters that some take."""
    return sorted([*_CODECS, *_registered])


def is_there(kind: str) -> bool:
    """Whether there is a codec of this kind; an installed package's is registered then."""
    if kind not in names() and (installed := maybe_installed(CODECS, kind)) is not None:
        register_codec(installed)
    return kind in names()


def traits_of(name: str) -> Traits:
    own = _maybe_registered(name)
    return Traits() if own is None else make_registered(own, name).traits


def _maybe_registered(name: str) -> type[OwnCodec] | None:
    """The user's codec of this name; None if it is one of foreprop's."""
    kind = kind_of(name)
    if is_there(kind):
        return _registered.get(kind)
    if kind in LAB_CODECS:
        raise ConfigError(
            f"compression: {kind!r} is a codec of foreprop-lab, which is not installed:"
            f" {INSTALL_LAB}"
        )
    hint = advice_on_value("compression", kind, [*names(), *LAB_CODECS])
    raise ConfigError(
        f"compression: no codec is called {name!r}; there are {[NONE, *names()]}"
        + (hint or f". If it is yours, {HOW}")
    )


def make(name: str, training: DgcTraining | None = None) -> TensorCodec:
    """The codec of this name, for what workers push: ``int8``, ``topk:0.01``.

    ``training`` is what `foreprop.features.compression.dgc.Dgc` must know of the training; by
    default there is neither momentum nor warm-up.
    """
    kind, colon, parameter = name.partition(":")
    if (known := _maybe_registered(name)) is not None:
        own = make_registered(known, name)
        return ErrorFeedback(own) if own.traits.keeps_error else own
    if colon and kind not in PARAMETERS:
        raise ConfigError(f"compression is {name!r}; {kind} takes no parameter: say {kind!r}")
    given: dict[str, Any] = {"training": training} if kind == "dgc" else {}
    try:
        return _CODECS[kind](*[parameter] * bool(colon), **given)
    except ConfigError:
        raise  # a package that is not installed
    except ValueError as error:
        raise ConfigError(f"compression is {name!r}; {kind} takes {PARAMETERS[kind]}") from error


def make_for_replies(name: str, pushes: int, training: DgcTraining | None = None) -> TensorCodec:
    """The codec that answers pushes in codec ``name`` with differences of values; without state.

    What a reply leaves out is in the next difference, so its codec has to bring the image nearer
    each time. One that does not says which other one takes its place. Workers', or nodes', largest
    elements are different ones: the union of all ``pushes`` to a slice has so many times as many.
    """
    kind, _, parameter = name.partition(":")
    make(name, training)  # to check its parameter
    if kind == "topk":
        return ErrorFeedback(TopK(name, SentShare(parse_share(parameter or "0.01"), times=pushes)))
    if kind == "dgc":
        return dgc_replies(parameter or "0.001", pushes, training)
    return make(traits_of(name).answer or name)


def maybe_for_averages(name: str, pushes: int) -> TensorCodec | None:
    """The codec that answers pushes in codec ``name`` with averages; its state is what it leaves
    out. None for ``dgc``, whose workers push no gradients: averages of others cross as they are.
    """
    if kind_of(name) == "dgc":
        return None
    if traits_of(name).votes:  # a majority has three values, which come back as they are
        return int2().codec
    return make_for_replies(name, pushes)

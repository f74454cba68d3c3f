"""Codecs by name, foreprop's and the user's; a module is imported when somebody uses it."""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any, cast

import torch

from foreprop.config.environment import did_you_mean
from foreprop.config.otherwords import answer_to_value
from foreprop.config.plugins import CODECS, HOW, maybe_installed
from foreprop.core.codec import AUTO, NONE, Codec, kind_of
from foreprop.errors import ConfigError

if TYPE_CHECKING:
    from foreprop.compression.dgc import DgcTraining
    from foreprop.compression.registered import OwnCodec

TensorCodec = Codec[torch.Tensor]

_CODECS: dict[str, str | type[OwnCodec]] = {
    "1bit": "onebit:one_bit",
    "bf16": "sixteenbit:bf16",
    "dgc": "dgc:dgc",
    "efsign": "onebit:ef_sign",
    "fp16": "sixteenbit:fp16",
    "int2": "blockwise:int2",
    "int4": "blockwise:int4",
    "int8": "blockwise:int8",
    "lossless": "lossless:Lossless",
    "qsgd": "stochastic:qsgd",
    "randomk": "sparse:random_k",
    "sign": "onebit:sign",
    "terngrad": "stochastic:terngrad",
    "topk": "sparse:top_k",
}
"""By name: module of this folder, and class or function; or a class that was registered."""
PARAMETERS = {
    "qsgd": "levels from 1 to 127, as in qsgd:7",
    "topk": "a share above 0 and at most 1, as in topk:0.01",
    "randomk": "a share above 0 and at most 1, as in randomk:0.01",
    "dgc": "a share above 0 and at most 1, and steps of a warm-up's stage, as in dgc:0.001:500",
}
"""What may follow a name and a colon."""
_WANT_TRAINING = {"dgc"}


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
    if (known := _CODECS.get(name)) is not None and not _is_again(known, codec):
        raise ConfigError(f"{codec.__name__}.name is {name!r}, which another codec is called")
    _CODECS[name] = codec
    return codec


def _is_again(known: object, codec: type) -> bool:
    """Whether it is the same class, be it of a module that was loaded twice."""
    theirs = (getattr(known, "__module__", ""), getattr(known, "__qualname__", ""))
    return theirs == (codec.__module__, codec.__qualname__)


_METHODS = ("most_bytes", "encode", "decode")
_NAME = re.compile(r"[A-Za-z][\w-]*", re.ASCII)


def names() -> list[str]:
    """All that ``compression`` may be but `NONE`, without the parameters that some take."""
    return sorted(_CODECS)


def make(name: str, training: DgcTraining | None = None) -> TensorCodec:
    """The codec of this name, for what workers push: ``int8``, ``topk:0.01``.

    ``training`` is what `foreprop.compression.dgc.Dgc` must know of it; by default neither
    momentum nor warm-up. Raises `ConfigError` for a name or a parameter that is not there.
    """
    kind, colon, parameter = name.partition(":")
    known = _CODECS.get(kind)
    if known is None and (installed := maybe_installed(CODECS, kind)) is not None:
        known = register_codec(installed)
    if known is None:
        advice = answer_to_value("compression", kind) or did_you_mean(kind, names())
        raise ConfigError(
            f"compression: no codec is called {name!r}; there are {[NONE, *names()]}"
            + (advice or f". If it is yours, {HOW}")
        )
    if not isinstance(known, str):
        from foreprop.compression.errorfeedback import ErrorFeedback
        from foreprop.compression.registered import make_registered

        return ErrorFeedback(make_registered(known, name))
    if colon and kind not in PARAMETERS:
        raise ConfigError(f"compression is {name!r}; {kind} takes no parameter: say {kind!r}")
    module, _, factory = known.partition(":")
    found = importlib.import_module(f"foreprop.compression.{module}")
    given: dict[str, Any] = {"training": training} if kind in _WANT_TRAINING else {}
    try:
        return cast("TensorCodec", getattr(found, factory)(*[parameter] * bool(colon), **given))
    except ConfigError:
        raise  # a package that is not installed
    except ValueError as error:
        raise ConfigError(f"compression is {name!r}; {kind} takes {PARAMETERS[kind]}") from error


def make_for_replies(name: str, pushes: int, training: DgcTraining | None = None) -> TensorCodec:
    """What answers pushes in codec ``name`` with differences of values: with an empty state.

    What a reply leaves out is in the next difference, so its codec has to bring the image nearer
    each time. Those of ``sign``, TernGrad and coarse QSGD need not, so others take their place.
    Workers', or nodes', largest elements are different ones: the union of all ``pushes`` to a slice
    has so many times as many.
    """
    kind, _, parameter = name.partition(":")
    make(name, training)  # its parameter is checked
    if kind == "topk":
        from foreprop.compression.errorfeedback import ErrorFeedback
        from foreprop.compression.sparse import SentShare, TopK, parse_share

        return ErrorFeedback(TopK(name, SentShare(parse_share(parameter or "0.01"), times=pushes)))
    if kind == "dgc":
        from foreprop.compression.dgc import dgc_replies

        return dgc_replies(parameter or "0.001", pushes, training)
    coarse = kind == "qsgd" and parameter and int(parameter) <= 7
    others = {"sign": "efsign", "terngrad": "int2", "qsgd": "int4" if coarse else "int8"}
    return make(others.get(kind, name))


def maybe_for_averages(name: str, pushes: int) -> TensorCodec | None:
    """What answers pushes in codec ``name`` with averages; its state is what it leaves out.

    None of ``dgc``, whose workers push no gradients: others' cross as they are.
    """
    kind = kind_of(name)
    if kind == "sign":  # a majority has three values, which come back as they are
        from foreprop.compression.blockwise import int2

        return int2().codec
    return None if kind == "dgc" else make_for_replies(name, pushes)

"""The codecs by name. Each one's module is loaded when it is first made."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from foreprop.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from foreprop.compression.dgc import DgcTraining
    from foreprop.core.codec import Codec

CODECS = {
    "bf16": "foreprop.compression.sixteenbit:bf16",
    "fp16": "foreprop.compression.sixteenbit:fp16",
    "int8": "foreprop.compression.blockwise:int8",
    "int4": "foreprop.compression.blockwise:int4",
    "1bit": "foreprop.compression.onebit:one_bit",
    "sign": "foreprop.compression.onebit:sign",
    "efsign": "foreprop.compression.onebit:ef_sign",
    "terngrad": "foreprop.compression.stochastic:terngrad",
    "qsgd": "foreprop.compression.stochastic:qsgd",
    "topk": "foreprop.compression.sparse:top_k",
    "randomk": "foreprop.compression.sparse:random_k",
    "dgc": "foreprop.compression.dgc:dgc",
}
PARAMETERS = {
    "qsgd": "levels from 1 to 127, as in qsgd:7",
    "topk": "a share above 0 and at most 1, as in topk:0.01",
    "randomk": "a share above 0 and at most 1, as in randomk:0.01",
    "dgc": "a share above 0 and at most 1, as in dgc:0.001",
}
"""What may follow a name and a colon."""
WANT_TRAINING = {"dgc"}


def make(name: str, training: DgcTraining | None = None) -> Codec[torch.Tensor]:
    """The codec called ``name``, for what workers push: ``int8``, ``topk:0.01``.

    ``training`` is what `foreprop.compression.dgc.Dgc` must know of it; by default neither
    momentum nor warm-up. Raises `ConfigError` for a name or a parameter that there is not.
    """
    kind, colon, parameter = name.partition(":")
    if kind not in CODECS:
        raise ConfigError(f"compression is {name!r}; there are {', '.join(CODECS)}")
    if colon and kind not in PARAMETERS:
        raise ConfigError(f"compression is {name!r}; {kind} takes no parameter: say {kind!r}")
    module, _, factory = CODECS[kind].partition(":")
    given: dict[str, Any] = {"training": training} if kind in WANT_TRAINING and training else {}
    try:
        codec: Codec[torch.Tensor] = getattr(import_module(module), factory)(
            *[parameter] * bool(colon), **given
        )
    except ValueError as error:
        raise ConfigError(f"compression is {name!r}; {kind} takes {PARAMETERS[kind]}") from error
    return codec


def make_for_replies(
    name: str, world_size: int, training: DgcTraining | None = None
) -> Codec[torch.Tensor]:
    """What answers pushes in codec ``name``: always with an empty state.

    What a reply leaves out is in the next difference, so its codec has to bring the image nearer
    each time. Those of ``sign``, TernGrad and coarse QSGD need not, so others take their place.
    The ranks' largest elements are different ones: their union has ``world_size`` times as many.
    """
    kind, _, parameter = name.partition(":")
    make(name, training)  # its parameter is checked
    if kind == "topk":
        from foreprop.compression.sparse import SentShare, TopK, parse_share

        return TopK(name, SentShare(parse_share(parameter or "0.01"), times=world_size))
    if kind == "dgc":
        from foreprop.compression.dgc import dgc_replies

        return dgc_replies(parameter or "0.001", world_size, training)
    coarse = kind == "qsgd" and parameter and int(parameter) <= 7
    others = {"sign": "efsign", "terngrad": "int4", "qsgd": "int4" if coarse else "int8"}
    return make(others.get(kind, name))


def takes(name: str, shape: Sequence[int]) -> bool:
    """Whether the codec is for a parameter of this shape; others are sent as they are.

    DGC leaves out biases and the weights of normalisations, which have one dimension.
    """
    return not name.startswith("dgc") or len(shape) > 1

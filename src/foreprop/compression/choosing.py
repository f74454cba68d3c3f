"""Which slices are encoded, and how; what a session says about it, and what it cannot do.

All processes decide alike, from the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from foreprop.compression.codecs import (
    TensorCodec,
    make,
    make_for_replies,
    maybe_for_averages,
)
from foreprop.config import Config
from foreprop.core.codec import (
    EXACT,
    NONE,
    Choice,
    choices_text,
    codec_of,
    is_exact,
    kind_of,
    matches,
    takes,
)
from foreprop.core.manifest import Manifest, ParameterInfo
from foreprop.core.slicing import Slice
from foreprop.core.wire import Header, Kind
from foreprop.errors import ConfigError, RemoteProtocolError
from foreprop.path.tensors import DTYPES

if TYPE_CHECKING:
    from foreprop.compression.dgc import DgcTraining


class SliceCodec:
    """How one slice crosses the wire; ``raw_bytes`` is its length as it is.

    What is exactly that long has not been encoded: so an array that does not shrink is sent as it
    is, and so are values to begin from.
    """

    __slots__ = (
        "average_codec",
        "codec",
        "decay",
        "dtype",
        "elems",
        "most_bytes",
        "most_reply_bytes",
        "piece",
        "raw_bytes",
        "reply_codec",
    )

    def __init__(
        self,
        piece: Slice,
        codec: TensorCodec,
        reply_codec: TensorCodec,
        average_codec: TensorCodec | None,
        dtype: torch.dtype,
    ) -> None:
        self.piece = piece
        self.codec = codec
        self.reply_codec = reply_codec
        """Of differences of values, where servers update."""
        self.average_codec = average_codec
        """Where workers update; None: gradients and averages go as they are."""
        self.decay = 0.0
        """Times the values it is added to a gradient, before that is encoded: weight decay."""
        self.dtype = dtype
        self.elems = piece.elems
        self.raw_bytes = piece.elems * dtype.itemsize
        self.most_bytes = self._bound(codec)
        self.most_reply_bytes = max(self._bound(reply_codec), self._bound(average_codec or codec))

    def _bound(self, codec: TensorCodec) -> int:
        """Of what crosses as a code: shorter than the array, or the array would cross."""
        most = self.raw_bytes if codec.exact else codec.most_bytes(self.elems)
        return min(most, self.raw_bytes - 1)

    @property
    def gains(self) -> bool:
        """Whether no code of a gradient is as long as it; of exact codecs that does not matter.

        An answer whose code is no shorter goes as it is.
        """
        return self.codec.exact or self.codec.most_bytes(self.elems) < self.raw_bytes

    def tensor_of(self, data: memoryview) -> torch.Tensor:
        """The slice's raw bytes as what they are, in the same memory."""
        return torch.frombuffer(data, dtype=self.dtype)


def coded_slices(manifest: Manifest, slices: Iterable[Slice]) -> dict[int, SliceCodec]:
    """By number, those that are encoded. A codec whose bound is no gain leaves tiny ones alone."""
    names = [codec_of(info.name, manifest.knobs.compression) for info in manifest.parameters]
    dtypes = [DTYPES[dtype] for dtype in manifest.wire_dtypes()]
    codecs: dict[
        tuple[str, DgcTraining | None], tuple[TensorCodec, TensorCodec, TensorCodec | None]
    ] = {}
    found = {}
    for piece in slices:
        name, info = names[piece.parameter], manifest.parameters[piece.parameter]
        if name == NONE or not takes(name, info.shape):
            continue
        training = _training_of(name, manifest, piece)
        if (name, training) not in codecs:
            pushes = manifest.peers().count
            answers = make_for_replies(name, pushes, training), maybe_for_averages(name, pushes)
            codecs[name, training] = make(name, training), *answers
        coded = SliceCodec(piece, *codecs[name, training], dtypes[piece.parameter])
        if training is not None:
            coded.decay = training.decay
        if coded.gains:
            found[piece.number] = coded
    return found


def _training_of(name: str, manifest: Manifest, piece: Slice) -> DgcTraining | None:
    if kind_of(name) != "dgc":
        return None
    from foreprop.compression.dgctraining import training_of

    return training_of(manifest, piece)


def check_code(header: Header, coded: SliceCodec) -> None:
    """Raises `RemoteProtocolError` for a length that its codec cannot have given."""
    is_push = header.kind == Kind.PUSH
    most = coded.most_bytes if is_push else coded.most_reply_bytes
    if header.payload_bytes > most:
        codec = coded.codec if is_push else coded.reply_codec
        raise RemoteProtocolError(
            f"{Kind(header.kind).name} of slice {header.slice} carries {header.payload_bytes}"
            f" bytes; {codec.name} gives at most {most}, and as it is it has {coded.raw_bytes}"
        )


def lossy_parameters(manifest: Manifest) -> set[int]:
    """The numbers of parameters of which workers do not see all that servers keep."""
    pieces = coded_slices(manifest, manifest.slices()).values()
    return {coded.piece.parameter for coded in pieces if not coded.codec.exact}


def why_not(manifest: Manifest) -> str | None:
    """Why this process cannot take part: a codec that it has not."""
    try:
        check_codecs(manifest.knobs.compression)
    except ConfigError as error:
        return str(error)
    return None


def check_codecs(choices: Iterable[Choice]) -> None:
    """Raises `ConfigError` for codecs that are not there, or not installed."""
    for _, name in choices:
        if name != NONE:
            make(name)


def check_setting(config: Config, manifest: Manifest) -> None:
    """Raises `ConfigError` for what cannot be encoded, with what to do about it."""
    choices = manifest.knobs.compression
    check_choices(choices, manifest.parameters)
    if any(kind_of(codec) == "dgc" for _, codec in choices):
        from foreprop.compression.dgctraining import check_dgc

        check_dgc(config, manifest)


def check_choices(choices: Sequence[Choice], parameters: Sequence[ParameterInfo]) -> None:
    """Raises `ConfigError` for codecs and patterns that are not for these parameters."""
    check_codecs(choices)
    names = [info.name for info in parameters]
    for pattern, _ in choices:
        if not any(matches(name, pattern) for name in names):
            raise ConfigError(
                f"compression: no parameter's name matches {pattern!r}; there are {names}"
            )
    for info in parameters:
        codec = codec_of(info.name, choices)
        if codec != NONE:
            _check_parameter(info, codec)


def _check_parameter(info: ParameterInfo, codec: str) -> None:
    why = None
    if info.rows and codec not in EXACT:
        why = (
            "which is held row by row: each worker would keep an error as large as the table, of"
            " which a row's part waits until the row is used again; 'lossless' is for tables, too"
        )
    elif info.dtype != "float32" and codec not in EXACT:
        why = f"which is {info.dtype}; lossy codecs are for float32"
    if why is not None:
        raise ConfigError(
            f"compression: {codec} is chosen for {info.name}, {why}. Leave it out, before the"
            f" patterns that match it: {{{info.name!r}: 'none', ...}}"
        )


def describe(choices: Sequence[Choice]) -> str:
    """For the line that is printed at the start."""
    shown = choices_text(choices)
    if len(choices) == 1 and choices[0][0] == "*":
        shown = choices[0][1]
    return f" compression={shown} ({'exact' if is_exact(choices) else 'lossy'})"

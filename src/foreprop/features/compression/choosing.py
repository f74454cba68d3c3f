"""Which slices are encoded, and how; what a session says about it, and what it cannot do.

All processes decide alike, from the manifest. A payload that is exactly as long as the slice has
not been encoded: so an array that does not shrink is sent as it is, and so are values to begin
from. Small slices have no codec whose bound is no gain.

A ``check_`` raises `ConfigError`, with what to do, unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

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
from foreprop.core.frames import SendFrame
from foreprop.core.manifest import Manifest, ParameterInfo
from foreprop.core.slicing import Slice
from foreprop.core.wire import Header, Kind
from foreprop.engine.tensors import DTYPES
from foreprop.engine.trace import CodecStage, TraceRecorder
from foreprop.errors import ConfigError, RemoteProtocolError
from foreprop.features.compression.codecs import (
    TensorCodec,
    make,
    make_for_replies,
    maybe_for_averages,
)
from foreprop.features.compression.dgc import DgcTraining, check_dgc, training_of


class SliceCodec:
    """How one slice crosses the wire; ``raw_bytes`` is its length as it is.

    ``codec`` is for gradients. Where servers update, ``reply_codec`` is for differences of values.
    If `answers_differ`, it is for values by themselves, or None: they go as they are. Where workers
    update, ``average_codec`` is for averages; with None gradients and averages go as they are.
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
        reply_codec: TensorCodec | None,
        average_codec: TensorCodec | None,
        dtype: torch.dtype,
    ) -> None:
        self.piece = piece
        self.codec = codec
        self.reply_codec = reply_codec
        self.average_codec = average_codec
        self.decay = 0.0
        """The weight decay: a gradient has it times the values added before it is encoded."""
        self.dtype = dtype
        self.elems = piece.elems
        self.raw_bytes = piece.elems * dtype.itemsize
        self.most_bytes = self._bound(codec)
        answers = (reply_codec or codec, average_codec or codec)
        self.most_reply_bytes = max(map(self._bound, answers))

    def _bound(self, codec: TensorCodec) -> int:
        # fewer than the array has, or that would cross
        most = self.raw_bytes if codec.exact else codec.most_bytes(self.elems)
        return min(most, self.raw_bytes - 1)

    @property
    def gains(self) -> bool:
        """Whether all codes of gradients are shorter than they are; exact ones need not be."""
        return self.codec.exact or self.codec.most_bytes(self.elems) < self.raw_bytes

    def tensor_of(self, data: memoryview) -> torch.Tensor:
        return torch.frombuffer(data, dtype=self.dtype)


def answers_differ(manifest: Manifest) -> bool:
    """Whether workers may have values of different steps when a server answers them."""
    return bool(manifest.knobs.staleness) or manifest.knobs.counts_some


def coded_slices(manifest: Manifest, slices: Iterable[Slice]) -> dict[int, SliceCodec]:
    names = [codec_of(info.name, manifest.knobs.compression) for info in manifest.parameters]
    dtypes = [DTYPES[dtype] for dtype in manifest.wire_dtypes()]
    codecs: dict[
        tuple[str, DgcTraining | None], tuple[TensorCodec, TensorCodec | None, TensorCodec | None]
    ] = {}
    found = {}
    for piece in slices:
        name, info = names[piece.parameter], manifest.parameters[piece.parameter]
        if name == NONE or not takes(name, info.shape):
            continue
        training: DgcTraining | None = None
        if kind_of(name) == "dgc":
            training = training_of(manifest, piece)
        if (name, training) not in codecs:
            pushes, codec = manifest.peers().count, make(name, training)
            reply: TensorCodec | None = make_for_replies(name, pushes, training)
            if answers_differ(manifest):
                reply = codec if codec.exact else None
            codecs[name, training] = codec, reply, maybe_for_averages(name, pushes)
        coded = SliceCodec(piece, *codecs[name, training], dtypes[piece.parameter])
        if training is not None:
            coded.decay = training.decay
        if coded.gains:
            found[piece.number] = coded
    return found


def note_code(
    trace: TraceRecorder,
    stage: CodecStage,
    name: str,
    about: SendFrame | Header,
    started_ns: int,
    size_bytes: int,
) -> None:
    """Note a slice that has been encoded or decoded, of so many bytes as a code."""
    place = {"step": about.step, "slice_": about.slice, "priority": about.priority}
    trace.span(stage.value, name, started_ns, size_bytes=size_bytes, **place)


def check_code(header: Header, coded: SliceCodec) -> None:
    """Raise `RemoteProtocolError` for a length that the slice's codec cannot have given."""
    is_push = header.kind == Kind.PUSH
    most = coded.most_bytes if is_push else coded.most_reply_bytes
    if header.payload_bytes > most:
        codec = (None if is_push else coded.reply_codec) or coded.codec
        raise RemoteProtocolError(
            f"{Kind(header.kind).name} of slice {header.slice} carries {header.payload_bytes}"
            f" bytes; {codec.name} gives at most {most}, and as it is it has {coded.raw_bytes}"
        )


def lossy_parameters(manifest: Manifest) -> set[int]:
    """The numbers of the parameters whose values on servers workers do not see in full."""
    pieces = coded_slices(manifest, manifest.slices()).values()
    lossy = (coded for coded in pieces if not coded.codec.exact)
    return {coded.piece.parameter for coded in lossy if coded.reply_codec is not None}


def why_not(manifest: Manifest) -> str | None:
    """Why this process cannot take part: a codec that it does not have."""
    try:
        check_codecs(manifest.knobs.compression)
    except ConfigError as error:
        return str(error)
    return None


def check_codecs(choices: Iterable[Choice]) -> None:
    for _, name in choices:
        if name != NONE:
            make(name)


def check_setting(config: Config, manifest: Manifest) -> None:
    choices = manifest.knobs.compression
    check_choices(choices, manifest.parameters)
    if any(kind_of(codec) == "dgc" for _, codec in choices):
        check_dgc(config, manifest)


def check_choices(choices: Sequence[Choice], parameters: Sequence[ParameterInfo]) -> None:
    check_codecs(choices)
    names = [info.name for info in parameters]
    for pattern, _ in choices:
        if not any(matches(name, pattern) for name in names):
            raise ConfigError(
                f"compression: no parameter's name matches {pattern!r}; there are {names}"
            )
    for info in parameters:
        codec = codec_of(info.name, choices)
        if codec in EXACT:
            continue
        if info.rows:
            why = (
                "which is held row by row: each worker would keep an error as large as the table,"
                " of which a row's part waits until the row is used again; 'lossless' is for"
                " tables, too"
            )
        elif info.dtype != "float32":
            why = f"which is {info.dtype}; lossy codecs are for float32"
        else:
            continue
        raise ConfigError(
            f"compression: {codec} is chosen for {info.name}, {why}. Leave it out, before the"
            f" patterns that match it: {{{info.name!r}: 'none', ...}}"
        )


def describe(choices: Sequence[Choice]) -> str:
    shown = choices_text(choices)
    if len(choices) == 1 and choices[0][0] == "*":
        shown = choices[0][1]
    return f" compression={shown} ({'exact' if is_exact(choices) else 'lossy'})"

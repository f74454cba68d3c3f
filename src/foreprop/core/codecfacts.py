"""What each codec costs and saves, by its name: bytes each way, CPU time, and what is lost.

Bytes follow from the formats. CPU times are those of one core, as docs/compression.md has them.
Losses are the mean squared error over the mean square of normal gradients, without error feedback:
they order codecs, and weigh elements. Of a codec that sends some elements only, the loss is the
energy of the rest; of one that is unbiased, its variance. A registered codec states its own costs
(`declare`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from foreprop.core.codec import AUTO, NONE, Choice, codec_of, kind_of, takes
from foreprop.core.slicing import Slice
from foreprop.errors import INSTALL_LAB, ConfigError

LOSSLESS = "lossless"
_FLOAT_BYTES = 4
_BLOCK_ELEMS = 128  # of int8, int4 and int2, which have one scale
_ENTRY_BYTES = 8  # of a sparse codec: a value and its place
LOSSLESS_SHARE = 0.85
"""The share of its bytes that a slice keeps: weights, the worst that was tried, had 0.84."""
_KEPT = {"topk": 0.01, "randomk": 0.01, "dgc": 0.001}
"""The share of the elements that is sent, if the name does not say it."""
_SHARE_OF = {LOSSLESS: "share of the bytes", **dict.fromkeys(_KEPT, "share of the elements")}
_GB = 1e9


class CodecFacts(NamedTuple):
    """What a planner and a simulator know of a codec, without its kernels.

    ``bytes_per_elem`` takes the slice's number of elements. Times are per GB of float32, on one
    core of the machine in docs/compression.md. A worker keeps ``state_arrays`` of a slice's size.
    """

    exact: bool
    bytes_per_elem: Callable[[int], float]
    encode_s_per_gb: float
    decode_s_per_gb: float
    state_arrays: int


class Coded(NamedTuple):
    """The bytes and CPU times of one encoded slice."""

    push_bytes: int
    reply_bytes: int
    encode_s: float
    decode_s: float


UNCODED = Coded(0, 0, 0.0, 0.0)


class KnownCodec(NamedTuple):
    """A codec as planners know it; see `codec_named`."""

    name: str
    facts: CodecFacts
    loss: float
    kept: float | None = None
    """The share of a slice's elements that a rank pushes, if the codec is sparse."""
    is_seeded: bool = False
    """Places are not sent: all ranks draw the same."""
    raw_answers: bool = False
    """Answers are values instead of differences, for workers may be in different steps."""
    answer: str | None = None
    """The codec of answers, if it is another one."""

    @property
    def session_name(self) -> str:
        """The name as a setting, which does not say what share a lossless codec keeps."""
        return kind_of(self.name) if self.facts.exact else self.name

    def coded(self, elems: int, *, ranks: int, cpu: float = 1.0) -> Coded:
        """What a slice of so many elements costs on a core ``cpu`` times as fast as the table's.

        The reply to sparse pushes has the elements that any of the ``ranks`` has sent, or all
        elements if that is less. With `raw_answers` only exact codecs make replies shorter.
        """
        if not elems:
            return UNCODED
        push_bytes = _whole(elems * self.facts.bytes_per_elem(elems))
        size_gb = elems * _FLOAT_BYTES / _GB
        return Coded(
            push_bytes,
            self._reply_bytes(elems, push_bytes, ranks),
            size_gb * self.facts.encode_s_per_gb / cpu,
            size_gb * self.facts.decode_s_per_gb / cpu,
        )

    def _reply_bytes(self, elems: int, push_bytes: int, ranks: int) -> int:
        if self.raw_answers and not self.facts.exact:
            return elems * _FLOAT_BYTES
        if self.kept is not None and not self.is_seeded:
            return min(ranks * push_bytes, elems * _FLOAT_BYTES)
        if self.answer is None:
            return push_bytes
        return _whole(elems * codec_named(self.answer).facts.bytes_per_elem(elems))


def _whole(size_bytes: float) -> int:
    return math.ceil(size_bytes - 1e-6)  # a float may be a little more than the whole number


class _Row(NamedTuple):
    """The facts of a kind of codec, with one scale for each ``block_elems`` elements, if any.

    The bytes of a sparse codec are those of each element that is sent.
    """

    bytes_per_elem: float
    encode_s_per_gb: float
    decode_s_per_gb: float
    state_arrays: int
    loss: float
    exact: bool = False
    block_elems: int = 0


_TABLE: Mapping[str, _Row] = {
    NONE: _Row(4, 0.0, 0.0, 0, 0.0, exact=True),
    LOSSLESS: _Row(4 * LOSSLESS_SHARE, 0.93, 0.46, 0, 0.0, exact=True),
    "bf16": _Row(2, 0.12, 0.09, 0, 2.7e-6),
    "fp16": _Row(2, 0.10, 0.09, 0, 4.3e-8),
    "int8": _Row(1, 0.78, 0.19, 1, 4.0e-5, block_elems=_BLOCK_ELEMS),
    "int4": _Row(1 / 2, 0.83, 0.22, 1, 1.3e-2, block_elems=_BLOCK_ELEMS),
    "int2": _Row(1 / 4, 1.09, 0.23, 1, 0.19, block_elems=_BLOCK_ELEMS),
    "topk": _Row(_ENTRY_BYTES, 1.24, 0.15, 1, 0.0),
    "randomk": _Row(_FLOAT_BYTES, 1.07, 0.47, 1, 0.0),
    "dgc": _Row(_ENTRY_BYTES, 0.90, 0.15, 2, 0.0),
}
CODEC_NAMES = tuple(_TABLE)
LAB_CODECS = ("1bit", "efsign", "qsgd", "sign", "terngrad")
"""The codecs of papers that foreprop-lab registers, as a user's package would."""
_declared: dict[str, Callable[[str], KnownCodec | None]] = {}

_LADDER = (NONE, LOSSLESS, "bf16", "int8", "int4", "int2", "dgc")
"""Codecs in the order of their loss."""
AUTO_CODECS = _LADDER[: _LADDER.index("int4") + 1]
"""What ``auto`` may use: the codecs that pass the test of accuracy (docs/compression.md). Sparse
and registered codecs are only used where a setting names them."""


def declare(kind: str, known: Callable[[str], KnownCodec | None]) -> None:
    """Make a registered codec known; ``known`` is called with its name, parameter included."""
    _declared[kind] = known
    codec_named.cache_clear()


def allowed_by(text: str) -> tuple[str, ...] | None:
    """The codecs of ``auto``, or of ``auto:int8``, which none may lose more than; else None.

    Raises `ConfigError`.
    """
    word, mark, most = text.partition(":")
    if word != AUTO:
        return None
    if not mark:
        return AUTO_CODECS
    if most not in _LADDER:
        raise ConfigError(
            f"compression is {text!r}; after {AUTO}: comes the lossiest codec that may be chosen,"
            f" one of {', '.join(_LADDER)}"
        )
    return _LADDER[: _LADDER.index(most) + 1]


@functools.cache
def codec_named(name: str) -> KnownCodec:
    """The codec of this name: ``int8``, or ``topk:0.01``, which sends 1 % of the elements.

    ``lossless:0.7`` says what share of the bytes was measured. A warm-up, as in ``dgc:0.001:500``,
    is not counted. Raises `ConfigError` for other names.
    """
    family, mark, text = name.partition(":")
    if family in _declared and (declared := _declared[family](name)) is not None:
        return declared
    if family == "dgc":
        text = text.partition(":")[0]
    row = _TABLE.get(family)
    if family in LAB_CODECS:
        raise ConfigError(
            f"compression names the codec {name!r} of foreprop-lab, which is not installed:"
            f" {INSTALL_LAB}"
        )
    if family in _declared:
        raise ConfigError(
            f"compression names the codec {name!r}, of which a prediction has to know the time:"
            " its class says it as s_per_gb (docs/extending.md)"
        )
    if row is None or (mark and family not in _SHARE_OF):
        raise ConfigError(
            f"compression names the codec {name!r}; there are {', '.join(CODEC_NAMES)}, and"
            " topk:R, randomk:R, dgc:R with the share R of the elements that is sent"
        )
    share = _share(name, family, text) if mark else _KEPT.get(family, LOSSLESS_SHARE)
    if family == LOSSLESS:
        row = row._replace(bytes_per_elem=_FLOAT_BYTES * share)
    kept = share if family in _KEPT else None
    loss = row.loss if kept is None else 1 - kept
    return KnownCodec(name, _facts_of(row, kept), loss, kept, family == "randomk")


def encoded_share(
    choices: Sequence[Choice], name: str, shape: Sequence[int], piece: Slice
) -> float:
    """A push's share of a slice's bytes; 1 if the slice is not encoded, or nothing is known."""
    codec = codec_of(name, choices)
    kind = kind_of(codec)
    if codec == NONE or not takes(codec, shape):
        return 1.0
    known = _declared[kind](codec) if kind in _declared else None
    if kind in _TABLE:
        known = codec_named(codec)
    if known is None:
        return 1.0
    return min(1.0, known.facts.bytes_per_elem(piece.elems) / _FLOAT_BYTES)


def _share(name: str, family: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise ConfigError(
            f"compression names the codec {name!r}; after {family}: comes a {_SHARE_OF[family]},"
            " more than 0 and at most 1"
        )
    return share


def _facts_of(row: _Row, kept: float | None) -> CodecFacts:
    def bytes_per_elem(elems: int) -> float:
        sent = 1.0 if kept is None else math.ceil(kept * elems - 1e-9) / elems
        blocks = math.ceil(elems / row.block_elems) if row.block_elems else 0
        return row.bytes_per_elem * sent + _FLOAT_BYTES * blocks / elems

    times = (row.encode_s_per_gb, row.decode_s_per_gb)
    return CodecFacts(row.exact, bytes_per_elem, *times, row.state_arrays)

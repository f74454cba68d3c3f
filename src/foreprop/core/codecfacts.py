"""What each codec costs and saves, by its name: bytes each way, CPU time, and what is lost.

Bytes follow from the formats (Seide 2014; Alistarh 2017, QSGD; Wen 2017, TernGrad; Lin 2018, DGC).
CPU times are those of one core, as docs/compression.md has them. Losses are the mean squared error
over the mean square of normal gradients, without error feedback: they order codecs, and weigh
elements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from foreprop.core.codec import AUTO, NONE, Choice, codec_of, kind_of, takes
from foreprop.core.slicing import Slice
from foreprop.errors import ConfigError

LOSSLESS = "lossless"
_FLOAT_BYTES = 4
_BLOCK_ELEMS = 128
"""Of int8, int4 and int2: one scale for so many."""
_ENTRY_BYTES = 8
"""Of a sparse codec: a value and its place."""
LOSSLESS_SHARE = 0.85
"""Of the bytes what is left: byte planes of weights, the worst of what was tried, had 0.84."""
_KEPT = {"topk": 0.01, "randomk": 0.01, "dgc": 0.001}
"""Of the elements, if the name does not say it."""
_SHARE_OF = {LOSSLESS: "share of the bytes", **dict.fromkeys(_KEPT, "share of the elements")}
_QSGD = "qsgd"
_QSGD_ELEMS = 512
"""Of a norm."""
_QSGD_BITS = {1: 2, 7: 4, 127: 8}
"""Of an element, by the most levels that go into them."""
_GB = 1e9


class CodecFacts(NamedTuple):
    """What a planner and a simulator know of a codec, without its kernels."""

    exact: bool
    bytes_per_elem: Callable[[int], float]
    """Of a slice of so many elements; of float32 that is 4."""
    encode_s_per_gb: float
    """Of float32, on one core of the machine in docs/compression.md."""
    decode_s_per_gb: float
    state_arrays: int
    """How many arrays of the slice's size a worker keeps."""


class Coded(NamedTuple):
    """A slice, encoded."""

    push_bytes: int
    reply_bytes: int
    encode_s: float
    decode_s: float


UNCODED = Coded(0, 0, 0.0, 0.0)
"""Of nothing."""


class KnownCodec(NamedTuple):
    """A codec as planners know it; see `codec_named`."""

    name: str
    facts: CodecFacts
    """Of pushes."""
    loss: float
    """Of an element: mean squared error over mean square. Of what sends a part it is the rest's
    energy, of what is unbiased its variance."""
    kept: float | None = None
    """Of sparse ones: the share of a slice's elements that a rank pushes."""
    is_seeded: bool = False
    """Places are not sent: all ranks draw the same."""

    @property
    def session_name(self) -> str:
        """As a session is told it: what a lossless codec saves is no setting there."""
        return kind_of(self.name) if self.facts.exact else self.name

    def coded(self, elems: int, *, ranks: int, cpu: float = 1.0) -> Coded:
        """A slice of so many elements; ``cpu``: how many times as fast as the table's a core is.

        The reply is the difference to the values that all have, by the same codec, or by one that
        brings them nearer each time. Of sparse pushes it is the union of what ``ranks`` ranks have
        sent, if that is less than all.
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
        if self.kept is not None and not self.is_seeded:
            return min(ranks * push_bytes, elems * _FLOAT_BYTES)
        answer = _ANSWERS.get(self.name) or _ANSWERS.get(kind_of(self.name))
        if answer is None:
            return push_bytes
        return _whole(elems * codec_named(answer).facts.bytes_per_elem(elems))


def _whole(size_bytes: float) -> int:
    """Rounded up, but for what floats add to a whole number."""
    return math.ceil(size_bytes - 1e-6)


class _Row(NamedTuple):
    """Of the table: what does not depend on the name's parameter."""

    bytes_per_elem: float
    scales_bytes: int
    """For each slice."""
    encode_s_per_gb: float
    decode_s_per_gb: float
    state_arrays: int
    loss: float
    exact: bool = False
    block_elems: int = 0
    """Beside what the slice has, a scale for each block of so many."""


_TABLE: Mapping[str, _Row] = {
    NONE: _Row(4, 0, 0.0, 0.0, 0, 0.0, exact=True),
    LOSSLESS: _Row(4 * LOSSLESS_SHARE, 0, 0.93, 0.46, 0, 0.0, exact=True),
    "bf16": _Row(2, 0, 0.12, 0.09, 0, 2.7e-6),
    "fp16": _Row(2, 0, 0.10, 0.09, 0, 4.3e-8),
    "int8": _Row(1, 0, 0.78, 0.19, 1, 4.0e-5, block_elems=_BLOCK_ELEMS),
    "int4": _Row(1 / 2, 0, 0.83, 0.22, 1, 1.3e-2, block_elems=_BLOCK_ELEMS),
    "int2": _Row(1 / 4, 0, 1.09, 0.23, 1, 0.19, block_elems=_BLOCK_ELEMS),
    "1bit": _Row(1 / 8, 8, 1.35, 0.40, 1, 0.36),
    "efsign": _Row(1 / 8, 8, 1.27, 0.40, 1, 0.36),
    "sign": _Row(1 / 8, 8, 0.49, 0.40, 1, 0.36),
    "terngrad": _Row(2 / 8, 4, 1.29, 0.20, 0, 0.99),
    _QSGD: _Row(1, 0, 1.23, 0.18, 0, 0.0, block_elems=_QSGD_ELEMS),
    "topk": _Row(_ENTRY_BYTES, 0, 1.24, 0.15, 1, 0.0),
    "randomk": _Row(_FLOAT_BYTES, 0, 1.07, 0.47, 1, 0.0),
    "dgc": _Row(_ENTRY_BYTES, 0, 0.90, 0.15, 2, 0.0),
}
"""Of a sparse one, bytes of each element that is kept; QSGD's follow from its levels."""
CODEC_NAMES = tuple(_TABLE)

_ANSWERS = {
    "sign": "efsign",
    "terngrad": "int2",
    _QSGD: "int8",
    **{f"{_QSGD}:{levels}": "int4" for levels in range(1, 8)},
}
"""What answers pushes in these codecs, as in `compression.codecs.make_for_replies`."""

_LADDER = (NONE, LOSSLESS, "bf16", "int8", "int4", "int2", "1bit", "dgc")
"""In the order of loss."""
AUTO_CODECS = _LADDER[: _LADDER.index("int4") + 1]
"""What ``auto`` may use: what passes the test of accuracy (docs/compression.md). Codecs that keep
signs, or leave elements out, are for who asks for them."""


def allowed_by(text: str) -> tuple[str, ...] | None:
    """Codecs of ``auto``, or of ``auto:int8``: none that loses more; None: it is not automatic.

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
    """Of ``int8``, or with a parameter: ``topk:0.01`` keeps 1 % of the elements.

    ``lossless:0.7`` says what share of the bytes was measured. Of a warm-up, as in
    ``dgc:0.001:500``, nothing is known. Raises `ConfigError` for others.
    """
    family, mark, text = name.partition(":")
    if family == "dgc":
        text = text.partition(":")[0]
    row = _TABLE.get(family)
    if row is None or (mark and family not in (*_SHARE_OF, _QSGD)):
        raise ConfigError(
            f"compression names the codec {name!r}; there are {', '.join(CODEC_NAMES)}, and"
            " topk:R, randomk:R, dgc:R with the share R of the elements that is sent, qsgd:LEVELS"
        )
    if family == _QSGD:
        return _qsgd(name, text if mark else "127", row)
    share = _share(name, family, text) if mark else _KEPT.get(family, LOSSLESS_SHARE)
    if family == LOSSLESS:
        row = row._replace(bytes_per_elem=_FLOAT_BYTES * share)
    kept = share if family in _KEPT else None
    loss = row.loss if kept is None else 1 - kept
    return KnownCodec(name, _facts(row, kept), loss, kept, family == "randomk")


def encoded_share(
    choices: Sequence[Choice], name: str, shape: Sequence[int], piece: Slice
) -> float:
    """Of the bytes of a parameter's slice what a push has; 1 if that is not encoded, or unknown."""
    codec = codec_of(name, choices)
    if codec == NONE or kind_of(codec) not in _TABLE or not takes(codec, shape):
        return 1.0
    bytes_per_elem = codec_named(codec).facts.bytes_per_elem(piece.elems)
    return min(1.0, bytes_per_elem / _FLOAT_BYTES)


def _qsgd(name: str, text: str, row: _Row) -> KnownCodec:
    """Alistarh et al., section 3.1: variance at most min(d / s^2, sqrt(d) / s) of norms of d."""
    levels = int(text) if text.isdecimal() else 0
    if not 1 <= levels <= 127:
        raise ConfigError(
            f"compression names the codec {name!r}; after {_QSGD}: come its levels, from 1 to 127"
        )
    bits = next(bits for most, bits in _QSGD_BITS.items() if levels <= most)
    elems = _QSGD_ELEMS
    row = row._replace(bytes_per_elem=bits / 8)
    loss = min(elems / levels**2, math.sqrt(elems) / levels)
    return KnownCodec(name, _facts(row, None), loss)


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


def _facts(row: _Row, kept: float | None) -> CodecFacts:
    return CodecFacts(
        row.exact,
        _bytes_per_elem(row, kept),
        row.encode_s_per_gb,
        row.decode_s_per_gb,
        row.state_arrays,
    )


def _bytes_per_elem(row: _Row, kept: float | None) -> Callable[[int], float]:
    def of(elems: int) -> float:
        sent = 1.0 if kept is None else math.ceil(kept * elems - 1e-9) / elems
        blocks = math.ceil(elems / row.block_elems) if row.block_elems else 0
        scales_bytes = row.scales_bytes + _FLOAT_BYTES * blocks
        return row.bytes_per_elem * sent + scales_bytes / elems

    return of

"""The exact codec for tables that are held row by row: of pushed rows, and of rows that answer.

What is as long as the rows are is the rows, as of slices; what is shorter is a code. Values go as
they are, not as differences: workers keep no image of rows that they do not use.
"""

from __future__ import annotations

import torch

from foreprop.compression.codecs import make
from foreprop.core.codec import EXACT, NONE, Place, codec_of
from foreprop.core.codecfacts import LOSSLESS
from foreprop.core.manifest import Manifest
from foreprop.path.memory import bytes_of

_NOWHERE = Place(0, 0, 0)
"""Nothing is drawn."""


class RowCodecs:
    """Of a session's tables, by their parameters' numbers. Any thread."""

    def __init__(self, manifest: Manifest) -> None:
        choices = manifest.knobs.compression
        self._coded = {
            number
            for number, info in enumerate(manifest.parameters)
            if info.rows and codec_of(info.name, choices) in EXACT - {NONE}
        }
        self._codec = make(LOSSLESS) if self._coded else None

    def encoded(self, parameter: int, rows: torch.Tensor) -> memoryview:
        """The rows' code, or their bytes if that is no shorter."""
        flat = rows.contiguous().view(-1)
        raw = bytes_of(flat)
        if self._codec is None or parameter not in self._coded or not len(raw):
            return raw
        data = self._codec.encode(flat, {}, _NOWHERE)
        return data if len(data) < len(raw) else raw

    def is_code(self, parameter: int, size_bytes: int, rows_bytes: int) -> bool:
        """Whether rows that take ``rows_bytes`` have come as a code of that size."""
        return parameter in self._coded and size_bytes < rows_bytes

    def decode(self, data: memoryview, out: torch.Tensor) -> None:
        """Fill ``out``, contiguous rows. Raises `RemoteProtocolError` for what is no code."""
        if self._codec is not None:
            self._codec.decode(data, out.view(-1), _NOWHERE)

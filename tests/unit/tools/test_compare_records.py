"""What ranks tell, as lines among those of the script."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreprop.tools.compare.records import (
    MARK,
    Began,
    Chunk,
    Ended,
    RecordWriter,
    chunks,
    maybe_decode,
)
from foreprop.tools.compare.run import Lines


@given(st.lists(st.floats(width=32), max_size=300))
def test_losses_come_back_bit_for_bit(losses: list[float]) -> None:
    """As short lines; what is not finite comes back as None."""
    lines = [
        MARK + msgspec.json.encode(chunk)
        for chunk in chunks(3, losses, [1 / 3] * max(0, len(losses) - 1))
    ]
    assert all(len(line) < 4096 for line in lines)
    told = [maybe_decode(line) for line in lines]
    assert all(isinstance(one, Chunk) and one.rank == 3 for one in told)
    found = [loss for one in told if isinstance(one, Chunk) for loss in one.losses]
    assert found == [loss if math.isfinite(loss) else None for loss in losses]


def test_other_lines_are_no_records() -> None:
    assert maybe_decode(b"loss 2.5") is None
    assert maybe_decode(MARK + b"{damaged") is None


def test_a_record_is_a_line_of_its_own(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Also after what a script has printed without a line end, as a progress bar does."""
    print("\r50 %", end="")
    RecordWriter(1).write(Began(rank=0, about="x"), Ended(rank=0, steps=2))
    text = capfd.readouterr().out.encode()
    lines = Lines(tmp_path / "log")
    lines.write(b"".join(b"[0] " + line + b"\n" for line in text.split(b"\n")))
    lines.close()
    assert lines.records == [Began(rank=0, about="x"), Ended(rank=0, steps=2)]
    assert "50 %" in (tmp_path / "log").read_text()

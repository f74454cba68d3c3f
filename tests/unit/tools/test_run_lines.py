"""Whole lines, however a pipe cuts them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foreprop.tools.run.records import LIMIT_BYTES, LineSplitter


@given(st.lists(st.binary(max_size=20)))
def test_the_same_lines_for_any_split(pieces: list[bytes]) -> None:
    """But for carriage returns, which another test is about."""
    text = b"".join(pieces).replace(b"\r", b"")
    splitter, lines = LineSplitter(), []
    for piece in pieces:
        lines += splitter.feed(piece.replace(b"\r", b""))
    lines += splitter.finish()
    *whole, rest = text.split(b"\n")
    assert lines == whole + ([rest] if rest else [])
    assert splitter.finish() == []


def test_a_progress_bar_is_what_is_left_of_it() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"\r 10%\r 20%") == []
    assert splitter.feed(b"\r100%\nwindows\r\n90%\r100%\r\n\r 5") == [b"100%", b"windows", b"100%"]
    assert splitter.finish() == [b" 5"]


def test_a_line_without_end_is_passed_on_in_pieces() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"x" * LIMIT_BYTES) == []
    assert splitter.feed(b"yz") == [b"x" * LIMIT_BYTES]
    assert splitter.finish() == [b"yz"]


@given(st.lists(st.integers(0, 12)), st.integers(1, 30))
def test_pieces_do_not_depend_on_the_split(lengths: list[int], chunk: int) -> None:
    text = b"\n".join(b"abcdefghijkl"[:length] for length in lengths)
    whole, split = LineSplitter(limit_bytes=5), LineSplitter(limit_bytes=5)
    expected = whole.feed(text) + whole.finish()
    found = [
        line
        for start in range(0, len(text), chunk)
        for line in split.feed(text[start : start + chunk])
    ]
    assert found + split.finish() == expected
    assert all(len(line) <= 5 for line in expected)


def test_a_long_progress_bar_is_not_kept() -> None:
    splitter = LineSplitter()
    for percent in range(LIMIT_BYTES // 7 + 1000):
        assert splitter.feed(b"\r%6d" % percent) == []
    assert splitter.finish() == [b"%6d" % percent]

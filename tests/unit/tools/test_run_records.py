"""What hosts say arrives as it was, and nothing else is taken for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreprop.tools.run.records import (
    MARK,
    News,
    Output,
    Ready,
    Refused,
    WorkerFailed,
    decode,
    encode_news,
    encode_output,
)

TEXTS = st.binary(max_size=50).map(lambda text: text.replace(b"\n", b""))


@given(st.integers(0, 10_000), st.lists(TEXTS))
def test_output_arrives_as_it_was(rank: int, texts: list[bytes]) -> None:
    """Also what looks like a record: the mark is put before each line."""
    encoded = encode_output("err", rank, texts)
    *lines, nothing = encoded.split(b"\n")
    assert [decode(line) for line in lines] == [Output("err", rank, text) for text in texts]
    assert nothing == b""


@pytest.mark.parametrize(
    "news",
    [
        Ready(port=29500),
        Refused(reason="no\nroom"),
        WorkerFailed(rank=3, code=-9),
        WorkerFailed(rank=3, code=1, step=7, lost="server 0"),
    ],
)
def test_news_arrives_as_it_was(news: News) -> None:
    line, nothing = encode_news(news).split(b"\n")
    assert decode(line) == news
    assert nothing == b""


@given(st.binary(max_size=30))
def test_anything_else_is_a_line_of_somebody_else(line: bytes) -> None:
    assert line.startswith(MARK) or decode(line) is None
    decode(MARK + line)  # whatever it is, it is no error

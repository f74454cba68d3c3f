"""What the store has is read by type and within bounds; else the error says what was there."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foreprop.backends.dedicated import PublishedSession
from foreprop.config import Config
from foreprop.engine.rendezvous import (
    MOST_PARTS,
    Board,
    agree_on_session,
    decode_entry,
    decode_order,
    decode_parts,
)
from foreprop.engine.traffic import Endpoint
from foreprop.errors import ForepropError, RemoteProtocolError
from tests.cluster import worlds

READERS: dict[str, Callable[[str], object]] = {
    "an address": lambda text: decode_entry(text, Endpoint, "node 1's address"),
    "numbers": lambda text: decode_entry(text, list[float], "node 1's address"),
    "an order": lambda text: decode_order(text, 3, "node 1's address"),
    "parts": lambda text: decode_parts(text, "node 1's address"),
}
ANYTHING = st.one_of(
    st.text(),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda some: st.lists(some) | st.dictionaries(st.text(), some),
        max_leaves=5,
    ).map(json.dumps),
)


@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=60)
@given(text=ANYTHING)
@example(text="[" * 100_000)
@example(text="9" * 5000)
def test_anything_is_read_or_is_an_error_that_says_where_it_was(reader: str, text: str) -> None:
    error = error_of(lambda: READERS[reader](text))
    assert error is None or "node 1's address" in error
    assert len(error or "") < 2000


def error_of(read: Callable[[], object]) -> str | None:
    try:
        read()
    except RemoteProtocolError as error:
        return str(error)
    return None


@pytest.mark.parametrize("text", ["-1", str(MOST_PARTS + 1), "1e3", "", "²", "9" * 5000])
def test_numbers_of_parts_have_a_bound(text: str) -> None:
    with pytest.raises(RemoteProtocolError, match="for the number of parts of its manifest"):
        decode_parts(text, "its manifest")
    assert decode_parts(str(MOST_PARTS), "") == range(MOST_PARTS)


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3], [-1, 0, 1], [0, 1, 2, 3]])
def test_what_is_no_order(order: list[int]) -> None:
    with pytest.raises(RemoteProtocolError, match="is no order of 3 numbers"):
        decode_order(json.dumps(order), 3, "rank 0's order")
    assert decode_order("[2,0,1]", 3, "") == [2, 0, 1]


IDS = ["../../x", "a/b", "", "-", "a.b", "x" * 65, "a b", "\u00e9", "a\n", 7, None, ["a"]]


@pytest.mark.parametrize("session_id", IDS)
def test_a_session_s_id_names_no_path(session_id: object) -> None:
    """Traces and emulated links have it in their files' names."""
    board = Board(worlds(2)[1], "session/0", timeout_s=5.0)
    board.publish("", json.dumps([session_id, {}]))
    with pytest.raises(RemoteProtocolError, match="for a session"):
        agree_on_session(board, Config(), "", {})
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(
            {"session_id": session_id, "world_size": 1, "servers": 1, "nodes": 1}
            | {"workers_per_node": 1, "foreprop": "", "config": {}},
            PublishedSession,
        )


@pytest.mark.parametrize("port", [0, -1, 65_536, 2**70, "9"])
def test_a_port_is_one(port: object) -> None:
    with pytest.raises(RemoteProtocolError, match=r"the store has .* for node 1's address"):
        decode_entry(
            json.dumps({"host": 0, "address": "127.0.0.1", "port": port}),
            Endpoint,
            "node 1's address",
        )


def test_bytes_of_too_many_parts_are_not_waited_for() -> None:
    board = Board(worlds(1)[0], "session/0", timeout_s=5.0)
    board.publish("manifest", "999999999")
    with pytest.raises(ForepropError, match="the number of parts of rank 0's manifest; it must be"):
        board.lookup_bytes("manifest", "rank 0's manifest")

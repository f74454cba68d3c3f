"""A failure is the same error on the other side, and any bytes are an answer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreprop.errors import (
    ConfigError,
    Failure,
    ForepropError,
    HandshakeError,
    InternalError,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    StepTimeout,
    TrainingLoopError,
    TransportError,
    decode_failure,
    failure_of,
)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("wrong"),
        HandshakeError("rank 0 has 1"),
        InternalError("an invariant"),
        RemoteProtocolError("bytes"),
        StepTimeout("waited"),
        TrainingLoopError("the loop"),
        TransportError("cannot send"),
        PeerLost("rank 3 is gone", peer="rank 3", step=7),
    ],
)
def test_errors_of_ours_keep_their_kind(error: ForepropError) -> None:
    failure = decode_failure(memoryview(failure_of(error).encode()))
    again = failure.as_error()
    assert (type(again), str(again)) == (type(error), str(error))
    if isinstance(again, PeerLost):
        assert (again.peer, again.step) == ("rank 3", 7)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (LocalProtocolError("ours"), InternalError, "ours"),
        (ValueError("odd"), InternalError, "odd"),
        (KeyError(), InternalError, "KeyError()"),
        (ConnectionResetError("reset"), TransportError, "reset"),
        (ValueError("file \udcff"), InternalError, "file \\udcff"),
    ],
)
def test_other_errors_become_ours(
    error: Exception, kind: type[ForepropError], message: str
) -> None:
    again = decode_failure(failure_of(error).encode()).as_error()
    assert (type(again), str(again)) == (kind, message)


def test_an_unknown_kind_is_an_internal_error() -> None:
    assert type(Failure(kind="FutureError", message="m").as_error()) is InternalError


@given(st.one_of(st.binary(max_size=80), st.text(max_size=40).map(str.encode)))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_a_failure_or_raise_remote_protocol_error(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="not a failure report"):
        decode_failure(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"kind": "InternalError"}',
        b'{"kind": "InternalError", "message": 3}',
        b'{"kind": "a", "message": "\xff"}',
        b'{"kind": "a", "message": "b", "x": ' + b"[" * 100_000,
    ],
)
def test_bad_reports_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="not a failure report"):
        decode_failure(data)

"""Who is silent, as one who looks now and then sees it; and what is heard on real connections."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreprop.config import Config
from foreprop.core.wire import HEADER_BYTES, Kind, decode_header
from foreprop.engine import pulses
from foreprop.engine.pulses import LOOK_S, Pulses, Silence, pulse_greeting, read_greeting
from foreprop.errors import ConfigError


def verdicts(looks: list[tuple[float, bool]]) -> list[tuple[float, str]]:
    """Of looks at these moments: when there was something to say, and what."""
    silence = Silence(5.0, 15.0, 60.0)
    said = [(now_s, silence.look(now_s, heard=heard)) for now_s, heard in looks]
    return [(now_s, verdict) for now_s, verdict in said if verdict]


def test_it_is_told_once_and_then_acted_on() -> None:
    looks = [(step / 2, step < 10) for step in range(100)]
    assert verdicts(looks)[:2] == [(9.5, "told"), (19.5, "lost")]


def test_who_is_heard_again_is_told_again_when_it_falls_silent() -> None:
    looks = [(float(step), step % 10 == 9 or not step) for step in range(40)]
    assert verdicts(looks)[:4] == [(5.0, "told"), (9.0, "again"), (14.0, "told"), (19.0, "again")]


def test_who_has_never_been_heard_of_may_still_be_starting() -> None:
    looks = [(step / 2, step == 80) for step in range(200)]
    assert verdicts(looks) == [(45.0, "told"), *[(step / 2, "lost") for step in range(110, 200)]]
    never = [(step / 2, False) for step in range(121)]
    assert verdicts(never) == [(60.0, "lost")]


@given(st.lists(st.tuples(st.floats(0.01, 100.0), st.booleans()), max_size=200))
def test_who_could_not_look_has_seen_nothing(looks: list[tuple[float, bool]]) -> None:
    """However late the looks: silence that is acted on was seen in 15 of them at least."""
    silence, now_s, unheard = Silence(5.0, 15.0, 0.0), 0.0, 0
    for passed_s, heard in looks:
        now_s += passed_s
        unheard = 0 if heard else unheard + 1
        if silence.look(now_s, heard=heard) == "lost":
            assert unheard * LOOK_S >= 15.0
            return
        assert silence.silent_s < 15.0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"silence_report_s": 20.0}, "silence_report_s is 20 and silence_timeout_s is 15: who"),
        ({"silence_timeout_s": 0.5}, "silence_timeout_s is 0.5; it must be at least 1"),
    ],
)
def test_settings_that_mean_nothing(settings: dict[str, float], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Config(**settings)  # type: ignore[arg-type]


def test_a_greeting_says_where_its_rank_is() -> None:
    frame = pulse_greeting("an-id", 7, "node 3, host n\x1b3")
    header = decode_header(frame[:HEADER_BYTES])
    assert (header.kind, header.rank) == (Kind.PULSE, 7)
    assert read_greeting(memoryview(frame)[HEADER_BYTES:]) == (b"an-id", "node 3, host n3")


# Real connections.
@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def config_of(report_s: float = 1.0, timeout_s: float = 2.0) -> Config:
    return Config(silence_report_s=report_s, silence_timeout_s=timeout_s)


class Clock:
    """Whose looks are a second apart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(pulses.time, "monotonic", self._look)

    def _look(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_what_is_told_of_a_silent_peer(
    ends: tuple[socket.socket, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Clock(monkeypatch)
    near, far = ends
    heard, lost = Pulses("rank 0", config_of(2.0, 5.0), beats=True), list[tuple[int, str]]()
    heard.add(3, near, "server 3 at 10.0.0.3", lambda *loss: lost.append(loss))
    with caplog.at_level(logging.WARNING, "foreprop"):
        for look in range(12):
            if look in (0, 3):
                far.send(b"\0")
            heard.look()
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0 has heard nothing of server 3 at 10.0.0.3 for 2 s (silence_report_s); after 5 s"
        " (silence_timeout_s) it counts as lost",
        "rank 0 hears of server 3 at 10.0.0.3 again, after 2 s",
        "rank 0 has heard nothing of server 3 at 10.0.0.3 for 2 s (silence_report_s); after 5 s"
        " (silence_timeout_s) it counts as lost",
    ]
    why = "rank 0 has heard nothing of it for 5 s (silence_timeout_s)"
    assert lost == [(3, f"server 3 at 10.0.0.3 is gone: {why}")]
    assert not heard
    assert len(far.recv(100)) == 1 + 9  # it has said at once, and in each look, that it is there


def test_who_never_comes_is_waited_for_as_long_as_at_the_start(
    ends: tuple[socket.socket, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its listener is there before it: it may import torch for longer than others are silent."""
    Clock(monkeypatch)
    heard, lost = Pulses("rank 0", config_of(), beats=True, first_s=7.0), list[tuple[int, str]]()
    heard.add(3, ends[0], "server 3", lambda *loss: lost.append(loss))
    with caplog.at_level(logging.WARNING, "foreprop"):
        for _ in range(7):
            heard.look()
        assert not lost
        assert not caplog.records
        heard.look()
    why = "rank 0 has heard nothing of it for 7 s (join_timeout_s)"
    assert lost == [(3, f"server 3 is gone: {why}")]


def test_who_hangs_up_is_not_silent(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has ended: the connection beside it tells how."""
    Clock(monkeypatch)
    near, far = ends
    heard = Pulses("rank 0", config_of(), beats=True)
    heard.add(0, near, "server 0", lambda number, why: pytest.fail(why))
    far.close()
    for _ in range(10):
        heard.look()
    assert not heard


def test_the_last_connection_of_a_peer_counts() -> None:
    heard = Pulses("server 0", config_of(), beats=False)

    def never(number: int, why: str) -> None:
        pytest.fail(why)

    (first, far), (second, other) = socket.socketpair(), socket.socketpair()
    with far, other:
        heard.add(1, first, "rank 1", never)
        heard.add(1, second, "rank 1 again", never)
        assert len(heard) == 1
        assert far.recv(1) == b""
        heard.drop(1)
        assert other.recv(1) == b""
        heard.drop(1)

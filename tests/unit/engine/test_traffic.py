"""What probes make of each other on loopback, and of who should not be there."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import cast

import pytest

from foreprop.engine import traffic
from foreprop.engine.stream import listen
from foreprop.engine.traffic import (
    Endpoint,
    ProbeListener,
    _count,
    listen_everywhere,
    ping,
    reach,
    send,
)
from foreprop.errors import TransportError
from foreprop.tools.doctor.probe import Probe
from foreprop.tools.doctor.records import Reach, Send

TOKEN = bytes(range(16))
ADDRESS = "127.0.0.1"


@pytest.fixture
def listener() -> Iterator[ProbeListener]:
    started = ProbeListener(listen(ADDRESS), 1, TOKEN)
    yield started
    started.close()


@pytest.fixture
def peer(listener: ProbeListener) -> Endpoint:
    return Endpoint(host=1, address=ADDRESS, port=listener.port)


@pytest.fixture
def silent() -> Iterator[Endpoint]:
    """Takes connections, as the kernel does, and says nothing."""
    with socket.create_server((ADDRESS, 0)) as sock:
        yield Endpoint(host=1, address=ADDRESS, port=sock.getsockname()[1])


def test_the_right_probe_is_reached(peer: Endpoint) -> None:
    attempt = reach(0, peer, TOKEN, 60.0)
    assert (attempt.source, attempt.to, attempt.outcome) == (0, 1, "connected")


def test_another_probe_is_a_stranger(listener: ProbeListener) -> None:
    other = Endpoint(host=2, address=ADDRESS, port=listener.port)
    assert reach(0, other, TOKEN, 60.0).outcome == "stranger"


def test_idle_connections_make_room(listener: ProbeListener, peer: Endpoint) -> None:
    with ExitStack() as stack:
        for _ in range(100):
            idle = socket.create_connection((ADDRESS, listener.port), timeout=60)
            stack.enter_context(idle)
        assert reach(0, peer, TOKEN, 60.0).outcome == "connected"
        assert len(listener._strangers) <= 64


def test_a_thousand_idle_connections_cost_no_thread(
    listener: ProbeListener, peer: Endpoint
) -> None:
    """Whatever they have said of a greeting; they are closed in time."""
    before = threading.active_count()
    with ExitStack() as stack:
        for number in range(1000):
            idle = socket.create_connection((ADDRESS, listener.port), timeout=60)
            stack.enter_context(idle)
            idle.sendall(TOKEN[: number % 16])
            if number % 100 == 99:
                assert reach(0, peer, TOKEN, 60.0).outcome == "connected"
        assert threading.active_count() <= before + 1


def test_strangers_are_closed_in_time(
    listener: ProbeListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "_PATIENCE_S", 0.2)
    with socket.create_connection((ADDRESS, listener.port), timeout=60) as idle:
        idle.sendall(TOKEN)
        assert idle.recv(1) == b""


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e300, 601.0])
def test_who_asks_for_an_endless_measurement_is_closed(
    seconds: float, listener: ProbeListener
) -> None:
    for greeting in ((TOKEN, 2, seconds, 0.1), (TOKEN, 2, 0.1, seconds), (TOKEN, 3, 0.1, 0.1)):
        with socket.create_connection((ADDRESS, listener.port), timeout=60) as sock:
            sock.sendall(struct.pack("!16sBdd", *greeting))
            assert sock.recv(1) == b""


def test_who_does_not_know_the_token_is_not_answered(peer: Endpoint) -> None:
    attempt = reach(0, peer, bytes(16), 60.0)
    assert attempt.outcome == "stranger"
    assert ping(0, peer, bytes(16), 0.1).error
    assert send(0, peer, bytes(16), settle_s=0.0, seconds=0.1).error


def test_nobody_listening_is_refused() -> None:
    with socket.create_server((ADDRESS, 0)) as sock:
        port = sock.getsockname()[1]
    attempt = reach(0, Endpoint(host=1, address=ADDRESS, port=port), TOKEN, 60.0)
    assert attempt.outcome == "refused"


def test_silence_is_a_timeout_in_time(silent: Endpoint) -> None:
    started_s = time.monotonic()
    assert reach(0, silent, TOKEN, 0.3).outcome == "timeout"
    assert time.monotonic() - started_s < 60


def test_a_name_that_means_nothing_fails() -> None:
    attempt = reach(0, Endpoint(host=1, address="no.such.invalid", port=1), TOKEN, 60.0)
    assert attempt.outcome == "failed"
    assert attempt.error


def test_round_trips_and_clock_of_one_machine(peer: Endpoint) -> None:
    trip = ping(0, peer, TOKEN, 1.0)
    assert trip.error is None
    assert trip.count >= 2
    assert 0 < trip.least_s <= trip.median_s <= trip.p90_s
    assert abs(trip.offset_s) <= trip.least_s  # it is the same clock


def test_a_rate_is_what_the_receiver_counts(peer: Endpoint) -> None:
    flow = send(0, peer, TOKEN, settle_s=0.05, seconds=0.2)
    assert flow.error is None
    assert flow.bits_per_s > 10e6


class SimulatedSocket:
    """50 kB arrive every 10 ms of a simulated clock, until the rate has been told."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.told = b""

    def monotonic(self) -> float:
        return self.now_s

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0

    def recv_into(self, _: memoryview) -> int:
        if self.told:
            return 0
        self.now_s += 0.01
        return 50_000

    def sendall(self, data: bytes) -> None:
        self.told += data


@pytest.mark.parametrize("settle_s", [0.0, 0.105])
def test_a_rate_is_right_whenever_counting_begins(
    settle_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sock = SimulatedSocket()
    monkeypatch.setattr("foreprop.engine.traffic.time", sock)
    _count(cast(socket.socket, sock), settle_s, 0.5)
    (bits_per_s,) = struct.unpack("!d", sock.told)
    assert bits_per_s == pytest.approx(40e6)


def test_a_receiver_that_does_not_answer_ends_the_sending(
    silent: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreprop.engine.traffic._PATIENCE_S", 0.2)
    started_s = time.monotonic()
    flow = send(0, silent, TOKEN, settle_s=0.0, seconds=0.1)
    assert flow.error == "the receiver does not say what it got"
    assert time.monotonic() - started_s < 60


def test_closing_a_listener_ends_what_is_under_way(
    listener: ProbeListener, peer: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "_PATIENCE_S", 600.0)
    with socket.create_connection((ADDRESS, peer.port)):
        started_s = time.monotonic()
        listener.close()
        assert time.monotonic() - started_s < 60


def test_a_taken_port_is_a_clear_error() -> None:
    with listen_everywhere(0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(TransportError, match=f"cannot listen on port {port}: Address already"):
            listen_everywhere(port)


def test_a_probe_measures_several_peers_at_once() -> None:
    listeners = [ProbeListener(listen(ADDRESS), host, bytes(16)) for host in (1, 2)]
    peers = [Endpoint(host=n + 1, address=ADDRESS, port=x.port) for n, x in enumerate(listeners)]
    probe = Probe()
    probe._token = bytes(16)
    reached = probe.answer(Reach(peers=peers, timeout_s=60.0))
    assert [attempt.outcome for attempt in reached.attempts] == ["connected"] * 2  # type: ignore[union-attr]
    sent = probe.answer(Send(peers=peers, settle_s=0.05, seconds=0.1))
    assert all(flow.bits_per_s > 0 for flow in sent.flows)  # type: ignore[union-attr]
    probe.close()
    for listener in listeners:
        listener.close()

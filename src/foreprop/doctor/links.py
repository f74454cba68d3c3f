"""Findings about links, clocks, and the kernels' settings for TCP."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple

from foreprop.doctor.records import Examination, Finding
from foreprop.doctor.speed import SLOW_RATE, best_rates
from foreprop.doctor.words import differing, known_facts
from foreprop.link.stream import is_loopback
from foreprop.quantities import rate_text, time_text

CLOCK_S = 0.010
"""Steps take tens of milliseconds: clocks that differ by more put a trace's events in another."""


# Links.
def find_links(examination: Examination) -> Iterator[Finding]:
    known = [
        (name, facts)
        for name, facts in known_facts(examination)
        if facts.address is not None and not is_loopback(facts.address)
    ]
    mtus: dict[str, Hashable] = {n: f.mtu_bytes for n, f in known if f.mtu_bytes is not None}
    yield from differing(
        "the interfaces' MTU differs",
        mtus,
        severity="warning",
        check="link",
        advice="set one MTU on all hosts and switches (ip link set dev IFACE mtu 1500): where"
        " it changes on the way, large packets may vanish",
    )
    speeds: dict[str, Hashable] = {
        name: rate_text(facts.speed_bits_per_s)
        for name, facts in known
        if facts.speed_bits_per_s is not None
    }
    yield from differing(
        "the links' speed differs",
        speeds,
        severity="warning",
        check="link",
        advice="every step waits for the slowest: see its cable, switch port and negotiation"
        " (ethtool), or choose another interface with FOREPROP_INTERFACE",
    )
    for name, facts in known:
        if facts.full_duplex is False:
            yield Finding(
                severity="warning",
                check="link",
                hosts=[name],
                found=f"{name}: {facts.interface} is half duplex: it cannot send while it receives",
                advice="switch on autonegotiation at both ends of the cable (ethtool -s IFACE"
                " autoneg on)",
            )
    yield from _find_unused_speed(examination)


def _find_unused_speed(examination: Examination) -> Iterator[Finding]:
    told: dict[str, str] = {}
    for number, best in best_rates(examination.alone).items():
        host = examination.hosts[number]
        speed = host.facts.speed_bits_per_s if host.facts is not None else None
        if host.facts is not None and speed is not None and best < SLOW_RATE * speed:
            told[host.name] = (
                f"{host.name} {rate_text(best)} of {rate_text(speed)} ({host.facts.interface})"
            )
    if told:
        yield Finding(
            severity="hint",
            check="link",
            hosts=list(told),
            found="less than half of what the interface claims goes through: "
            + "; ".join(told.values()),
            advice="a virtual interface may claim anything; else see CPU load, shapers, the"
            " switch's ports, and whether one connection is limited (see window)",
        )


# Clocks.
def clock_offsets_s(examination: Examination) -> dict[int, tuple[float, float]]:
    """By host: its clock minus the first's, and by how much that may be off."""
    found = {0: (0.0, 0.0)} if examination.hosts else {}
    for trip in examination.trips:
        if trip.error is None and 0 in (trip.source, trip.to):
            other, sign = (trip.to, 1) if trip.source == 0 else (trip.source, -1)
            found[other] = (sign * trip.offset_s, trip.least_s / 2)
    return found


def find_clocks(examination: Examination) -> Iterator[Finding]:
    for host, (offset_s, error_s) in clock_offsets_s(examination).items():
        if abs(offset_s) - error_s > CLOCK_S:
            name, first = examination.hosts[host].name, examination.hosts[0].name
            way = "ahead of" if offset_s > 0 else "behind"
            yield Finding(
                severity="warning",
                check="clock",
                hosts=[name],
                found=f"the clock of {name} is {time_text(abs(offset_s))} {way} that of {first}"
                f" (± {time_text(error_s)})",
                advice="training does not mind, but traces and logs of different hosts do not fit"
                " together: run chrony or systemd-timesyncd on all hosts",
            )


# Kernels.
def find_kernels(examination: Examination) -> Iterator[Finding]:
    """TCP's settings, against rate times round trip."""
    controls: dict[str, Hashable] = {
        name: facts.congestion_control
        for name, facts in known_facts(examination)
        if facts.congestion_control is not None
    }
    yield from differing(
        "TCP's congestion control differs",
        controls,
        severity="hint",
        check="window",
        advice="one may take the other's share of a link: set net.ipv4.tcp_congestion_control"
        " alike",
    )
    worst: dict[tuple[int, str], _Window] = {}
    for window in _windows(examination):
        if window.allowed_bytes < window.needed_bytes:
            key = (window.host, window.setting)
            worst[key] = max(window, worst.get(key, window), key=lambda w: w.needed_bytes)
    for window in worst.values():
        yield _too_small(examination.hosts[window.host].name, window)


class _Window(NamedTuple):
    """What a host's setting lets be on the way to or from another, and what that needs."""

    host: int
    setting: str
    allowed_bytes: float
    needed_bytes: float
    why: str


def _windows(examination: Examination) -> Iterator[_Window]:
    for trip in examination.trips:
        if trip.error is None:
            for source, to in ((trip.source, trip.to), (trip.to, trip.source)):
                yield from _windows_of_pair(examination, source, to, trip.median_s)


def _windows_of_pair(
    examination: Examination, source: int, to: int, trip_s: float
) -> Iterator[_Window]:
    """Of automatic buffers the kernel keeps about half for its bookkeeping (man 7 tcp); of one
    that is asked for, as pushes do, it gives twice what wmem_max allows."""
    sender, receiver = examination.hosts[source].facts, examination.hosts[to].facts
    if sender is None or receiver is None:
        return
    rates = [f.bits_per_s for f in examination.alone if (f.source, f.to) == (source, to)]
    claimed = min(sender.speed_bits_per_s or 0.0, receiver.speed_bits_per_s or 0.0)
    rate = max([*rates, claimed])
    needed_bytes = rate / 8 * trip_s
    why = f"{rate_text(rate)} with a round trip of {time_text(trip_s)}"
    if receiver.receive_buffer_bytes is not None:
        allowed_bytes = receiver.receive_buffer_bytes / 2
        yield _Window(to, "net.ipv4.tcp_rmem", allowed_bytes, needed_bytes, why)
    if sender.send_buffer_bytes is not None:
        allowed_bytes = sender.send_buffer_bytes / 2
        yield _Window(source, "net.ipv4.tcp_wmem", allowed_bytes, needed_bytes, why)
    if sender.asked_buffer_bytes is not None:
        servers = max(1, len(examination.hosts))
        allowed_bytes = servers * 2 * sender.asked_buffer_bytes
        yield _Window(source, "net.core.wmem_max", allowed_bytes, needed_bytes, why)
    allowed_bytes = sender.push_window_bytes
    yield _Window(source, "FOREPROP_PUSH_WINDOW_BYTES", allowed_bytes, needed_bytes, why)


def _too_small(name: str, window: _Window) -> Finding:
    return Finding(
        severity="hint",
        check="window",
        hosts=[name],
        found=f"{name}: {window.setting} allows {window.allowed_bytes / 1e6:.2g} MB on the way;"
        f" {window.why} needs {window.needed_bytes / 1e6:.2g} MB",
        advice=f"if more than is measured is to go through, raise {window.setting}"
        + (" there with sysctl (of three numbers the third)" * window.setting.startswith("net."))
        + " so that twice that is allowed",
    )

"""Findings about links, clocks, and the kernels' settings for TCP.

What is usual is a median over hosts of each one's best, so that a few slow hosts do not move it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from foreprop.engine.stream import is_loopback
from foreprop.engine.traffic import Flow, Trip
from foreprop.quantities import rate_text, time_text
from foreprop.tools.doctor.records import (
    Examination,
    Finding,
    both_stayed,
    differing,
    error,
    hint,
    known_facts,
    warning,
)

SLOW_RATE = 0.5
"""The share of the usual rate below which a flow counts as slow."""
SLOW_TRIP = 3.0
_LEAST_TRIP_EXCESS_S = 0.0002
"""How much longer than usual a round trip within one rack may take by chance."""
FAR_TRIP_S = 0.005


# How fast.
def usual_trip_s(trips: Sequence[Trip]) -> float | None:
    best: dict[int, float] = {}
    for trip in trips:
        if trip.error is None:
            for host in (trip.source, trip.to):
                best[host] = min(best.get(host, trip.median_s), trip.median_s)
    return statistics.median(best.values()) if best else None


def usual_rate(flows: Sequence[Flow]) -> float | None:
    """bit/s, in either direction."""
    best = best_rates(flows)
    return statistics.median(best.values()) if best else None


def best_rates(flows: Sequence[Flow]) -> dict[int, float]:
    best: dict[int, float] = {}
    for flow in flows:
        if flow.error is None:
            for host in (flow.source, flow.to):
                best[host] = max(best.get(host, 0.0), flow.bits_per_s)
    return best


def find_slow_trips(examination: Examination) -> Iterator[Finding]:
    good = [trip for trip in examination.trips if trip.error is None]
    yield from _find_broken(examination, examination.trips, "small messages")
    usual_s = usual_trip_s(good)
    if usual_s is None:
        return
    least_slow_s = max(SLOW_TRIP * usual_s, usual_s + _LEAST_TRIP_EXCESS_S)
    slow = [trip for trip in good if trip.median_s > least_slow_s]
    yield from _find_slow_places(examination, good, slow, usual_s)
    if usual_s > FAR_TRIP_S:
        yield warning(
            "round trip",
            [host.name for host in examination.hosts],
            f"a round trip of {time_text(usual_s)} is usual here: these hosts are far apart",
            "every first use of a parameter may wait for that; train within one site, or on"
            " fewer and larger machines",
        )
    for trip in good:
        excess_s = trip.p90_s - trip.median_s
        if trip in slow or excess_s <= 5 * _LEAST_TRIP_EXCESS_S:
            continue
        if trip.p90_s > SLOW_TRIP * trip.median_s:
            one, other = (examination.hosts[number].name for number in (trip.source, trip.to))
            yield hint(
                "round trip",
                [one, other],
                f"{one} and {other}: one message in ten takes {time_text(trip.p90_s)} or more there"
                f" and back, half of them {time_text(trip.median_s)} or less",
                "see whether other programs use these machines or the network between them",
            )


def _find_slow_places(
    examination: Examination, good: Sequence[Trip], slow: Sequence[Trip], usual_s: float
) -> Iterator[Finding]:
    """Slow trips; a host that is slow with every other one is one finding."""
    left, places = list(slow), []
    for number, host in enumerate(examination.hosts):
        mine = [trip for trip in left if number in (trip.source, trip.to)]
        if len(mine) > 1 and mine == [t for t in good if number in (t.source, t.to)]:
            left = [trip for trip in left if trip not in mine]
            places.append(([host.name], f"{host.name} and every other host", mine))
    for trip in left:
        one, other = (examination.hosts[number].name for number in (trip.source, trip.to))
        places.append(([one, other], f"{one} and {other}", [trip]))
    for names, where, trips in places:
        least, most = (time_text(choose(t.median_s for t in trips)) for choose in (min, max))
        takes = least if most == least else f"{least} to {most}"
        yield warning(
            "round trip",
            names,
            f"a round trip between {where} takes {takes}, where {time_text(usual_s)} is usual",
            "see whether the way leads over another site, a tunnel or Wi-Fi, and whether the"
            " host sleeps to save power; set FOREPROP_INTERFACE if there is a nearer network",
        )


def _find_broken(
    examination: Examination, measured: Sequence[Trip | Flow], what: str
) -> Iterator[Finding]:
    for one in measured:
        if one.error is not None and both_stayed(examination, one.source, one.to):
            source, to = (examination.hosts[number].name for number in (one.source, one.to))
            yield error(
                "reach",
                [source, to],
                f"{what} from {source} to {to} broke off, although they connect: {one.error}",
                "see whether the link drops packets, and large ones in particular: ping -M do -s"
                f" 1472 {to} from {source}; MTUs must be alike all the way",
            )


def find_slow_flows(examination: Examination) -> Iterator[Finding]:
    flows = (*examination.alone, *examination.together)
    yield from _find_broken(examination, flows, "sending")
    usual = usual_rate(examination.alone)
    if usual is None:
        return
    good = [flow for flow in examination.alone if flow.error is None]
    slow = [flow for flow in good if flow.bits_per_s < SLOW_RATE * usual]
    left = slow
    for host, name in enumerate(host.name for host in examination.hosts):
        for sends in (True, False):
            mine, others = _of_host(slow, host, sends=sends), _of_host(good, host, sends=sends)
            if len(others) > 1 and len(mine) == len(others):
                left = [flow for flow in left if flow not in mine]
                yield _slow_host(name, usual, mine, sends=sends)
    reverse = {(flow.source, flow.to): flow.bits_per_s for flow in good}
    for flow in left:
        yield _slow_pair(examination, flow, usual, reverse.get((flow.to, flow.source)))


def _of_host(flows: Sequence[Flow], host: int, *, sends: bool) -> list[Flow]:
    return [flow for flow in flows if (flow.source if sends else flow.to) == host]


_SLOW_LINK = (
    "see the link's negotiated speed, cable and switch port of {where} (ethtool), other traffic, a"
    " traffic shaper, and whether the right interface is used (FOREPROP_INTERFACE)"
)


def _slow_host(name: str, usual: float, flows: Sequence[Flow], *, sends: bool) -> Finding:
    best = max(flow.bits_per_s for flow in flows)
    verb = "sends to" if sends else "gets from"
    return warning(
        "rate",
        [name],
        f"{name} {verb} every other host at {rate_text(best)} or less, where"
        f" {rate_text(usual)} is usual; every step waits for the slowest",
        _SLOW_LINK.format(where=name),
    )


def _slow_pair(examination: Examination, flow: Flow, usual: float, back: float | None) -> Finding:
    one, other = (examination.hosts[host].name for host in (flow.source, flow.to))
    reverse = "" if back is None else f" ({rate_text(back)} the other way)"
    return warning(
        "rate",
        [one, other],
        f"{one} sends to {other} at {rate_text(flow.bits_per_s)}{reverse}, where"
        f" {rate_text(usual)} is usual",
        _SLOW_LINK.format(where=f"{one} and {other}"),
    )


def totals(flows: Sequence[Flow]) -> dict[int, list[float]]:
    """Each host's bit/s sent and received, over all its peers."""
    sums: dict[int, list[float]] = {}
    for flow in flows:
        if flow.error is None:
            sums.setdefault(flow.source, [0.0, 0.0])[0] += flow.bits_per_s
            sums.setdefault(flow.to, [0.0, 0.0])[1] += flow.bits_per_s
    return sums


def find_crowding(examination: Examination) -> Iterator[Finding]:
    """Hosts that get less when all send at once, as in training, than each alone."""
    texts, crowded = [], []
    for host, both in sorted(totals(examination.together).items()):
        name = examination.hosts[host].name
        for sends, together in ((True, both[0]), (False, both[1])):
            flows = _of_host(examination.alone, host, sends=sends)
            alone = max((flow.bits_per_s for flow in flows if flow.error is None), default=0.0)
            if together < SLOW_RATE * alone:
                verb = "sends" if sends else "receives"
                texts.append(f"{name} {verb} {rate_text(together)} ({rate_text(alone)} alone)")
                crowded.append(name)
    if texts:
        yield warning(
            "all at once",
            list(dict.fromkeys(crowded)),
            "when everybody sends to everybody, as in training, there is much less: "
            + ", ".join(texts),
            "see whether the switch or an uplink between switches is shared by too many,"
            " whether CPUs are busy, and whether several hosts of the file are one machine",
        )


CLOCK_S = 0.010
"""Steps take tens of milliseconds: clocks further apart put a trace's events in another step."""


# Links.
def find_links(examination: Examination) -> Iterator[Finding]:
    known = [
        (name, facts)
        for name, facts in known_facts(examination)
        if facts.address is not None and not is_loopback(facts.address)
    ]
    yield from differing(
        "warning",
        "link",
        "the interfaces' MTU differs",
        {name: facts.mtu_bytes for name, facts in known},
        "set one MTU on all hosts and switches (ip link set dev IFACE mtu 1500): where"
        " it changes on the way, large packets may vanish",
    )
    speeds = {name: facts.speed_bits_per_s for name, facts in known}
    yield from differing(
        "warning",
        "link",
        "the links' speed differs",
        {name: speed and rate_text(speed) for name, speed in speeds.items()},
        "every step waits for the slowest: see its cable, switch port and negotiation"
        " (ethtool), or choose another interface with FOREPROP_INTERFACE",
    )
    advice = "switch on autonegotiation at both ends of the cable (ethtool -s IFACE autoneg on)"
    for name, facts in known:
        if facts.full_duplex is False:
            text = f"{name}: {facts.interface} is half duplex: it cannot send while it receives"
            yield warning("link", [name], text, advice)
    yield from _find_unused_speed(examination)


def _find_unused_speed(examination: Examination) -> Iterator[Finding]:
    texts: dict[str, str] = {}
    for number, best in best_rates(examination.alone).items():
        host = examination.hosts[number]
        speed = host.facts.speed_bits_per_s if host.facts is not None else None
        if host.facts is not None and speed is not None and best < SLOW_RATE * speed:
            texts[host.name] = (
                f"{host.name} {rate_text(best)} of {rate_text(speed)} ({host.facts.interface})"
            )
    if texts:
        claims = "less than half of what the interface claims goes through: "
        yield hint(
            "link",
            list(texts),
            claims + "; ".join(texts.values()),
            "a virtual interface may claim anything; else see CPU load, shapers, the"
            " switch's ports, and whether one connection is limited (see window)",
        )


# Clocks.
def clock_offsets_s(examination: Examination) -> dict[int, tuple[float, float]]:
    """Each host's clock minus the first's, and by how much that may be off."""
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
            yield warning(
                "clock",
                [name],
                f"the clock of {name} is {time_text(abs(offset_s))} {way} that of {first}"
                f" (± {time_text(error_s)})",
                "training does not mind, but traces and logs of different hosts do not fit"
                " together: run chrony or systemd-timesyncd on all hosts",
            )


# Kernels.
def find_kernels(examination: Examination) -> Iterator[Finding]:
    """TCP's settings, against rate times round trip."""
    controls = {name: facts.congestion_control for name, facts in known_facts(examination)}
    advice = "one may take the other's share of a link: set net.ipv4.tcp_congestion_control alike"
    yield from differing("hint", "window", "TCP's congestion control differs", controls, advice)
    worst: dict[tuple[int, str], _Window] = {}
    for window in _windows(examination):
        if window.allowed_bytes < window.needed_bytes:
            key = (window.host, window.setting)
            worst[key] = max(window, worst.get(key, window), key=lambda w: w.needed_bytes)
    for window in worst.values():
        name = examination.hosts[window.host].name
        yield hint(
            "window",
            [name],
            f"{name}: {window.setting} allows {window.allowed_bytes / 1e6:.2g} MB on the way;"
            f" {window.why} needs {window.needed_bytes / 1e6:.2g} MB",
            f"if more than is measured is to go through, raise {window.setting}"
            + " there with sysctl (of three numbers the third)" * window.setting.startswith("net.")
            + " so that twice that is allowed",
        )


class _Window(NamedTuple):
    """The bytes that a host's setting allows on the way to or from another, and those needed."""

    host: int
    setting: str
    allowed_bytes: float
    needed_bytes: float
    why: str


def _windows(examination: Examination) -> Iterator[_Window]:
    """The windows that limit each flow.

    The kernel keeps about half of automatic buffers for its bookkeeping (man 7 tcp); of one that is
    asked for, as pushes do, it gives twice what wmem_max allows.
    """
    servers = len(examination.hosts)
    trips = [trip for trip in examination.trips if trip.error is None]
    ways = [
        (trip, way) for trip in trips for way in ((trip.source, trip.to), (trip.to, trip.source))
    ]
    for trip, (source, to) in ways:
        sender, receiver = examination.hosts[source].facts, examination.hosts[to].facts
        if sender is None or receiver is None:
            continue
        rates = [f.bits_per_s for f in examination.alone if (f.source, f.to) == (source, to)]
        claimed = min(sender.speed_bits_per_s or 0.0, receiver.speed_bits_per_s or 0.0)
        rate = max([*rates, claimed])
        why = f"{rate_text(rate)} with a round trip of {time_text(trip.median_s)}"
        for host, setting, size_bytes, factor in (
            (to, "net.ipv4.tcp_rmem", receiver.receive_buffer_bytes, 0.5),
            (source, "net.ipv4.tcp_wmem", sender.send_buffer_bytes, 0.5),
            (source, "net.core.wmem_max", sender.asked_buffer_bytes, 2 * servers),
            (source, "FOREPROP_PUSH_WINDOW_BYTES", sender.push_window_bytes, 1),
        ):
            if size_bytes is not None:
                yield _Window(host, setting, factor * size_bytes, rate / 8 * trip.median_s, why)

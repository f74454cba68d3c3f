"""A healthy cluster as the doctor sees it, for tests to spoil."""

from __future__ import annotations

from typing import Any

from foreprop.engine.traffic import Attempt, Flow, Trip
from foreprop.tools.doctor.records import Examination, Examined, Facts, Resolved

GBIT = 1e9
NAMES = ("node0", "node1", "node2", "node3")


def facts(host: int, **changes: Any) -> Facts:
    values: dict[str, Any] = {
        "foreprop": "0.1.0",
        "python": "3.11.7",
        "torch": "2.13.0",
        "byteorder": "little",
        "names": [resolved(name, f"10.0.0.{n + 1}") for n, name in enumerate(NAMES)],
        "own_name": resolved(NAMES[host], f"10.0.0.{host + 1}"),
        "gloo_interface": None,
        "address": f"10.0.0.{host + 1}",
        "port": 40_000 + host,
        "rendezvous_port": 29_500 if host == 0 else None,
        "interface": "eth0",
        "mtu_bytes": 1500,
        "speed_bits_per_s": GBIT,
        "full_duplex": True,
        "congestion_control": "cubic",
        "send_buffer_bytes": 4_194_304,
        "receive_buffer_bytes": 6_291_456,
        "asked_buffer_bytes": 212_992,
        "first_port": 32_768,
        "last_port": 60_999,
        "push_window_bytes": 1_572_864,
        "cpus": 8,
        "load": 0.5,
        "threads": None,
        "open_files": 1024,
    }
    return Facts(**values | changes)


def resolved(name: str, *addresses: str, error: str | None = None) -> Resolved:
    return Resolved(name=name, addresses=list(addresses), error=error)


def pairs(count: int) -> list[tuple[int, int]]:
    return [(a, b) for a in range(count) for b in range(count) if a != b]


def flows(count: int, **spoilt: float) -> list[Flow]:
    """``_0_1=0.3``: from 0 to 1 at 0.3 Gbit/s; others 0.94."""
    return [
        Flow(source=a, to=b, bits_per_s=spoilt.get(f"_{a}_{b}", 0.94) * GBIT)
        for a, b in pairs(count)
    ]


def trips(count: int, **spoilt: dict[str, float]) -> list[Trip]:
    """``_0_1={"median_s": ...}``; others 0.1 ms."""
    usual = {"median_s": 1e-4, "p90_s": 1.2e-4, "least_s": 9e-5, "offset_s": 1e-5}
    return [
        Trip(source=a, to=b, count=500, **usual | spoilt.get(f"_{a}_{b}", {}))
        for a, b in pairs(count)
        if a < b
    ]


def examination(
    count: int = 3,
    *,
    workers: int = 1,
    spoilt: dict[int, dict[str, Any]] | None = None,
    **more: Any,
) -> Examination:
    """``spoilt``: by host, what its facts are instead; ``more``: the measurements instead."""
    hosts = [
        Examined(name=NAMES[n], workers=workers, facts=facts(n, **(spoilt or {}).get(n, {})))
        for n in range(count)
    ]
    together = [Flow(source=a, to=b, bits_per_s=0.93 * GBIT / (count - 1)) for a, b in pairs(count)]
    values: dict[str, Any] = {
        "rendezvous": "node0",
        "hosts": hosts,
        "attempts": [attempt(a, b) for a, b in pairs(count)],
        "trips": trips(count),
        "alone": flows(count),
        "together": together,
    }
    return Examination(**values | more)


def attempt(source: int, to: int, outcome: str = "connected", **changes: Any) -> Attempt:
    values: dict[str, Any] = {
        "source": source,
        "to": to,
        "address": f"10.0.0.{to + 1}",
        "port": 40_000 + to,
        "purpose": "server",
        "outcome": outcome,
    }
    return Attempt(**values | changes)

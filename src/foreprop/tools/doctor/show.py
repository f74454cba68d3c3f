"""The report: tables of hosts and pairs, then the findings; or JSON."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from foreprop.engine.traffic import Flow
from foreprop.quantities import counted, rate_text, time_text
from foreprop.tools.doctor.links import clock_offsets_s, totals
from foreprop.tools.doctor.records import (
    Examination,
    Examined,
    Finding,
    Severity,
    groups,
    known_facts,
)

_MOST_PAIRS = 30
_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "yellow", "hint": "cyan"}


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--json`` prints; ``ok`` if nothing would keep training from working."""

    ok: bool
    findings: list[Finding]
    examination: Examination


def report(examination: Examination, findings: list[Finding]) -> Report:
    ok = all(finding.severity != "error" for finding in findings)
    return Report(ok=ok, findings=findings, examination=examination)


def to_json(shown: Report) -> str:
    return msgspec.json.format(msgspec.json.encode(shown), indent=2).decode()


def show(console: Console, shown: Report) -> None:
    table = _table(
        "Hosts", "host", "workers", "address", "interface", "link", "MTU", "CPUs", "clock"
    )
    offsets = clock_offsets_s(shown.examination)
    for number, host in enumerate(shown.examination.hosts):
        table.add_row(*map(escape, _host_row(host, offsets.get(number))))
    console.print(table)
    console.print(_versions(shown.examination))
    if any(facts.devices for _, facts in known_facts(shown.examination)):
        console.print(_devices(shown.examination))
    if shown.examination.trips or shown.examination.alone:
        console.print(_pairs(shown.examination))
    if shown.examination.together:
        table = _table("All at once", "host", "sends", "receives")
        for number, (out, into) in sorted(totals(shown.examination.together).items()):
            name = escape(shown.examination.hosts[number].name)
            table.add_row(name, rate_text(out), rate_text(into))
        console.print(table)
    for finding in shown.findings:
        console.print(_finding(finding))
    counts = {severity: sum(f.severity == severity for f in shown.findings) for severity in _STYLES}
    total = ", ".join(f"{n} {severity}{'s' * (n > 1)}" for severity, n in counts.items() if n)
    if not shown.ok:
        console.print(Text(f"Training would not work: {total}."))
    else:
        console.print(Text(f"Nothing keeps training from working{': ' * bool(total)}{total}."))


def _table(title: str, *headings: str) -> Table:
    title_text = Text(title, style="bold", no_wrap=True)
    table = Table(title=title_text, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _versions(examination: Examination) -> Text:
    versions: dict[str, Hashable] = {
        name: f"foreprop {f.foreprop}{'' if f.plane else ' (no native plane)'},"
        f" torch {f.torch or 'none'}, Python {f.python}"
        for name, f in known_facts(examination)
    }
    if len(set(versions.values())) == 1:
        return Text(f"{next(iter(versions.values()))} on {counted(len(versions), 'host')}")
    return Text(groups(versions))


def _host_row(host: Examined, offset: tuple[float, float] | None) -> list[str]:
    facts = host.facts
    if facts is None:
        return [host.name, str(host.workers), "no results"]
    speed = facts.speed_bits_per_s
    return [
        host.name,
        str(host.workers),
        facts.address or "none",
        facts.interface or "?",
        "?" if speed is None else rate_text(speed),
        "?" if facts.mtu_bytes is None else str(facts.mtu_bytes),
        str(facts.cpus),
        "?" if offset is None else f"{offset[0] * 1e3:+.3f} ms",
    ]


def _devices(examination: Examination) -> Table:
    # with the NUMA nodes of the device and of the interface by which gradients leave
    table = _table(
        "Devices", "host", "device", "model", "memory", "driver", "NCCL", "NUMA", "interface"
    )
    for name, facts in known_facts(examination):
        near = "?" if facts.interface_numa_node is None else str(facts.interface_numa_node)
        for device in facts.devices:
            memory = device.memory_bytes
            table.add_row(
                escape(name),
                device.name,
                escape(device.model),
                "?" if memory is None else f"{memory / 2**30:.1f} GiB",
                escape(device.driver or "?"),
                facts.nccl or "-",
                "?" if device.numa_node is None else str(device.numa_node),
                near,
            )
    return table


def _pairs(examination: Examination) -> Table:
    """A table of the pairs, or of the slowest if there are too many to show."""
    trips = {}
    for trip in examination.trips:
        if trip.error is None:
            trips[trip.source, trip.to] = trips[trip.to, trip.source] = trip
    together = {(f.source, f.to): f for f in examination.together}
    alone = {(f.source, f.to): f for f in examination.alone}
    pairs = sorted(alone.keys() | trips.keys())
    title = "Pairs"
    if len(pairs) > _MOST_PAIRS:
        pairs.sort(key=lambda pair: alone[pair].bits_per_s if pair in alone else 0.0)
        title = f"The slowest {_MOST_PAIRS} of {len(pairs)} directions (--json has all)"
        del pairs[_MOST_PAIRS:]
    table = _table(title, "from", "to", "round trip", "90 % within", "rate alone", "all at once")
    for pair in pairs:
        found = trips.get(pair)
        table.add_row(
            *(escape(examination.hosts[host].name) for host in pair),
            "-" if found is None else time_text(found.median_s),
            "-" if found is None else time_text(found.p90_s),
            _rate(alone.get(pair)),
            _rate(together.get(pair)),
        )
    return table


def _rate(flow: Flow | None) -> str:
    if flow is None:
        return "-"
    return rate_text(flow.bits_per_s) if flow.error is None else "broke off"


def _finding(finding: Finding) -> RenderableType:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(min_width=8)
    table.add_column(overflow="fold")
    table.add_row(Text(finding.severity, style=_STYLES[finding.severity]), Text(finding.found))
    table.add_row("", Text(f"-> {finding.advice}"))
    return table

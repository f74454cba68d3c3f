"""What the measurements mean, and what to do about it. Pure: an `Examination` in, findings out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from foreprop.tools.doctor import links, setup
from foreprop.tools.doctor.records import Examination, Finding, Severity

_ORDER: Mapping[Severity, int] = {"error": 0, "warning": 1, "hint": 2}
_CHECKS: Sequence[Callable[[Examination], Iterator[Finding]]] = (
    setup.find_failures,
    setup.find_directories,
    setup.find_versions,
    setup.find_names,
    setup.find_addresses,
    setup.find_unreached,
    links.find_slow_trips,
    links.find_slow_flows,
    links.find_crowding,
    links.find_links,
    links.find_clocks,
    links.find_kernels,
    setup.find_processors,
    setup.find_open_files,
    setup.find_devices,
)


def find(examination: Examination) -> list[Finding]:
    """All findings, errors first; what is the same on several hosts is one finding."""
    found = [finding for check in _CHECKS for finding in check(examination)]
    return sorted(_merge(found), key=lambda finding: _ORDER[finding.severity])


def _merge(found: Sequence[Finding]) -> list[Finding]:
    """Merge findings that begin with ``HOST: `` and differ in nothing else."""
    merged: dict[tuple[object, ...], Finding] = {}
    for number, finding in enumerate(found):
        host, *others = finding.hosts
        what = finding.found.removeprefix(f"{host}: ")
        if others or what == finding.found:
            merged[number,] = finding
            continue
        key = (finding.severity, finding.check, what, finding.advice)
        hosts = [*(merged[key].hosts if key in merged else ()), host]
        text = f"{', '.join(hosts)}: {what}"
        merged[key] = msgspec.structs.replace(finding, hosts=hosts, found=text)
    return list(merged.values())

"""What the measurements mean, and what to do about it. Pure: an `Examination` in, findings out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from foreprop.doctor.links import (
    find_clocks,
    find_crowding,
    find_kernels,
    find_links,
    find_slow_flows,
    find_slow_trips,
)
from foreprop.doctor.records import Examination, Finding, Severity
from foreprop.doctor.setup import (
    find_addresses,
    find_directories,
    find_failures,
    find_names,
    find_open_files,
    find_processors,
    find_unreached,
    find_versions,
)

_ORDER: Mapping[Severity, int] = {"error": 0, "warning": 1, "hint": 2}
_CHECKS: Sequence[Callable[[Examination], Iterator[Finding]]] = (
    find_failures,
    find_directories,
    find_versions,
    find_names,
    find_addresses,
    find_unreached,
    find_slow_trips,
    find_slow_flows,
    find_crowding,
    find_links,
    find_clocks,
    find_kernels,
    find_processors,
    find_open_files,
)


def find(examination: Examination) -> list[Finding]:
    """Errors first; what is the same on several hosts is one finding."""
    found = [finding for check in _CHECKS for finding in check(examination)]
    return sorted(_merge(found), key=lambda finding: _ORDER[finding.severity])


def _merge(found: Sequence[Finding]) -> list[Finding]:
    """Those that begin with ``HOST: `` and differ in nothing else."""
    same: dict[tuple[object, ...], list[Finding]] = {}
    for number, finding in enumerate(found):
        what = finding.found.removeprefix(f"{finding.hosts[0]}: ")
        alone = number if len(finding.hosts) > 1 or what == finding.found else None
        key = (alone, finding.severity, finding.check, what, finding.advice)
        same.setdefault(key, []).append(finding)
    return [_merge_same(key[3], findings) for key, findings in same.items()]


def _merge_same(what: object, findings: Sequence[Finding]) -> Finding:
    first = findings[0]
    if len(findings) == 1:
        return first
    hosts = [finding.hosts[0] for finding in findings]
    return msgspec.structs.replace(first, hosts=hosts, found=f"{', '.join(hosts)}: {what}")

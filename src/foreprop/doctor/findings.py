"""What the measurements mean, and what to do about it. Pure: an `Examination` in, findings out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from foreprop.doctor.addresses import find_addresses, find_names, find_unreached
from foreprop.doctor.links import find_clocks, find_kernels, find_links
from foreprop.doctor.records import Examination, Finding, Severity
from foreprop.doctor.setup import (
    find_directories,
    find_failures,
    find_open_files,
    find_processors,
    find_versions,
)
from foreprop.doctor.speed import find_crowding, find_slow_flows, find_slow_trips

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
    """Errors first."""
    found = [finding for check in _CHECKS for finding in check(examination)]
    return sorted(found, key=lambda finding: _ORDER[finding.severity])

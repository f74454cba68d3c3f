"""Words of findings: who has which value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from functools import partial

from foreprop.doctor.records import Examination, Facts, Finding, Severity

Known = list[tuple[str, Facts]]
error, warning, hint = (
    partial(Finding, "error"),
    partial(Finding, "warning"),
    partial(Finding, "hint"),
)
"""Findings, of a check, about hosts: what is found, and what to do about it."""


def known_facts(examination: Examination) -> Known:
    return [(host.name, host.facts) for host in examination.hosts if host.facts is not None]


def both_stayed(examination: Examination, source: int, to: int) -> bool:
    """Whether neither host's probe has failed, which would explain what others saw of it."""
    return all(examination.hosts[host].failure is None for host in (source, to))


def groups(values: Mapping[str, Hashable]) -> str:
    """``node0, node1: 2.6; node2: 2.7``, the most common first."""
    names: dict[Hashable, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    most_first = sorted(names.items(), key=lambda item: -len(item[1]))
    return "; ".join(f"{', '.join(who)}: {value}" for value, who in most_first)


def odd_ones(values: Mapping[str, Hashable]) -> list[str]:
    """Those that do not have the most common value."""
    (common, _), *_ = Counter(values.values()).most_common(1)
    return [name for name, value in values.items() if value != common]


def differing(
    severity: Severity, check: str, told: str, values: Mapping[str, Hashable], advice: str
) -> Iterator[Finding]:
    """One finding if hosts do not all have the same value: ``told``, and who has which.

    A host whose value is None is left out.
    """
    known = {name: value for name, value in values.items() if value is not None}
    if len(set(known.values())) > 1:
        yield Finding(severity, check, odd_ones(known), f"{told}: {groups(known)}", advice)

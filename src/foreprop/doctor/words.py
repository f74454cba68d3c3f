"""Words of findings: who has which value."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping

from foreprop.doctor.records import Examination, Facts, Finding, Severity

Known = list[tuple[str, Facts]]


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
    told: str, values: Mapping[str, Hashable], *, severity: Severity, check: str, advice: str
) -> Iterator[Finding]:
    """One finding if the hosts do not all have the same value: ``told``, and who has which."""
    if len(set(values.values())) > 1:
        yield Finding(
            severity=severity,
            check=check,
            hosts=odd_ones(values),
            found=f"{told}: {groups(values)}",
            advice=advice,
        )


def is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True

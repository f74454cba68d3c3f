"""Steps if the links, the cluster or the devices were others: a curve for each architecture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import msgspec

from foreprop import quantities
from foreprop.errors import ConfigError
from foreprop.plan.planner import (
    P3,
    Candidate,
    PlanSetting,
    candidate_step_s,
    choose,
    collective_candidates,
)

Variable = Literal["rate", "latency", "compute", "nodes", "servers"]
_PARSE: Mapping[Variable, quantities.Parse] = {
    "rate": quantities.parse_rate,
    "latency": quantities.parse_time,
    "compute": quantities.parse_time,
    "nodes": quantities.parse_count,
    "servers": quantities.parse_count,
}
_FIELDS: Mapping[Variable, str] = {
    "rate": "rate_bits_per_s",
    "latency": "latency_s",
    "compute": "compute_s",
    "nodes": "nodes",
}
_WHOLE = ("nodes", "servers")
_ROUND = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
_FEW, _MOST = 5, 24
"""Fewer round points are replaced by evenly spaced ones, more points are an error."""


class WhatIfPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The steps and throughputs of `WhatIf.candidates`, in their order, at one value.

    The ``ideal`` throughput is that of devices that never wait.
    """

    value: float
    steps_s: list[float]
    throughputs: list[float]
    ideal: float
    recommended: str


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """A curve for each of the ``candidates`` over the values of one variable, with their unit.

    The rest of the plan is about the value ``asked``.
    """

    variable: Variable
    unit: str
    throughput_unit: str
    candidates: list[str]
    points: list[WhatIfPoint]
    asked: float | None


def parse_what_if(text: str) -> tuple[Variable, list[float]]:
    """Read ``rate=1Gbit..100Gbit`` or ``nodes=2,4,8``; raises `ConfigError`.

    A range is taken at round values.
    """
    name, equals, values = text.partition("=")
    variables = get_args(Variable)
    if not equals or name.strip() not in variables:
        raise ConfigError(
            f"what_if is {text!r}; it must be one of {', '.join(variables)}, '=' and a range, as"
            " rate=1Gbit..100Gbit or nodes=2..64"
        )
    variable: Variable = next(v for v in variables if v == name.strip())
    parse = _PARSE[variable]
    field = f"what_if's {variable}"
    ends = quantities.maybe_ends(field, values, parse)
    if ends is None:
        chosen = sorted({parse(field, part) for part in values.split(",")})
    elif variable in _WHOLE:
        chosen = _whole_values(int(ends[0]), int(ends[1]))
    else:
        chosen = _round_values(*ends)
    if len(chosen) > _MOST:
        raise ConfigError(f"what_if is {text!r}: {len(chosen)} points; at most {_MOST}")
    return variable, chosen


def _whole_values(first: int, last: int) -> list[float]:
    """All values of a small range, else powers of two, three halves of them, and the ends."""
    if last - first < 2 * _FEW:
        return [float(value) for value in range(first, last + 1)]
    powers = [2**n for n in range(last.bit_length() + 1)]
    inside = {v for power in powers for v in (power, power * 3 // 2) if first < v < last}
    return [float(value) for value in sorted({first, last} | inside)]


def _round_values(first: float, last: float) -> list[float]:
    if first > 0:
        decades = range(math.floor(math.log10(first)), math.ceil(math.log10(last)) + 1)
        inside = [float(f"{r}e{d}") for d in decades for r in _ROUND]
        chosen = [first, *(v for v in inside if first * 1.05 < v < last / 1.05), last]
        if len(chosen) >= _FEW:
            return chosen
    return [first + (last - first) * n / 8 for n in range(9)]


def what_if(
    setting: PlanSetting,
    variable: Variable,
    values: Sequence[float],
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> WhatIf:
    """The curves of DDP, ring, p2p with p3, and ps with p3 and the most servers considered.

    A model with tables also has hybrid, and DDP with dense gradients. With the variable ``servers``
    each value has ps with so many. Raises `ConfigError` before any work.
    """
    made: list[tuple[PlanSetting, dict[Candidate, float]]] = []
    settings = [_changed(setting, variable, value) for value in values]
    tables = any(changed.tables for changed in settings)  # which depends on the number of nodes
    for number, changed in enumerate(settings, start=1):
        progress(f"{variable}: {number} of {len(values)}")
        curves = list(collective_candidates(changed, tables))
        if 0 in changed.servers:
            curves.append(Candidate("p2p", P3))
        if max(changed.servers) > 0:
            curves.append(Candidate("ps", P3, max(changed.servers)))
        steps_s = {candidate: candidate_step_s(changed, candidate) for candidate in curves}
        made.append((changed, steps_s))
    names = [candidate.name for candidate in made[0][1]]
    if variable == "servers":
        names[-1] = "ps p3"  # of each point with so many servers
    return WhatIf(
        variable=variable,
        unit={"rate": "bit/s", "latency": "s", "compute": "s"}.get(variable, variable),
        throughput_unit=setting.throughput_unit,
        candidates=names,
        points=[
            WhatIfPoint(
                value=value,
                steps_s=list(steps_s.values()),
                throughputs=[changed.throughput(seconds) for seconds in steps_s.values()],
                ideal=changed.throughput(changed.compute_s),
                recommended=choose(steps_s).name,
            )
            for value, (changed, steps_s) in zip(values, made, strict=True)
        ],
        asked=getattr(setting, _FIELDS[variable]) if variable in _FIELDS else None,
    )


def _changed(setting: PlanSetting, variable: Variable, value: float) -> PlanSetting:
    if variable == "servers":
        if value < 1:
            raise ConfigError(
                "what_if's servers has 0; begin with 1: servers beside the workers are p2p, which"
                " has a curve anyway"
            )
        return replace(setting, servers=(0, int(value)))
    changes: dict[str, Any] = {_FIELDS[variable]: int(value) if variable in _WHOLE else value}
    return replace(setting, **changes)


def value_text(variable: Variable, value: float) -> str:
    if variable in _WHOLE:
        return f"{value:.0f}"
    return quantities.rate_text(value) if variable == "rate" else quantities.time_text(value)

"""What makes one node's link differ from the others: its rate, and another job's bytes on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foreprop.errors import ConfigError
from foreprop.quantities import parse_count, parse_rate, parse_time


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """One node's link, in both directions, if it is not as fast as the others."""

    node: int
    factor: float | None = None
    """Of the others' rate."""
    rate_bits_per_s: float | None = None
    """Instead of ``factor``."""

    def __post_init__(self) -> None:
        value = self.rate_bits_per_s if self.factor is None else self.factor
        if value is None or not 0 < value < math.inf:
            raise ConfigError(
                f"link_rates has {value} for node {self.node}; it must be positive and finite"
            )

    def of(self, rate_bits_per_s: float) -> float:
        """If that is the others' rate."""
        return self.rate_bits_per_s or rate_bits_per_s * (self.factor or 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossTraffic:
    """Another job's bytes on one node's link, in both directions, for part of the time."""

    node: int
    share: float
    """Of the link's rate, while there is some."""
    period_s: float = 1.0
    duty: float = 1.0
    """For which share of each period, at its start; 1: all the time."""

    def __post_init__(self) -> None:
        checks = {
            f"the share {self.share:g}": (0 < self.share < 1, "above 0 and below 1"),
            f"the period {self.period_s:g} s": (0 < self.period_s < math.inf, "positive"),
            f"the duty {self.duty:g}": (0 < self.duty <= 1, "above 0 and at most 1"),
        }
        for what, (holds, allowed) in checks.items():
            if not holds:
                raise ConfigError(
                    f"cross_traffic has {what} for node {self.node}; it must be {allowed}"
                )

    @property
    def left(self) -> float:
        """The share of the link's rate that is left to others, in the long run."""
        return 1 - self.share * self.duty

    def work_s(self, time_s: float) -> float:
        """Seconds of the whole link that others have had until then, since time 0."""
        periods, rest_s = divmod(time_s, self.period_s)
        shared_s = min(rest_s, self.duty * self.period_s)
        return periods * self.period_s * self.left + rest_s - self.share * shared_s

    def time_s(self, work_s: float) -> float:
        """The inverse of `work_s`."""
        periods, rest_s = divmod(work_s, self.period_s * self.left)
        shared_s = self.duty * self.period_s * (1 - self.share)
        if rest_s < shared_s:
            return periods * self.period_s + rest_s / (1 - self.share)
        return periods * self.period_s + self.duty * self.period_s + rest_s - shared_s

    def least_s(self, work_s: float) -> float:
        """How long so much work takes at least, whenever it begins: when the others have paused."""
        starts_s = self.duty * self.period_s
        return self.time_s(self.work_s(starts_s) + work_s) - starts_s


def parse_link_rates(text: str) -> tuple[LinkRate, ...]:
    """Of ``3:0.5,2:40Mbit``: a factor or a rate by node; raises `ConfigError`."""
    rates = []
    for part in text.split(","):
        node, colon, value = part.partition(":")
        if not colon:
            raise ConfigError(f"link_rates has {part!r}; it must be NODE:FACTOR or NODE:RATE")
        number, amount = parse_count("link_rates", node), _maybe_number(value)
        rate = parse_rate("link_rates", value) if amount is None else None
        rates.append(LinkRate(node=number, factor=amount, rate_bits_per_s=rate))
    return tuple(rates)


def parse_cross_traffic(text: str) -> tuple[CrossTraffic, ...]:
    """Of ``3:0.4`` or ``3:0.4:2s:0.5``: node, share, period and duty; raises `ConfigError`."""
    traffic = []
    for part in text.split(","):
        node, *values = part.split(":")
        numbers = [_maybe_number(value) for value in (*values[:1], *values[2:])]
        if len(values) not in (1, 3) or None in numbers:
            raise ConfigError(
                f"cross_traffic has {part!r}; it must be NODE:SHARE or NODE:SHARE:PERIOD:DUTY, as"
                " 3:0.4:2s:0.5"
            )
        share, *duty = [number for number in numbers if number is not None]
        number = parse_count("cross_traffic", node)
        if duty:
            period_s = parse_time("cross_traffic", values[1])
            named = {"period_s": period_s, "duty": duty[0]}
            traffic.append(CrossTraffic(node=number, share=share, **named))
        else:
            traffic.append(CrossTraffic(node=number, share=share))
    return tuple(traffic)


def _maybe_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def check_links(rates: Sequence[LinkRate], traffic: Sequence[CrossTraffic], nodes: int) -> None:
    """Each node once, and one that there is; raises `ConfigError`."""
    for option, given in (("link_rates", rates), ("cross_traffic", traffic)):
        named = [each.node for each in given]
        for node in named:
            if not 0 <= node < nodes:
                raise ConfigError(f"{option} has node {node}; there are 0 to {nodes - 1}")
            if named.count(node) > 1:
                raise ConfigError(f"{option} names node {node} twice")

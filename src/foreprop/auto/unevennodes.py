"""What follows for a session's servers from nodes whose links or compute differ: pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from foreprop.config import Config
from foreprop.config.combinations import FEATURES
from foreprop.core.linkshares import as_setting, late_nodes_of, ready_in, shares_of
from foreprop.model.planner import PlanSetting
from foreprop.workload.limit import HEADER_FACTOR
from foreprop.workload.profile import Profile

_OWN_PLACEMENT = FEATURES["own placement"]
"""A rule of its own, whatever links differ."""


def rates_as_setting(node_rates: Sequence[float], config: Config) -> str | None:
    """Of the nodes whose links are slower; None if there are none, or a setting says it."""
    if config.node_rates is not None or _OWN_PLACEMENT.is_asked(config):
        return None
    return as_setting(node_rates)


def late_as_setting(
    setting: PlanSetting,
    config: Config,
    computed_s: Sequence[float],
    node_rates: Sequence[float],
    step_s: float,
) -> str | None:
    """None if no node's server is to own less for its compute, or a setting says who is late."""
    if config.late_nodes is not None or _OWN_PLACEMENT.is_asked(config):
        return None
    rates = node_rates or [1.0] * len(computed_s)
    elems = sum(math.prod(array.shape) for array in with_touched_rows(setting).arrays)
    fastest_bits_per_s = setting.rate_bits_per_s / min(rates, default=1.0)
    model_s = HEADER_FACTOR * 8 * setting.bytes_per_elem * elems / fastest_bits_per_s
    late = late_nodes_of(computed_s, rates, model_s=model_s, step_s=step_s) if computed_s else ()
    return ",".join(map(str, late)) or None


def as_if_even(setting: PlanSetting, node_rates: Sequence[float]) -> PlanSetting:
    """With the rate of even links on which even shares take as long as the suited ones do here."""
    even = ready_in([1.0] * len(node_rates), [1.0] * len(node_rates))
    share = even / ready_in(node_rates, shares_of(node_rates)) / min(node_rates)
    return replace(setting, rate_bits_per_s=setting.rate_bits_per_s * share)


def with_touched_rows(setting: PlanSetting) -> Profile:
    """Tables as arrays of the rows that a step touches: so many bytes are sent."""
    arrays = [
        msgspec.structs.replace(
            array,
            shape=(max(1, round(array.rows * (array.alpha or 0.0))), array.row_elems),
            alpha=None,
        )
        if setting.is_table(array)
        else array
        for array in setting.profile.arrays
    ]
    return replace(setting.profile, arrays=tuple(arrays))

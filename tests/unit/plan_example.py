"""A small model for the planner's tests: a forecast of it takes milliseconds."""

from __future__ import annotations

from typing import Any

from foreprop.plan.planner import PlanSetting
from foreprop.plan.profile import Profile, ProfiledArray

GBIT = 1e9
SMALL = Profile(
    name="small",
    arrays=tuple(
        ProfiledArray(name=f"fc{n}.weight", shape=(500, 400), forward_flops=1e6) for n in range(12)
    ),
)
"""9.6 MB in 12 equal layers. On 4 nodes at 1 Gbit/s they need 120 ms with headers."""


def sparse_profile(*, alpha: float = 0.02, rows: int = 50_000, dense: int = 12) -> Profile:
    """SMALL between two tables of 100 elements a row, 20 MB each."""
    tables = [
        ProfiledArray(name=f"{name}.weight", shape=(rows, 100), forward_flops=1e5, alpha=alpha)
        for name in ("words", "classes")
    ]
    return Profile(name="sparse", arrays=(tables[0], *SMALL.arrays[:dense], tables[1]))


def setting(**changes: Any) -> PlanSetting:
    fields: dict[str, Any] = {
        "profile": SMALL,
        "compute_s": 0.14,
        "nodes": 4,
        "rate_bits_per_s": 1 * GBIT,
        "latency_s": 50e-6,
    }
    return PlanSetting(**(fields | changes))

"""Which run has which test: `make test`, `make test-lab`, and `make test-all` with the rest."""

from __future__ import annotations

import os
from typing import Any

import pytest


def long_cases(*values: Any) -> list[Any]:
    """Of a test's parameter: what a run after every change can do without."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


def tier_of(item: pytest.Item) -> str:
    if os.environ.get("FOREPROP_ARCHITECTURE"):
        return "ring"  # all of tests/conformance once more
    for marker, tier in [("alone", "alone"), ("long", "all")]:
        if item.get_closest_marker(marker):
            return tier
    return "lab" if item.nodeid.startswith("lab/tests/") else "default"

"""Two tiers: `make test` runs what is not marked `long`, `make test-all` the rest."""

from __future__ import annotations

from typing import Any

import pytest


def long_cases(*values: Any) -> list[Any]:
    """Of a test's parameter: what a run after every change can do without."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]

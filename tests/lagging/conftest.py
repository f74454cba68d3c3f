"""Each test finds the device empty."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def _nothing_of_others() -> None:
    """What tests before held in cycles."""
    gc.collect()

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.process.harness import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    started = Zygote()
    yield started
    started.close()

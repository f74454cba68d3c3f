from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.process.harness import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # opens torch's own pipes
    started = Zygote()
    yield started
    started.close()

"""What two servers' receiving threads do with one averaged parameter at the same time."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from foreprop.gradients.averaged import AveragedParameter


class _Session:
    """As much of one as an averaged parameter asks at its start."""

    rounds = None
    settling = threading.RLock()
    measures = False

    def engine_of(self, parameter: int) -> tuple[Any, int]:
        return None, parameter

    def memory_of(self, parameter: torch.Tensor) -> None:
        return None


def test_answers_that_come_at_once_land_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = _Session()
    parameter = nn.Parameter(torch.zeros(4))
    averaged = AveragedParameter(0, "weight", parameter, session, session, wanted=True)
    averaged._in_rounds = True  # a round has begun
    empty = torch.empty

    def empty_late(*args: Any, **kwargs: Any) -> torch.Tensor:
        time.sleep(0.05)
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty_late)
    rooms: list[memoryview] = []
    threads = [threading.Thread(target=lambda: rooms.append(averaged.values)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    first, second = rooms
    first[:4] = b"\x01\x02\x03\x04"
    assert bytes(second[:4]) == b"\x01\x02\x03\x04"
    averaged.detach()

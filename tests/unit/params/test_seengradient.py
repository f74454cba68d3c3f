"""A gradient that waits and is not read costs next to nothing."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from foreprop.params.parameter import SeenGradient

BOUND_S = 20e-6
"""Ten times what it takes on a quiet machine."""


def test_a_gradient_that_nobody_reads_costs_microseconds() -> None:
    nobody: Any = object()  # who is never asked
    seen = SeenGradient(nobody)
    rounds = []
    for _ in range(20):
        tensors = [torch.zeros(3) for _ in range(500)]
        begin = time.thread_time()
        for tensor in tensors:
            seen.see(tensor)
            seen.wait()
            seen.release()
            seen.forget()
        rounds.append((time.thread_time() - begin) / len(tensors))
    print(f"{statistics.median(rounds) * 1e6:.2f} us per gradient")
    assert statistics.median(rounds) < BOUND_S

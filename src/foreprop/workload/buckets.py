"""The buckets of torch's DistributedDataParallel: their sizes, and which arrays are in which."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foreprop.workload.limit import BYTES_PER_ELEM, model_bytes
from foreprop.workload.setting import LabSetting

BUCKET_BYTES = 25 * 2**20
"""DDP's buckets, unscaled."""
CANDIDATE_BUCKETS_BYTES = tuple(n * 2**20 for n in (1, 2, 5, 10, 25, 50))
"""What ddp-tuned tries, unscaled."""


def fill_buckets(sizes_elems: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """DDP's: the arrays' numbers, last first; a bucket is closed when it holds ``bucket_bytes``."""
    buckets: list[list[int]] = []
    held_bytes = bucket_bytes
    for number in reversed(range(len(sizes_elems))):
        if held_bytes >= bucket_bytes:
            buckets.append([])
            held_bytes = 0
        buckets[-1].append(number)
        held_bytes += sizes_elems[number] * BYTES_PER_ELEM
    return buckets


def best_bucket(setting: LabSetting, step_s: Callable[[int, int], float]) -> int:
    """The scaled size with the shortest steps, tried one after the other.

    ``step_s``: the time of a step, of a candidate as it is and scaled.
    """
    seconds: dict[int, float] = {}
    for candidate in CANDIDATE_BUCKETS_BYTES:
        size = setting.scaled(candidate)
        if seconds and size > 2 * model_bytes(setting.layers):
            break  # one bucket holds everything
        seconds[size] = step_s(candidate, size)
    return min(seconds, key=lambda size: seconds[size])

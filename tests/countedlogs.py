"""What a server has counted, and after it its substitutes, from their logs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from foreprop.core.membership import CountedReplay


def counted_by(folder: Path, index: int, workers: int, slices: Sequence[int]) -> CountedReplay:
    """Of the server of this number: of two that say something of a step, the later one counts."""
    paths = sorted(
        folder.glob(f"server-{index}.*.counted"), key=lambda path: path.stat().st_mtime_ns
    )
    logs = [path.read_text().splitlines() for path in paths]
    lines = [line for _, *rest in logs for line in rest]
    by_step = sorted(lines, key=lambda line: int(line.split()[0]))
    return CountedReplay([logs[0][0], *by_step], workers, slices)

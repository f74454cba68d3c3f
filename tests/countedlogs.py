"""What was counted of a server's slices: by itself, and after it by those who have taken them over.

Each of these has logs of its own, which begin with the first round that it has closed.
"""

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

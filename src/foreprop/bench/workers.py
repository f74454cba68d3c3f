"""Worker processes for benchmarks and the demo, started as torchrun starts them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def run_workers(
    count: int,
    work: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
) -> dict[int, Any]:
    """Run ``work(*arguments)`` in ``count`` processes on this machine; the results by rank.

    ``work`` must be a module's function. Raises ``ChildFailedError`` if any process fails.
    """
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        start_method="spawn",
        monitor_interval=0.1,
    )
    results: dict[int, Any] = elastic_launch(settings, work)(*arguments)
    return results

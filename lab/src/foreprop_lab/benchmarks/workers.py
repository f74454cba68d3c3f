"""Worker processes for benchmarks and the demo, started as torchrun starts them."""

from __future__ import annotations

import logging
import signal
import uuid
from collections.abc import Callable
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from foreprop_lab.lab.cluster import children_start_undisturbed


def run_workers(
    count: int,
    work: Callable[..., Any],
    *arguments: Any,
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
    with children_start_undisturbed():
        results: dict[int, Any] = elastic_launch(settings, _work)(work, *arguments)
    return results


def _work(work: Callable[..., Any], *arguments: Any) -> Any:
    signal.signal(signal.SIGINT, _interrupt_once)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return work(*arguments)


def _interrupt_once(number: int, frame: object) -> None:
    """Ctrl-C reaches a worker from the terminal and again from torch's launcher."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt

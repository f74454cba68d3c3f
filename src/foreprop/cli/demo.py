"""``foreprop demo``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from foreprop.cli.presets import presets_from
from foreprop.demo.run import run_demo
from foreprop.demo.training import MAX_BATCH_SIZE, MIN_STEPS, DemoSetting


def demo(
    steps: Annotated[int, typer.Option(min=MIN_STEPS, help="Steps with each system.")] = 72,
    workers: Annotated[
        int, typer.Option(min=2, help="Nodes, each with a worker and a server.")
    ] = 4,
    batch_size: Annotated[
        int, typer.Option(min=1, max=MAX_BATCH_SIZE, help="Images per worker and step.")
    ] = 512,
    rate_mbit: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="Rate of each node's link in Mbit/s; by default such that communication takes as"
            " long as computation.",
        ),
    ] = None,
    presets: Annotated[
        str, typer.Option(help="Presets to compare, separated by commas.")
    ] = "kvstore,p3",
    report: Annotated[
        Path, typer.Option(help="HTML report to write; traces go into folders beside it.")
    ] = Path("runs/demo/report.html"),
) -> None:
    """Train a small network on Fashion-MNIST with P3, its baseline and DDP, side by side.

    Workers and servers are real processes on this machine; each node is a network namespace whose
    link the kernel shapes. Where it makes no namespaces, sockets are paced and DDP is left out.
    Shows ms per step, samples per second, the share of time spent waiting for parameters,
    accuracy, and the final weights' SHA-256, which is the same for all presets.
    """
    setting = DemoSetting(
        workers=workers,
        steps=steps,
        batch_size=batch_size,
        presets=presets_from(presets),
        rate_bits_per_s=None if rate_mbit is None else rate_mbit * 1e6,
        folder=str(report.parent),
    )
    command = " ".join(["foreprop", *sys.argv[1:]])
    run_demo(setting, report, command=command, console=Console())

"""``foreprop demo``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from foreprop.cli.options import Shown, filling, mbit
from foreprop.cli.presets import presets_from
from foreprop.demo.run import run_demo
from foreprop.demo.training import DemoSetting


@filling(
    DemoSetting,
    rate_bits_per_s=mbit(),
    presets=Shown(kind=str, default="kvstore,p3", read=presets_from),
)
def demo(
    *,
    report: Annotated[
        Path, typer.Option(help="HTML report to write; traces go into folders beside it.")
    ] = Path("runs/demo/report.html"),
    **given: Any,
) -> None:
    """Train a small network on Fashion-MNIST with P3, its baseline and DDP, side by side.

    Workers and servers are real processes on this machine; each node is a network namespace whose
    link the kernel shapes. Where it makes no namespaces, sockets are paced and DDP is left out.
    Shows ms per step, samples per second, the share of time spent waiting for parameters,
    accuracy, and the final weights' SHA-256, which is the same for all presets.
    """
    setting = DemoSetting(folder=str(report.parent), **given)
    command = " ".join(["foreprop", *sys.argv[1:]])
    run_demo(setting, report, command=command, console=Console())

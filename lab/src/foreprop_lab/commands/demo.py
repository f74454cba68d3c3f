"""``foreprop demo``: the first thing to try."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from foreprop.tools.cli.options import Shown, filling
from foreprop.tools.cli.output import console, print_table
from foreprop_lab.commands.options import compute, presets_from, rate
from foreprop_lab.demo.run import run_demo
from foreprop_lab.demo.training import DemoSetting

_PAGE = "report.html"


@filling(
    DemoSetting,
    workers=Shown(name="nodes"),
    batch_size=Shown(name="batch"),
    rate_bits_per_s=rate(),
    compute_s=compute("300ms"),
    presets=Shown(kind=str, default="kvstore,p3", read=presets_from),
)
def demo(
    *,
    out: Annotated[
        Path,
        typer.Option(
            help=f"Folder for {_PAGE}, results.json and traces, or the name of the .html file."
        ),
    ] = Path("runs/demo"),
    **given: Any,
) -> None:
    """Train a small network on Fashion-MNIST with P3, its baseline and DDP, side by side.

    Workers and servers are real processes on this machine, which really train; each node is a
    network namespace whose link the kernel shapes, and its accelerator's time is emulated. Where
    there are no namespaces, sockets are paced and DDP is left out.

    Shows how much faster than DDP, ms per step, samples per second, the share of time spent waiting
    for parameters, accuracy, and the final weights' SHA-256, which is the same for all presets.

    Examples:
      foreprop demo
      foreprop demo --nodes 2 --rate 200Mbit --steps 48 --out runs/small
    """
    report = out if out.suffix == ".html" else out / _PAGE
    setting = DemoSetting(folder=str(report.parent), **given)
    command = " ".join(["foreprop", *sys.argv[1:]])
    run_demo(setting, report, command=command, console=console(), output=print_table)

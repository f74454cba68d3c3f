"""``foreprop lab figures``: the paper's figures, measured and drawn."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from foreprop.errors import ConfigError
from foreprop.tools.cli.options import writable
from foreprop_lab.experiments.figures.campaign import make_figures
from foreprop_lab.lab.mxnet import build_system
from foreprop_lab.lab.run import run_lab


def figures(
    out: Annotated[Path, typer.Option(help="Folder for figures, data and the page.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Few points and steps: minutes instead of hours.")
    ] = False,
    only: Annotated[
        str, typer.Option(help="Numbers of the figures to make, separated by commas.")
    ] = "1,2,3,4,5",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Measured steps, instead of each figure's own.")
    ] = None,
    mxnet_python: Annotated[
        Path | None,
        typer.Option(help="Python of an environment with mxnet==1.9.1 and numpy<1.24."),
    ] = None,
) -> None:
    """Run what the paper's figures need and draw them, each with its data, and a page of all.

    Stopped and started again with the same options, it goes on where it was.

    Examples:
      foreprop lab figures --out runs/figures --quick
      foreprop lab figures --out runs/figures --only 1,3 --steps 10
    """
    console = Console()
    made = make_figures(
        writable(out),
        quick=quick,
        console=console,
        measure=partial(run_lab, build=build_system),
        only=_numbers(only),
        iterations=steps,
        mxnet_python=mxnet_python,
        command=" ".join(["foreprop", *sys.argv[1:]]),
    )
    console.print(f"Page: {made.page}", soft_wrap=True, markup=False)
    if made.failed:
        raise typer.Exit(1)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(",") if number.strip())
    except ValueError as error:
        raise ConfigError(f"only is {text!r}; it must be numbers separated by commas") from error

"""``foreprop top``: every rank of a training, live in the terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from foreprop.cli.output import console
from foreprop.report.live import live_page


def top(
    directory: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="The folder given as watch=...")
    ],
    every: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show the table once, and end.")] = False,
) -> None:
    """Show all ranks of a training: step, time per step, waiting, traffic, and what failed.

    Every rank leaves word in the folder about once a second, so all must see it: one machine, or a
    shared file system. Ends when all ranks have, or on Ctrl-C.

    Examples:
      foreprop top runs/watch
      foreprop top --once runs/watch
    """
    screen = console()
    page, over = live_page(directory)
    if once or not screen.is_terminal:
        screen.print(page)
        return
    with Live(page, console=screen, auto_refresh=False) as live:
        while not over:
            time.sleep(every)
            page, over = live_page(directory)
            live.update(page, refresh=True)

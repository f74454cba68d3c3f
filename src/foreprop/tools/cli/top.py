"""``foreprop top``: every rank of a training, live in the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from foreprop.engine.status import RankStatus, read_statuses
from foreprop.quantities import rate_text, time_text
from foreprop.tools.cli.output import console

SILENT_S = 10.0
"""A rank that has written nothing for so long is shown as silent."""
_LEAST_DIFFERENCE = 0.05
"""Difference of the shares of waiting, for one rank to be the one that others wait for."""


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


def is_over(statuses: Sequence[RankStatus]) -> bool:
    """Whether every rank of the session has ended."""
    if not statuses or _missing(statuses):
        return False
    return all(status.state in ("closed", "failed") for status in statuses)


def _missing(statuses: Sequence[RankStatus]) -> set[int]:
    return set(range(statuses[0].world_size)) - {status.rank for status in statuses}


def waited_for(statuses: Sequence[RankStatus]) -> int | None:
    """The rank that the others wait for: as a rank knows, or the one that waits least itself."""
    known = [status.straggler for status in statuses if status.straggler is not None]
    if known:
        return known[0]
    shares = sorted(
        (status.waiting_share, status.rank)
        for status in statuses
        if status.state == "training" and status.waiting_share is not None
    )
    if len(shares) < 2 or shares[1][0] - shares[0][0] < _LEAST_DIFFERENCE:
        return None
    return shares[0][1]


def live_page(folder: Path, now_s: float | None = None) -> tuple[RenderableType, bool]:
    """What to show now, and whether all ranks have ended; raises `ConfigError`."""
    statuses = read_statuses(folder)
    now_s = time.time() if now_s is None else now_s
    if not statuses:
        text = f"No rank has left word in {folder} yet: parallelize(..., watch={str(folder)!r})"
        return Text(text), False
    errors = [
        Text(f"rank {status.rank} ({plain(status.host)}) failed: {plain(status.error)}", "red")
        for status in statuses
        if status.state == "failed"
    ]
    if missing := len(_missing(statuses)):
        errors.append(Text(f"{missing} of {statuses[0].world_size} ranks have left no word yet"))
    return Group(_table(statuses, now_s), *errors), is_over(statuses)


def _table(statuses: Sequence[RankStatus], now_s: float) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    shown.add_column("rank", justify="right")
    shown.add_column("host", overflow="fold")
    for heading in ("step", "per step", "waiting", "out", "in", "queue"):
        shown.add_column(heading, justify="right", overflow="fold")
    shown.add_column("state", overflow="fold")
    slowest = waited_for(statuses)
    for status in statuses:
        shown.add_row(
            str(status.rank),
            Text(plain(status.host)),
            f"{status.step:,}",
            "-" if status.step_s is None else time_text(status.step_s),
            "-" if status.waiting_share is None else f"{100 * status.waiting_share:.0f}%",
            _rate(status.sent_bits_per_s),
            _rate(status.received_bits_per_s),
            str(status.queue_depth),
            _state(status, now_s, slowest=status.rank == slowest),
        )
    return shown


def plain(text: str) -> str:
    """A rank's text with the codes that a terminal would obey written out, as Python does."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _rate(bits_per_s: float | None) -> str:
    return rate_text(bits_per_s) if bits_per_s else "-"


def _state(status: RankStatus, now_s: float, *, slowest: bool) -> Text:
    if status.state == "failed":
        return Text("failed", style="red")
    silent_s = now_s - status.at_s
    if status.state != "closed" and silent_s > SILENT_S:
        return Text(f"{status.state}, no word for {silent_s:.0f} s", style="yellow")
    if slowest and status.state == "training":
        return Text("training, the others wait for it", style="yellow")
    return Text(status.state)

"""``foreprop report``: a page about one's own job, from its traces."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from foreprop.quantities import parse_rate
from foreprop.tools.cli.trace import TraceFolder
from foreprop.tools.report.jobpage import Selection, read_job, write_job_report


def report(
    directory: TraceFolder,
    out: Annotated[
        Path | None, typer.Option(help="Page to write.", show_default="DIRECTORY/report.html")
    ] = None,
    worker: Annotated[
        list[int] | None,
        typer.Option(min=0, help="A rank to show; may be given often. By default the first four."),
    ] = None,
    first_step: Annotated[
        int | None, typer.Option(min=1, help="First step to draw; by default a typical one.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=20, help="Steps to draw.")] = 2,
    rate: Annotated[
        str | None,
        typer.Option(
            help="Each node's link, each way, as 10Gbit, for what is predicted; by default the most"
            " that one carries in the trace."
        ),
    ] = None,
) -> None:
    """Make one HTML page of a job's traces: time per step, waiting, and a timeline.

    Says beside it what DistributedDataParallel would take, and what no schedule can beat, as the
    model of `foreprop plan` predicts them from the recorded times.

    Examples:
      foreprop report runs/trace
      foreprop report runs/trace --rate 10Gbit --worker 3
    """
    selection = Selection(
        folder=directory,
        workers=tuple(worker or ()),
        first_step=first_step,
        steps=steps,
        rate_bits_per_s=None if rate is None else parse_rate("rate", rate),
    )
    job = read_job(selection)
    target = out or directory / "report.html"
    write_job_report(target, job, command=" ".join(["foreprop", *sys.argv[1:]]))
    typer.echo(job.headline.replace("\N{NO-BREAK SPACE}", " "))
    typer.echo(f"Report: {target}")

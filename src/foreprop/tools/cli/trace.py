"""``foreprop trace``: one run's traces as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foreprop.quantities import counted
from foreprop.tools.cli.output import print_json
from foreprop.tools.report.perfetto import merge_traces

TraceFolder = Annotated[
    Path, typer.Argument(exists=True, file_okay=False, help="The folder given as trace=...")
]


def trace(
    directory: TraceFolder,
    out: Annotated[
        Path | None, typer.Option(help="File to write.", show_default="DIRECTORY/merged.json")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the file's name and its number of events as JSON.")
    ] = False,
) -> None:
    """Lay the traces of one run's workers and servers into one file for Perfetto.

    Times begin with the first event. Across machines they are as good as the clocks agree.

    Examples:
      foreprop trace runs/demo/p3
      foreprop trace runs/trace --out all.json
    """
    target = out or directory / "merged.json"
    count = merge_traces(directory, target)
    if as_json:
        print_json({"file": str(target), "events": count})
    else:
        typer.echo(f"{counted(count, 'event')} in {target}; open it in https://ui.perfetto.dev")

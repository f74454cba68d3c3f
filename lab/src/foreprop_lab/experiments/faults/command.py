"""``foreprop lab faults``: throughput of an elastic session through faults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from foreprop.quantities import parse_rate, parse_time
from foreprop.tools.cli.options import names_in, writable
from foreprop.tools.cli.output import console, print_line, print_table
from foreprop_lab.experiments.chart import write_chart
from foreprop_lab.experiments.faults.chart import chart_of
from foreprop_lab.experiments.faults.run import run_faults
from foreprop_lab.experiments.faults.trial import REJOIN, SYSTEMS, Fault, FaultSetting, Trial


def faults(
    *,
    model: Annotated[str, typer.Option(help="A profile, as resnet50.")] = "resnet50",
    scale: Annotated[int, typer.Option(min=1, help="Divides every array.")] = 16,
    nodes: Annotated[int, typer.Option(min=3, max=16, help="Workers, one to a node.")] = 4,
    rate: Annotated[str, typer.Option(help="The links' rate.")] = "200Mbit",
    compute: Annotated[str, typer.Option(help="The device's time per step.")] = "500ms",
    pause: Annotated[str, typer.Option(help="From one fault to the next.")] = "12s",
    silent: Annotated[
        str, typer.Option(help="Who answers nothing for so long is taken for dead.")
    ] = "8s",
    systems: Annotated[str, typer.Option(help=f"Separated by commas: {', '.join(SYSTEMS)}.")] = (
        "p3"
    ),
    torchft_python: Annotated[
        Path | None,
        typer.Option(help="Python of an environment with torchft==0.2.0, of this one's version."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for data, chart and logs.")] = Path(
        "runs/faults"
    ),
) -> None:
    """Train through a slow link, a stop, a cut, a kill and a rejoin; draw throughput over time.

    The workers have elastic=True, and a server beside each. A kill takes a node's worker and its
    server; later that worker starts again and joins. Who answers nothing for as long as a stop or a
    cut lasts is still waited for. Systems train one after the other, through the same faults.

    Examples:
      foreprop lab faults
      foreprop lab faults --systems p3,torchft --torchft-python torchft/bin/python
      foreprop lab faults --nodes 3 --pause 9s --silent 6s --out runs/elastic
    """
    shown = console()
    setting = FaultSetting(
        model=model,
        scale=scale,
        nodes=nodes,
        rate_bits_per_s=parse_rate("--rate", rate),
        compute_s=parse_time("--compute", compute),
        pause_s=parse_time("--pause", pause),
        silent_s=parse_time("--silent", silent),
        systems=names_in(systems),
        torchft_python=torchft_python,
    )
    folder = writable(out)
    with shown.status("") as status:
        trials = run_faults(setting, folder, status.update)
    print_table(shown, table_of(trials))
    data = msgspec.json.format(msgspec.json.encode(trials), indent=1)
    write_chart(folder, "faults", chart_of(trials), data)
    print_line(shown, f"Data, chart and logs: {folder}")


def table_of(trials: Sequence[Trial]) -> Table:
    table = Table(title="while each fault lasts, and until the next")
    table.add_column("system")
    table.add_column("fault")
    for heading in (
        "nobody else ended a step for",
        "steps per second of all workers",
        "first step after the start",
    ):
        table.add_column(heading, justify="right")
    for trial in trials:
        name = f"{trial.system} {trial.version}"
        table.add_row(name, "none", "", f"{trial.pace(0.0, trial.faults[0].at_s):.2f}", "")
        for fault, until_s in trial.windows():
            down = f"{trial.down_s(fault, until_s):.2f} s"
            pace = f"{trial.pace(fault.at_s, until_s):.2f}"
            table.add_row(name, fault.name, down, pace, _back(trial, fault))
    return table


def _back(trial: Trial, fault: Fault) -> str:
    if fault.name != REJOIN:
        return ""
    back_s = trial.back_s(fault)
    return "it made none" if back_s is None else f"{back_s:.2f} s"

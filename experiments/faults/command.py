"""``foreprop lab faults``: throughput of an elastic session through faults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from experiments.chart import write_chart
from experiments.faults.chart import chart_of
from experiments.faults.run import FaultSetting, Trial, run_faults
from foreprop.cli.options import writable
from foreprop.cli.output import console, print_table, say
from foreprop.quantities import parse_rate, parse_time


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
    out: Annotated[Path, typer.Option(help="Folder for data, chart and logs.")] = Path(
        "runs/faults"
    ),
) -> None:
    """Train through a slow link, a stop, a cut and a kill; draw throughput over time.

    The workers have elastic=True, and a server beside each. A kill takes a node's worker and its
    server. Who answers nothing for as long as a stop or a cut lasts is still waited for.

    Examples:
      foreprop lab faults
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
    )
    folder = writable(out)
    with shown.status("") as status:
        trial = run_faults(setting, folder, status.update)
    print_table(shown, _table(trial))
    data = msgspec.json.format(msgspec.json.encode(trial), indent=1)
    write_chart(folder, "faults", chart_of(trial), data)
    say(shown, f"Data, chart and logs: {folder}")


def _table(trial: Trial) -> Table:
    table = Table(title="while each fault lasts, and until the next")
    for heading in ("fault", "nobody ended a step for", "steps per second of all workers"):
        table.add_column(heading, justify="left" if heading == "fault" else "right")
    table.add_row("none", "", f"{trial.pace(0.0, trial.faults[0].at_s):.2f}")
    for fault, until_s in trial.windows():
        pace = trial.pace(fault.at_s, until_s)
        table.add_row(fault.name, f"{trial.down_s(fault, until_s):.2f} s", f"{pace:.2f}")
    return table

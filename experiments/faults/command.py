"""``foreprop lab faults``: throughput through faults, beside torchft."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from experiments.chart import write_chart
from experiments.faults.chart import chart_of
from experiments.faults.run import SYSTEMS, FaultSetting, Trial, missing_peer, run_faults
from experiments.faults.worker import TORCHFT
from foreprop.cli.options import names_in, writable
from foreprop.cli.output import console, print_table, say
from foreprop.errors import ConfigError
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
        str, typer.Option(help="Both systems take who answers nothing for so long for dead.")
    ] = "8s",
    systems: Annotated[
        str, typer.Option(help=f"Separated by commas: {', '.join(SYSTEMS)}.")
    ] = ",".join(SYSTEMS),
    out: Annotated[Path, typer.Option(help="Folder for data, chart and logs.")] = Path(
        "runs/faults"
    ),
) -> None:
    """Train through a slow link, a stop, a cut and a kill; draw throughput over time.

    A kill takes a node's worker and its server. p3-elastic is p3 with elastic=True. torchft is DDP
    in torchft's manager, each worker a replica group of its own, the lighthouse on node 0; where it
    is not installed it is left out. Both meet the same faults at the same moments, one system after
    the other.

    Examples:
      foreprop lab faults
      foreprop lab faults --nodes 3 --pause 9s --systems p3-elastic --out runs/elastic
    """
    shown = console()
    chosen = tuple(names_in(systems))
    missing = missing_peer()
    if missing is not None and TORCHFT in chosen:
        say(shown, missing)
        chosen = tuple(name for name in chosen if name != TORCHFT)
    if not chosen:
        raise ConfigError(f"--systems is {systems!r}, of which nothing can run here")
    setting = FaultSetting(
        model=model,
        scale=scale,
        nodes=nodes,
        rate_bits_per_s=parse_rate("--rate", rate),
        compute_s=parse_time("--compute", compute),
        pause_s=parse_time("--pause", pause),
        silent_s=parse_time("--silent", silent),
        systems=chosen,
    )
    folder = writable(out)
    with shown.status("") as status:
        trials = run_faults(setting, folder, status.update)
    print_table(shown, _table(trials))
    data = msgspec.json.format(msgspec.json.encode(trials), indent=1)
    write_chart(folder, "faults", chart_of(trials), data)
    say(shown, f"Data, chart and logs: {folder}")


def _table(trials: list[Trial]) -> Table:
    first = trials[0].faults[0].at_s
    table = Table(title="seconds in which nobody ended a step (steps per second of all workers)")
    table.add_column("system")
    table.add_column("no fault", justify="right")
    for fault in trials[0].faults:
        table.add_column(fault.name, justify="right")
    for trial in trials:
        cells = [f"{trial.pace(0.0, first):.2f}/s"]
        for fault, until_s in trial.windows():
            down = f"{trial.down_s(fault, until_s):.1f} s"
            cells.append(f"{down} ({trial.pace(fault.at_s, until_s):.2f}/s)")
        table.add_row(trial.system, *cells)
    return table

"""``foreprop lab mlp``: the comparison paper's experiment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from foreprop.errors import ConfigError, how_to_install
from foreprop.tools.cli.options import filling, systems, writable
from foreprop.tools.cli.output import console, print_table
from foreprop.tools.compare.result import write_records
from foreprop_lab.commands.options import compute, rate
from foreprop_lab.experiments.mlp.run import Errors, MlpRecord, errors_of, run_mlp
from foreprop_lab.experiments.mlp.training import MLP_SYSTEMS, MlpSetting

_WORKERS, _STEPS = "1,2,3,4,5,6,7", 40
_QUICK_WORKERS, _QUICK_STEPS = "1,2,4", 10


@filling(
    MlpSetting,
    systems=systems(MLP_SYSTEMS, default=",".join(MLP_SYSTEMS)),
    rate_bits_per_s=rate("100Mbit"),
    compute_s=compute("300ms"),
)
def mlp(
    nodes: Annotated[
        str | None,
        typer.Option(
            help="Numbers of nodes of one worker each, with commas.", show_default=_WORKERS
        ),
    ] = None,
    *,
    steps: Annotated[
        int | None, typer.Option(help="Measured steps of each system.", show_default=str(_STEPS))
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"{_QUICK_STEPS} steps of {_QUICK_WORKERS} workers.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for results.json and figures.")] = Path(
        "runs/mlp"
    ),
    **given: Any,
) -> None:
    """Train a perceptron on Fashion-MNIST, 1 to 7 workers; write results.json and figures.

    The experiment of Alqahtani and Demirbas: 1, 2 and 4 dedicated servers, peers, a ring; epoch
    times measured, predicted by the paper's formulas, and by our own model.

    Examples:
      foreprop lab mlp --quick
      foreprop lab mlp --nodes 2,4 --systems p2p,ring,ddp --rate 100Mbit --out runs/mlp
    """
    steps = steps if steps is not None else _QUICK_STEPS if quick else _STEPS
    settings = [
        MlpSetting(workers=count, steps=steps, **given)
        for count in _numbers(nodes or (_QUICK_WORKERS if quick else _WORKERS))
    ]
    results = writable(out) / "results.json"
    records: list[MlpRecord] = []
    shown = console()
    with shown.status("") as status:
        for setting in settings:
            records += run_mlp(setting, progress=status.update)
            write_records(results, records)
    print_table(shown, _records_table(settings[0], records))
    errors = errors_of(records)
    print_table(shown, _errors_table(errors))
    write_records(out / "errors.json", errors)
    shown.print(f"Records: {results}", soft_wrap=True, markup=False)
    _draw(out, records, shown)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(number) for number in text.split(",") if number.strip()]
    except ValueError as error:
        raise ConfigError(f"nodes is {text!r}; it must be numbers with commas") from error
    if not numbers or len(set(numbers)) < len(numbers):
        raise ConfigError(f"nodes is {text!r}; it must be some numbers, each once")
    return numbers


def _draw(out: Path, records: Sequence[MlpRecord], console: Console) -> None:
    """Draw the charts, if matplotlib is installed, which is an extra and takes a second to load."""
    try:
        from foreprop_lab.experiments.chart import write_chart
        from foreprop_lab.experiments.mlp import charts
    except ModuleNotFoundError as error:
        console.print(f"No figures: {error.name} is missing; {how_to_install('plots')}")
        return
    data = charts.chart_data(records)
    write_chart(out, "epoch-times", charts.epoch_chart(records), data)
    write_chart(out, "throughput", charts.throughput_chart(records), data)
    write_chart(out, "comparison", charts.comparison_chart(records), data)
    console.print(f"Figures: {out}/*.png", soft_wrap=True, markup=False)


def _records_table(setting: MlpSetting, records: Sequence[MlpRecord]) -> Table:
    made = Table(
        title=f"784-{setting.hidden}-{setting.hidden}-10, batches of {setting.batch},"
        f" {setting.rate_bits_per_s / 1e6:g} Mbit/s, compute {setting.compute_s:g} s,"
        f" servers and peers with preset {setting.preset}"
    )
    headings = ("system", "workers", "s/step", "epoch s", "refined", "published", "images/s")
    for heading in (*headings, "CPUs"):
        made.add_column(heading, justify="left" if heading == "system" else "right")
    for record in records:
        predicted = record.predicted_epoch_s
        made.add_row(
            record.system,
            str(record.workers),
            f"{record.step_s.median:.3f}",
            f"{record.epoch_s:.1f}",
            f"{predicted.refined:.1f}",
            "" if predicted.published is None else f"{predicted.published:.0f}",
            f"{record.images_per_s:.0f}",
            "CPU-bound" if record.cpu_bound else f"{record.cpu_share:.0%}",
        )
    return made


def _errors_table(errors: Sequence[Errors]) -> Table:
    made = Table(title="errors of predicted epoch times")
    for heading in ("system", "model", "points", "median", "at most", "mean"):
        made.add_column(heading, justify="left" if heading in ("system", "model") else "right")
    for row in errors:
        made.add_row(
            row.system,
            row.model.replace("_", " "),
            str(row.points),
            f"{row.median:.1%}",
            f"{row.at_most:.1%}",
            f"{row.mean:+.1%}",
        )
    return made

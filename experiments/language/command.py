"""``foreprop lab language``: tables with sparse gradients, and five ways of training them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from experiments.language.ablation import ABLATION
from experiments.language.records import LanguageRecord, with_bytes
from experiments.language.training import (
    HYBRID,
    LANGUAGE_SYSTEMS,
    LanguageSetting,
    Text,
    build_system,
    lstm_profile,
)
from foreprop.cli.folder import writable
from foreprop.cli.lab import WorkersPerNode, names_in, nodes_text
from foreprop.lab.run import run_lab, sampled_steps
from foreprop.workload.records import write_records

app = typer.Typer(add_completion=False)


@app.command()
def language(
    nodes: Annotated[int, typer.Option(help="Nodes, each with its workers.")] = 8,
    workers_per_node: WorkersPerNode = 1,
    rate_mbit: Annotated[float, typer.Option(help="The links' rate in Mbit/s.")] = 30.0,
    compute_s: Annotated[
        float, typer.Option(help="Seconds that the device computes per step.")
    ] = 1.0,
    scale: Annotated[
        int, typer.Option(help="Divides widths; the vocabulary and the batch stay.")
    ] = 16,
    systems: Annotated[
        str, typer.Option(help=f"Separated by commas: {', '.join(LANGUAGE_SYSTEMS)}.")
    ] = ",".join(LANGUAGE_SYSTEMS),
    ablation: Annotated[
        bool,
        typer.Option(
            "--ablation", help=f"Instead: {', '.join(ABLATION)}, each with those before it."
        ),
    ] = False,
    iterations: Annotated[int, typer.Option(help="Measured steps of each system.")] = 20,
    width: Annotated[int, typer.Option(help="Elements of a word's row, unscaled.")] = 512,
    hidden: Annotated[int, typer.Option(help="Units of the LSTM, unscaled.")] = 1024,
    samples: Annotated[int, typer.Option(help="Words that the softmax draws.")] = 8192,
    text: Annotated[
        Path | None, typer.Option(help="A file of words, instead of WikiText-2.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for results.json.")] = Path("runs/language"),
) -> None:
    """Train a language model on WikiText-2's 76,616 types, sparse and dense; write results.json.

    A step looks up few rows of two large tables. hybrid all-reduces the LSTM and leaves the rows to
    servers; ring and ddp-dense all-reduce everything; ddp-sparse all-gathers the rows' gradients.
    """
    setting = LanguageSetting(
        profile=lstm_profile(width, hidden),
        systems=tuple(ABLATION) if ablation else names_in(systems),
        nodes=nodes,
        workers_per_node=workers_per_node,
        scale=scale,
        compute_s=compute_s,
        rate_bits_per_s=rate_mbit * 1e6,
        iterations=iterations,
        sample_network=True,
        width=width,
        hidden=hidden,
        samples=samples,
        text=text,
    )
    results = writable(out) / "results.json"
    Text(setting, 0)  # fetched before the clocks run
    console = Console()
    with console.status("") as status:
        result = run_lab(setting, build=build_system, progress=status.update)
    for notice in result.notices:
        console.print(f"Notice: {notice}", style="yellow", markup=False)
    measured = with_bytes(result, sampled_steps=sampled_steps(setting))
    console.print(_language_table(setting, measured))
    write_records(results, measured)
    console.print(f"Records: {results}", soft_wrap=True, markup=False)


def _language_table(setting: LanguageSetting, measured: list[LanguageRecord]) -> Table:
    title = (
        f"language model, widths / {setting.scale}, {nodes_text(setting)} at"
        f" {setting.rate / 1e6:.0f} Mbit/s, compute {setting.compute_s:g} s"
    )
    made = Table(title=title)
    first = setting.systems[0]
    compared = f"over {first}" if first in ABLATION else "hybrid is"
    headings = ("system", "step", "steps/s", compared, "sent", "received", "waiting", "CPUs")
    for heading in headings:
        system = heading == "system"
        made.add_column(heading, justify="left" if system else "right", no_wrap=system)
    steps = {m.record.system: m.record.iteration_s.median for m in measured}
    best = steps.get(HYBRID)

    def ratio(step_s: float) -> str:
        if first in ABLATION:
            return f"{steps[first] / step_s:.2f}x"
        return f"{step_s / best:.2f}x" if best else ""

    for entry in measured:
        record, step_s = entry.record, entry.record.iteration_s.median
        made.add_row(
            record.system,
            f"{step_s:.3f} s",
            f"{1 / step_s:.3f}",
            ratio(step_s),
            f"{entry.sent_bytes / 1e6:.1f} MB",
            f"{entry.received_bytes / 1e6:.1f} MB",
            f"{record.waiting_s:.2f} s",
            f"{record.cpu_share:.0%}" + (" CPU-bound" if record.cpu_bound else ""),
        )
    return made

"""``foreprop lab language``: tables with sparse gradients, and five ways to train them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from foreprop.tools.cli.options import Shown, filling, systems, writable
from foreprop.tools.cli.output import console, print_table
from foreprop_lab.commands.measured import keep, nodes_text, print_notices
from foreprop_lab.commands.options import STEPS, compute, rate
from foreprop_lab.experiments.language.ablation import ABLATION
from foreprop_lab.experiments.language.records import LanguageRecord, with_bytes
from foreprop_lab.experiments.language.training import (
    HYBRID,
    LANGUAGE_SYSTEMS,
    LanguageSetting,
    Text,
    build_system,
    lstm_profile,
)
from foreprop_lab.lab.run import run_lab, sampled_steps
from foreprop_lab.setting.labsetting import UNEVEN


@filling(
    LanguageSetting,
    ("balance", "slice_elems", "mxnet_python", "trace", "staleness", *UNEVEN),
    nodes=Shown(default=8, help="Nodes, each with its workers."),
    rate_bits_per_s=rate("30Mbit", help="The links' rate, as 30Mbit."),
    compute_s=compute("1s", help="What the device computes per step, as 250ms."),
    iterations=STEPS,
    scale=Shown(help="Divides widths; the vocabulary and the batch stay."),
    systems=systems(LANGUAGE_SYSTEMS, default=",".join(LANGUAGE_SYSTEMS)),
)
def language(
    *,
    ablation: Annotated[
        bool,
        typer.Option(
            "--ablation", help=f"Instead: {', '.join(ABLATION)}, each with those before it."
        ),
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for results.json.")] = Path("runs/language"),
    **given: Any,
) -> None:
    """Train a language model on WikiText-2's 76,616 types, sparse and dense; write its records.

    A step looks up few rows of two large tables. hybrid all-reduces the LSTM and leaves the rows to
    servers; ring and ddp-dense all-reduce everything; ddp-sparse all-gathers the rows' gradients.

    Examples:
      foreprop lab language --nodes 4 --steps 6
      foreprop lab language --ablation --nodes 4 --workers-per-node 2 --rate 20Mbit --compute 1.5s
    """
    if ablation:
        given["systems"] = tuple(ABLATION)
    profile = lstm_profile(given["width"], given["hidden"])
    setting = LanguageSetting(profile=profile, sample_network=True, **given)
    results = writable(out) / "results.json"
    Text(setting, 0)  # fetched before the clocks run
    shown = console()
    with shown.status("") as status:
        result = run_lab(setting, build=build_system, progress=status.update)
    print_notices(shown, result)
    measured = with_bytes(result, sampled_steps=sampled_steps(setting))
    print_table(shown, _language_table(setting, measured))
    keep(shown, results, measured)


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

"""What ``lab run`` and ``lab simulate`` have in common: options, and how records are shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from foreprop.errors import ConfigError
from foreprop.plan.profile import load_profile, profile_names, read_profile
from foreprop.quantities import time_text
from foreprop.tools.cli.options import Shown
from foreprop.tools.cli.output import print_line, print_table
from foreprop.tools.compare.result import write_records
from foreprop_lab.setting.labsetting import (
    DDP,
    DDP_TUNED,
    MXNET,
    RING,
    LabSetting,
    base_of,
    environment_text,
    usual_compute_s,
)
from foreprop_lab.setting.links import carried_bytes, parse_cross_traffic, parse_link_rates
from foreprop_lab.setting.records import Record
from foreprop_lab.setting.unevenness import parse_staleness, parse_step_lengths
from foreprop_lab.simulate.run import SIMULATED

if TYPE_CHECKING:
    from foreprop_lab.lab.run import LabResult

Model = Annotated[
    str | None, typer.Option(help=f"One of {', '.join(profile_names())}; default vgg19.")
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        help="A file that foreprop.profile() has saved, or a JSON file of arrays and FLOPs.",
    ),
]
Out = Annotated[Path, typer.Option(help="Folder for results.json.")]
EGRESS_ONLY = Shown(
    name="egress_only",
    kind=bool,
    default=False,
    declared=("--egress-only",),
    help="Shape only what nodes send, as the paper did.",
    read=lambda only: not only,
)
UNEVEN_OPTIONS = {
    "slowdown": Shown(default=0.5),
    "step_lengths": Shown(kind=str | None, read=parse_step_lengths),
    "link_rates": Shown(kind=str | None, default=None, read=parse_link_rates),
    "cross_traffic": Shown(kind=str | None, default=None, read=parse_cross_traffic),
}
STALENESS = Shown(kind=str, default="0", read=partial(parse_staleness, "staleness"))
USUAL_SYSTEMS = "p3,slicing,kvstore,ddp"

_SHORT_S = 0.1
"""Shorter steps are shown with more digits."""


def completed(model: str | None, path: Path | None, given: dict[str, Any]) -> dict[str, Any]:
    """Add the profile, and the compute that suits it."""
    if path is None:
        profile = load_profile(model or "vgg19")
    elif model is not None:
        raise ConfigError(f"--model {model} and --profile {path} are both given: give one of them")
    else:
        profile = read_profile(path)
    compute_s = given["compute_s"]
    if compute_s is None:
        compute_s = usual_compute_s(profile, max(1, given["nodes"] * given["workers_per_node"]))
    links = {name: given[name] or () for name in ("link_rates", "cross_traffic")}
    return given | links | {"profile": profile, "compute_s": compute_s}


def print_notices(console: Console, result: LabResult) -> None:
    for notice in result.notices:
        console.print(f"Notice: {notice}", style="yellow", markup=False)


def show(to: Console, setting: LabSetting, records: list[Record], path: Path) -> None:
    """Print the table of records, what is to be said of it, and where they are kept."""
    print_table(to, table(setting, records))
    for line in (*launch_lines(records), *compression_lines(records)):
        print_line(to, line)
    if text := environment_text(setting):
        to.print(text, soft_wrap=True, markup=False)
    keep(to, path, records)
    for line in over_ddp_lines(records):
        print_line(to, line, "bold")


def keep(console: Console, path: Path, records: Sequence[msgspec.Struct]) -> None:
    write_records(path, records)
    console.print(f"Records: {path}", soft_wrap=True, markup=False)


def nodes_text(setting: LabSetting) -> str:
    each = f" of {setting.workers_per_node} workers" * (setting.workers_per_node > 1)
    return f"{setting.nodes} nodes{each}"


def _plain_ddp(records: Sequence[Record]) -> Record | None:
    return next((record for record in records if record.system == DDP), None)


def over_ddp_lines(records: Sequence[Record]) -> Iterator[str]:
    """What the fastest of foreprop's systems is worth, if DDP was beside it."""
    ddp = _plain_ddp(records)
    ours = [record for record in records if base_of(record.system) not in (DDP, DDP_TUNED, *MXNET)]
    if ddp is None or not ours:
        return
    best = min(ours, key=lambda record: record.typical_s)
    steps = f"{time_text(best.typical_s)} per step instead of {time_text(ddp.typical_s)}"
    bound = [record.system for record in (best, ddp) if record.cpu_bound]
    if bound:
        yield f"{best.system}, {steps} with ddp: CPU-bound ({', '.join(bound)}), so no speed-up."
    else:
        yield f"{best.system} is {ddp.typical_s / best.typical_s:.2f}x as fast as ddp: {steps}."


def launch_lines(records: Sequence[Record]) -> Iterator[str]:
    """How much longer launching took in each system, for threads that had the interpreter."""
    for record in records:
        if record.launch_s and record.launching_s:
            held = (record.held_s or 0.0) / record.launching_s
            yield (
                f"{record.system}: launches of {time_text(record.launch_s)} took"
                f" {1 + held:.2f} times their {time_text(record.launching_s)} a step, the wait for"
                " the interpreter's lock included"
            )


def compression_lines(records: Sequence[Record]) -> Iterator[str]:
    """What the codecs of each system leave exact, and how long its devices compute."""
    for record in records:
        if record.coded:
            step_s = record.typical_s
            yield (
                f"{record.system}: {record.coded}; step {time_text(step_s)},"
                f" {record.compute_s / step_s:.2f} of it compute"
            )
        if record.counted_bytes and record.sent_bytes:
            yield (
                f"{record.system}: a node's link had {record.sent_bytes / 1e6:.2f} MB a step;"
                f" {_expected_bytes(record) / 1e6:.2f} MB follow from foreprop's count"
            )


def _expected_bytes(record: Record) -> float:
    """The bytes, with headers, that leave a node's link: all but the part for its own server.

    A ring's ranks send each chunk twice, less their own part, in messages of a part each.
    """
    if base_of(record.system) == RING:
        ranks = record.nodes * record.workers_per_node
        passes = 2 * (ranks - 1)
        frames = passes * (record.counted_frames or 0)
        return carried_bytes(frames, passes / ranks * (record.counted_bytes or 0))
    others = (record.nodes - 1) / record.nodes * record.workers_per_node
    frames = record.counted_frames or 0
    return carried_bytes(round(others * frames), others * (record.counted_bytes or 0))


def table(setting: LabSetting, records: list[Record]) -> Table:
    first = records[0]
    simulated = first.network == SIMULATED
    kind = "simulated: " if simulated else ""
    if first.representatives is not None:
        kind = "simulated by symmetry: "
    places = 3 if first.limit_s >= _SHORT_S else 4
    shown = Table(
        title=f"{kind}{first.model} / {first.scale}, {nodes_text(setting)},"
        f" {first.rate_bits_per_s / 1e6:.0f} Mbit/s (balance {first.balance:.2f}),"
        f" compute {first.compute_s:.{places - 1}f} s, limit {first.limit_s:.{places}f} s"
        + (f", staleness {first.staleness}" if first.staleness else "")
        + (f", launches of {time_text(first.launch_s)}" if first.launch_s else "")
    )
    ddp = _plain_ddp(records)
    headings = ["system", "s/step", "p10-p90", *["over ddp"] * (ddp is not None), "efficiency"]
    for heading in (*headings, "waiting s", "CPU s/GB", "CPUs"):
        shown.add_column(heading, justify="left" if heading == "system" else "right")
    for record in records:
        step = record.iteration_s
        over = [] if ddp is None else [f"{ddp.typical_s / record.typical_s:.2f}x"]
        shown.add_row(
            record.system,
            f"{step.median:.{places}f}",
            f"{step.p10:.{places}f}-{step.p90:.{places}f}",
            *over,
            "CPU-bound" if record.cpu_bound else f"{record.efficiency:.3f}",
            f"{record.waiting_s:.{places}f}",
            "" if simulated else f"{record.cpu_s_per_gb:.1f}",
            "" if simulated else f"{100 * record.cpu_share:.0f} %",
        )
    if any(record.cpu_bound for record in records):
        shown.caption = (
            "CPU-bound: the processors were busy for over 80 % of the time, so that these steps say"
            f" nothing about the network; take a larger --compute (now"
            f" {time_text(setting.compute_s)})"
        )
    return shown

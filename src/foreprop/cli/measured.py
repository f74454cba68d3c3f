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

from foreprop.cli.options import Shown
from foreprop.core.staleness import parse_staleness
from foreprop.errors import ConfigError
from foreprop.quantities import time_text
from foreprop.simulate.run import SIMULATED
from foreprop.workload.limit import carried_bytes
from foreprop.workload.links import parse_cross_traffic, parse_link_rates
from foreprop.workload.profile import Profile, load_profile, profile_names, read_profile
from foreprop.workload.records import Record, write_records
from foreprop.workload.setting import DDP, DDP_TUNED, MXNET, RING, LabSetting, usual_compute_s
from foreprop.workload.systemconfig import environment_text
from foreprop.workload.systemnames import base_of
from foreprop.workload.unevenness import parse_step_lengths

if TYPE_CHECKING:
    from foreprop.lab.run import LabResult

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
    """With the profile, and the compute that suits it."""
    profile = _profile(model, path)
    compute_s = given["compute_s"]
    if compute_s is None:
        compute_s = usual_compute_s(profile, max(1, given["nodes"] * given["workers_per_node"]))
    links = {name: given[name] or () for name in ("link_rates", "cross_traffic")}
    return given | links | {"profile": profile, "compute_s": compute_s}


def say_notices(console: Console, result: LabResult) -> None:
    for notice in result.notices:
        console.print(f"Notice: {notice}", style="yellow", markup=False)


def say_environment(console: Console, setting: LabSetting) -> None:
    if text := environment_text(setting):
        console.print(text, soft_wrap=True, markup=False)


def keep(console: Console, path: Path, records: Sequence[msgspec.Struct]) -> None:
    write_records(path, records)
    console.print(f"Records: {path}", soft_wrap=True, markup=False)


def nodes_text(setting: LabSetting) -> str:
    each = f" of {setting.workers_per_node} workers" * (setting.workers_per_node > 1)
    return f"{setting.nodes} nodes{each}"


def _profile(model: str | None, path: Path | None) -> Profile:
    if path is None:
        return load_profile(model or "vgg19")
    if model is not None:
        raise ConfigError(f"--model {model} and --profile {path} are both given: give one of them")
    return read_profile(path)


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
    """Of frames, what leaves a node's link: not the part for its own server, and headers.

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

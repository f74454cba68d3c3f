"""``foreprop lab``: a cluster in a box, real peers, the paper's figures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from foreprop.cli.clone import add_from_clone, load
from foreprop.cli.options import Shown, filling, mbit, systems, writable
from foreprop.errors import ConfigError
from foreprop.lab.run import Build, LabResult, run_lab
from foreprop.quantities import parse_time
from foreprop.simulate.run import SIMULATED, simulate_lab
from foreprop.simulate.setting import SIMULATED_SYSTEMS, SimulatedSetting
from foreprop.workload.links import parse_cross_traffic, parse_link_rates
from foreprop.workload.profile import Profile, load_profile, profile_names, read_profile
from foreprop.workload.records import Record, write_records
from foreprop.workload.setting import MXNET, SYSTEMS, LabSetting, usual_compute_s
from foreprop.workload.systemconfig import environment_text
from foreprop.workload.unevenness import parse_step_lengths

lab = typer.Typer(
    help="Measure systems side by side on a cluster of network namespaces on this machine.",
    no_args_is_help=True,
)
_Model = Annotated[
    str | None, typer.Option(help=f"One of {', '.join(profile_names())}; default vgg19.")
]
_ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        help="A file that foreprop.profile() has saved, or a JSON file of arrays and FLOPs.",
    ),
]
_Out = Annotated[Path, typer.Option(help="Folder for results.json.")]
_EGRESS_ONLY = Shown(
    name="egress_only",
    kind=bool,
    default=False,
    declared=("--egress-only",),
    help="Shape only what nodes send, as the paper did.",
    read=lambda only: not only,
)
_COMPUTE = Shown(kind=float | None, default=None)
_UNEVEN = {
    "slowdown": Shown(default=0.5),
    "step_lengths": Shown(kind=str | None, read=parse_step_lengths),
    "link_rates": Shown(kind=str | None, default=None, read=parse_link_rates),
    "cross_traffic": Shown(kind=str | None, default=None, read=parse_cross_traffic),
}
_SYSTEMS = "p3,slicing,kvstore,ddp"

_SHORT_S = 0.1
"""Shorter steps are shown with more digits."""


@lab.command("run")
@filling(
    LabSetting,
    rate_bits_per_s=mbit(),
    compute_s=_COMPUTE,
    systems=systems(SYSTEMS, default=_SYSTEMS, more="; p3@200000: with slices of that size"),
    shape_ingress=_EGRESS_ONLY,
    **_UNEVEN,
)
def run(
    model: _Model = None,
    profile: _ProfileFile = None,
    *,
    out: _Out = Path("runs/lab"),
    **given: Any,
) -> None:
    """Measure several systems in one cluster, their steps interleaved; write results.json.

    Nodes are network namespaces joined by links that the kernel shapes; accelerators are emulated;
    autograd, optimizers and sockets are real. efficiency is the limit, which no schedule can beat,
    over the median step.
    """
    setting = LabSetting(**_completed(model, profile, given))
    results = writable(out) / "results.json"
    console = Console()
    with console.status("") as status:
        result = run_lab(setting, build=_build(setting), progress=status.update)
    say_notices(console, result)
    console.print(table(setting, result.records))
    say_environment(console, setting)
    keep(console, results, result.records)


@lab.command("simulate")
@filling(
    SimulatedSetting,
    ("mxnet_python", "trace"),
    rate_bits_per_s=mbit(),
    compute_s=_COMPUTE,
    systems=systems(SIMULATED_SYSTEMS, default=_SYSTEMS),
    shape_ingress=_EGRESS_ONLY,
    **_UNEVEN,
    latency_s=Shown(name="latency", kind=str, default="100us", read=partial(parse_time, "latency")),
    symmetric=Shown(declared=("--symmetric/--every-node",)),
)
def simulate(
    model: _Model = None,
    profile: _ProfileFile = None,
    *,
    out: _Out = Path("runs/simulated"),
    **given: Any,
) -> None:
    """Predict what `run` would measure, without a cluster; write results.json.

    The presets and ring are foreprop's own state machines, on a simulated clock with simulated
    links; ddp is a model of DistributedDataParallel. The same options give the same records. Many
    nodes are simulated by symmetry, which is exact for ring and ddp, and close for the presets.
    """
    setting = SimulatedSetting(**_completed(model, profile, given))
    results = writable(out) / "results.json"
    console = Console()
    with console.status("") as status:
        records = simulate_lab(setting, progress=status.update)
    console.print(table(setting, records))
    say_environment(console, setting)
    keep(console, results, records)


def _build(setting: LabSetting) -> Build | None:
    """What builds the setting's systems, if the lab does not by itself."""
    peers = [name for name in setting.systems if name in MXNET]
    if not peers:
        return None
    build: Build = load("experiments.mxnet:build_system", f"the system {peers[0]}")
    return build


def _completed(model: str | None, path: Path | None, given: dict[str, Any]) -> dict[str, Any]:
    """With the profile, and the compute that suits it."""
    profile = _profile(model, path)
    compute_s = given["compute_s"]
    if compute_s is None:
        compute_s = usual_compute_s(profile, given["nodes"] * given["workers_per_node"])
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
        raise ConfigError(f"model is {model!r} and profile is {path}: give one of them")
    return read_profile(path)


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
    )
    for heading in ("system", "s/step", "p10-p90", "efficiency", "waiting s", "CPU s/GB", "CPUs"):
        shown.add_column(heading, justify="left" if heading == "system" else "right")
    for record in records:
        step = record.iteration_s
        shown.add_row(
            record.system,
            f"{step.median:.{places}f}",
            f"{step.p10:.{places}f}-{step.p90:.{places}f}",
            "CPU-bound" if record.cpu_bound else f"{record.efficiency:.3f}",
            f"{record.waiting_s:.{places}f}",
            "" if simulated else f"{record.cpu_s_per_gb:.1f}",
            "" if simulated else f"{100 * record.cpu_share:.0f} %",
        )
    if any(record.cpu_bound for record in records):
        shown.caption = (
            "CPU-bound: the processors were busy for over 80 % of the time, so that these steps say"
            f" nothing about the network; take a larger --compute-s (now {setting.compute_s:g})"
        )
    return shown


add_from_clone(
    lab,
    "mlp",
    "experiments.mlp.command:app",
    "Train a perceptron on Fashion-MNIST, 1 to 7 workers; write results.json and figures.",
)
add_from_clone(
    lab,
    "language",
    "experiments.language.command:app",
    "Train a language model on WikiText-2's 76,616 types, sparse and dense; write results.json.",
)
add_from_clone(
    lab,
    "figures",
    "experiments.figures.command:app",
    "Run what the paper's figures need and draw them, each with its data, and a page of all.",
)

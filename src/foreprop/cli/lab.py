"""``foreprop lab``: a cluster in a box, real peers, the paper's figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from foreprop.cli.clone import add_from_clone
from foreprop.cli.folder import writable
from foreprop.errors import ConfigError
from foreprop.lab.run import run_lab
from foreprop.quantities import parse_time
from foreprop.simulate.run import SIMULATED, simulate_lab
from foreprop.simulate.setting import SIMULATED_SYSTEMS, SimulatedSetting
from foreprop.workload.profile import Profile, load_profile, profile_names, read_profile
from foreprop.workload.records import Record, write_records
from foreprop.workload.setting import SYSTEMS, LabSetting, usual_compute_s

lab = typer.Typer(
    help="Measure systems side by side on a cluster of network namespaces on this machine.",
    no_args_is_help=True,
)
MxnetPython = Annotated[
    Path | None,
    typer.Option(help="Python of an environment with mxnet==1.9.1 and numpy<1.24."),
]

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
_Nodes = Annotated[int, typer.Option(help="Nodes, each with a worker and a server.")]
WorkersPerNode = Annotated[int, typer.Option(help="Workers on each node.")]
_Balance = Annotated[
    float | None, typer.Option(help="Wire time / compute, which sets the rate; default 1.0.")
]
_Rate = Annotated[
    float | None, typer.Option(help="The links' rate in Mbit/s, instead of --balance.")
]
_Scale = Annotated[int, typer.Option(help="Divides every array, slice and bucket.")]
_Compute = Annotated[
    float | None,
    typer.Option(
        help="Seconds that the device computes per step; by default as measured (see --profile),"
        " or else enough for 2 CPUs."
    ),
]
_Iterations = Annotated[int, typer.Option(help="Measured steps of each system.")]
_SliceElems = Annotated[
    int | None,
    typer.Option(help="Elements per slice of the unscaled model, instead of the usual ones."),
]
_Jitter = Annotated[
    float, typer.Option(help="Draw each layer's time anew, up to this share off, as 0.2.")
]
_EgressOnly = Annotated[
    bool, typer.Option("--egress-only", help="Shape only what nodes send, as the paper did.")
]

_SHORT_S = 0.1
"""Shorter steps are shown with more digits."""


@lab.command("run")
def run(
    model: _Model = None,
    profile: _ProfileFile = None,
    nodes: _Nodes = 4,
    workers_per_node: WorkersPerNode = 1,
    balance: _Balance = None,
    rate_mbit: _Rate = None,
    scale: _Scale = 16,
    compute_s: _Compute = None,
    systems: Annotated[
        str,
        typer.Option(
            help=f"Separated by commas: {', '.join(SYSTEMS)}; p3@200000: with slices of that size."
        ),
    ] = "p3,slicing,kvstore,ddp",
    iterations: _Iterations = 20,
    slice_elems: _SliceElems = None,
    jitter: _Jitter = 0.0,
    egress_only: _EgressOnly = False,
    mxnet_python: MxnetPython = None,
    trace: Annotated[
        Path | None, typer.Option(help="Folder for traces of the presets, for `foreprop trace`.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for results.json.")] = Path("runs/lab"),
) -> None:
    """Measure several systems in one cluster, their steps interleaved; write results.json.

    Nodes are network namespaces joined by links that the kernel shapes; accelerators are emulated;
    autograd, optimizers and sockets are real. efficiency is the limit, which no schedule can beat,
    over the median step.
    """
    chosen = _profile(model, profile)
    if compute_s is None:
        compute_s = usual_compute_s(chosen, nodes * workers_per_node)
    setting = LabSetting(
        profile=chosen,
        systems=names_in(systems),
        nodes=nodes,
        workers_per_node=workers_per_node,
        scale=scale,
        compute_s=compute_s,
        rate_bits_per_s=None if rate_mbit is None else rate_mbit * 1e6,
        balance=balance,
        iterations=iterations,
        slice_elems=slice_elems,
        jitter=jitter,
        shape_ingress=not egress_only,
        mxnet_python=mxnet_python,
        trace=trace,
    )
    results = writable(out) / "results.json"
    console = Console()
    with console.status("") as status:
        result = run_lab(setting, progress=status.update)
    for notice in result.notices:
        console.print(f"Notice: {notice}", style="yellow", markup=False)
    console.print(table(setting, result.records))
    write_records(results, result.records)
    console.print(f"Records: {results}", soft_wrap=True, markup=False)


@lab.command("simulate")
def simulate(
    model: _Model = None,
    profile: _ProfileFile = None,
    nodes: _Nodes = 4,
    workers_per_node: WorkersPerNode = 1,
    balance: _Balance = None,
    rate_mbit: _Rate = None,
    scale: _Scale = 16,
    compute_s: _Compute = None,
    systems: Annotated[
        str, typer.Option(help=f"Separated by commas: {', '.join(SIMULATED_SYSTEMS)}.")
    ] = "p3,slicing,kvstore,ddp",
    iterations: _Iterations = 20,
    slice_elems: _SliceElems = None,
    jitter: _Jitter = 0.0,
    step_jitter: Annotated[
        float,
        typer.Option(
            help="Each worker's compute takes exp(this x a normal draw) as long, anew in each step."
        ),
    ] = 0.0,
    slow_nodes: Annotated[int, typer.Option(help="Nodes that compute more slowly.")] = 0,
    slowdown: Annotated[
        float, typer.Option(help="By what share they take longer, as 0.5 for half as long again.")
    ] = 0.5,
    latency: Annotated[
        str, typer.Option(help="From host to host, without queues: half of what ping shows.")
    ] = "100us",
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--every-node",
            help="Let one stand for all that do the same; by default above 64 nodes of one worker.",
        ),
    ] = None,
    representatives: Annotated[
        int, typer.Option(help="How many stand for all, if it is symmetric; 4 are more exact.")
    ] = 1,
    egress_only: _EgressOnly = False,
    out: Annotated[Path, typer.Option(help="Folder for results.json.")] = Path("runs/simulated"),
) -> None:
    """Predict what `run` would measure, without a cluster; write results.json.

    The presets and ring are foreprop's own state machines, on a simulated clock with simulated
    links; ddp is a model of DistributedDataParallel. The same options give the same records. Many
    nodes are simulated by symmetry, which is exact for ring and ddp, and close for the presets.
    """
    chosen = _profile(model, profile)
    if compute_s is None:
        compute_s = usual_compute_s(chosen, nodes * workers_per_node)
    setting = SimulatedSetting(
        profile=chosen,
        systems=names_in(systems),
        nodes=nodes,
        workers_per_node=workers_per_node,
        scale=scale,
        compute_s=compute_s,
        rate_bits_per_s=None if rate_mbit is None else rate_mbit * 1e6,
        balance=balance,
        iterations=iterations,
        slice_elems=slice_elems,
        jitter=jitter,
        step_jitter=step_jitter,
        slow_nodes=slow_nodes,
        slowdown=slowdown,
        latency_s=parse_time("latency", latency),
        symmetric=symmetric,
        representatives=representatives,
        shape_ingress=not egress_only,
    )
    results = writable(out) / "results.json"
    console = Console()
    with console.status("") as status:
        records = simulate_lab(setting, progress=status.update)
    console.print(table(setting, records))
    write_records(results, records)
    console.print(f"Records: {results}", soft_wrap=True, markup=False)


def names_in(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


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

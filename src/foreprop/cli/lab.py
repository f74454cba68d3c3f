"""``foreprop lab``: a cluster in a box, real peers, the paper's figures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from foreprop.cli.folder import writable
from foreprop.cli.mlp import mlp
from foreprop.errors import ConfigError
from foreprop.lab.ablation import ABLATION
from foreprop.lab.language import (
    HYBRID,
    LANGUAGE_SYSTEMS,
    LanguageSetting,
    Text,
    lstm_profile,
)
from foreprop.lab.languagerecords import LanguageRecord, with_bytes
from foreprop.lab.run import run_lab, sampled_steps
from foreprop.quantities import parse_time
from foreprop.simulate.run import SIMULATED, simulate_lab
from foreprop.simulate.setting import SIMULATED_SYSTEMS, SimulatedSetting
from foreprop.workload.profile import Profile, load_profile, profile_names, read_profile
from foreprop.workload.records import Record, write_records
from foreprop.workload.setting import SYSTEMS, LabSetting, usual_compute_s

if TYPE_CHECKING:
    from foreprop.lab.figures import Figures

lab = typer.Typer(
    help="Measure systems side by side on a cluster of network namespaces on this machine.",
    no_args_is_help=True,
)
lab.command("mlp")(mlp)

_MxnetPython = Annotated[
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
_WorkersPerNode = Annotated[int, typer.Option(help="Workers on each node.")]
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
    workers_per_node: _WorkersPerNode = 1,
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
    mxnet_python: _MxnetPython = None,
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
        systems=_names(systems),
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
    workers_per_node: _WorkersPerNode = 1,
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
        systems=_names(systems),
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


@lab.command("language")
def language(
    nodes: Annotated[int, typer.Option(help="Nodes, each with its workers.")] = 8,
    workers_per_node: _WorkersPerNode = 1,
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
        systems=tuple(ABLATION) if ablation else _names(systems),
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
        result = run_lab(setting, progress=status.update)
    for notice in result.notices:
        console.print(f"Notice: {notice}", style="yellow", markup=False)
    measured = with_bytes(result, sampled_steps=sampled_steps(setting))
    console.print(_language_table(setting, measured))
    write_records(results, measured)
    console.print(f"Records: {results}", soft_wrap=True, markup=False)


def _language_table(setting: LanguageSetting, measured: list[LanguageRecord]) -> Table:
    title = (
        f"language model, widths / {setting.scale}, {_nodes(setting)} at"
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


@lab.command("figures")
def figures(
    out: Annotated[Path, typer.Option(help="Folder for figures, data and the page.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Few points and steps: minutes instead of hours.")
    ] = False,
    only: Annotated[
        str, typer.Option(help="Numbers of the figures to make, separated by commas.")
    ] = "1,2,3,4,5",
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Measured steps, instead of each figure's own.")
    ] = None,
    mxnet_python: _MxnetPython = None,
) -> None:
    """Run what the paper's figures need and draw them, each with its data, and a page of all.

    Stopped and started again with the same options, it goes on where it was.
    """
    make_figures = _import_make_figures()
    console = Console()
    made = make_figures(
        writable(out),
        quick=quick,
        console=console,
        measure=run_lab,
        only=_numbers(only),
        iterations=iterations,
        mxnet_python=mxnet_python,
        command=" ".join(["foreprop", *sys.argv[1:]]),
    )
    console.print(f"Page: {made.page}", soft_wrap=True, markup=False)
    if made.failed:
        raise typer.Exit(1)


def _import_make_figures() -> Callable[..., Figures]:
    """Only here: matplotlib takes a second to load, and is an extra."""
    try:
        from foreprop.lab.figures import make_figures
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"figures need {error.name}, which is not installed: pip install 'foreprop[lab]'"
        ) from error
    return make_figures


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _nodes(setting: LabSetting) -> str:
    each = f" of {setting.workers_per_node} workers" * (setting.workers_per_node > 1)
    return f"{setting.nodes} nodes{each}"


def _profile(model: str | None, path: Path | None) -> Profile:
    if path is None:
        return load_profile(model or "vgg19")
    if model is not None:
        raise ConfigError(f"model is {model!r} and profile is {path}: give one of them")
    return read_profile(path)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(",") if number.strip())
    except ValueError as error:
        raise ConfigError(f"only is {text!r}; it must be numbers separated by commas") from error


def table(setting: LabSetting, records: list[Record]) -> Table:
    first = records[0]
    simulated = first.network == SIMULATED
    kind = "simulated: " if simulated else ""
    if first.representatives is not None:
        kind = "simulated by symmetry: "
    places = 3 if first.limit_s >= _SHORT_S else 4
    shown = Table(
        title=f"{kind}{first.model} / {first.scale}, {_nodes(setting)},"
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

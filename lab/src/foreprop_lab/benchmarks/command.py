"""``foreprop bench``: what foreprop itself costs, measured beside a yardstick in the same run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from foreprop.plan.profile import load_profile
from foreprop.quantities import parse_rate, rate_text
from foreprop.tools.cli.checked import CheckedCommand
from foreprop.tools.cli.output import console, print_line, print_table
from foreprop_lab.benchmarks.codecs import NAMES, measure_codecs
from foreprop_lab.benchmarks.compressed import measure_compression, measure_on_gradients
from foreprop_lab.benchmarks.exchange import Exchange, measure_exchange
from foreprop_lab.benchmarks.jitter import simulate_jitter
from foreprop_lab.benchmarks.loopback import MODELS, measure_loopback
from foreprop_lab.benchmarks.memory import KINDS as MEMORY_KINDS
from foreprop_lab.benchmarks.memory import PARAMETERS as MEMORY_PARAMETERS
from foreprop_lab.benchmarks.memory import measure_memory
from foreprop_lab.benchmarks.overhead import (
    measure_replica_check,
    measure_scheduling,
    measure_waiting,
)
from foreprop_lab.benchmarks.plain import measure_alone
from foreprop_lab.benchmarks.tables import measure_tables
from foreprop_lab.benchmarks.trainer import measure_trainer
from foreprop_lab.benchmarks.wire import measure_wire
from foreprop_lab.setting.labsetting import rate_for_balance

bench = typer.Typer(help="Measure foreprop itself.", no_args_is_help=True, add_completion=False)


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


@bench.command("wire", cls=CheckedCommand)
def wire(
    slice_elems: Annotated[int, typer.Option(min=1, help="Elements (4 bytes) per slice.")] = 50_000,
    slices: Annotated[int, typer.Option(min=1, help="Slices per step.")] = 500,
    steps: Annotated[int, typer.Option(min=1, help="Steps to take the median of.")] = 20,
) -> None:
    """Data plane: one worker, one server, loopback, no model; against bare sockets.

    The bare pair moves the same messages (header and payload, pushes one way and replies the other)
    with sendmsg and recv_into and does nothing else; steps of all alternate. foreprop is shown
    without compute, also without the checksums of frames, and with the server applying SGD, whose
    memory traffic comes on top; that also with encryption="tls".

    Examples:
      foreprop bench wire
      foreprop bench wire --slice-elems 200000 --slices 100
    """
    rows = measure_wire(slice_elems=slice_elems, slices=slices, steps=steps)
    shown = _table(
        f"{slices} slices of {slice_elems * 4 / 1e3:g} kB per step, each way",
        ("", "Gbit/s each way", "CPU s per GB", "of bare sockets"),
    )
    for row in rows:
        shown.add_row(
            row.name,
            f"{row.bits_per_s / 1e9:.2f}",
            f"{row.cpu_s_per_gb:.2f}",
            f"{100 * row.ratio:.0f} %",
        )
    print_table(console(), shown)


@bench.command("overhead", cls=CheckedCommand)
def overhead(
    slices: Annotated[int, typer.Option(min=1, help="Slices of 16 elements per step.")] = 2000,
    parameters: Annotated[int, typer.Option(min=1, help="Parameters of one element.")] = 500,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps.")] = 20,
) -> None:
    """Scheduling: microseconds per slice in worker and server, and per waiting parameter.

    Examples:
      foreprop bench overhead
      foreprop bench overhead --slices 500 --steps 50
    """
    scheduling = measure_scheduling(slices=slices, steps=steps)
    waiting = measure_waiting(parameters=parameters, steps=steps)
    shown = _table("Cost beyond the bytes", ("", "microseconds", "of which"))
    shown.add_row("worker, CPU per slice", f"{scheduling.worker_us_per_slice:.1f}", "")
    shown.add_row("server, CPU per slice and worker", f"{scheduling.server_us_per_slice:.1f}", "")
    shown.add_row(
        "waiting parameter, per step",
        f"{waiting.total_us:.1f}",
        f"first use {waiting.first_use_us:.1f}, swap {waiting.swap_us:.1f}",
    )
    resnet = load_profile("resnet50")
    check_us = measure_replica_check([math.prod(array.shape) for array in resnet.arrays])
    shown.add_row("comparing ranks' parameters, per step", f"{check_us:.1f}", "ResNet-50")
    print_table(console(), shown)


@bench.command("trainer", cls=CheckedCommand)
def trainer(
    slice_kb: Annotated[
        list[float] | None,
        typer.Option(min=0.064, max=1e5, help="kB per slice; by default 200, 50 and 8."),
    ] = None,
    servers: Annotated[
        list[int] | None, typer.Option(min=1, max=16, help="Servers; by default 1 and 4.")
    ] = None,
    slices: Annotated[int, typer.Option(min=1, help="Slices per step.")] = 250,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to take medians of.")] = 9,
    encrypted: Annotated[bool, typer.Option("--encrypted", help="With TLS, but for gloo.")] = False,
    compression: Annotated[str | None, typer.Option(help="With a codec, but for gloo.")] = None,
    staged: Annotated[
        bool, typer.Option("--staged", help="With gradients that are copied first, as a GPU's.")
    ] = False,
) -> None:
    """The training thread: how much slower it is while slices move, and they beside it.

    It waits, calls eager layers as launching kernels does, calls bare operations of torch, or logs
    in Python, on a processor of its own. Beside it gloo reduces as many bytes in DDP's buckets.

    Examples:
      foreprop bench trainer
      foreprop bench trainer --slice-kb 50 --servers 4 --rounds 5
      foreprop bench trainer --slice-kb 200 --servers 1 --compression int8
      foreprop bench trainer --staged --slice-kb 200 --slice-kb 50
    """
    costs = measure_trainer(
        slices_kb=slice_kb or [200.0, 50.0, 8.0],
        servers=servers or [1, 4],
        slices=slices,
        rounds=rounds,
        encrypted=encrypted,
        compression=compression,
        staged=staged,
    )
    shown = _table(
        f"{slices} slices per step, medians of {rounds} rounds",
        ("", "training thread", "us alone", "slower by", "Gbit/s each way", "of waiting"),
    )
    for cost in costs:
        shown.add_row(
            cost.plane,
            cost.thread,
            f"{cost.alone_us:.1f}",
            f"{cost.slow_down:.2f}",
            f"{cost.bits_per_s / 1e9:.2f}",
            f"{cost.of_waiting:.2f}",
        )
    print_table(console(), shown)


@bench.command("alone", cls=CheckedCommand)
def alone(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to take medians of.")] = 40,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each kind in a round.")] = 10,
) -> None:
    """A world of one: CPU time per step, plain and with foreprop; kinds alternate.

    The first three kinds train the same model; "plain, again" shows how far to believe the others.
    The last one has a server process all the same, as several ranks have; its CPU time is not in.

    Examples:
      foreprop bench alone
      foreprop bench alone --rounds 80
    """
    shown = _table(
        f"medians of {rounds} rounds of {steps} steps each", ("", "", "CPU ms per step", "of plain")
    )
    for cost in measure_alone(rounds=rounds, steps=steps):
        shown.add_row(cost.model, cost.kind, f"{cost.step_s * 1e3:.3f}", f"{cost.ratio:.3f}")
    print_table(console(), shown)


@bench.command("loopback", cls=CheckedCommand)
def loopback(
    model: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(MODELS)}; by default all.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks, on this machine.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to take medians of.")] = 15,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each kind in a round.")] = 20,
) -> None:
    """Where the network costs nothing: step and CPU time beside DDP's; kinds alternate.

    "ddp, again" shows how far to believe the others, "alone" what a step takes that exchanges
    nothing. CPU time is that of all ranks together, in milliseconds per step: of threads that
    train, of the ranks' other threads, of servers.

    Examples:
      foreprop bench loopback --model gpt --ranks 2
    """
    unknown = sorted(set(model or ()) - set(MODELS))
    if unknown:
        raise typer.BadParameter(f"no model is called {unknown[0]!r}; there are {list(MODELS)}")
    shown = _table(
        f"{ranks} ranks, medians of {rounds} rounds of {steps} steps each",
        ("", "", "step, ms", "of DDP's", "CPU: training", "others", "servers"),
    )
    kinds, models = ["p2p", "ring"], model or list(MODELS)
    costs = measure_loopback(models=models, kinds=kinds, ranks=ranks, rounds=rounds, steps=steps)
    for cost in costs:
        cpu = [f"{used_s * 1e3:.1f}" for used_s in cost.cpu]
        shown.add_row(cost.model, cost.kind, f"{cost.step_s * 1e3:.1f}", f"{cost.ratio:.2f}", *cpu)
    print_table(console(), shown)


@bench.command("memory", cls=CheckedCommand)
def memory(
    params: Annotated[
        int, typer.Option(min=1, help="About so many parameters.")
    ] = MEMORY_PARAMETERS,
    kind: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(MEMORY_KINDS)}; by default workers.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks, on this machine.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps.")] = 10,
) -> None:
    """Memory of a whole job beside DDP's: SGD with momentum trains a transformer.

    All processes of a job count, ranks and servers, each with its PSS: of what several share, its
    part. They are looked at twenty times a second. The jobs run one after the other.

    Examples:
      foreprop bench memory
      foreprop bench memory --params 15000000 --kind workers --kind elastic
    """
    unknown = sorted(set(kind or ()) - set(MEMORY_KINDS))
    if unknown:
        raise typer.BadParameter(f"no kind is called {unknown[0]!r}; there are {[*MEMORY_KINDS]}")
    found = measure_memory(kind or ["workers"], parameters=params, ranks=ranks, steps=steps)
    shown = _table(
        f"{found[0].parameters / 1e6:.1f} million parameters, {ranks} ranks",
        ("", "at most, GB", "of DDP's", "of it ranks", "median", "step, s"),
    )
    for job in found:
        sizes = (job.ranks_bytes, job.median_bytes)
        shown.add_row(
            job.kind,
            f"{job.peak_bytes / 1e9:.2f}",
            f"{job.peak_bytes / found[0].peak_bytes:.2f}",
            *(f"{size_bytes / 1e9:.2f}" for size_bytes in sizes),
            f"{job.step_s:.2f}",
        )
    print_table(console(), shown)


@bench.command("compression", cls=CheckedCommand)
def compression(
    model: Annotated[str, typer.Option(help=f"Of {', '.join(MODELS)}.")] = "mnist",
    codec: Annotated[list[str] | None, typer.Option(help="By default lossless.")] = None,
    rate: Annotated[
        list[str] | None, typer.Option(help="Of the links, as 40Mbit; by default 40 and 100.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks, on this machine.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to take medians of.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each kind in a round.")] = 4,
) -> None:
    """Codecs by themselves, and steps of real training on slow links; kinds alternate.

    Every rank is a node, whose link foreprop paces. CPU time is that of all ranks and servers
    together, per step.

    Examples:
      foreprop bench compression --model mnist --rate 40Mbit
    """
    if model not in MODELS:
        raise typer.BadParameter(f"no model is called {model!r}; there are {list(MODELS)}")
    names, rates = (
        codec or ["lossless"],
        [parse_rate("rate", one) for one in rate or ["40Mbit", "100Mbit"]],
    )
    alone = _table(
        f"slices of {model}'s training, one thread",
        ("", "", "encode, s per GB", "decode, s per GB", "bytes left"),
    )
    for cost in measure_on_gradients(names, model=model, steps=rounds * steps):
        per_gb = (f"{cost.encode_s_per_gb:.2f}", f"{cost.decode_s_per_gb:.2f}")
        alone.add_row(cost.codec, cost.what, *per_gb, f"{100 * cost.share:.0f} %")
    print_table(console(), alone)
    shown = _table(
        f"{model}, {ranks} ranks, medians of {rounds} rounds of {steps} steps each",
        ("links", "", "step, ms", "of none's", "bytes left", "CPU, ms"),
    )
    for step in measure_compression(
        model=model, rates_bits_per_s=rates, codecs=names, ranks=ranks, rounds=rounds, steps=steps
    ):
        shown.add_row(
            rate_text(step.rate_bits_per_s),
            step.codec,
            f"{step.step_s * 1e3:.0f}",
            f"{step.ratio:.2f}",
            f"{100 * step.share:.0f} %",
            f"{step.cpu_s * 1e3:.0f}",
        )
    print_table(console(), shown)


@bench.command("exchange", cls=CheckedCommand)
def exchange(
    nodes: Annotated[int, typer.Option(min=2, max=64, help="Nodes of the lab.")] = 16,
    rate: Annotated[str, typer.Option(help="Rate of the links, as 20Mbit.")] = "19.15Mbit",
    node_mb: Annotated[
        float, typer.Option(min=0.001, max=1e5, help="MB that leave each node.")
    ] = 12.0,
    message_kb: Annotated[
        float, typer.Option(min=0.001, max=1e6, help="kB of each message.")
    ] = 12.5,
    steps: Annotated[int, typer.Option(min=1, help="Exchanges to take the median of.")] = 5,
) -> None:
    """Plain TCP from every node of the lab to every other one, nothing waiting for anything.

    By default what 16 nodes exchange in one step of ResNet-50 / 16, in slices: how much of such
    links is left to any parameter server, whatever its schedule.

    Examples:
      foreprop bench exchange
      foreprop bench exchange --nodes 4 --rate 80Mbit
    """
    setting = Exchange(
        nodes=nodes,
        rate_bits_per_s=parse_rate("rate", rate),
        node_bytes=round(node_mb * 1e6),
        message_bytes=round(message_kb * 1e3),
    )
    seconds = measure_exchange(setting, rounds=steps)
    print_line(
        console(),
        f"{nodes} nodes at {rate_text(setting.rate_bits_per_s)}: {seconds:.3f} s until the last has"
        " everything,"
        f" {setting.ideal_s:.3f} s at the links' rate: {setting.ideal_s / seconds:.3f} of it",
    )


@bench.command("jitter", cls=CheckedCommand)
def jitter(
    model: Annotated[str, typer.Option(help="One of the lab's models.")] = "resnet50",
    nodes: Annotated[int, typer.Option(min=2, max=1024, help="Ranks.")] = 4,
    balance: Annotated[
        float, typer.Option(min=0.001, max=1000.0, help="Wire time / compute.")
    ] = 1.0,
    share: Annotated[
        float,
        typer.Option(
            min=0.0, max=0.99, help="Maximum relative deviation of a layer's time (0.2 = ±20 %)."
        ),
    ] = 0.2,
    chunk_elems: Annotated[int, typer.Option(min=1, help="Elements per collective.")] = 400_000,
    steps: Annotated[int, typer.Option(min=1, help="Simulated steps.")] = 200,
) -> None:
    """Simulated: what a planned order of collectives loses to an adaptive one under jitter.

    Examples:
      foreprop bench jitter --model vgg19 --nodes 8 --share 0.1
    """
    layers = load_profile(model).layers(scale=1, compute_s=1.0)
    rate = rate_for_balance(layers, nodes=nodes, balance=balance)
    result = simulate_jitter(
        layers,
        nodes=nodes,
        rate_bits_per_s=rate,
        chunk_elems=chunk_elems,
        jitter=share,
        steps=steps,
    )
    shown = Table(title=f"{model}, {nodes} ranks, compute 1 s, balance {balance:g}, ±{share:.0%}")
    shown.add_column("order")
    shown.add_column("step", justify="right")
    shown.add_column("of the adaptive order's", justify="right")
    for name, seconds in (
        ("planned, no jitter", result.even_s),
        ("planned", result.planned_s),
        ("adaptive", result.adaptive_s),
        ("backward", result.backward_s),
    ):
        shown.add_row(name, f"{seconds:.3f} s", f"{seconds / result.adaptive_s:.3f}")
    print_table(console(), shown)


@bench.command("tables", cls=CheckedCommand)
def tables(
    rows: Annotated[int, typer.Option(min=1, help="Rows of the shard.")] = 2_000_000,
    row_elems: Annotated[int, typer.Option(min=1, help="Elements (4 bytes) per row.")] = 64,
    share: Annotated[float, typer.Option(help="Of the rows, how many are updated, once.")] = 1.0,
    rows_per_update: Annotated[int, typer.Option(min=1, help="Rows in a step.")] = 4096,
) -> None:
    """What a server's shard of a remote table takes, with nobody else in the process.

    Each row is asked for, made, and updated, as in its first step.

    Examples:
      foreprop bench tables --rows 100000 --share 0.5
    """
    if not 0 < share <= 1:
        raise typer.BadParameter(f"{share} is not above 0 and at most 1", param_hint="--share")
    found = measure_tables(
        rows=rows, row_elems=row_elems, share=share, rows_per_update=rows_per_update
    )
    shown = _table(
        f"{rows} rows of {row_elems} elements, {share:.2%} of them updated",
        ("", "values, MB", "at the start, MB", "at most, MB", "ms per update"),
    )
    for cost in found:
        sizes = (cost.table_bytes, cost.start_bytes, cost.peak_bytes)
        in_mb = [f"{size_bytes / 1e6:.1f}" for size_bytes in sizes]
        shown.add_row(cost.optimizer, *in_mb, f"{cost.update_s * 1e3:.1f}")
    print_table(console(), shown)


@bench.command("codecs", cls=CheckedCommand)
def codecs(
    slice_elems: Annotated[
        int, typer.Option(min=1, max=1_000_000_000, help="Elements (4 bytes) per slice.")
    ] = 50_000,
    slices: Annotated[int, typer.Option(min=1, max=64, help="Slices of a round.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to take medians of.")] = 9,
) -> None:
    """Codecs: CPU seconds to encode and decode a GB of float32, and up to which link they pay.

    Gradients are normal numbers, of which lossless leaves more than of most (see foreprop bench
    compression); encoding includes error feedback. "Pays below" is the link rate at which encoding,
    sending and decoding, one after the other, take as long as sending float32.

    Examples:
      foreprop bench codecs
      foreprop bench codecs --slice-elems 200000 --rounds 3
    """
    shown = _table(
        f"{slices} slices of {slice_elems} elements, medians of {rounds} rounds",
        ("codec", "bytes per element", "encode, s/GB", "decode, s/GB", "pays below"),
    )
    for cost in measure_codecs(NAMES, slice_elems=slice_elems, slices=slices, rounds=rounds):
        shown.add_row(
            cost.name,
            f"{cost.bytes_per_elem:.4f}",
            f"{cost.encode_s_per_gb:.2f}",
            f"{cost.decode_s_per_gb:.2f}",
            f"{cost.worth_below_bits_per_s / 1e9:.1f} Gbit/s",
        )
    print_table(console(), shown)

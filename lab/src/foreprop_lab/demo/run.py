"""Start the demo's nodes, have them train, and show what they measured: a table and a report."""

from __future__ import annotations

import errno
import json
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from foreprop.errors import ConfigError
from foreprop.quantities import counted
from foreprop.tools.report.timeline import Timeline, timeline_from_trace
from foreprop.version import __version__
from foreprop_lab.datasets import fashion_mnist
from foreprop_lab.demo.report import ReportContext, RunSummary, write_report
from foreprop_lab.demo.training import (
    BLOCK_STEPS,
    DDP,
    SCALE,
    Block,
    DemoSetting,
    Trained,
    balanced_rate,
    serve_node,
    typical_step,
)
from foreprop_lab.lab.cluster import Cluster, children_start_undisturbed
from foreprop_lab.lab.network import NetworkUnavailable
from foreprop_lab.setting.links import Network

_BURST_BYTES = 80_000  # the two CPUs are busy training: let TCP's large segments pass whole
RESULTS = "results.json"
_MOST_BUSY = 0.5
"""The largest share of the emulated compute that real computing may take.

Above it, steps take as long as the processors need.
"""
PrintTable = Callable[[Console, Table], None]
_SHAPED = "each a namespace, its link shaped by the kernel (tbf)"
_PACED = "each with a link that foreprop emulates by pacing its sockets"
_DDP_BUCKETS = "ddp has its default buckets, which are those of 1 MB too: fc1 is one array"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What was measured with one system; times are rank 0's, in seconds."""

    step_s: list[float] = field(default_factory=list)
    waited_s: float | None = 0.0
    trained: list[Trained] = field(default_factory=list)
    """What each node had in the end, in the ranks' order."""

    def add(self, block: Block) -> None:
        self.step_s += block.step_s
        if self.waited_s is None or block.waited_s is None:
            self.waited_s = None
        else:
            self.waited_s += block.waited_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All that a run of the demo measured."""

    setting: DemoSetting
    """The setting, with the rate that was used, and whether sockets were paced."""
    compute_s: float
    rate_bits_per_s: float
    outcomes: dict[str, Outcome]


def run_demo(
    setting: DemoSetting, report: Path, *, command: str, console: Console, output: PrintTable
) -> None:
    """Train with every system; write report and results.json, print table and headline."""
    folder = Path(setting.folder)
    _prepare_folders(report, [folder / name for name in setting.presets])
    console.print("Fashion-MNIST (31 MB) is fetched once, and checked ...")
    fashion_mnist("train")
    found = measure(setting, console)
    summaries = [summarise(name, found) for name in found.setting.systems]
    write_results(report.parent / RESULTS, found, summaries, command)
    output(console, table(summaries, found))
    console.print(headline(summaries, found), style="bold", soft_wrap=True, markup=False)
    timelines = [
        Timeline(preset=name, events=_events(folder / name, found.outcomes[name]))
        for name in setting.presets
    ]
    write_report(report, _context(found, command), summaries, timelines)
    console.print(f"Report with the timeline of two steps: {report}", soft_wrap=True)
    console.print(f"All steps: {report.parent / RESULTS}", soft_wrap=True)
    console.print(
        f"Traces of all processes: foreprop trace {folder / setting.presets[-1]} lays them into one"
        " file for https://ui.perfetto.dev",
        soft_wrap=True,
    )


def _prepare_folders(report: Path, trace_folders: list[Path]) -> None:
    """Create the folders before the work begins, and remove an older run's traces."""
    try:
        if report.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        for folder in trace_folders:
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob("*.trace.json"):
                old.unlink()
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"out is {report}, which cannot be written: {why}") from error


def measure(setting: DemoSetting, console: Console) -> Found:
    with _cluster(setting, None) as cluster:
        cluster.ask_all(("ready", ""))  # nobody begins to measure before all have their data
        busy_s: float = cluster.ask_all(("calibrate", ""))[0]
    if busy_s > _MOST_BUSY * setting.compute_s:
        console.print(
            f"Notice: this machine's processors compute {1e3 * busy_s:.0f} ms per step, much of"
            f" the emulated {1e3 * setting.compute_s:.0f} ms: steps will spread; take a larger"
            " --compute or a smaller --batch",
            style="yellow",
            soft_wrap=True,
        )
    compute_s = setting.compute_s
    rate = setting.rate_bits_per_s or balanced_rate(setting.workers, compute_s)
    setting = replace(setting, rate_bits_per_s=rate)
    network = Network(
        nodes=setting.workers, rate_bits_per_s=rate, buffer_scale=SCALE, burst_bytes=_BURST_BYTES
    )
    try:
        cluster = _cluster(setting, network)
    except NetworkUnavailable as error:
        console.print(
            f"No links made by the kernel ({error}): foreprop paces its own sockets instead, and"
            " DDP, whose sockets nobody paces, is left out."
        )
        setting = replace(setting, paced=True)
        cluster = _cluster(setting, None)
    links = _PACED if setting.paced else _SHAPED
    console.print(
        f"{counted(setting.workers, 'node')} with a worker and a server, {links};"
        f" {counted(setting.steps, 'step')} with each of {', '.join(setting.systems)}, in"
        " alternating blocks"
    )
    with cluster:
        outcomes = _train_in_turns(cluster, setting)
    return Found(setting=setting, compute_s=compute_s, rate_bits_per_s=rate, outcomes=outcomes)


def _cluster(setting: DemoSetting, network: Network | None) -> Cluster:
    with children_start_undisturbed():
        return Cluster(serve_node, setting, nodes=setting.workers, network=network)


def _train_in_turns(cluster: Cluster, setting: DemoSetting) -> dict[str, Outcome]:
    """Train the systems in alternating blocks, so that the machine's load meets all alike."""
    outcomes = {name: Outcome() for name in setting.systems}
    for name in outcomes:
        cluster.ask_all(("build", name))
    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(),
        TextColumn("{task.completed:>4}/{task.total} steps"),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bars = {name: progress.add_task(name, total=setting.steps, note="") for name in outcomes}
        for done in range(0, setting.steps, BLOCK_STEPS):
            steps = min(BLOCK_STEPS, setting.steps - done)
            for name, outcome in outcomes.items():
                block: Block = cluster.ask_all(("block", name, steps))[0]
                note = "warming up"
                if done:
                    outcome.add(block)
                    note = f"{1e3 * statistics.median(outcome.step_s):.0f} ms/step"
                progress.update(bars[name], advance=steps, note=note)
    for name, outcome in outcomes.items():
        outcome.trained = cluster.ask_all(("finish", name))
    return outcomes


def summarise(name: str, found: Found) -> RunSummary:
    """Summarise rank 0's times; the weights' checksum lists all of them if the ranks differ."""
    setting, outcome = found.setting, found.outcomes[name]
    deciles = statistics.quantiles(outcome.step_s, n=10)
    median = statistics.median(outcome.step_s)
    checksums = sorted({trained.weights_sha256 for trained in outcome.trained})
    waited_s = outcome.waited_s
    return RunSummary(
        preset=name,
        step_s_median=median,
        step_s_p10=deciles[0],
        step_s_p90=deciles[-1],
        samples_per_s=setting.batch_size * setting.workers / median,
        waiting_share=None if waited_s is None else waited_s / sum(outcome.step_s),
        test_accuracy=outcome.trained[0].test_accuracy or 0.0,
        weights_sha256="+".join(checksums),
        sums_alike=name != DDP,
        steps=setting.steps,
        compute_s=found.compute_s,
    )


def table(summaries: Sequence[RunSummary], found: Found) -> Table:
    shown = Table(
        title=f"Fashion-MNIST, {found.rate_bits_per_s / 1e6:.0f} Mbit/s per node,"
        f" {1e3 * found.compute_s:.0f} ms of (emulated) computation per step"
        f"{_limit_text(found)}",
        caption=_caption(summaries),
    )
    other = baseline(summaries)
    headings = ["system", "ms/step", "p10-p90", f"over {other.preset}", "samples/s", "waiting"]
    for heading in (*headings, "accuracy", "SHA-256"):
        left = heading in {"system", "SHA-256"}
        shown.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for summary in summaries:
        share = summary.waiting_share
        shown.add_row(
            summary.preset,
            f"{1e3 * summary.step_s_median:.0f}",
            f"{1e3 * summary.step_s_p10:.0f}-{1e3 * summary.step_s_p90:.0f}",
            f"{other.step_s_median / summary.step_s_median:.2f}x",
            f"{summary.samples_per_s:.0f}",
            "-" if share is None else f"{100 * share:.0f} %",
            f"{100 * summary.test_accuracy:.1f} %",
            summary.weights_sha256[:16],
        )
    return shown


def _limit_text(found: Found) -> str:
    limit_s = found.setting.limit_s
    return "" if limit_s is None else f", limit {1e3 * limit_s:.0f} ms"


def baseline(summaries: Sequence[RunSummary]) -> RunSummary:
    """The run that all others are compared with: DDP's, or else that of the first preset."""
    return next((summary for summary in summaries if summary.preset == DDP), summaries[0])


def headline(summaries: Sequence[RunSummary], found: Found) -> str:
    """What the last preset gains over the baseline, in words; it is p3 unless others are chosen."""
    other, best = baseline(summaries), summaries[len(found.setting.presets) - 1]
    ratio = other.step_s_median / best.step_s_median
    clear = best.step_s_p90 < other.step_s_p10 or best.step_s_p10 > other.step_s_p90
    return (
        f"{best.preset} trains {ratio:.2f}x as fast as {other.preset}:"
        f" {1e3 * best.step_s_median:.0f} ms per step instead of"
        f" {1e3 * other.step_s_median:.0f}{_limit_text(found)}"
        f"{'' if clear else ' (but their ranges overlap: p10 to p90)'}"
    )


def write_results(path: Path, found: Found, summaries: Sequence[RunSummary], command: str) -> None:
    other = baseline(summaries)
    systems = [
        {
            **msgspec.to_builtins(summary),
            "over": other.step_s_median / summary.step_s_median,
            "step_s": found.outcomes[summary.preset].step_s,
        }
        for summary in summaries
    ]
    whole = {
        "command": command,
        "foreprop": __version__,
        "torch": str(torch.__version__),
        "setting": msgspec.to_builtins(found.setting),
        "rate_bits_per_s": found.rate_bits_per_s,
        "compute_s": found.compute_s,
        "limit_s": found.setting.limit_s,
        "compared_with": other.preset,
        "systems": systems,
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n")


def _caption(summaries: Sequence[RunSummary]) -> str:
    alike = [summary for summary in summaries if summary.sums_alike]
    same = len({summary.weights_sha256 for summary in alike}) == 1
    if len(alike) == len(summaries):
        return "final weights identical, bit for bit" if same else "FINAL WEIGHTS DIFFER"
    return "\n".join(
        (
            "final weights identical among the presets, bit for bit"
            if same
            else "FINAL WEIGHTS DIFFER among the presets",
            "ddp's differ in their last bits: its ring adds the gradients in another order",
            _DDP_BUCKETS,
            "its waiting is inside of backward, and cannot be told from computing",
        )
    )


def _events(folder: Path, outcome: Outcome) -> Any:
    (path,) = folder.glob("worker-0.*.trace.json")
    first_step = typical_step(outcome.step_s)
    return timeline_from_trace(json.loads(path.read_text()), first_step=first_step)


def _context(found: Found, command: str) -> ReportContext:
    setting = found.setting
    return ReportContext(
        title="P3 beside its baseline",
        model="two convolutions, a heavy fully connected layer (6.6 MB), Fashion-MNIST",
        workers=setting.workers,
        servers=setting.workers,
        rate_bits_per_s=found.rate_bits_per_s,
        links="paced by foreprop" if setting.paced else "shaped by the kernel (tbf)",
        batch_size=setting.batch_size,
        machine={
            "system": f"{platform.system()} {platform.machine()}",
            "cores": str(psutil.cpu_count()),
            "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
            "python": platform.python_version(),
        },
        command=command,
        foreprop_version=__version__,
        torch_version=torch.__version__,
    )

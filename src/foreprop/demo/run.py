"""Starts the demo's workers, and shows what they found: a table and a report."""

from __future__ import annotations

import errno
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from foreprop.bench.workers import run_workers
from foreprop.datasets import fashion_mnist
from foreprop.demo.training import DemoSetting, PresetOutcome, train_all, typical_step
from foreprop.errors import ConfigError
from foreprop.observe.report import ReportContext, RunSummary, write_report
from foreprop.observe.timeline import Timeline, timeline_from_trace
from foreprop.version import __version__


def run_demo(setting: DemoSetting, report: Path, *, command: str, console: Console) -> None:
    """Train with every preset, print the table, write the report to ``report``."""
    folder = Path(setting.folder)
    _make_room(report, [folder / name for name in setting.presets])
    console.print("Fashion-MNIST (31 MB) is fetched once, and checked ...")
    fashion_mnist("train")
    console.print(
        f"{setting.workers} workers and {setting.workers} servers on this machine, each pair a node"
        f" with an emulated link; {setting.steps} steps per preset, blocks of the presets alternate"
    )
    by_rank = run_workers(setting.workers, train_all, setting)
    found = by_rank[0]
    summaries = [
        summarise(
            name, [by_rank[rank]["outcomes"][name] for rank in sorted(by_rank)], setting, found
        )
        for name in setting.presets
    ]
    console.print(table(summaries, found))
    timelines = [
        Timeline(preset=name, events=_events(folder / name, found["outcomes"][name]))
        for name in setting.presets
    ]
    write_report(report, _context(setting, found, command), summaries, timelines)
    console.print(f"Report with the timeline of two steps: {report}", soft_wrap=True)
    console.print(
        f"Traces of all processes: foreprop trace {folder / setting.presets[-1]} lays them into one"
        " file for https://ui.perfetto.dev",
        soft_wrap=True,
    )


def _make_room(report: Path, trace_folders: list[Path]) -> None:
    """Be sure before the work that its outcome can be written; remove an older run's traces."""
    try:
        if report.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        for folder in trace_folders:
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob("*.trace.json"):
                old.unlink()
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"report is {report}, which cannot be written: {why}") from error


def summarise(
    preset: str, outcomes: list[PresetOutcome], setting: DemoSetting, found: dict[str, Any]
) -> RunSummary:
    """Rank 0's times; the weights' checksum is a list of them if the ranks do not agree."""
    zero = outcomes[0]
    deciles = statistics.quantiles(zero.step_s, n=10)
    median = statistics.median(zero.step_s)
    checksums = sorted({outcome.weights_sha256 for outcome in outcomes})
    return RunSummary(
        preset=preset,
        step_s_median=median,
        step_s_p10=deciles[0],
        step_s_p90=deciles[-1],
        samples_per_s=setting.batch_size * setting.workers / median,
        waiting_share=zero.waited_s / sum(zero.step_s),
        test_accuracy=zero.test_accuracy,
        weights_sha256="+".join(checksums),
        steps=setting.steps,
        compute_s=found["compute_s"],
    )


def table(summaries: list[RunSummary], found: dict[str, Any]) -> Table:
    same = len({summary.weights_sha256 for summary in summaries}) == 1
    rate = found["rate_bits_per_s"] / 1e6
    shown = Table(
        title=f"Fashion-MNIST, {rate:.0f} Mbit/s per node, {1e3 * found['compute_s']:.0f} ms of"
        " computation per step",
        caption="final weights identical, bit for bit" if same else "FINAL WEIGHTS DIFFER",
    )
    for heading in ("preset", "ms/step", "p10-p90", "samples/s", "waiting", "accuracy", "SHA-256"):
        shown.add_column(heading, justify="left" if heading in {"preset", "SHA-256"} else "right")
    for summary in summaries:
        shown.add_row(
            summary.preset,
            f"{1e3 * summary.step_s_median:.0f}",
            f"{1e3 * summary.step_s_p10:.0f}-{1e3 * summary.step_s_p90:.0f}",
            f"{summary.samples_per_s:.0f}",
            f"{100 * summary.waiting_share:.0f} %",
            f"{100 * summary.test_accuracy:.1f} %",
            summary.weights_sha256[:16],
        )
    return shown


def _events(folder: Path, outcome: PresetOutcome) -> Any:
    (path,) = folder.glob("worker-0.*.trace.json")
    first_step = typical_step(outcome.step_s)
    return timeline_from_trace(json.loads(path.read_text()), first_step=first_step)


def _context(setting: DemoSetting, found: dict[str, Any], command: str) -> ReportContext:
    return ReportContext(
        title="P3 beside its baseline",
        model="two convolutions, a heavy fully connected layer (6.6 MB), Fashion-MNIST",
        workers=setting.workers,
        servers=setting.workers,
        rate_bits_per_s=found["rate_bits_per_s"],
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

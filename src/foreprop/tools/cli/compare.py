"""``foreprop compare``: the user's own script on DDP and on foreprop, side by side."""

from __future__ import annotations

import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from foreprop.config import Config
from foreprop.errors import ConfigError
from foreprop.quantities import counted
from foreprop.tools.cli.options import Shown, filling, systems, writable
from foreprop.tools.cli.output import console, print_json, print_line, print_table
from foreprop.tools.cli.run import Grace, Hosts, Script, check_script, hosts_from, with_host_options
from foreprop.tools.compare.records import Task
from foreprop.tools.compare.result import Comparison, Row, write_records
from foreprop.tools.compare.run import Lines, Request, Start, Stopped
from foreprop.tools.compare.run import compare as run_comparison
from foreprop.tools.compare.systems import CONTENDERS, USUAL, check_systems
from foreprop.tools.run.plan import Plan
from foreprop.tools.run.run import Launcher, Outcome

_RANK = "foreprop.tools.compare.rank"
_LEAST_WORKERS = 2
_REQUEST = {
    "systems": systems(CONTENDERS, default=",".join(USUAL)),
    "seed": Shown(kind=int, default=0, read=lambda seed: None if seed < 0 else seed),
    "module": Shown(declared=("--module", "-m")),
}


@with_host_options()
@filling(Request, **_REQUEST)
def compare(
    script: Script,
    *,
    grace: Grace = 10.0,
    out: Annotated[Path, typer.Option(help="Folder for results.json and the runs' logs.")] = Path(
        "runs/compare"
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the records, and no table.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show what the script prints, on standard error.")
    ] = False,
    **given: Any,
) -> None:
    """Run your own script with DDP and with foreprop, in turns, and lay them side by side.

    The script needs foreprop's two lines and nothing else. It is started afresh for each system and
    round, on the hosts that `foreprop run` would take, and ended after some steps. The table has
    throughput, time per step, the share that waits for others, bytes, and whether the losses
    agree step by step. docs/compare.md explains it.

    Examples:
      foreprop compare --workers-per-node 2 train.py
      foreprop compare --resources hosts --batch 64 train.py --epochs 1
    """
    hosts = {name: given.pop(name) for name in [spec.name for spec in fields(Hosts)]}
    plan = hosts_from(hosts).plan(script, module=given["module"], grace_s=grace)
    request = Request(
        script=script[0],
        workers=sum(host.workers for host in plan.hosts),
        machines=len(plan.hosts),
        command=shlex.join(["foreprop", *sys.argv[1:]]),
        **given | {"systems": check_systems(given["systems"])},
    )
    check_request(request, plan)
    found = _run(request, starter(plan, script, request), writable(out), verbose=verbose)
    write_records(out / "results.json", found)
    if as_json:
        print_json(found)
    else:
        show(console(), found)
        typer.echo(f"Records: {out / 'results.json'}")
    if any(row.error for row in found.rows):
        raise typer.Exit(1)


def _run(request: Request, start: Start, folder: Path, *, verbose: bool) -> Comparison:
    echo = cast("BinaryIO", sys.stderr.buffer) if verbose else None
    screen = console(to_errors=True)
    try:
        with screen.status("") as status:

            def progress(text: str) -> None:
                if screen.is_terminal:
                    status.update(text)
                else:
                    typer.echo(f"foreprop compare: {text}", err=True)

            return run_comparison(request, start, folder / "logs", progress=progress, echo=echo)
    except Stopped as stopped:
        typer.echo(f"foreprop compare: {stopped}", err=True)
        raise typer.Exit(stopped.code) from None


def check_request(request: Request, plan: Plan) -> None:
    """Raise `ConfigError` for a request that could not run."""
    if request.workers < _LEAST_WORKERS:
        raise ConfigError(
            f"workers_per_node is {request.workers} on one machine: a comparison needs two workers"
            " at least. Give --workers-per-node 2, or a file of hosts as --resources"
        )
    if Config.resolve().dedicated_servers:
        raise ConfigError(
            "FOREPROP_DEDICATED_SERVERS is set; a comparison starts every run by itself and cannot"
            " have dedicated servers: unset it"
        )
    check_script(plan)


def starter(plan: Plan, script: list[str], request: Request) -> Start:
    """A function that runs the script as `foreprop run` does, its ranks with a given task."""
    environment = dict(plan.environment)
    if request.seed is not None:
        environment.setdefault("PYTHONHASHSEED", "0")

    def start(task: Task, lines: Lines) -> Outcome:
        words = (_RANK, msgspec.json.encode(task).decode(), *script)
        stream = cast("BinaryIO", lines)
        task_plan = replace(plan, script=words, module=True, environment=environment)
        return Launcher(task_plan, stream, stream).run()

    return start


def show(to: Console, found: Comparison) -> None:
    """Print the table, and below it what must be known to read it."""
    print_table(to, table(found))
    for row in found.rows:
        if row.error:
            log = next(run.log for run in found.runs if run.system == row.system and run.error)
            print_line(to, f"{row.system} failed: {row.error}; what it printed is in {log}", "red")
    if all(row.step_s is None for row in found.rows):
        return
    for notice in found.notices:
        print_line(to, f"Notice: {notice}", "yellow")
    for line in legend(found):
        print_line(to, line)


def table(found: Comparison) -> Table:
    unit = "samples/s" if found.batch is not None else "steps/s"
    shown = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    headings = (unit, "over\nDDP", "ms/step\nmedian", "p10-p90", "waiting", "MB sent\nper step")
    shown.add_column("system", no_wrap=True)
    for heading in headings:
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("losses", no_wrap=True)
    for row in found.rows:
        shown.add_row(*cells(row, found))
    return shown


def cells(row: Row, found: Comparison) -> tuple[str, ...]:
    if row.step_s is None or row.steps_per_s is None:
        return (row.system, *[""] * 6, "failed" if row.error else "not run")
    step, waiting = row.step_s, row.waiting_share
    throughput = row.steps_per_s if row.samples_per_s is None else row.samples_per_s
    return (
        row.system,
        f"{throughput:.3g}" if throughput < 100 else f"{throughput:,.0f}",
        "" if row.over_ddp is None else f"{row.over_ddp:.2f}x",
        f"{1e3 * step.median:.1f}",
        f"{1e3 * step.p10:.1f}-{1e3 * step.p90:.1f}",
        "" if waiting is None else f"{waiting:.0%}",
        "" if row.sent_bytes_per_step is None else f"{row.sent_bytes_per_step / 1e6:.2f}",
        f"itself: {row.losses}" if row.system == found.reference else row.losses,
    )


def legend(found: Comparison) -> list[str]:
    each = f"{counted(found.workers, 'worker')} on {counted(found.machines, 'machine')}"
    interfaces = {rank.interface for run in found.runs for rank in run.ranks if rank.interface}
    return [
        f"{each}; {counted(found.steps, 'step')} after {found.warm_up}, median of all rounds.",
        "waiting: what a step takes longer than alone, where no rank hears of another.",
        f"MB sent: by a machine over {', '.join(sorted(interfaces)) or 'its interface'}, whoever"
        " sends.",
        f"losses: of every rank and step, beside {found.reference}'s of the same round;"
        " agree: within 1 % of the usual loss.",
    ]

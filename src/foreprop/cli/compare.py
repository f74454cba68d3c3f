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

from foreprop.cli.options import Shown, filling, systems, writable
from foreprop.cli.output import console, print_json, print_table, say
from foreprop.cli.run import Hosts, asking_for_hosts, check_script, hosts_from
from foreprop.compare.records import Task
from foreprop.compare.result import Comparison, Row
from foreprop.compare.run import Lines, Request, Start, Stopped
from foreprop.compare.run import compare as run_comparison
from foreprop.compare.systems import CONTENDERS, USUAL, check_systems
from foreprop.config import Config
from foreprop.errors import ConfigError
from foreprop.quantities import counted
from foreprop.run.plan import Plan
from foreprop.run.run import Launcher, Outcome
from foreprop.workload.records import write_records

_RANK = "foreprop.compare.rank"
_FEWEST = 2


_REQUEST = {
    "systems": systems(CONTENDERS, default=",".join(USUAL)),
    "seed": Shown(kind=int, default=0, read=lambda seed: None if seed < 0 else seed),
    "module": Shown(declared=("--module", "-m")),
}


@asking_for_hosts()
@filling(Request, **_REQUEST)
def compare(
    script: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT [ARGS]...",
            help="The training script, and its arguments: all that follows is the script's.",
        ),
    ],
    *,
    grace: Annotated[
        float, typer.Option(min=0.0, help="Seconds from SIGTERM to SIGKILL for workers.")
    ] = 10.0,
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
    found = _run(request, starting(plan, script, request), writable(out), verbose=verbose)
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
            tell = status.update if screen.is_terminal else _tell
            return run_comparison(request, start, folder / "logs", progress=tell, echo=echo)
    except Stopped as stopped:
        typer.echo(f"foreprop compare: {stopped}", err=True)
        raise typer.Exit(stopped.code) from None


def _tell(text: str) -> None:
    typer.echo(f"foreprop compare: {text}", err=True)


def check_request(request: Request, plan: Plan) -> None:
    """Raises `ConfigError` for what no run could be made of."""
    if request.workers < _FEWEST:
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


def starting(plan: Plan, script: list[str], request: Request) -> Start:
    """Runs the script as `foreprop run` does."""
    environment = dict(plan.environment)
    if request.seed is not None:
        environment.setdefault("PYTHONHASHSEED", "0")

    def start(task: Task, lines: Lines) -> Outcome:
        told = msgspec.json.encode(task).decode()
        of_rank = replace(plan, script=(_RANK, told, *script), module=True, environment=environment)
        stream = cast("BinaryIO", lines)
        return Launcher(of_rank, stream, stream).run()

    return start


# The table.
def show(to: Console, found: Comparison) -> None:
    """The table, and below it what must be known to read it."""
    print_table(to, table(found))
    for row in found.rows:
        if row.error:
            log = next(run.log for run in found.runs if run.system == row.system and run.error)
            say(to, f"{row.system} failed: {row.error}; what it printed is in {log}", "red")
    if all(row.step_s is None for row in found.rows):
        return
    for notice in found.notices:
        say(to, f"Notice: {notice}", "yellow")
    for line in legend(found):
        say(to, line)


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
    """Of one system; empty where there is nothing to say."""
    if row.step_s is None or row.steps_per_s is None:
        return (row.system, *[""] * 6, "failed" if row.error else "not run")
    step, waiting = row.step_s, row.waiting_share
    throughput = row.steps_per_s if row.samples_per_s is None else row.samples_per_s
    beside = f"itself: {row.losses}" if row.system == found.reference else row.losses
    return (
        row.system,
        f"{throughput:.3g}" if throughput < 100 else f"{throughput:,.0f}",
        "" if row.over_ddp is None else f"{row.over_ddp:.2f}x",
        f"{1e3 * step.median:.1f}",
        f"{1e3 * step.p10:.1f}-{1e3 * step.p90:.1f}",
        "" if waiting is None else f"{waiting:.0%}",
        "" if row.sent_bytes_per_step is None else f"{row.sent_bytes_per_step / 1e6:.2f}",
        beside,
    )


def legend(found: Comparison) -> list[str]:
    """What the columns are."""
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

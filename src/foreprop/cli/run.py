"""``foreprop run``: one training run on several machines, started from one."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from foreprop.config import environment_for_hosts
from foreprop.errors import ConfigError
from foreprop.run.plan import DEFAULT_PORT, Plan, check_reachable, hosts_here
from foreprop.run.resources import Host, read_resources
from foreprop.run.run import Launcher


def run(
    script: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT [ARGS]...",
            help="The training script, and its arguments: all that follows is the script's.",
        ),
    ],
    resources: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The hosts, one per line: HOST, HOST workers=4 or HOST:0,1,2,3 (GPU ids); the"
            " first has the rendezvous. Without a file: this machine.",
        ),
    ] = None,
    workers_per_node: Annotated[
        int, typer.Option(min=1, help="Workers of a host whose line does not say.")
    ] = 1,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as after python -m.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Port of the rendezvous on the first host; by default a free one.",
        ),
    ] = None,
    master_addr: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address of the first host, for the other hosts; by default as in the file.",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=VALUE]",
            help="A variable for all workers; without a value as it is here. Settings"
            " (FOREPROP_...) are passed on anyway. May be repeated.",
        ),
    ] = None,
    python: Annotated[
        str, typer.Option(help="Python on every host, with foreprop; by default this one's path.")
    ] = sys.executable,
    directory: Annotated[
        Path | None,
        typer.Option(help="Where to start on every host; by default the current directory."),
    ] = None,
    ssh: Annotated[
        str, typer.Option(help="Command that gets USER@HOST and a shell command as arguments.")
    ] = "ssh",
    grace: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds from SIGTERM to SIGKILL for workers that have to end."),
    ] = 10.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what to type for the same with torchrun.")
    ] = False,
) -> None:
    """Train on several machines: start torchrun on every host of a file, and watch over it.

    Every line that a worker prints is prefixed by its rank, every line of torchrun or ssh by its
    host. If one worker fails, all are ended, and its exit code is this command's; Ctrl-C and
    SIGTERM end all too. No process is left on any host, however this command ends.

    ssh has to work without a password; hosts that are this machine need none. docs/run.md
    describes the file.
    """
    plan = plan_run(
        hosts=(
            (Host(name="127.0.0.1", workers=workers_per_node),)
            if resources is None
            else read_resources(resources, workers_per_node=workers_per_node)
        ),
        script=script,
        module=module,
        port=port,
        master_addr=master_addr,
        environment=environment_for_hosts(env or ()),
        python=python,
        directory=directory,
        ssh=ssh,
        grace_s=grace,
    )
    if dry_run:
        typer.echo(describe(plan))
        return
    outcome = Launcher(plan, sys.stdout.buffer, sys.stderr.buffer).run()
    if outcome.failure is not None:
        typer.echo(f"foreprop run: {outcome.failure}", err=True)
    if outcome.code:
        raise typer.Exit(outcome.code)


def plan_run(
    *,
    hosts: tuple[Host, ...],
    script: list[str],
    module: bool,
    port: int | None,
    master_addr: str | None,
    environment: dict[str, str],
    python: str,
    directory: Path | None,
    ssh: str,
    grace_s: float,
) -> Plan:
    """Raises `ConfigError`."""
    here = hosts_here(hosts)
    if master_addr is None:
        check_reachable(hosts, here)
    return Plan(
        hosts=hosts,
        here=here,
        script=tuple(script),
        module=module,
        port=port,
        master_address=master_addr or hosts[0].name,
        environment=environment,
        python=_absolute(python),
        directory=os.path.abspath(directory or "."),
        ssh=_ssh_words(ssh),
        grace_s=grace_s,
    )


def _absolute(python: str) -> str:
    """A path is meant from here; a name is looked up on each host."""
    return os.path.abspath(python) if os.sep in python else python


def _ssh_words(text: str) -> tuple[str, ...]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"ssh is {text!r}, which no shell could read: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(f"ssh is {text!r}; it must begin with a program that is here")
    return (_absolute(words[0]), *words[1:])


def describe(plan: Plan) -> str:
    """For each host a comment and the command."""
    lines = []
    if plan.port is None:
        lines.append(
            f"# without --port the port is a free one of the first host; {DEFAULT_PORT} here"
        )
    for index, host in enumerate(plan.hosts):
        ranks = ", ".join(map(str, plan.ranks(index)))
        where = "this machine" if plan.is_here(index) else f"over {plan.ssh[0]}"
        lines += [f"# {host.name} ({where}): rank {ranks}", plan.by_hand(index)]
    return "\n".join(lines)

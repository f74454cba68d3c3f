"""``foreprop run``: start a training on several machines."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from foreprop.config.launchers import environment_for_hosts
from foreprop.errors import ConfigError
from foreprop.quantities import option
from foreprop.tools.cli.options import Command, Shown, filling
from foreprop.tools.cli.output import print_json
from foreprop.tools.run.plan import DEFAULT_PORT, Plan, check_reachable, hosts_here
from foreprop.tools.run.rejoins import NodeRange, parse_nodes
from foreprop.tools.run.resources import Host, read_resources
from foreprop.tools.run.restarts import Restarts, without_hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Where to run, and how to get there: the options of ``foreprop run`` and ``doctor``."""

    resources: Path | None = option(
        "The hosts, one per line: HOST, HOST workers=4 or HOST:0,1,2,3 (GPU ids); the first has the"
        " rendezvous. Without a file: this machine.",
        None,
    )
    workers_per_node: int = option("Workers of a host whose line does not say.", 1, least=1)
    port: int | None = option(
        "Port of the rendezvous on the first host; by default a free one.",
        None,
        least=1,
        most=65535,
    )
    master_addr: str | None = option(
        "Address of the first host, for the other hosts; by default as in the file.", None
    )
    env: tuple[str, ...] = option(
        "A variable for all workers; without a value as it is here. Settings (FOREPROP_...) are"
        " passed on anyway. May be repeated.",
        (),
    )
    python: str = option(
        "Python on every host, with foreprop; by default this one's path.", sys.executable
    )
    directory: Path | None = option(
        "Where to start on every host; by default the current directory.", None
    )
    ssh: str = option("Command that gets USER@HOST and a shell command as arguments.", "ssh")

    def plan(self, script: Sequence[str] = (), *, module: bool = False, grace_s: float = 0) -> Plan:
        hosts: tuple[Host, ...] = (Host(name="127.0.0.1", workers=self.workers_per_node),)
        if self.resources is not None:
            hosts = read_resources(self.resources, workers_per_node=self.workers_per_node)
        environment = environment_for_hosts(self.env)
        here = hosts_here(hosts)
        if self.master_addr is None:
            check_reachable(hosts, here)
        try:
            words = shlex.split(self.ssh)
        except ValueError as error:
            raise ConfigError(f"ssh is {self.ssh!r}, which no shell could read: {error}") from error
        if not words or shutil.which(words[0]) is None:
            raise ConfigError(f"ssh is {self.ssh!r}; it must begin with a program that is here")
        return Plan(
            hosts=hosts,
            here=here,
            script=tuple(script),
            module=module,
            port=self.port,
            master_address=self.master_addr or hosts[0].name,
            environment=environment,
            python=_absolute(self.python),
            directory=os.path.abspath(self.directory or "."),
            ssh=(_absolute(words[0]), *words[1:]),
            grace_s=grace_s,
        )


def with_host_options(**helps: str) -> Callable[[Command], Command]:
    """Give a command the options of `Hosts`; ``helps`` are their helps where it has its own."""
    forms = {
        "resources": Shown(metavar="FILE"),
        "master_addr": Shown(metavar="ADDRESS"),
        "python": Shown(show_default=False),
        "env": Shown(kind=list[str] | None, default=None, metavar="NAME[=VALUE]"),
    }
    forms |= {name: replace(forms.get(name, Shown()), help=text) for name, text in helps.items()}
    return filling(Hosts, **forms)


MaxRestarts = Annotated[
    int,
    typer.Option(
        min=0,
        help="How often to start again after a failure; with --nodes, each host. Ctrl-C is none.",
    ),
]
MinHosts = Annotated[
    int | None,
    typer.Option(
        min=1, help="Start with the hosts that answer if they are so many; by default all."
    ),
]


Elastic = Annotated[
    bool, typer.Option("--elastic", help="Go on without a host that fails (docs/elastic.md).")
]
Nodes = Annotated[
    str | None,
    typer.Option(
        metavar="MIN:MAX",
        help="With --elastic: begin with the hosts that answer, go on with so many, start those"
        " that fail again, and grow by those that answer later.",
    ),
]

Script = Annotated[
    list[str],
    typer.Argument(
        metavar="SCRIPT [ARGS]...",
        help="The training script, and its arguments: all that follows is the script's.",
    ),
]
Grace = Annotated[
    float,
    typer.Option(min=0.0, help="Seconds from SIGTERM to SIGKILL for workers that have to end."),
]


@with_host_options()
def run(
    script: Script,
    *,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as after python -m.")
    ] = False,
    grace: Grace = 10.0,
    elastic: Elastic = False,
    nodes: Nodes = None,
    max_restarts: MaxRestarts = 0,
    min_hosts: MinHosts = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what to type for the same with torchrun.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --dry-run: print it as JSON, and nothing else.")
    ] = False,
    **given: Any,
) -> None:
    """Train on several machines: start torchrun on every host of a file, and watch over it.

    Every line that a worker prints is prefixed by its rank, every line of torchrun or ssh by its
    host. If one worker fails, all are ended, and its exit code is this command's; Ctrl-C and
    SIGTERM end all too. No process is left on any host, however this command ends.
    With --elastic the other hosts go on, and with --nodes MIN:MAX a host that fails, or answers
    later, is started and joins them. With --max-restarts alone all are started again, with the
    hosts that answer; a script that uses foreprop.checkpoint goes on where it was.

    ssh has to work without a password; hosts that are this machine need none. docs/run.md
    describes the file.

    Examples:
      foreprop run train.py --epochs 3
      foreprop run --workers-per-node 2 train.py
      foreprop run --resources hosts.txt --env NCCL_DEBUG=INFO -m package.train
      foreprop run --resources hosts.txt --max-restarts 3 --min-hosts 2 train.py
      foreprop run --resources hosts.txt --elastic train.py
      foreprop run --resources hosts.txt --elastic --nodes 2:4 --max-restarts 3 train.py
      foreprop run --resources hosts.txt --dry-run train.py
    """
    if as_json and not dry_run:
        raise ConfigError("--json is given without --dry-run: it is what that prints as JSON")
    plan = replace(hosts_from(given).plan(script, module=module, grace_s=grace), elastic=elastic)
    range_of_nodes = _checked_nodes(nodes, plan, min_hosts)
    if dry_run:
        if range_of_nodes is not None:  # it begins with these if all answer
            plan = without_hosts(plan, {}, range_of_nodes.most)
        _print_plan(plan, as_json=as_json)
        return
    check_script(plan)
    _train(plan, max_restarts, min_hosts, range_of_nodes)


def _train(plan: Plan, restarts: int, min_hosts: int | None, nodes: NodeRange | None) -> None:
    streams = sys.stdout.buffer, sys.stderr.buffer
    outcome = Restarts(
        plan, *streams, say=_say, most=restarts, least_hosts=min_hosts, nodes=nodes
    ).run()
    if outcome.failure is not None:
        _say(outcome.failure)
    if outcome.code:
        raise typer.Exit(outcome.code)


def _print_plan(plan: Plan, *, as_json: bool) -> None:
    if as_json:
        print_json(described(plan))
    else:
        typer.echo(describe(plan))


def _checked_nodes(nodes: str | None, plan: Plan, min_hosts: int | None) -> NodeRange | None:
    if nodes is None:
        return None
    found = parse_nodes(nodes, len(plan.hosts))
    if not plan.elastic:
        raise ConfigError(
            f"nodes is {nodes!r} without --elastic; only an elastic run goes on without a host: add"
            " --elastic, or give --min-hosts and --max-restarts, which start all again"
        )
    if min_hosts is not None:
        raise ConfigError(
            f"nodes is {nodes!r}, whose first number says what --min-hosts {min_hosts} says; leave"
            " out --min-hosts"
        )
    return found


def _say(text: str) -> None:
    typer.echo(f"foreprop run: {text}", err=True)


def hosts_from(given: dict[str, Any]) -> Hosts:
    return Hosts(**given | {"env": tuple(given["env"] or ())})


def check_script(plan: Plan) -> None:
    """Raise `ConfigError` if the script is not there, as far as this machine can see."""
    script = plan.script[0]
    if plan.is_here(0) and not plan.module and not Path(plan.directory, script).is_file():
        raise ConfigError(f"script is {script!r}; there is no such file in {plan.directory}")


def _absolute(python: str) -> str:
    # a path is meant from here; a name is looked up on each host
    return os.path.abspath(python) if os.sep in python else python


def described(plan: Plan) -> dict[str, Any]:
    return {
        "master_address": plan.master_address,
        "port": plan.port,
        "hosts": [
            {
                "name": host.name,
                "here": plan.is_here(index),
                "ranks": list(plan.ranks(index)),
                "command": plan.by_hand(index),
            }
            for index, host in enumerate(plan.hosts)
        ],
    }


def describe(plan: Plan) -> str:
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

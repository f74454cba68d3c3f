"""``foreprop doctor``: does what is installed and the network let these hosts train?"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from foreprop.config import launch_info
from foreprop.errors import ConfigError
from foreprop.tools.cli.run import hosts_from, with_host_options
from foreprop.tools.doctor.examine import Questions, examine
from foreprop.tools.doctor.findings import find
from foreprop.tools.doctor.hosts import HostsPanel
from foreprop.tools.doctor.records import Examination
from foreprop.tools.doctor.show import report, show, to_json
from foreprop.tools.run.plan import Plan

_FILE_WIDTH = 120
"""Characters per line where the report goes to no terminal."""
_SELF_TEST = "Self-test"


@with_host_options(
    resources="The hosts, as foreprop run takes them. Without a file: under torchrun the ranks'"
    " machines, else this machine alone.",
    port="The rendezvous' port, if foreprop run is to be given one.",
    env="A variable for all hosts, as for foreprop run. May be repeated.",
    directory="Where training is to start; by default the current directory.",
)
def doctor(
    *,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=10.0, help="Seconds for each measurement of a rate.")
    ] = 1.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print findings and all measurements as JSON.")
    ] = False,
    wait: Annotated[
        float, typer.Option(min=1.0, help="Seconds that a host has to start and answer.")
    ] = 60.0,
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test", help="Only train a small model here.", rich_help_panel=_SELF_TEST
        ),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda:0, ...; else what there is.", rich_help_panel=_SELF_TEST),
    ] = None,
    **given: Any,
) -> None:
    """Check hosts before training: names, addresses, ports, versions, clocks, links, rates.

    Every pair of hosts connects, exchanges small messages, and sends as much as goes, first alone,
    then all at once as in training. Each finding says what to do about it. The exit code is 1 if
    something would keep training from working, 0 otherwise.

    With --resources, probes are started as foreprop run starts workers. Or let the ranks of a run
    check each other: torchrun ... -m foreprop doctor, or foreprop run ... -m foreprop doctor.

    --self-test trains a small model on this machine's device, and compares with plain torch.

    Examples:
      foreprop doctor --resources hosts.txt
      foreprop doctor --resources hosts.txt --seconds 3 --json
      foreprop doctor --self-test --device cpu
    """
    if self_test or device is not None:
        _train_here(device, self_test=self_test, as_json=as_json)
        return
    found = _examination(given, seconds=seconds, wait_s=wait)
    if found is None:
        return
    shown = report(found, find(found))
    if as_json:
        print(to_json(shown), flush=True)
    else:
        show(Console(width=None if sys.stdout.isatty() else _FILE_WIDTH), shown)
    if not shown.ok:
        raise typer.Exit(1)


def _examination(given: dict[str, Any], *, seconds: float, wait_s: float) -> Examination | None:
    """What was examined, or None on a rank of torchrun's that is not the one to report it."""
    info, resources = launch_info(), given["resources"]
    if not info.launched:
        return examine_hosts(hosts_from(given).plan(), seconds=seconds, wait_s=wait_s)
    if resources is not None:
        raise ConfigError(
            f"--resources is {str(resources)!r}, but this is rank {info.rank} of torchrun's; leave"
            " it out to examine the ranks' machines, or start foreprop doctor by itself"
        )
    from foreprop.tools.doctor.ranks import examine_ranks

    return examine_ranks(info, _say, seconds=seconds, wait_s=wait_s)


def _train_here(device: str | None, *, self_test: bool, as_json: bool) -> None:
    if not self_test:
        raise ConfigError(
            f"device is {device!r}, which only --self-test uses; give both or neither"
        )
    from foreprop.tools.doctor.selftest import show_self_test

    if not show_self_test(device, as_json=as_json):
        raise typer.Exit(1)


def examine_hosts(plan: Plan, *, seconds: float, wait_s: float) -> Examination:
    """Examine a plan's hosts with probes that are started as its workers would be."""
    names = tuple(host.name for host in plan.hosts)
    asked = Questions(
        names=names,
        workers=tuple(host.workers for host in plan.hosts),
        rendezvous=plan.master_address,
        look_up=tuple(dict.fromkeys((plan.master_address, *names))),
        serve_rendezvous=True,
        port=plan.port,
        directory=plan.directory,
        environments=tuple(map(plan.environment_of, range(len(names)))),
        seconds=seconds,
        wait_s=wait_s,
    )
    with HostsPanel(plan) as panel:
        return examine(panel, asked, _say)


def _say(text: str) -> None:
    print(f"foreprop doctor: {text}", file=sys.stderr, flush=True)

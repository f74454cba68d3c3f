"""``foreprop doctor``: does what is installed and the network let these hosts train?"""

from __future__ import annotations

import socket
import sys
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from foreprop.cli.run import asking_for_hosts, hosts_from
from foreprop.config import LaunchInfo, launch_info
from foreprop.doctor.examine import Questions, examine
from foreprop.doctor.findings import find
from foreprop.doctor.hosts import HostsPanel
from foreprop.doctor.records import Examination, Examined, Failure
from foreprop.doctor.show import report, show, to_json
from foreprop.errors import ConfigError
from foreprop.run.plan import Plan

_FILE_WIDTH = 120
"""Characters per line where the report goes to no terminal."""


_HERE = "Self-test"


@asking_for_hosts(
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
        typer.Option("--self-test", help="Only train a small model here.", rich_help_panel=_HERE),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda:0, ...; else what there is.", rich_help_panel=_HERE),
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
    info, resources = launch_info(), given["resources"]
    if info.launched and resources is not None:
        raise ConfigError(
            f"--resources is {str(resources)!r}, but this is rank {info.rank} of torchrun's; leave"
            " it out to examine the ranks' machines, or start foreprop doctor by itself"
        )
    if info.launched:
        found = _examine_ranks(info, seconds=seconds, wait_s=wait)
        if found is None:
            return
    else:
        found = examine_hosts(hosts_from(given).plan(), seconds=seconds, wait_s=wait)
    shown = report(found, find(found))
    if as_json:
        print(to_json(shown), flush=True)
    else:
        show(Console(width=None if sys.stdout.isatty() else _FILE_WIDTH), shown)
    if not shown.ok:
        raise typer.Exit(1)


def _train_here(device: str | None, *, self_test: bool, as_json: bool) -> None:
    if not self_test:
        raise ConfigError(
            f"device is {device!r}, which only --self-test uses; give both or neither"
        )
    from foreprop.doctor.selftest import chosen_device, train_on

    chosen = chosen_device(device)
    outcomes = train_on(chosen)
    ok = all(outcome.ok for outcome in outcomes)
    if as_json:
        told = {"device": str(chosen), "ok": ok, "outcomes": [o._asdict() for o in outcomes]}
        print(msgspec.json.encode(told).decode(), flush=True)
    else:
        for outcome in outcomes:
            print(f"{'ok    ' if outcome.ok else 'FAILED'} {outcome.what}: {outcome.told}")
    if not ok:
        raise typer.Exit(1)


def examine_hosts(plan: Plan, *, seconds: float, wait_s: float) -> Examination:
    """The hosts of a plan, by probes that are started as its workers would be."""
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


def _examine_ranks(info: LaunchInfo, *, seconds: float, wait_s: float) -> Examination | None:
    """The machines of torchrun's ranks; None on all ranks but rank 0."""
    from foreprop.cluster.world import current_world
    from foreprop.doctor.ranks import RanksPanel, attend, gather_present

    world, hostname = current_world(), socket.gethostname()
    if world.rank != 0:
        attend(world, info, hostname)
        return None
    present, missing = gather_present(world, wait_s)
    others = [rank for rank in present if rank.local_rank == 0]
    firsts = [0, *(rank.rank for rank in others)]
    names = [hostname, *(rank.hostname for rank in others)]
    bounds = [*firsts[1:], world.size]
    asked = Questions(
        names=tuple(f"{name} (rank {rank})" for name, rank in zip(names, firsts, strict=True)),
        workers=tuple(end - start for start, end in zip(firsts, bounds, strict=True)),
        rendezvous=info.master_address,
        look_up=(info.master_address,),
        serve_rendezvous=False,  # it is there: the ranks have met
        environments=({},) * len(firsts),
        seconds=seconds,
        wait_s=wait_s,
    )
    with RanksPanel(world, firsts) as panel:
        found = examine(panel, asked, _say)
    text = f"it has not come to the rendezvous within {wait_s:g} s"
    absent = [
        Examined(name=f"rank {rank}", failure=Failure(kind="silent", text=text)) for rank in missing
    ]
    return msgspec.structs.replace(found, hosts=[*found.hosts, *absent])


def _say(text: str) -> None:
    print(f"foreprop doctor: {text}", file=sys.stderr, flush=True)

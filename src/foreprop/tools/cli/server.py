"""``foreprop server``: dedicated servers beside a training."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from foreprop.backends.dedicated import Supervisor
from foreprop.config import Config, launch_info
from foreprop.errors import ConfigError
from foreprop.tools.run.plan import DEFAULT_PORT


def server(
    rendezvous: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The workers' rendezvous: torchrun's --master-addr and --master-port, or its"
            " --rdzv-endpoint. By default MASTER_ADDR and MASTER_PORT, else 127.0.0.1:29500,"
            " which is torchrun's own default.",
        ),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Servers to give to each session.")] = 1,
    interface: Annotated[
        str | None,
        typer.Option(
            help="Network interface or address to listen on; by default the one on the route to"
            " the rendezvous host."
        ),
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0.1, help="Seconds to wait for the rendezvous to appear.")
    ] = 120.0,
) -> None:
    """Run dedicated servers for a script that says parallelize(..., dedicated_servers=K).

    Start it before or after torchrun, on any machine that reaches the rendezvous; several commands
    together give K. Settings come from the script, but for what is this machine's own: set
    FOREPROP_SECRET_FILE, FOREPROP_PORT_RANGE and FOREPROP_TRACE here. It ends, with exit code 0,
    when the run has ended; Ctrl-C ends it and its servers at once, and the workers then raise
    PeerLost.

    torchrun --standalone picks a port at random: the script's workers say after 10 seconds which
    --rendezvous they wait at, or give torchrun --master-addr HOST --master-port PORT.

    Examples:
      foreprop server --rendezvous 10.0.0.1:29500 --count 2
      foreprop server --interface eth1
    """
    host, port = endpoint(rendezvous)
    own = {} if interface is None else {"interface": interface}
    config = Config.resolve(dedicated_servers=count, **own)
    supervisor = Supervisor(
        host=host, port=port, count=count, config=config, wait_s=wait, report=_report
    )
    try:
        succeeded = supervisor.run()
    except KeyboardInterrupt:
        _report("interrupted; its servers have been ended")
        raise typer.Exit(130) from None
    if not succeeded:
        raise typer.Exit(1)


def endpoint(text: str | None) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` (an IPv6 address in brackets); raises `ConfigError`."""
    if text is None:
        info = launch_info()
        return info.master_address, info.master_port or DEFAULT_PORT
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"rendezvous is {text!r}; it must be HOST:PORT, as 10.0.0.1:29500")
    return host.strip("[]"), int(port)


def _report(text: str) -> None:
    print(f"foreprop server: {text}", file=sys.stderr, flush=True)

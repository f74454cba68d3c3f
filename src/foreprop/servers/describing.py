"""What a session with servers is, for the line that is printed at its start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreprop.config import PRESETS, Config
from foreprop.quantities import counted
from foreprop.servers.launch import Connections
from foreprop.servers.setup import Setup

if TYPE_CHECKING:
    from foreprop.compression.pushcodecs import PushCodecs


def describe_served(setup: Setup, connections: Connections, codecs: PushCodecs | None) -> str:
    """Who takes part and how; of settings, what is not as by default."""
    config = setup.config
    kind = "dedicated" if config.dedicated_servers else "beside the workers"
    relayed = ", local aggregation" if connections.workers_per_push > 1 else ""
    return (
        f"{counted(setup.world.size, 'worker')} on {counted(connections.nodes, 'node')},"
        f" {counted(connections.servers, 'server')} {kind}{relayed}; {_describe_order(config)},"
        f" slice_elems={config.cut_elems(connections.servers)}{describe_wire_dtype(config)}"
        f"{'' if codecs is None else codecs.describe()}{_describe_staleness(config)}"
        f"{_describe_counting(config)};"
        f" address {connections.address}{_describe_link(config)}{_describe_devices(setup)}"
    )


def _describe_devices(setup: Setup) -> str:
    if all(parameter.device.type == "cpu" for parameter in setup.parameters):
        return ""
    from foreprop.path.asyncdevice import describe_devices

    return describe_devices(setup.parameters)


def _describe_order(config: Config) -> str:
    """The preset, or what no preset has together."""
    if (name := config.preset) is not None:
        return f"preset {name}"
    return " ".join(f"{knob}={getattr(config, knob)}" for knob in PRESETS["p3"])


def _describe_link(config: Config) -> str:
    return "" if config.encryption is None else ", encrypted"


def _describe_staleness(config: Config) -> str:
    """If workers may be apart."""
    if not config.staleness:
        return ""
    strength = config.delay_compensation
    made_up = "" if strength is None else f" delay_compensation={strength:g}"
    return f" staleness={config.staleness}{made_up} (not exact: results depend on timing)"


def _describe_counting(config: Config) -> str:
    """If servers may count some workers only."""
    if config.elastic:
        more = (
            "" if config.max_workers is None else f", up to {counted(config.max_workers, 'worker')}"
        )
        return f" elastic (a worker that dies leaves{more})"
    if config.counted_replay is not None:
        return f" counted_replay={config.counted_replay}"
    backups = config.backup_workers
    return f" backup_workers={backups} (not exact: the last are left out)" if backups else ""


def describe_wire_dtype(config: Config) -> str:
    """If it is not the parameters' own."""
    return f" wire_dtype={config.wire_dtype}" if config.wire_dtype is not None else ""

"""The line that describes a session with servers at its start."""

from __future__ import annotations

from foreprop.backends.launch import Connections
from foreprop.config import PRESETS, Config
from foreprop.engine.asyncdevice import describe_devices
from foreprop.params.setup import Setup
from foreprop.quantities import counted


def describe_served(setup: Setup, connections: Connections, codecs: str, why_python: str) -> str:
    """Who takes part and how, with settings that are not the defaults, and the ``codecs``.

    ``why_python`` says why the native plane does not carry the slices, if so.
    """
    config = setup.config
    kind = "dedicated" if config.dedicated_servers else "beside the workers"
    relayed = ", local aggregation" if connections.workers_per_push > 1 else ""
    encrypted = "" if config.encryption is None else ", encrypted"
    preset = f"preset {config.preset}"
    if config.preset is None:  # what no preset has together
        preset = " ".join(f"{knob}={getattr(config, knob)}" for knob in PRESETS["p3"])
    staleness = ""
    if config.staleness:
        strength = config.delay_compensation
        corrected = "" if strength is None else f" delay_compensation={strength:g}"
        staleness = (
            f" staleness={config.staleness}{corrected} (not exact: results depend on timing)"
        )
    return (
        f"{counted(setup.world.size, 'worker')} on {counted(connections.nodes, 'node')},"
        f" {counted(connections.servers, 'server')} {kind}{relayed}; {preset},"
        f" slice_elems={config.cut_elems(connections.servers)}{describe_wire_dtype(config)}"
        f"{codecs}{staleness}"
        f"{_describe_counting(config)};"
        f" address {connections.address}{encrypted}{describe_devices(setup.parameters)}"
        f"; {f'Python plane ({why_python})' if why_python else 'native plane'}"
    )


def _describe_counting(config: Config) -> str:
    text = ""
    if config.elastic:
        most = config.max_workers
        more = "" if most is None else f", up to {counted(most, 'worker')}"
        text = f" elastic (a worker that dies leaves{more})"
    if config.counted_replay is not None:
        text += f" counted_replay={config.counted_replay}"
    elif (backups := config.backup_workers) > 0:
        text += f" backup_workers={backups} (not exact: the last are left out)"
    return text


def describe_wire_dtype(config: Config) -> str:
    return f" wire_dtype={config.wire_dtype}" if config.wire_dtype is not None else ""

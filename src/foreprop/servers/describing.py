"""What a session with servers is, for the line that is printed at its start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreprop.config import PRESETS, Config
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
        f"{setup.world.size} workers on {connections.nodes} node(s),"
        f" {connections.servers} server(s) {kind}{relayed}; {_describe_order(config)},"
        f" slice_elems={config.cut_elems(connections.servers)}{describe_wire_dtype(config)}"
        f"{'' if codecs is None else codecs.describe()};"
        f" address {connections.address}{'' if config.encryption is None else ', encrypted'}"
    )


def maybe_preset(config: Config) -> str | None:
    """The one whose knobs are set."""
    for name, knobs in PRESETS.items():
        if all(getattr(config, knob) == value for knob, value in knobs.items()):
            return name
    return None


def _describe_order(config: Config) -> str:
    """The preset, or what no preset has together."""
    if (name := maybe_preset(config)) is not None:
        return f"preset {name}"
    return " ".join(f"{knob}={getattr(config, knob)}" for knob in PRESETS["p3"])


def describe_wire_dtype(config: Config) -> str:
    """If it is not the parameters' own."""
    return f" wire_dtype={config.wire_dtype}" if config.wire_dtype is not None else ""

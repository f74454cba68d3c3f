"""What a session is told for each of foreprop's systems in the lab and in the simulator."""

from __future__ import annotations

from typing import Any

from foreprop.config import PRESETS, Config
from foreprop.workload.foundsettings import DIVIDED, SAID_BY_SYSTEMS, settings_found
from foreprop.workload.setting import AUTO, CLIP_NORM, CLIPPED, RING, SERVERS, LabSetting
from foreprop.workload.systemnames import base_of

_DEFAULT = Config()


def foreprop_config(name: str, setting: LabSetting, **changes: Any) -> Config:
    """Of a preset, ``ring`` or ``auto``: what counts elements or bytes divided by the scale.

    ``changes`` are fields of `Config`, and come first; then what the system's name says, then the
    environment, whose sizes are divided, too, then the defaults.
    """
    fields: dict[str, Any] = {"architecture": AUTO.get(name, RING if name == RING else "p2p")}
    fields["staleness"] = setting.staleness
    fields |= changes
    fields.setdefault("workers_per_node", setting.workers_per_node)
    if "slice_elems" not in fields:
        fields["slice_elems"] = "auto" if name in AUTO else setting.slice_elems_of(name)
    missing = [size for size in DIVIDED if size not in fields]
    found = settings_found() if missing else {}
    for size in missing:
        fields[size] = setting.scaled(found.get(size, getattr(_DEFAULT, size)))
    if CLIPPED.get(name) == "servers":
        fields.setdefault("clip_grad_norm", CLIP_NORM)
    if name == SERVERS or CLIPPED.get(name) == "servers":
        fields.setdefault("update", "servers")
    system = base_of(name)
    return Config.resolve(system if system in PRESETS else None, **fields)


def honoured_settings(setting: LabSetting) -> dict[str, Any]:
    """Those of the environment that this setting leaves to it, as they are there."""
    named = {*SAID_BY_SYSTEMS, *(("slice_elems",) if setting.slice_elems else ())}
    return {name: value for name, value in settings_found().items() if name not in named}


def environment_text(setting: LabSetting) -> str:
    """What the environment has changed, for a person; empty if it has nothing."""
    honoured = honoured_settings(setting)
    parts = []
    for name, value in honoured.items():
        divided = f" (/ {setting.scale})" * (name in DIVIDED and setting.scale > 1)
        parts.append(f"{name}={value}{divided}")
    text = f"From the environment: {', '.join(parts)}" if parts else ""
    others = [name for name in settings_found() if name not in honoured]
    if others:
        text += "; " * bool(text) + f"not used, for systems or options say it: {', '.join(others)}"
    return text

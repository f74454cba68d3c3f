"""Keep each measurement, so that a restart skips it, with the timelines cut from its traces.

A kept run holds all that the figures need: its traces may be deleted.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from foreprop.errors import ConfigError
from foreprop.plan.profile import Layer
from foreprop.tools.report.timeline import Timeline, TimelineEvent, timeline_from_trace
from foreprop_lab.setting.labsetting import LabSetting
from foreprop_lab.setting.records import Record


class KeptRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the lab. ``timelines`` has the events of two steps for each traced system."""

    title: str
    taken_at: str
    took_s: float
    machine: dict[str, str]
    records: list[Record]
    samples: dict[str, list[tuple[float, int, int]]] = {}
    timelines: dict[str, list[TimelineEvent]] = {}
    notices: list[str] = []


def write_run(path: Path, run: KeptRun) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(msgspec.json.encode(run) + b"\n")
    partial.replace(path)


def maybe_read_run(path: Path) -> KeptRun | None:
    """The kept run; None if there is no file, or none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=KeptRun)
    except (FileNotFoundError, msgspec.DecodeError, ConfigError):
        return None


def remove_traces(folder: Path) -> None:
    """Remove an older run's traces, which would be taken for the new one's."""
    for old in folder.glob("*/*.trace.json"):
        old.unlink()


def timelines_from(setting: LabSetting) -> dict[str, list[TimelineEvent]]:
    """Two typical steps of worker 0 under each traced system.

    Raises `ConfigError` if a system's trace is missing or holds no two steps.
    """
    if setting.trace is None:
        return {}
    return {name: _timeline(setting.trace / name, setting.layers) for name in setting.systems}


def _timeline(folder: Path, layers: Sequence[Layer]) -> list[TimelineEvent]:
    paths = sorted(folder.glob("worker-0.*.trace.json"))
    if len(paths) != 1:
        raise ConfigError(f"{folder} has {len(paths)} traces of worker 0; there must be one")
    trace = json.loads(paths[0].read_bytes())
    events = timeline_from_trace(trace, first_step=typical_pair(trace))
    return [_with_layer_name(event, layers) for event in events]


def typical_pair(trace: Mapping[str, Any]) -> int:
    """The first of two consecutive steps that took about as long as most.

    A step counts from its first forward event to the next step's. Between two blocks of steps the
    worker pauses while other systems have their turn, so the step there is not typical.
    """
    starts: dict[int, float] = {}
    for event in trace.get("traceEvents", ()):
        if event.get("cat") == "forward":
            step, at = int(event["args"]["step"]), float(event["ts"])
            starts[step] = min(at, starts.get(step, at))
    took = {s: starts[s + 1] - at for s, at in starts.items() if s + 1 in starts}
    pairs = [s for s in took if s + 1 in took]
    if not pairs:
        raise ConfigError(f"the trace has the steps {sorted(starts)}; it takes three in a row")
    median = statistics.median(took.values())
    return min(pairs, key=lambda s: abs(took[s] - median) + abs(took[s + 1] - median))


def _with_layer_name(event: TimelineEvent, layers: Sequence[Layer]) -> TimelineEvent:
    """The event with the profile's name of the layer in place of its number."""
    number, _, rest = event.layer.partition(".")
    if not (number.isdecimal() and int(number) < len(layers)):
        return event
    name = layers[int(number)].name
    is_parameter = event.lane != "compute"
    return replace(event, layer=f"{name}.{rest.rpartition('.')[2]}" if is_parameter else name)


def timelines_of(run: KeptRun) -> list[Timeline]:
    return [Timeline(preset=name, events=events) for name, events in run.timelines.items()]

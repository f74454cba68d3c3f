"""What one measurement of the lab yields, and the file that keeps it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from foreprop.core.slicing import SLICE_ELEMS, usual_slice_elems
from foreprop.durable import replace_file
from foreprop.errors import ConfigError
from foreprop.workload import limit
from foreprop.workload.foundsettings import local_aggregation
from foreprop.workload.setting import DDP, MXNET, LabSetting, filling_packets
from foreprop.workload.systemconfig import honoured_settings

CPU_BOUND_SHARE = 0.8


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Median and outer deciles of the steps' times, seconds."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(median=values[0], p10=values[0], p90=values[0])
        deciles = statistics.quantiles(values, n=10, method="inclusive")
        return cls(median=statistics.median(values), p10=deciles[0], p90=deciles[-1])


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One system in one setting."""

    system: str
    model: str
    scale: int
    nodes: int
    workers_per_node: int = 1
    local_aggregation: str | None = None
    """foreprop's setting; None of other systems."""
    rate_bits_per_s: float
    balance: float
    """Wire time / compute."""
    compute_s: float
    wire_s: float
    """2 (N - 1) / N x bytes / rate, without headers."""
    limit_s: float
    """What no schedule can beat, headers counted: see `foreprop.workload.limit`."""
    iteration_s: Spread
    efficiency: float
    """``limit_s / typical_s``."""
    waiting_s: float
    """How long the emulated device was idle per step, mean."""
    cpu_s_per_gb: float
    """CPU time of all the system's processes per 10^9 bytes of parameters and gradients sent."""
    cpu_share: float
    """Of all CPUs, what was busy during the steps."""
    cpu_bound: bool
    """Whether `cpu_share` is above 0.8: then this is no network result."""
    iterations: int
    slice_elems: int
    """Largest slice, already divided by the scale."""
    bucket_bytes: int | None
    """DDP's bucket size, already divided by the scale."""
    network: str
    """``namespaces`` (the kernel's links and shapers), ``pacing`` (the transport's own) or
    ``simulated`` (`foreprop.simulate`): nothing was measured."""
    representatives: int | None = None
    """How many workers were simulated and stood for all nodes; None: each for itself."""
    versions: dict[str, str]
    staleness: int | str | UnsetType = UNSET
    """How many steps a worker may be ahead of the slowest, or ``async``; left out if none. Steps
    are then harmonic means over the workers, and `limit_s` is of steps that are made together."""
    simulated: dict[str, Any] | UnsetType = UNSET
    """Of `simulate.setting.SimulatedSetting`, what no lab has; left out if there is nothing."""
    uneven: dict[str, Any] | UnsetType = UNSET
    """Of `LabSetting`, what makes nodes, links or steps differ; left out if nothing does."""
    mean_s: float | UnsetType = UNSET
    """Of the steps, where they are to differ: then `limit_s` is of the mean."""
    environment: dict[str, Any] | UnsetType = UNSET
    """foreprop's settings that came from there, of the unscaled model; left out if none did."""
    compression: str | UnsetType = UNSET
    """Codecs of foreprop's frames, as they were asked for; left out if there were none. Then
    `limit_s` is of the bytes that are left."""
    sent_bytes: int | UnsetType = UNSET
    """That left a node's link in a step, by its interface, all headers included: the mean of the
    nodes, in the last block; left out where links have no interface."""
    counted_bytes: int | UnsetType = UNSET
    """Of frames that foreprop counts, a worker's pushes and answers in such a step."""
    counted_frames: int | UnsetType = UNSET
    """How many these are."""
    coded: str | UnsetType = UNSET
    """What share of the bytes went by which of them."""

    @property
    def typical_s(self) -> float:
        """Of a step, what the limit is compared with."""
        return self.iteration_s.median if isinstance(self.mean_s, UnsetType) else self.mean_s

    @property
    def has_usual_slices(self) -> bool:
        """P3's size, or the default's on so many nodes, which is smaller on many."""
        uneven = usual_slice_elems(self.nodes, uneven=True)
        usual = (SLICE_ELEMS, usual_slice_elems(self.nodes), uneven)
        divided = [size // self.scale for size in usual]
        return self.slice_elems in (*divided, *map(filling_packets, divided))


def record_of(
    system: str,
    setting: LabSetting,
    step_s: Sequence[float],
    waited_s: Sequence[float],
    **measured: Any,
) -> Record:
    """What follows from the setting and its steps; ``measured`` are the record's other fields.

    A ``limit_s`` among them comes before the setting's.
    """
    compute_s, wire_s = limit.compute_s(setting.layers), setting.wire_s
    limit_s = measured.pop("limit_s") if "limit_s" in measured else setting.limit_s
    spread = Spread.of(step_s)
    ours = not system.startswith(DDP) and system not in MXNET
    found = honoured_settings(setting) if ours else {}
    mean_s = statistics.fmean(step_s)
    fields = {"slice_elems": setting.slice_elems_of(system)} | measured
    return Record(
        system=system,
        model=setting.profile.name,
        scale=setting.scale,
        nodes=setting.nodes,
        workers_per_node=setting.workers_per_node,
        local_aggregation=local_aggregation() if ours else None,
        rate_bits_per_s=setting.rate,
        balance=wire_s / compute_s,
        compute_s=compute_s,
        wire_s=wire_s,
        limit_s=limit_s,
        iteration_s=spread,
        efficiency=limit_s / (mean_s if setting.varies else spread.median),
        waiting_s=statistics.fmean(waited_s),
        iterations=len(step_s),
        uneven=setting.uneven or UNSET,
        mean_s=mean_s if setting.varies else UNSET,
        environment=found or UNSET,
        **fields,
    )


def write_records(path: Path, records: Sequence[msgspec.Struct] | msgspec.Struct) -> None:
    replace_file(path, msgspec.json.format(msgspec.json.encode(records), indent=1) + b"\n")


def read_records(path: Path) -> list[Record]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Record])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} holds no results of the lab: {error}") from error

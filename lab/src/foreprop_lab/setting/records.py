"""The record of one measurement of the lab, and the file that keeps it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from foreprop.core.slicing import SLICE_ELEMS, usual_slice_elems
from foreprop.errors import ConfigError
from foreprop.plan import limit
from foreprop.tools.compare.result import Spread
from foreprop_lab.setting.labsetting import (
    DDP,
    MXNET,
    LabSetting,
    filling_packets,
    honoured_settings,
    local_aggregation,
)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one system in one setting; fields that say nothing of it are left out."""

    system: str
    model: str
    scale: int
    nodes: int
    workers_per_node: int = 1
    local_aggregation: str | None = None
    """foreprop's setting; None for other systems."""
    rate_bits_per_s: float
    balance: float
    """Wire time / compute."""
    compute_s: float
    wire_s: float
    """2 (N - 1) / N x bytes / rate, without headers."""
    limit_s: float
    """The limit that no schedule can beat, headers counted (`foreprop.plan.limit`)."""
    iteration_s: Spread
    efficiency: float
    """``limit_s / typical_s``."""
    waiting_s: float
    """How long the emulated device was idle per step, mean."""
    cpu_s_per_gb: float
    """CPU time of all the system's processes for each 10^9 bytes of parameters and gradients."""
    cpu_share: float
    """The share of all CPUs that was busy during the steps."""
    cpu_bound: bool
    """Whether `cpu_share` is above 0.8: then this is no network result."""
    iterations: int
    slice_elems: int
    """The largest slice, already divided by the scale."""
    bucket_bytes: int | None
    """DDP's bucket size, already divided by the scale."""
    network: str
    """``namespaces`` (the kernel's links and shapers), ``pacing`` (the transport's own) or
    ``simulated`` (`foreprop_lab.simulate`): nothing was measured."""
    representatives: int | None = None
    """How many workers were simulated and stood for all nodes; None if each was simulated."""
    versions: dict[str, str]
    staleness: int | str | UnsetType = UNSET
    """How many steps a worker may be ahead of the slowest, or ``async``. Steps are then harmonic
    means over the workers, and `limit_s` is that of steps that are made together."""
    simulated: dict[str, Any] | UnsetType = UNSET
    """The fields of `simulate.setting.SimulatedSetting` that no lab has."""
    uneven: dict[str, Any] | UnsetType = UNSET
    """The fields of `LabSetting` that make nodes, links or steps differ."""
    mean_s: float | UnsetType = UNSET
    """The mean of the steps, where they are to differ: then `limit_s` is that of the mean."""
    environment: dict[str, Any] | UnsetType = UNSET
    """foreprop's settings that came from the environment, of the unscaled model."""
    compression: str | UnsetType = UNSET
    """The codecs of foreprop's frames, as they were asked for. Then `limit_s` is that of the bytes
    that are left."""
    sent_bytes: int | UnsetType = UNSET
    """The bytes that left a node's link in a step, by its interface, all headers included: the mean
    of the nodes in the last block."""
    counted_bytes: int | UnsetType = UNSET
    """The bytes of frames that foreprop counts: a worker's pushes and answers in such a step."""
    counted_frames: int | UnsetType = UNSET
    """The number of those frames."""
    coded: str | UnsetType = UNSET
    """The shares of the bytes that each codec took."""
    launch_s: float | UnsetType = UNSET
    """What each operation cost that launched a layer's kernels, where any did."""
    launching_s: float | UnsetType = UNSET
    """What they take in a step together; `compute_s` has it in it."""
    held_s: float | UnsetType = UNSET
    """How long they waited per step for the interpreter's lock, mean; it is no part of
    `waiting_s`."""

    @property
    def typical_s(self) -> float:
        """The time that the limit is compared with."""
        return self.iteration_s.median if isinstance(self.mean_s, UnsetType) else self.mean_s

    @property
    def has_usual_slices(self) -> bool:
        """Whether slices have P3's size, or the default on so many nodes, which is smaller."""
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
    """The record of a setting and its steps; ``measured`` are the record's other fields.

    A ``limit_s`` among them replaces the setting's.
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


def read_records(path: Path) -> list[Record]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Record])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} holds no results of the lab: {error}") from error

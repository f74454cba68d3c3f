"""The settings that `parallelize` takes by name, for editors and type checkers alone.

No training loads this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from foreprop.config.settings import (
    Architecture,
    Collectives,
    Encryption,
    LocalAggregation,
    PlaneChoice,
    SliceElems,
    Staleness,
    UpdateBy,
    Wait,
    WholeTables,
)
from foreprop.core.manifest import Reduction, WireDtype
from foreprop.core.sendqueue import LaneRule, Order, Reply
from foreprop.core.slicing import Granularity, Placement


class Settings(TypedDict, total=False):
    """The fields of `Config`, which says what each means."""

    architecture: Architecture | None
    update: UpdateBy
    dedicated_servers: int
    servers_per_node: int
    slice_elems: SliceElems
    wire_dtype: WireDtype | None
    compression: str | Mapping[str, str] | None
    reduction: Reduction
    clip_grad_norm: float | None
    ema: float | None
    sparse_parameters: str | None
    staleness: Staleness
    elastic: bool
    wait: Wait
    step_timeout_s: float
    interface: str | None
    port_range: str | None
    secret_file: str | None
    encryption: Encryption | None
    workers_per_node: int | None
    local_aggregation: LocalAggregation
    collectives: Collectives
    pinned_bytes: int | None
    node_rates: str | None
    late_nodes: str | None
    rebalance_s: float | None
    max_workers: int | None
    join: str | None
    join_timeout_s: float
    silence_report_s: float
    silence_timeout_s: float
    stall_report_s: float
    check_replicas: int | None
    check_finite: bool
    whole_tables: WholeTables | None
    plugins: str | None
    trace: str | None
    trace_steps: str | None
    log_steps: int | None
    watch: str | None
    granularity: Granularity
    order: Order
    reply: Reply
    placement: Placement
    lanes: LaneRule
    plane: PlaneChoice
    big_array_elems: int
    unsent_bytes: int
    push_window_bytes: int
    chunk_elems: int
    chunks_in_flight: int
    link_rate_bits_per_s: float | None
    backup_workers: int
    delay_compensation: float | None
    counted_log: str | None
    counted_replay: str | None
    backward_passes: int | None
    clip_grad_value: float | None
    sparse_reduction: Reduction | None
    dense_parameters: str | None
    table_init: str | None
    table_seed: int
    check_stale: bool

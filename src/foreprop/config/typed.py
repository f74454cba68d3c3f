"""What `parallelize` takes by name, for editors and type checkers: no training loads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from foreprop.config.settings import (
    Architecture,
    Collectives,
    Encryption,
    LocalAggregation,
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
    """What `parallelize` takes by name: the fields of `Config`, which says what each means."""

    architecture: Architecture | None
    update: UpdateBy
    granularity: Granularity
    order: Order
    reply: Reply
    placement: Placement
    lanes: LaneRule
    slice_elems: SliceElems
    big_array_elems: int
    placement_seed: int
    servers_per_node: int
    dedicated_servers: int
    workers_per_node: int | None
    local_aggregation: LocalAggregation
    interface: str | None
    port_range: str | None
    secret_file: str | None
    encryption: Encryption | None
    link_rate_bits_per_s: float | None
    node_rates: str | None
    late_nodes: str | None
    rebalance_s: float | None
    unsent_bytes: int
    push_window_bytes: int
    pinned_bytes: int | None
    chunk_elems: int
    chunks_in_flight: int
    collectives: Collectives
    sparse_parameters: str | None
    dense_parameters: str | None
    whole_tables: WholeTables | None
    table_init: str | None
    table_seed: int
    backward_passes: int | None
    staleness: Staleness
    delay_compensation: float | None
    elastic: bool
    max_workers: int | None
    backup_workers: int
    join: str | None
    counted_log: str | None
    counted_replay: str | None
    reduction: Reduction
    sparse_reduction: Reduction | None
    clip_grad_norm: float | None
    clip_grad_value: float | None
    ema: float | None
    wire_dtype: WireDtype | None
    compression: str | Mapping[str, str] | None
    plugins: str | None
    wait: Wait
    check_replicas: int | None
    check_stale: bool
    check_finite: bool
    step_timeout_s: float
    join_timeout_s: float
    stall_report_s: float
    silence_report_s: float
    silence_timeout_s: float
    trace: str | None
    trace_steps: str | None
    log_steps: int | None
    watch: str | None

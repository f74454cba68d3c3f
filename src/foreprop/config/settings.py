"""Settings and presets.

Precedence: an explicit argument beats the command line beats the environment beats the default.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from foreprop.config.described import described, with_advice
from foreprop.config.environment import (
    check_value,
    preset_from_environment,
    settings_from_environment,
)
from foreprop.core.manifest import Aggregation, Knobs, Reduction, WireDtype
from foreprop.core.sendqueue import LaneRule, Order, Reply
from foreprop.core.slicing import BIG_ARRAY_ELEMS, Granularity, Placement, usual_slice_elems

Architecture = Literal["p2p", "ps", "ring", "hybrid", "auto"]
WholeTables = Literal["all", "rank0", "none"]
SliceElems = int | Literal["auto"] | None
Collectives = Literal["auto", "gloo", "nccl"]
LocalAggregation = Literal["auto", "on", "off"]
Wait = Literal["use", "modules"]
Encryption = Literal["tls"]
UpdateBy = Literal["auto", "servers", "workers"]
Staleness = int | Literal["async", "late"]
Preset = Literal["p3", "slicing", "kvstore", "wfbp", "tensorflow", "p3-2019"]


def _preset(*knobs: str, lanes: str = "peers", **more: int) -> Mapping[str, Any]:
    names = ("granularity", "order", "reply", "placement")
    return {**dict(zip(names, knobs, strict=True)), "lanes": lanes, **more}


_P3 = ("slice", "priority", "broadcast")
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "p3": _preset(*_P3, "round_robin"),
    "slicing": _preset("slice", "fifo", "broadcast", "round_robin"),
    "kvstore": _preset("array", "fifo", "notify", "kvstore"),
    "wfbp": _preset("array", "fifo", "broadcast", "balanced"),
    "tensorflow": _preset("array", "fifo", "pull", "balanced"),
    "p3-2019": _preset(*_P3, "strict_round_robin", lanes="one", slice_elems=50_000),
}
"""Each named after the system whose protocol it reproduces; each knob can be set by itself."""


_FEW = (
    "architecture clip_grad_norm clip_grad_value compression counted_replay"
    " delay_compensation ema encryption join late_nodes max_workers node_rates port_range"
    " rebalance_s table_init trace_steps"
).split()
"""Settings that few sessions have: their values are checked in `config.checks`."""


def _setting(default: Any, text: str, minimum: float | None = None) -> Any:
    return field(default=default, metadata={"help": text, "minimum": minimum})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that can be set, checked on construction; units are in the names.

    ``Config.resolve("kvstore", slice_elems=...)`` starts from a preset. The environment variable
    of a field is ``FOREPROP_`` and its name in capitals, that of the preset ``FOREPROP_PRESET``.
    """

    architecture: Architecture | None = _setting(
        None,
        "p2p: servers beside the workers; ps: dedicated_servers; ring: all-reduce, the workers"
        " update; hybrid: ring, but servers for sparse gradients; auto: p2p, ring or hybrid, as"
        " the first steps and the links suggest, and servers with settings that need them; by"
        " default ps if there are dedicated_servers, else p2p",
    )
    update: UpdateBy = _setting(
        "auto",
        "who applies the optimizer: workers, each to all, after gradients that may be read and"
        " edited as with DDP; servers, each to its share of the parameters, with its share of the"
        " optimizer's state; auto: workers, unless another setting or a published preset needs"
        " servers",
    )
    granularity: Granularity = _setting(
        "slice", "what is sent as one: slices of slice_elems, or whole arrays"
    )
    order: Order = _setting("priority", "what goes first: the next forward pass's need, or fifo")
    reply: Reply = _setting(
        "broadcast",
        "broadcast: as soon as updated; notify: announce, then be pulled; pull: at the next step",
    )
    placement: Placement = _setting(
        "round_robin", "which server gets which piece; round_robin and balanced: by bytes"
    )
    lanes: LaneRule = _setting(
        "peers",
        "peers: each has a queue, and the kernel holds little; one: P3's consumer (section 4.2), a"
        " frame at a time to whichever peer, without unsent_bytes and push_window_bytes",
    )
    slice_elems: SliceElems = _setting(
        None,
        "elements per slice; by default what the slowest link between nodes carries in 0.7 ms, and"
        " on one machine 50000 (P3 section 5.7): see docs/tuning.md; auto: by simulation,"
        " where they may change later",
        1,
    )
    big_array_elems: int = _setting(
        BIG_ARRAY_ELEMS, "placement=kvstore: arrays above this are split over all servers", 1
    )
    placement_seed: int = _setting(0, "placement=kvstore: added to the hash that picks a server", 0)
    servers_per_node: int = _setting(1, "servers started beside each node's workers", 0)
    dedicated_servers: int = _setting(
        0, "servers started with `foreprop server`, instead of those beside the workers", 0
    )
    workers_per_node: int | None = _setting(
        None, "workers that count as one node; by default torchrun's local world size", 1
    )
    local_aggregation: LocalAggregation = _setting(
        "auto",
        "sum the gradients of a node's workers before they leave it; auto: where a node has several"
        " workers and there is more than one node, or dedicated_servers",
    )
    interface: str | None = _setting(
        None, "network interface or address; by default the route to the rendezvous host"
    )
    port_range: str | None = _setting(
        None, "ports that servers and relays listen on, as 29600-29699; by default any free one"
    )
    secret_file: str | None = _setting(
        None, "file of mode 600 with the job's secret, the same on every machine"
    )
    encryption: Encryption | None = _setting(
        None, "tls: TLS 1.3 between workers and servers, with keys made of the job's secret"
    )
    link_rate_bits_per_s: float | None = _setting(
        None, "pace each node's link to this rate, both directions (for trying things out)", 1000
    )
    node_rates: str | None = _setting(
        None,
        "links that are not as fast as the others', as 3:0.5,2:0.8: node and share of their rate;"
        " what its servers own suits it. By default all alike; architecture=auto measures them",
    )
    late_nodes: str | None = _setting(
        None,
        "nodes whose workers compute for longer than the others', as 3,5: their servers own half as"
        " much. By default none; architecture=auto measures it",
    )
    rebalance_s: float | None = _setting(
        None,
        "measure links again when one has become slow for good, and move slices to suit them; at"
        " most once in so many seconds. By default never",
        0.1,
    )
    unsent_bytes: int = _setting(131_072, "unsent bytes that the kernel may hold per link", 1)
    push_window_bytes: int = _setting(
        1_572_864, "most that a worker's pushes to all servers may be under way, unacknowledged", 1
    )
    pinned_bytes: int | None = _setting(
        None, "most host memory that is page-locked for a device; by default what copies need", 0
    )
    chunk_elems: int = _setting(
        400_000, "architecture=ring: elements per collective; small parameters join one", 1
    )
    chunks_in_flight: int = _setting(
        4, "architecture=ring: full chunks under way at once, or twice as many small", 1
    )
    collectives: Collectives = _setting(
        "auto",
        "architecture=ring: gloo, through host memory, or nccl, between GPUs; auto: nccl where each"
        " rank's parameters are on a GPU of its own",
    )
    sparse_parameters: str | None = _setting(
        None, "names of embeddings to be held row by row; patterns (*, ?), with commas"
    )
    dense_parameters: str | None = _setting(
        None, "names of embeddings not to be held row by row; patterns, with commas"
    )
    whole_tables: WholeTables | None = _setting(
        None,
        "who gets all rows of tables held row by row in state_dict() and close(); others keep what"
        " they have: all, rank0 or none; by default all, and for remote tables an error",
    )
    table_init: str | None = _setting(
        None,
        "how remote tables' rows begin: normal(mean, std), uniform(from, to) or constant(value);"
        " for some tables pattern=...; between several ;. By default normal(0, 1)",
    )
    table_seed: int = _setting(0, "of the numbers for that", 0)
    backward_passes: int | None = _setting(
        None, "backward passes per step; by default learned in the first step", 1
    )
    staleness: Staleness = _setting(
        0, "steps that a worker may be ahead of the slowest, async, or late: not exact if not 0", 0
    )
    delay_compensation: float | None = _setting(None, "with staleness: DC-ASGD's lambda", 0)
    elastic: bool = _setting(
        False, "a worker that dies leaves, with the server beside it, and the others go on"
    )
    max_workers: int | None = _setting(
        None,
        "elastic: most workers that there may be, for those that come later; by default as"
        " many as at the start",
        1,
    )
    backup_workers: int = _setting(
        0, "close each slice of a step without its so many latest pushes: not exact if not 0", 0
    )
    join: str | None = _setting(
        None, "HOST:PORT of any server of an elastic session that runs: come in a lost one's place"
    )
    counted_log: str | None = _setting(
        None, "folder where servers write whose pushes they have counted, if not all workers'"
    )
    counted_replay: str | None = _setting(
        None, "folder with such logs of another session: count the same pushes again"
    )
    reduction: Reduction = _setting(
        "mean", "what is made of the ranks' gradients: mean, or sum, for losses that are sums"
    )
    sparse_reduction: Reduction | None = _setting(
        None, "the same for sparse gradients of embeddings, wherever held; by default as reduction"
    )
    clip_grad_norm: float | None = _setting(
        None, "scale the aggregated gradients down to this global 2-norm"
    )
    clip_grad_value: float | None = _setting(None, "clamp aggregated gradients to this, both sides")
    ema: float | None = _setting(None, "keep parameters' moving averages; the decay, within 0 to 1")
    wire_dtype: WireDtype | None = _setting(
        None,
        "send float32 parameters' gradients and new values as bfloat16 or float16, half the bytes;"
        " updates stay in float32",
    )
    compression: str | Mapping[str, str] | None = _setting(
        None,
        "a codec (lossless, exact; int8, topk:0.01), codecs by patterns of names, the first match"
        " counts ({'*.weight': 'lossless'}, *.weight=lossless,*=none), or auto: just enough",
    )
    plugins: str | None = _setting(
        None, "modules, with commas, that register codecs and optimizers of your own everywhere"
    )
    wait: Wait = _setting(
        "use",
        "where a pending parameter is waited for: at its first use; or, for layers in C++ that read"
        " it past torch, at the entry of the module that owns it, too",
    )
    check_replicas: int | None = _setting(
        100, "all ranks' parameters are compared once within so many steps; None: never", 8
    )
    check_stale: bool = _setting(
        False, "for debugging: find and name who reads a parameter before its update is there"
    )
    check_finite: bool = _setting(
        False,
        "a gradient that is not finite is an error that names rank, parameter and step; without a"
        " scaler, for which that is normal. Costs a pass over every gradient",
    )
    step_timeout_s: float = _setting(300.0, "no progress for this long is an error", 0.1)
    join_timeout_s: float = _setting(120.0, "how long to wait for all processes at the start", 0.1)
    stall_report_s: float = _setting(10.0, "a wait this long is reported on standard error", 0.1)
    silence_report_s: float = _setting(
        5.0,
        "of a rank or server of which nothing was heard for this long a line tells: its host is cut"
        " off or stopped, whatever its code does",
        1.0,
    )
    silence_timeout_s: float = _setting(
        15.0, "of which nothing was heard for this long counts as lost", 1.0
    )
    trace: str | None = _setting(
        None, "folder for traces of every process, for `foreprop report` and `foreprop trace`"
    )
    trace_steps: str | None = _setting(
        None, "which steps are traced: FIRST-LAST, several separated by commas; by default all"
    )
    log_steps: int | None = _setting(
        None, "every so many steps rank 0 logs speed, waiting and traffic (logger foreprop)", 1
    )
    watch: str | None = _setting(
        None, "folder where each rank says every second how it goes, for `foreprop top`"
    )

    def __post_init__(self) -> None:
        if self.compression is not None or "auto" in (self.architecture, self.slice_elems):
            from foreprop.config.checks import settle

            settle(self)
        hints = typing.get_type_hints(Config)
        for spec in fields(self):
            check_value(spec, getattr(self, spec.name), hints[spec.name])
        if not self.is_usual:
            from foreprop.config.checks import check_settings

            check_settings(self)

    @classmethod
    def resolve(cls, preset: str | None = None, /, **explicit: Any) -> Config:
        """Explicit arguments over the environment over the preset over the defaults."""
        names = {spec.name for spec in fields(cls)}
        if unknown := [name for name in explicit if name not in names]:
            from foreprop.config.checks import unknown_setting

            raise unknown_setting(unknown[0], names)
        environment = settings_from_environment(typing.get_type_hints(cls))
        name_of_preset = preset or preset_from_environment() or "p3"
        if name_of_preset not in PRESETS:
            from foreprop.config.checks import unknown_preset

            raise unknown_preset(name_of_preset, PRESETS)
        return cls(**{**PRESETS[name_of_preset], **environment, **explicit})

    @property
    def is_usual(self) -> bool:
        """Whether nothing is asked for that few sessions have, or that is checked elsewhere."""
        few = any(getattr(self, name) is not None for name in _FEW) or self.staleness
        few = few or self.counts_some or self.silence_report_s > self.silence_timeout_s
        served = self.servers_per_node and not self.dedicated_servers
        return bool(served and not few and self.lanes == "peers" and not self.check_stale)

    @property
    def preset(self) -> str | None:
        """The one whose knobs are set, be it by name or one by one."""
        for name, knobs in PRESETS.items():
            if all(getattr(self, knob) == value for knob, value in knobs.items()):
                return name
        return None

    def replace(self, **changes: Any) -> Config:
        return dataclasses.replace(self, **changes)

    def knobs(self, servers: int) -> Knobs:
        """The settings that all processes of a session must share."""
        return Knobs(
            granularity=self.granularity,
            placement=self.placement,
            order=self.order,
            reply=self.reply,
            lanes=self.lanes,
            servers=servers,
            slice_elems=self.cut_elems(servers),
            big_array_elems=self.big_array_elems,
            placement_seed=self.placement_seed,
            shares=self.shares(servers),
            aggregation=self.aggregation,
            wire_dtype=self.wire_dtype,
            compression=self.codecs,
            staleness=0 if self.staleness == "late" else self.staleness,
            delay_compensation=self.delay_compensation or 0.0,
            elastic=self.elastic,
            max_workers=self.max_workers or 0,
            backup_workers=self.backup_workers,
            counted_replay=self.counted_replay is not None,
        )

    @property
    def counts_some(self) -> bool:
        """Whether servers may count the pushes of some workers only."""
        return self.elastic or self.backup_workers > 0 or self.counted_replay is not None

    @property
    def codecs(self) -> tuple[tuple[str, str], ...]:
        """Patterns of parameters' names, and their codecs (`core.codec`)."""
        if not isinstance(self.compression, str):
            return ()
        from foreprop.core.codec import choices_of

        return choices_of(self.compression)

    def servers_on(self, nodes: int) -> int:
        """Of a session on so many nodes."""
        return self.dedicated_servers or nodes * self.servers_per_node

    def cut_elems(self, servers: int) -> int:
        """``slice_elems`` as a number: as long as it is to be found, what is begun with."""
        size = self.slice_elems
        uneven = self.node_rates is not None
        return size if isinstance(size, int) else usual_slice_elems(servers, uneven=uneven)

    def shares(self, servers: int) -> tuple[int, ...]:
        """What each server owns, relative to the others; empty if all own as much."""
        if self.node_rates is None and self.late_nodes is None:
            return ()
        from foreprop.core.linkshares import plan_shares

        late, per_node = self.late_nodes, self.servers_per_node
        return plan_shares(self.node_rates, servers=servers, per_node=per_node, late=late)

    def keeps_whole_tables(self, rank: int) -> bool:
        """Whether this rank gets all rows of tables, in a checkpoint: see ``whole_tables``."""
        return {"all": True, "rank0": rank == 0, "none": False}[self.whole_tables or "all"]

    @property
    def aggregation(self) -> Aggregation:
        """What happens to gradients between their sum and the optimizer."""
        return Aggregation(
            reduction=self.reduction,
            sparse_reduction=self.sparse_reduction,
            clip_grad_norm=self.clip_grad_norm,
            clip_grad_value=self.clip_grad_value,
            ema=self.ema,
            check_finite=self.check_finite,
        )


Config.__init__ = with_advice(Config, Config.__init__)  # type: ignore[method-assign]
Config.__doc__ = described(Config)

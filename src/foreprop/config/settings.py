"""Settings and presets.

Precedence: an explicit argument beats the command line beats the environment beats the default.
What few sessions set is checked elsewhere (`config.checks`), which a plain training never loads.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import textwrap
import typing
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import partial
from typing import Any, Literal

from foreprop.config.environment import (
    check_value,
    preset_from_environment,
    settings_from_environment,
)
from foreprop.core.codec import choices_of
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
PlaneChoice = Literal["auto", "native", "python"]
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
"""Each is named after the system whose protocol it reproduces; each knob can be set by itself."""


# the settings that few sessions have: their values are checked in `config.checks`
_FEW = (
    "architecture clip_grad_norm clip_grad_value compression counted_replay"
    " delay_compensation ema encryption join late_nodes max_workers node_rates port_range"
    " rebalance_s table_init trace_steps"
).split()


Tier = Literal["use", "operate", "research"]
TIERS: Mapping[Tier, str] = {
    "use": "Use: what a training script sets",
    "operate": "Operate: what is set for a cluster, and for watching over a job",
    "research": "Research: for comparisons with papers, and what few trainings need",
}
"""The tiers' headings, the most used first; a setting's declaration names its own."""


def _setting(tier: Tier, default: Any, text: str, minimum: float | None = None) -> Any:
    return field(default=default, metadata={"tier": tier, "help": text, "minimum": minimum})


_use, _operate, _research = (partial(_setting, tier) for tier in TIERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that can be set, checked on construction; units are in the names.

    ``Config.resolve("kvstore", slice_elems=...)`` starts from a preset. The environment variable
    of a field is ``FOREPROP_`` and its name in capitals, that of the preset ``FOREPROP_PRESET``.
    """

    architecture: Architecture | None = _use(
        None,
        "p2p: servers beside the workers; ps: dedicated_servers; ring: all-reduce, the workers"
        " update; hybrid: ring, but servers for sparse gradients; auto: p2p, ring or hybrid, as"
        " the first steps and the links suggest, and servers with settings that need them; by"
        " default ps if there are dedicated_servers, else p2p",
    )
    update: UpdateBy = _use(
        "auto",
        "who applies the optimizer: workers, each to all, after gradients that may be read and"
        " edited as with DDP; servers, each to its share of the parameters, with its share of the"
        " optimizer's state; auto: workers, unless another setting or a published preset needs"
        " servers",
    )
    dedicated_servers: int = _use(
        0, "servers started with `foreprop server`, instead of those beside the workers", 0
    )
    servers_per_node: int = _use(1, "servers started beside each node's workers", 0)
    slice_elems: SliceElems = _use(
        None,
        "elements per slice; by default what the slowest link between nodes carries in 0.7 ms, and"
        " on one machine 50000 (P3 section 5.7): see docs/tuning.md; auto: by predicted"
        " steps, where they may change later",
        1,
    )
    wire_dtype: WireDtype | None = _use(
        None,
        "send float32 parameters' gradients and new values as bfloat16 or float16, half the bytes;"
        " updates stay in float32",
    )
    compression: str | Mapping[str, str] | None = _use(
        None,
        "a codec (lossless, exact; int8, topk:0.01), codecs by patterns of names, the first match"
        " counts ({'*.weight': 'lossless'}, *.weight=lossless,*=none), or auto: just enough",
    )
    reduction: Reduction = _use(
        "mean", "what is made of the ranks' gradients: mean, or sum, for losses that are sums"
    )
    clip_grad_norm: float | None = _use(
        None, "scale the aggregated gradients down to this global 2-norm"
    )
    ema: float | None = _use(None, "keep parameters' moving averages; the decay, within 0 to 1")
    sparse_parameters: str | None = _use(
        None, "names of embeddings to be held row by row; patterns (*, ?), with commas"
    )
    staleness: Staleness = _use(
        0, "steps that a worker may be ahead of the slowest, async, or late: not exact if not 0", 0
    )
    elastic: bool = _use(
        False, "a worker that dies leaves, with the server beside it, and the others go on"
    )
    wait: Wait = _use(
        "use",
        "where a pending parameter is waited for: at its first use; or, for layers in C++ that read"
        " it past torch, at the entry of the module that owns it, too",
    )
    step_timeout_s: float = _use(300.0, "no progress for this long is an error", 0.1)

    interface: str | None = _operate(
        None, "network interface or address; by default the route to the rendezvous host"
    )
    port_range: str | None = _operate(
        None, "ports that servers and relays listen on, as 29600-29699; by default any free one"
    )
    secret_file: str | None = _operate(
        None, "file of mode 600 with the job's secret, the same on every machine"
    )
    encryption: Encryption | None = _operate(
        None, "tls: TLS 1.3 between workers and servers, with keys made of the job's secret"
    )
    workers_per_node: int | None = _operate(
        None, "workers that count as one node; by default torchrun's local world size", 1
    )
    local_aggregation: LocalAggregation = _operate(
        "auto",
        "sum the gradients of a node's workers before they leave it; auto: where a node has several"
        " workers and there is more than one node, or dedicated_servers",
    )
    collectives: Collectives = _operate(
        "auto",
        "architecture=ring: gloo, through host memory, or nccl, between GPUs; auto: nccl where each"
        " rank's parameters are on a GPU of its own",
    )
    pinned_bytes: int | None = _operate(
        None, "most host memory that is page-locked for a device; by default what copies need", 0
    )
    node_rates: str | None = _operate(
        None,
        "links that are not as fast as the others', as 3:0.5,2:0.8: node and share of their rate;"
        " what its servers own suits it. By default all alike; architecture=auto measures them",
    )
    late_nodes: str | None = _operate(
        None,
        "nodes whose workers compute for longer than the others', as 3,5: their servers own half as"
        " much. By default none; architecture=auto measures it",
    )
    rebalance_s: float | None = _operate(
        None,
        "measure links again when one has become slow for good, and move slices to suit them; at"
        " most once in so many seconds. By default never",
        0.1,
    )
    max_workers: int | None = _operate(
        None,
        "elastic: most workers that there may be, for those that come later; by default as"
        " many as at the start",
        1,
    )
    join: str | None = _operate(
        None, "HOST:PORT of any server of an elastic session that runs: come in a lost one's place"
    )
    join_timeout_s: float = _operate(120.0, "how long to wait for all processes at the start", 0.1)
    silence_report_s: float = _operate(
        5.0,
        "of a rank or server of which nothing was heard for this long a line tells: its host is cut"
        " off or stopped, whatever its code does",
        1.0,
    )
    silence_timeout_s: float = _operate(
        15.0, "of which nothing was heard for this long counts as lost", 1.0
    )
    stall_report_s: float = _operate(10.0, "a wait this long is reported on standard error", 0.1)
    check_replicas: int | None = _operate(
        100, "all ranks' parameters are compared once within so many steps; None: never", 8
    )
    check_finite: bool = _operate(
        False,
        "a gradient that is not finite is an error that names rank, parameter and step; without a"
        " scaler, for which that is normal. Costs a pass over every gradient",
    )
    whole_tables: WholeTables | None = _operate(
        None,
        "who gets all rows of tables held row by row in state_dict() and close(); others keep what"
        " they have: all, rank0 or none; by default all, and for remote tables an error",
    )
    plugins: str | None = _operate(
        None, "modules, with commas, that register codecs and optimizers of your own everywhere"
    )
    trace: str | None = _operate(
        None, "folder for traces of every process, for `foreprop report` and `foreprop trace`"
    )
    trace_steps: str | None = _operate(
        None, "which steps are traced: FIRST-LAST, several separated by commas; by default all"
    )
    log_steps: int | None = _operate(
        None, "every so many steps rank 0 logs speed, waiting and traffic (logger foreprop)", 1
    )
    watch: str | None = _operate(
        None, "folder where each rank says every second how it goes, for `foreprop top`"
    )

    granularity: Granularity = _research(
        "slice", "what is sent as one: slices of slice_elems, or whole arrays"
    )
    order: Order = _research("priority", "what goes first: the next forward pass's need, or fifo")
    reply: Reply = _research(
        "broadcast",
        "broadcast: as soon as updated; notify: announce, then be pulled; pull: at the next step",
    )
    placement: Placement = _research(
        "round_robin", "which server gets which piece; round_robin and balanced: by bytes"
    )
    lanes: LaneRule = _research(
        "peers",
        "peers: each has a queue, and the kernel holds little; one: P3's consumer (section 4.2), a"
        " frame at a time to whichever peer, without unsent_bytes and push_window_bytes",
    )
    plane: PlaneChoice = _research(
        "auto",
        "what carries slices: native, outside of the interpreter; python; auto: native, where it"
        " was built and carries what the session asks for",
    )
    big_array_elems: int = _research(
        BIG_ARRAY_ELEMS, "placement=kvstore: arrays above this are split over all servers", 1
    )
    unsent_bytes: int = _research(131_072, "unsent bytes that the kernel may hold per link", 1)
    push_window_bytes: int = _research(
        1_572_864, "most that a worker's pushes to all servers may be under way, unacknowledged", 1
    )
    chunk_elems: int = _research(
        400_000, "architecture=ring: elements per collective; small parameters join one", 1
    )
    chunks_in_flight: int = _research(
        4, "architecture=ring: full chunks under way at once, or twice as many small", 1
    )
    link_rate_bits_per_s: float | None = _research(
        None, "pace each node's link to this rate, both directions (for trying things out)", 1000
    )
    backup_workers: int = _research(
        0, "close each slice of a step without its so many latest pushes: not exact if not 0", 0
    )
    delay_compensation: float | None = _research(None, "with staleness: DC-ASGD's lambda", 0)
    counted_log: str | None = _research(
        None, "folder where servers write whose pushes they have counted, if not all workers'"
    )
    counted_replay: str | None = _research(
        None, "folder with such logs of another session: count the same pushes again"
    )
    backward_passes: int | None = _research(
        None, "backward passes per step; by default learned in the first step", 1
    )
    clip_grad_value: float | None = _research(
        None, "clamp aggregated gradients to this, both sides"
    )
    sparse_reduction: Reduction | None = _research(
        None,
        "reduction of sparse gradients of embeddings, wherever held; by default the same",
    )
    dense_parameters: str | None = _research(
        None, "names of embeddings not to be held row by row; patterns, with commas"
    )
    table_init: str | None = _research(
        None,
        "how remote tables' rows begin: normal(mean, std), uniform(from, to) or constant(value);"
        " for some tables pattern=...; between several ;. By default normal(0, 1)",
    )
    table_seed: int = _research(0, "seed of the numbers that table_init draws", 0)
    check_stale: bool = _research(
        False, "for debugging: find and name who reads a parameter before its update is there"
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
        """A config of explicit arguments, else the environment, else the preset, else defaults."""
        hints = typing.get_type_hints(cls)
        name_of_preset = preset or preset_from_environment() or "p3"
        if not explicit.keys() <= hints.keys() or name_of_preset not in PRESETS:
            from foreprop.config.checks import refuse_names

            refuse_names(explicit, hints, name_of_preset, PRESETS)
        environment = settings_from_environment(hints)
        return cls(**{**PRESETS[name_of_preset], **environment, **explicit})

    @property
    def is_usual(self) -> bool:
        """Whether there is nothing for `config.checks` to check."""
        few = any(getattr(self, name) is not None for name in _FEW) or self.staleness
        few = few or self.counts_some or self.silence_report_s > self.silence_timeout_s
        served = self.servers_per_node and not self.dedicated_servers
        return bool(served and not few and self.lanes == "peers" and not self.check_stale)

    @property
    def preset(self) -> str | None:
        """The preset whose knobs are set, by its name or one by one."""
        for name, knobs in PRESETS.items():
            if all(getattr(self, knob) == value for knob, value in knobs.items()):
                return name
        return None

    def replace(self, **changes: Any) -> Config:
        return dataclasses.replace(self, **changes)

    def knobs(self, servers: int) -> Knobs:
        """The settings that all processes of a session with so many servers must share."""
        return Knobs(
            granularity=self.granularity,
            placement=self.placement,
            order=self.order,
            reply=self.reply,
            lanes=self.lanes,
            servers=servers,
            slice_elems=self.cut_elems(servers),
            big_array_elems=self.big_array_elems,
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
    def steps_may_differ(self) -> bool:
        """Whether ranks may have values of different steps, and must meet to have the same."""
        return bool(self.staleness or self.backup_workers)

    @property
    def may_aggregate(self) -> bool:
        """Whether a node's gradients may be added up before they cross a link."""
        apart = self.staleness not in (0, "late") or self.counts_some
        return self.local_aggregation != "off" and not apart

    @property
    def codecs(self) -> tuple[tuple[str, str], ...]:
        """The patterns of parameters' names with their codecs (`core.codec`)."""
        if not isinstance(self.compression, str):
            return ()
        return choices_of(self.compression)

    def servers_on(self, nodes: int) -> int:
        """How many servers a session on so many nodes has."""
        return self.dedicated_servers or nodes * self.servers_per_node

    def cut_elems(self, servers: int) -> int:
        """``slice_elems`` as a number; if it is still to be found, the one to begin with."""
        size = self.slice_elems
        uneven = self.node_rates is not None
        return size if isinstance(size, int) else usual_slice_elems(servers, uneven=uneven)

    def shares(self, servers: int) -> tuple[int, ...]:
        """How much each server owns, relative to the others; empty if all own the same."""
        if self.node_rates is None and self.late_nodes is None:
            return ()
        from foreprop.core.linkshares import plan_shares

        late, per_node = self.late_nodes, self.servers_per_node
        return plan_shares(self.node_rates, servers=servers, per_node=per_node, late=late)

    def keeps_whole_tables(self, rank: int) -> bool:
        """Whether this rank gets all rows of tables in a checkpoint (``whole_tables``)."""
        return {"all": True, "rank0": rank == 0, "none": False}[self.whole_tables or "all"]

    @property
    def aggregation(self) -> Aggregation:
        """The settings of what happens to gradients between their sum and the optimizer."""
        return Aggregation(
            reduction=self.reduction,
            sparse_reduction=self.sparse_reduction,
            clip_grad_norm=self.clip_grad_norm,
            clip_grad_value=self.clip_grad_value,
            ema=self.ema,
            check_finite=self.check_finite,
        )


# The documentation of `Config`, made from its fields.
def settings_in(tier: Tier, cls: type[Config]) -> list[Field[Any]]:
    return [spec for spec in fields(cls) if spec.metadata["tier"] == tier]


def _with_advice(cls: type[Config], make: Callable[..., None]) -> Callable[..., None]:
    """Have Python's own error about an unknown argument name the setting that is close to it."""

    @functools.wraps(make)
    def __init__(self: Config, *values: Any, **settings: Any) -> None:
        try:
            make(self, *values, **settings)
        except TypeError as error:
            from foreprop.config.checks import with_advice

            raise with_advice(error, settings, [spec.name for spec in fields(cls)]) from None

    return __init__


def _described(cls: type[Config]) -> str:
    paragraphs = [inspect.cleandoc(cls.__doc__ or "")]
    for tier, heading in TIERS.items():
        meanings = (
            textwrap.fill(
                f"{spec.name}: {spec.metadata['help']}",
                width=92,
                initial_indent="    ",
                subsequent_indent="        ",
                break_long_words=False,
            )
            for spec in settings_in(tier, cls)
        )
        paragraphs.append("\n".join([heading, *meanings]))
    return "\n\n".join(paragraphs) + "\n"


Config.__init__ = _with_advice(Config, Config.__init__)  # type: ignore[method-assign]
Config.__doc__ = _described(Config)

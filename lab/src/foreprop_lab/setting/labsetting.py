"""The setting of one run of the lab, and what it makes of each system.

A system's name is a preset or a peer, with ``@`` and the elements of a slice, and ``+`` and a
codec. foreprop's settings may be in the environment, too. They are a training's, so what counts
elements or bytes is of the unscaled model; the scale divides it as it does the arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from foreprop.config import PRESETS, Config, LocalAggregation
from foreprop.config.sources import resolve_with_sources
from foreprop.core.codec import NONE
from foreprop.core.linkshares import shares_of, slice_elems_at, spare
from foreprop.core.slicing import usual_slice_elems
from foreprop.core.staleness import Staleness, most_steps_apart
from foreprop.core.wire import HEADER_BYTES
from foreprop.errors import ConfigError
from foreprop.plan import limit
from foreprop.plan.limit import BYTES_PER_ELEM, model_bytes
from foreprop.plan.profile import Layer, Profile
from foreprop.quantities import option, time_text
from foreprop_lab.setting import criticalpath
from foreprop_lab.setting.codecs import check_codecs, powersgd_rank
from foreprop_lab.setting.links import CrossTraffic, LinkRate, Network, check_links
from foreprop_lab.setting.unevenness import Draw, StepLengths, Unevenness

DIVIDED = ("slice_elems", "big_array_elems", "chunk_elems", "unsent_bytes", "push_window_bytes")
"""The settings that the scale divides."""
SAID_BY_SYSTEMS = ("architecture", "workers_per_node", "staleness")
"""Settings that a system's name or an option decides, whatever the environment says."""


def settings_found() -> dict[str, Any]:
    config, sources = resolve_with_sources()
    found = sorted(name for name, source in sources.items() if source == "environment")
    return {name: getattr(config, name) for name in found}


def slice_elems_from_environment() -> int | None:
    """The slices' size that is set there; raises `ConfigError` if that is ``auto``."""
    found = settings_found().get("slice_elems")
    if found == "auto":
        raise ConfigError(
            "FOREPROP_SLICE_ELEMS is 'auto', which the systems auto and p3-auto are for; unset it"
        )
    return None if found is None else int(found)


def default_slice_elems(setting: LabSetting) -> int:
    """The size that a session would choose; P3's size if the arrays are divided.

    The hosts' cost of a slice is not divided, so that slices which suit fast or slow links would be
    too small or too few.
    """
    uneven = "node_rates" in settings_found()
    if setting.scale > 1:
        return usual_slice_elems(setting.nodes, uneven=uneven)
    elems = int(model_bytes(setting.layers) // BYTES_PER_ELEM)
    return slice_elems_at(setting.rate, servers=setting.nodes, elems=elems, uneven=uneven)


def local_aggregation() -> LocalAggregation:
    return Config.resolve().local_aggregation


SIZE_MARK = "@"
"""``p3@200000`` is p3 with slices of 200,000 elements of the unscaled model."""
CODEC_MARK = "+"
"""``p3+int8`` is p3 with that codec, ``p3+none`` without; ``ddp+fp16`` has a hook of torch's."""
STALE_SYSTEMS = tuple(name for name, knobs in PRESETS.items() if knobs["reply"] == "broadcast")
"""Systems in which a worker may be ahead of others, as it is answered about its own push."""


def split_codec(system: str) -> tuple[str, str | None]:
    """Split ``p3@200000+int8`` into ``p3@200000`` and ``int8``; a name may begin with the mark."""
    whole, mark, codec = system.partition(CODEC_MARK)
    return (whole, codec) if whole and mark else (system, None)


def base_of(system: str) -> str:
    """The first part of a name: ``p3`` of ``p3@200000+int8``."""
    return split_codec(system)[0].partition(SIZE_MARK)[0]


def check_staleness(staleness: Staleness, systems: Sequence[str]) -> None:
    """Raise `ConfigError` for systems whose workers are always in the same step."""
    if not most_steps_apart(staleness):
        return
    for system in systems:
        if base_of(system) not in STALE_SYSTEMS:
            raise ConfigError(
                f"systems has {system!r}, which makes its steps together; with a staleness"
                f" ({staleness!r}) there are {', '.join(STALE_SYSTEMS)}"
            )


DDP = "ddp"
DDP_TUNED = "ddp-tuned"
MXNET = ("mxnet-kvstore", "mxnet-p3")
DDP_SPARSE = "ddp-sparse"
"""DDP whose tables have sparse gradients, which it gathers."""
RING = "ring"
HYBRID = "hybrid"
"""The system ``ring``, with servers beside it for the rows of tables."""
AUTO = {"auto": "auto", "p3-auto": "p2p"}
"""Systems that plan for themselves, slices and all, and the ``architecture`` that they ask for."""
SERVERS = "p3-servers"
"""The preset p3 with servers that update."""
CLIPPED = {"p3-clip": "auto", "p3-clip-setting": "servers"}
"""The preset p3 in a loop that clips, with ``clip_grad_norm_`` or by a setting, and who updates."""
SYSTEMS = (*PRESETS, RING, *AUTO, SERVERS, *CLIPPED, DDP, DDP_TUNED, *MXNET)

DISCARDED_STEPS = 1
"""The steps of each block that do not count: TCP begins anew after a pause."""
RING_STEPS = 9
"""The steps until a ring has planned its order twice."""
CLIP_NORM = 1.0
"""The largest norm in systems that clip."""

_UNEVEN_COMPUTE = tuple(spec.name for spec in fields(Unevenness))
UNEVEN = (*_UNEVEN_COMPUTE, "link_rates", "cross_traffic")
"""The fields that make nodes, links or steps differ."""
LAUNCH_SHARE = 0.2
"""Launching takes at most this share of each pass of a layer, where a device is launched for."""
_LEAST_LAUNCH_S = 5e-6
"""About twice what a call of torch that does next to nothing takes."""
_FEW_PACKETS = 8
_SLICES_PER_S = 1000
_USUAL_NODES = 4
_MORE_NODES_EXPONENT = 1.25  # a slice is sent to more nodes, by processes of more threads


def usual_compute_s(profile: Profile, nodes: int) -> float:
    """A step's compute: as measured, or enough for two CPUs to do every node's work meanwhile.

    Their work per step grows with the number of slices of the usual size, whatever the scale.
    """
    if profile.measured_s is not None:
        return profile.measured_s
    slices = profile.slices(usual_slice_elems(nodes))
    more_nodes = max(1.0, nodes / _USUAL_NODES)
    return max(1.0, slices / _SLICES_PER_S) * math.pow(more_nodes, _MORE_NODES_EXPONENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabSetting:
    """One cluster, one model, several systems whose steps are interleaved.

    Slices, big arrays, buckets and the kernel's send buffers are divided by ``scale`` as the
    arrays are, for every system alike; see `slice_elems_of` for small slices. Raises `ConfigError`
    for what cannot be.
    """

    profile: Profile
    nodes: int = option("Nodes, each with a worker and a server.", 4)
    workers_per_node: int = option("Workers on each node.", 1)
    balance: float | None = option("Wire time / compute, which sets the rate; default 1.0.", None)
    rate_bits_per_s: float | None = option(
        "The links' rate, as 100Mbit, instead of --balance.", None
    )
    scale: int = option("Divides every array, slice and bucket.", 16)
    compute_s: float = option(
        "What the device computes per step, as 250ms; by default as measured (see --profile), or"
        " else enough for 2 CPUs.",
        2.0,
    )
    systems: tuple[str, ...] = option("Separated by commas.")
    iterations: int = option("Measured steps of each system.", 20)
    warm_up: int = 3
    slice_elems: int | None = option(
        "Elements per slice of the unscaled model, instead of the usual ones.", None
    )
    """The default is what a session on so many nodes would choose (`slice_elems_of`)."""
    compression: str | None = option(
        "Codec of the presets' frames, as int8 or lossless:0.7; auto, or auto:int8 for nothing"
        " lossier; or PATTERN=CODEC, separated by commas. Of one system: p3+int8, or p3+none.",
        None,
    )
    """The rate that follows from ``balance`` is that for float32."""
    slow_nodes: int = option("Nodes that compute more slowly.", 0)
    """They are the last ones."""
    slowdown: float = option(
        "Slow nodes take 1 + this times as long, as 0.5 for half as long again.", 0.0
    )
    jitter: float = option("Draw each layer's time anew, up to this share off, as 0.2.", 0.0)
    """It is drawn on every node and in every step."""
    step_jitter: float = option(
        "Each node's compute takes exp(this x a normal draw) as long, anew in each step.", 0.0
    )
    step_lengths: StepLengths | None = option(
        "Draw each worker's compute anew in each step, as with sequences of different lengths:"
        " lognormal:SPREAD, uniform:SPREAD or exponential:SPREAD, with mean 1.",
        None,
    )
    link_rates: tuple[LinkRate, ...] = option(
        "Links that are not as fast: NODE:FACTOR or NODE:RATE, separated by commas, as"
        " 3:0.5,2:40Mbit.",
        (),
    )
    cross_traffic: tuple[CrossTraffic, ...] = option(
        "Another job's bytes on a node's link: NODE:SHARE of its rate, or NODE:SHARE:PERIOD:DUTY,"
        " separated by commas, as 3:0.4:2s:0.5.",
        (),
    )
    staleness: Staleness = option(
        "How many steps a worker may be ahead of the slowest: 0 (synchronous), a number, or async.",
        0,
    )
    """See `core.staleness`; for presets that broadcast."""
    seed: int = option("Of all that is drawn.", 0)
    shape_ingress: bool = True
    launch_s: float | None = None
    """What each of the operations costs by which a layer launches its kernels (`launches_in`); by
    default nothing is launched."""
    mxnet_python: Path | None = option(
        "Python of an environment with mxnet==1.9.1 and numpy<1.24.", None
    )
    trace: Path | None = option(
        "Folder for traces of the presets and of ddp, for `foreprop trace`.", None
    )
    """One sub-folder per system."""
    sample_network: bool = False
    """Read node 0's interface counters every 10 ms during measured steps."""

    known_systems: ClassVar[tuple[str, ...]] = SYSTEMS
    paced_systems: ClassVar[tuple[str, ...]] = tuple(PRESETS)
    """Systems that can pace their own sockets, where there are no links made by the kernel."""
    coded_systems: ClassVar[tuple[str, ...]] = tuple(PRESETS)
    hooked_systems: ClassVar[tuple[str, ...]] = (DDP,)
    """Systems that may be compressed by codecs, and by hooks of torch's."""
    most_nodes: ClassVar[int] = 64

    def __post_init__(self) -> None:
        unknown = [name for name in self.systems if not self._knows(name)]
        if unknown or not self.systems:
            what = unknown[0] if unknown else ""
            raise ConfigError(f"systems has {what!r}; there are {', '.join(self.known_systems)}")
        if len(set(self.systems)) < len(self.systems):
            raise ConfigError(f"systems names one twice: {', '.join(self.systems)}")
        least_of = {"nodes": 2, "workers_per_node": 1, "scale": 1, "iterations": 1, "warm_up": 0}
        least_of["slice_elems"] = 1
        for name, least in least_of.items():
            number = getattr(self, name)
            if number is not None and number < least:
                raise ConfigError(f"{name} is {number}; at least {least}")
        if self.nodes > self.most_nodes:
            raise ConfigError(f"nodes is {self.nodes}; at most {self.most_nodes} on one machine")
        if self.workers > self.most_nodes:
            raise ConfigError(
                f"workers_per_node is {self.workers_per_node} on {self.nodes} nodes; at most"
                f" {self.most_nodes} workers on one machine"
            )
        if self.workers_per_node > 1 and any(name in MXNET for name in self.systems):
            raise ConfigError(
                f"workers_per_node is {self.workers_per_node}; mxnet-* can only be measured with 1"
            )
        if self.rate_bits_per_s is not None and self.balance is not None:
            raise ConfigError("rate and balance are both given: one follows from the other")
        for name in ("compute_s", "rate_bits_per_s", "balance"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be positive and finite")
        self._check_launch()
        self.unevenness.check(self.nodes)
        check_links(self.link_rates, self.cross_traffic, self.nodes)
        has_mxnet = any(name in MXNET for name in self.systems)
        for name in ("slow_nodes", "jitter", "step_jitter", "step_lengths"):
            if has_mxnet and (value := getattr(self, name)):
                raise ConfigError(f"{name} is {value}; mxnet-* can only be measured without")
        check_codecs(self.profile, self.compression)
        for system in self.systems:
            check = powersgd_rank if base_of(system) == DDP else partial(check_codecs, self.profile)
            check(self.codec_of(system))
        check_staleness(self.staleness, self.systems)
        if self.mxnet_python is None and has_mxnet:
            raise ConfigError("mxnet-* need mxnet_python: the Python of an environment with mxnet")

    def _check_launch(self) -> None:
        if self.launch_s is None:
            return
        least = time_text(_LEAST_LAUNCH_S)
        if not _LEAST_LAUNCH_S <= self.launch_s < math.inf:
            raise ConfigError(
                f"launch is {self.launch_s:g} s; it must be finite and at least {least}, as no"
                " operation of torch takes less"
            )
        if not self.launching_s:
            longest_s = max(max(layer.forward_s, layer.backward_s) for layer in self.layers)
            raise ConfigError(
                f"launch is {time_text(self.launch_s)}, of which not one fits into"
                f" {LAUNCH_SHARE:.0%} of any layer's pass (at most {time_text(longest_s)}); take a"
                " shorter one, or a longer compute"
            )

    def _knows(self, system: str) -> bool:
        whole, codec = split_codec(system)
        name, mark, size = whole.partition(SIZE_MARK)
        sized = not mark or (name in PRESETS and size.isdecimal() and int(size) > 0)
        coded = codec is None or name in (*self.coded_systems, *self.hooked_systems)
        return sized and coded and name in self.known_systems

    def slice_elems_of(self, system: str) -> int:
        name, mark, size = split_codec(system)[0].partition(SIZE_MARK)
        published = PRESETS.get(name, {}).get("slice_elems")
        usual = self._asked_slice_elems or published or self.unscaled_slice_elems
        elems = self.scaled(int(size) if mark else usual)
        return elems if mark or self._asked_slice_elems else filling_packets(elems)

    @property
    def unscaled_slice_elems(self) -> int:
        """``slice_elems``, or what the environment says, or the default."""
        return self._asked_slice_elems or default_slice_elems(self)

    @property
    def _asked_slice_elems(self) -> int | None:
        return self.slice_elems or slice_elems_from_environment()

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node

    def codec_of(self, system: str) -> str | None:
        """The codec that its name says, or for presets ``compression``; None for float32."""
        _, own = split_codec(system)
        common = self.compression if base_of(system) in self.coded_systems else None
        codec = common if own is None else own
        return None if codec == NONE else codec

    @property
    def layers(self) -> list[Layer]:
        return self.profile.layers(scale=self.scale, compute_s=self.compute_s)

    @property
    def launching_s(self) -> float:
        """What launching takes in a step of the profile's times, if nothing holds it up."""
        if self.launch_s is None:
            return 0.0
        passes_s = [s for layer in self.layers for s in (layer.forward_s, layer.backward_s)]
        return self.launch_s * sum(launches_in(seconds, self.launch_s) for seconds in passes_s)

    @property
    def rate(self) -> float:
        if self.rate_bits_per_s is not None:
            return self.rate_bits_per_s
        return rate_for_balance(self.layers, nodes=self.nodes, balance=self.balance or 1.0)

    @property
    def wire_s(self) -> float:
        size_bytes = limit.model_bytes(self.layers)
        return limit.wire_s(size_bytes, nodes=self.nodes, rate_bits_per_s=self.rate)

    @property
    def limit_s(self) -> float:
        """The limit that no schedule can beat, of a step or of the mean of those measured."""
        return self.limit_of(self.layers)

    def limit_of(self, layers: Sequence[Layer]) -> float:
        """The limit for layers of other sizes that take as long."""
        if self.is_even:
            return limit.limit_s(layers, nodes=self.nodes, rate_bits_per_s=self.rate)
        return min(self._placed_limit_s(layers, shares) for shares in self._placements)

    def _placed_limit_s(self, layers: Sequence[Layer], shares: tuple[int, ...]) -> float:
        """The limit if servers own such shares, by default about even ones."""
        size = self.slice_elems_of("p3")
        return criticalpath.limit_s(
            self.draw(range(self.workers)),
            criticalpath.plan_passage(layers, nodes=self.nodes, slice_elems=size, shares=shares),
            self.network,
            steps=self.iterations,
            workers_per_node=self.workers_per_node,
        )

    @property
    def _placements(self) -> set[tuple[int, ...]]:
        """Shares of servers to choose from.

        They are even, or such that slow links have the least to carry, or such that nodes that
        compute for longer have less, too.
        """
        suited = shares_of([self.network.left_of(node) for node in range(self.nodes)])
        late = range(self.nodes - self.slow_nodes, self.nodes) if self.slowdown else ()
        uneven = {tuple(shares) for shares in (suited, spare(suited, late))}
        return {(), *(shares for shares in uneven if len(set(shares)) > 1)}

    @property
    def unevenness(self) -> Unevenness:
        return Unevenness(**{name: getattr(self, name) for name in _UNEVEN_COMPUTE})

    @property
    def is_even(self) -> bool:
        return self.unevenness.is_even and not self.link_rates and not self.cross_traffic

    def draw(self, ranks: Sequence[int]) -> Draw:
        """The layers' times on these ranks; the first step that is measured has number 1."""
        return self.unevenness.draw(
            self.layers, ranks, nodes=self.nodes, workers_per_node=self.workers_per_node
        )

    @property
    def network(self) -> Network:
        return Network(
            nodes=self.nodes,
            rate_bits_per_s=self.rate,
            link_rates=self.link_rates,
            cross_traffic=self.cross_traffic,
            shape_ingress=self.shape_ingress,
            buffer_scale=self.scale,
        )

    @property
    def uneven(self) -> dict[str, Any]:
        """The fields that make nodes, links or steps differ, as records keep them."""
        if self.is_even:
            return {}
        changed = {name: value for name in UNEVEN if (value := getattr(self, name))}
        kept: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(changed))
        return kept

    @property
    def varies(self) -> bool:
        """Whether steps differ, so that the limit is of their mean."""
        return self.unevenness.is_drawn or bool(self.cross_traffic)

    def scaled(self, size: int) -> int:
        """A size of the unscaled model, divided as its arrays are."""
        return max(1, size // self.scale)


def launches_in(seconds: float, launch_s: float) -> int:
    """How many operations launch a layer's pass: as many as fit into `LAUNCH_SHARE` of it."""
    return int(LAUNCH_SHARE * seconds / launch_s)


def rate_for_balance(layers: Sequence[Layer], *, nodes: int, balance: float) -> float:
    """The link rate in bit/s at which ``wire_s / compute_s`` is ``balance``."""
    seconds = balance * limit.compute_s(layers)
    return limit.wire_s(model_bytes(layers), nodes=nodes, rate_bits_per_s=1.0) / seconds


def filling_packets(elems: int) -> int:
    """The elements of a slice, reduced so that its frame fills its packets if these are few."""
    packets = (HEADER_BYTES + elems * limit.BYTES_PER_ELEM) // limit.PACKET_BYTES
    if not 1 <= packets < _FEW_PACKETS:
        return elems
    return (packets * limit.PACKET_BYTES - HEADER_BYTES) // limit.BYTES_PER_ELEM


CANDIDATE_BUCKETS_BYTES = tuple(n * 2**20 for n in (1, 2, 5, 10, 25, 50))
"""The buckets that ddp-tuned tries, unscaled."""


def best_bucket(setting: LabSetting, step_s: Callable[[int, int], float]) -> int:
    """The scaled size with the shortest steps, of candidates that are tried one after the other.

    ``step_s`` measures a step, given the candidate as it is and scaled.
    """
    seconds: dict[int, float] = {}
    for candidate in CANDIDATE_BUCKETS_BYTES:
        size = setting.scaled(candidate)
        if seconds and size > 2 * model_bytes(setting.layers):
            break  # one bucket holds everything
        seconds[size] = step_s(candidate, size)
    return min(seconds, key=lambda size: seconds[size])


_DEFAULT = Config()


def foreprop_config(name: str, setting: LabSetting, **changes: Any) -> Config:
    """The settings of a session of one of foreprop's systems, in the lab and in the simulator."""
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
    """The settings of the environment that a run takes, as they are there."""
    named = {*SAID_BY_SYSTEMS, *(("slice_elems",) if setting.slice_elems else ())}
    return {name: value for name, value in settings_found().items() if name not in named}


def environment_text(setting: LabSetting) -> str:
    """A line for a person about what the environment has changed; empty if nothing."""
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

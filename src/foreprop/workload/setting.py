"""What one run of the lab is to measure: the settings, and what they make of each system."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from foreprop.config import PRESETS
from foreprop.core.codec import NONE
from foreprop.core.linkshares import shares_of, spare
from foreprop.core.slicing import usual_slice_elems
from foreprop.core.staleness import Staleness
from foreprop.core.wire import HEADER_BYTES
from foreprop.errors import ConfigError
from foreprop.workload import criticalpath, limit
from foreprop.workload.foundsettings import default_slice_elems, slice_elems_from_environment
from foreprop.workload.limit import BYTES_PER_ELEM, model_bytes
from foreprop.workload.links import CrossTraffic, LinkRate, check_links
from foreprop.workload.network import Network
from foreprop.workload.profile import Layer, Profile
from foreprop.workload.systemnames import SIZE_MARK, base_of, check_staleness, split_codec
from foreprop.workload.unevenness import Draw, StepLengths, Unevenness
from foreprop.workload.wirecodecs import check_codecs, powersgd_rank


def option(
    text: str, default: Any = MISSING, *, least: float | None = None, most: float | None = None
) -> Any:
    """A dataclass's field; ``text`` is what the option's help says."""
    metadata = {"help": text, "min": least, "max": most}
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


DDP = "ddp"
DDP_TUNED = "ddp-tuned"
MXNET = ("mxnet-kvstore", "mxnet-p3")
DDP_SPARSE = "ddp-sparse"
"""DDP whose tables have sparse gradients, which it gathers."""
RING = "ring"
HYBRID = "hybrid"
"""As ``ring``, with servers beside it for the rows of tables."""
AUTO = {"auto": "auto", "p3-auto": "p2p"}
"""What plans for itself, slices and all: by name the ``architecture`` that is asked for."""
SERVERS = "p3-servers"
"""The preset p3, whose servers update."""
CLIPPED = {"p3-clip": "auto", "p3-clip-setting": "servers"}
"""The preset p3 in a loop that clips: with ``clip_grad_norm_``, or as a setting. By name who
updates."""
SYSTEMS = (*PRESETS, RING, *AUTO, SERVERS, *CLIPPED, DDP, DDP_TUNED, *MXNET)

DISCARDED_STEPS = 1
"""Of each block: TCP begins anew after a pause."""
RING_STEPS = 9
"""Until a ring has planned its order twice."""
CLIP_NORM = 1.0
"""The largest norm of those that clip."""


_UNEVEN_COMPUTE = tuple(spec.name for spec in fields(Unevenness))
UNEVEN = (*_UNEVEN_COMPUTE, "link_rates", "cross_traffic")
"""The fields that make nodes, links or steps differ."""
_FEW_PACKETS = 8
_SLICES_PER_S = 1000
_USUAL_NODES = 4
_MORE_NODES_EXPONENT = 1.25  # a slice is sent to more nodes, by processes of more threads


def usual_compute_s(profile: Profile, nodes: int) -> float:
    """A step's compute: as measured, or with time to spare for two CPUs that do every node's work.

    What they do per step grows with the slices, of the usual size, whatever the scale.
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
    """Decides the rate if none is given."""
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
    """By default what a session on so many nodes cuts (`slice_elems_of`)."""
    compression: str | None = option(
        "Codec of the presets' frames, as int8 or lossless:0.7; auto, or auto:int8 for nothing"
        " lossier; or PATTERN=CODEC, separated by commas. Of one system: p3+int8, or p3+none.",
        None,
    )
    """The rate that follows from ``balance`` is that of float32."""
    slow_nodes: int = option("Nodes that compute more slowly.", 0)
    """The last ones."""
    slowdown: float = option(
        "Slow nodes take 1 + this times as long, as 0.5 for half as long again.", 0.0
    )
    jitter: float = option("Draw each layer's time anew, up to this share off, as 0.2.", 0.0)
    """On every node and in every step."""
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
    """Those that can pace their own sockets, where there are no links made by the kernel."""
    coded_systems: ClassVar[tuple[str, ...]] = tuple(PRESETS)
    hooked_systems: ClassVar[tuple[str, ...]] = (DDP,)
    """Those that may be compressed by codecs, and by hooks of torch's."""
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
        self._check_evenness()
        self._check_codecs()
        check_staleness(self.staleness, self.systems)
        if self.mxnet_python is None and any(name in MXNET for name in self.systems):
            raise ConfigError("mxnet-* need mxnet_python: the Python of an environment with mxnet")

    def _check_codecs(self) -> None:
        check_codecs(self.profile, self.compression)
        for system in self.systems:
            check = powersgd_rank if base_of(system) == DDP else partial(check_codecs, self.profile)
            check(self.codec_of(system))

    def _check_evenness(self) -> None:
        self.unevenness.check(self.nodes)
        check_links(self.link_rates, self.cross_traffic, self.nodes)
        if not any(name in MXNET for name in self.systems):
            return
        for name in ("slow_nodes", "jitter", "step_jitter", "step_lengths"):
            if value := getattr(self, name):
                raise ConfigError(f"{name} is {value}; mxnet-* can only be measured without")

    def _knows(self, system: str) -> bool:
        whole, codec = split_codec(system)
        name, mark, size = whole.partition(SIZE_MARK)
        sized = not mark or (name in PRESETS and size.isdecimal() and int(size) > 0)
        coded = codec is None or name in (*self.coded_systems, *self.hooked_systems)
        return sized and coded and name in self.known_systems

    def slice_elems_of(self, system: str) -> int:
        """Scaled: what the system's name says, ``slice_elems``, the environment, or the usual ones.

        Usual ones fill whole packets where they are few: packets are not divided as the arrays are,
        so that the last one, hardly used, would cost a share that it does not cost unscaled.
        """
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
        """Of all nodes together."""
        return self.nodes * self.workers_per_node

    def codec_of(self, system: str) -> str | None:
        """What its name says, or for presets ``compression``; None: it sends float32."""
        _, own = split_codec(system)
        common = self.compression if base_of(system) in self.coded_systems else None
        codec = common if own is None else own
        return None if codec == NONE else codec

    @property
    def layers(self) -> list[Layer]:
        return self.profile.layers(scale=self.scale, compute_s=self.compute_s)

    @property
    def rate(self) -> float:
        """The links' rate, bit/s."""
        if self.rate_bits_per_s is not None:
            return self.rate_bits_per_s
        return limit.rate_for_balance(self.layers, nodes=self.nodes, balance=self.balance or 1.0)

    @property
    def wire_s(self) -> float:
        """`limit.wire_s` of the scaled model."""
        size_bytes = limit.model_bytes(self.layers)
        return limit.wire_s(size_bytes, nodes=self.nodes, rate_bits_per_s=self.rate)

    @property
    def limit_s(self) -> float:
        """What no schedule can beat; where steps differ, of the mean of those that are measured."""
        return self.limit_of(self.layers)

    def limit_of(self, layers: Sequence[Layer]) -> float:
        """The same for layers of other sizes, that take as long."""
        if self.is_even:
            return limit.limit_s(layers, nodes=self.nodes, rate_bits_per_s=self.rate)
        return min(self._placed_limit_s(layers, shares) for shares in self._placements)

    def _placed_limit_s(self, layers: Sequence[Layer], shares: tuple[int, ...]) -> float:
        """If servers own such shares; without, about even ones."""
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
        """Shares of servers: even ones; such that slow links have the least to carry; and such that
        nodes that compute for longer have less."""
        suited = shares_of([self.network.left_of(node) for node in range(self.nodes)])
        late = range(self.nodes - self.slow_nodes, self.nodes) if self.slowdown else ()
        uneven = {tuple(shares) for shares in (suited, spare(suited, late))}
        return {(), *(shares for shares in uneven if len(set(shares)) > 1)}

    @property
    def unevenness(self) -> Unevenness:
        """Of the compute."""
        return Unevenness(**{name: getattr(self, name) for name in _UNEVEN_COMPUTE})

    @property
    def is_even(self) -> bool:
        """Whether nodes, links and steps are all alike."""
        return self.unevenness.is_even and not self.link_rates and not self.cross_traffic

    def draw(self, ranks: Sequence[int]) -> Draw:
        """What the layers take on these ranks; the first step that is measured has number 1."""
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
        """By field, what makes nodes, links or steps differ, as records keep it."""
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


def filling_packets(elems: int) -> int:
    """As many, or so much fewer that their frame fills its packets, if these are few."""
    packets = (HEADER_BYTES + elems * limit.BYTES_PER_ELEM) // limit.PACKET_BYTES
    if not 1 <= packets < _FEW_PACKETS:
        return elems
    return (packets * limit.PACKET_BYTES - HEADER_BYTES) // limit.BYTES_PER_ELEM


# The buckets of DistributedDataParallel.
BUCKET_BYTES = 25 * 2**20
"""DDP's buckets, unscaled."""
CANDIDATE_BUCKETS_BYTES = tuple(n * 2**20 for n in (1, 2, 5, 10, 25, 50))
"""What ddp-tuned tries, unscaled."""


def fill_buckets(sizes_elems: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """DDP's: the arrays' numbers, last first; a bucket is closed when it holds ``bucket_bytes``."""
    buckets: list[list[int]] = []
    held_bytes = bucket_bytes
    for number in reversed(range(len(sizes_elems))):
        if held_bytes >= bucket_bytes:
            buckets.append([])
            held_bytes = 0
        buckets[-1].append(number)
        held_bytes += sizes_elems[number] * BYTES_PER_ELEM
    return buckets


def best_bucket(setting: LabSetting, step_s: Callable[[int, int], float]) -> int:
    """The scaled size with the shortest steps, tried one after the other.

    ``step_s``: the time of a step, of a candidate as it is and scaled.
    """
    seconds: dict[int, float] = {}
    for candidate in CANDIDATE_BUCKETS_BYTES:
        size = setting.scaled(candidate)
        if seconds and size > 2 * model_bytes(setting.layers):
            break  # one bucket holds everything
        seconds[size] = step_s(candidate, size)
    return min(seconds, key=lambda size: seconds[size])

"""What the refined model predicts a step of: a model's layers, an architecture, hosts, links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from foreprop.config import PRESETS, Config
from foreprop.core.codecfacts import KnownCodec
from foreprop.core.parallax import Topology
from foreprop.core.slicing import BIG_ARRAY_ELEMS, Partition, usual_slice_elems
from foreprop.errors import ConfigError
from foreprop.plan import limit
from foreprop.plan.profile import Layer

ModelledArchitecture = Literal["p2p", "ps", "ring", "hybrid", "ddp"]
"""Those of `foreprop.Config`, and DistributedDataParallel, which reduces buckets in a ring."""
Resource = Literal["compute", "wire", "server", "relays", "latency"]
"""``wire``: the links of machines with workers; ``server``: those of others, and all updates;
``relays``: the processor of what sums the gradients of a node's workers."""
RESOURCES: tuple[Resource, ...] = get_args(Resource)
BUCKET_BYTES = 25 * 2**20  # DDP's


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The costs of every host of a cluster, by default a usual machine's.

    They are of the order that `foreprop bench overhead` and `bench wire` measure; ten times as much
    changes a step of ResNet-50 and Sockeye at balance 1.0 by less than 0.5 % with p3 and slicing,
    by up to 2.6 % with kvstore. Relays' costs are for the model, not for the simulation; they were
    measured with two and four workers (docs/plan.md).
    """

    send_s: float = 60e-6
    """The time from the last byte taken to the next frame: a thread wakes, the machine decides."""
    receive_s: float = 150e-6
    """The time from the last byte of a frame to the machine's event."""
    server_byte_s: float = 0.0
    """A server's processor time for each byte that it receives or sends: copies, serialising, sums.
    What passes between a node's workers and its relays costs nothing."""
    relay_byte_s: float = 1.2e-9
    """The processor time of a node's relays for each byte that they push on, answers included."""
    relay_worker_byte_s: float = 0.6e-9
    """The same for each byte that one of the node's workers pushes to it."""
    update_s: float = 60e-6  # to begin an update, whatever its size
    sum_elem_s: float = 0.4e-9  # of one worker's gradient
    update_elem_s: float = 0.7e-9  # by SGD with momentum
    copy_byte_s: float = 0.4e-9  # by loopback

    def updating_s(self, elems: int, workers: int) -> float:
        """How long a server sums and updates so many elements; 0 workers: they are summed."""
        return self.update_s + elems * (self.update_elem_s + workers * self.sum_elem_s)


_USUAL_HOSTS = Hosts()
_DEFAULT = Config()


class Table(NamedTuple):
    """An embedding with sparse gradients, held row by row, beside the arrays of its layer.

    A worker touches the share ``alpha`` of its rows in a step (Parallax, section 3.1).
    """

    layer: int
    """Its place in `Deployment.layers`."""
    elems: int
    row_elems: int
    alpha: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A model on a cluster. Raises `ConfigError` for what cannot be.

    ``layers`` are in forward order, with the time of each on one worker; ``nodes`` are machines
    with workers, whose links carry ``rate_bits_per_s`` each way. ``preset`` is for ``p2p`` and
    ``ps``. The touched rows of ``tables`` go to servers with ``p2p``, ``ps`` and ``hybrid`` (there
    beside the workers), and to all ranks with ``ddp``; ``ring`` reduces tables whole.
    """

    layers: Sequence[Layer]
    architecture: ModelledArchitecture = "p2p"
    preset: str = "p3"
    nodes: int
    workers_per_node: int = 1
    local_aggregation: bool = True
    """A node's workers send one push; for servers only."""
    dedicated_servers: int = 0
    rate_bits_per_s: float
    server_rate_bits_per_s: float | None = None
    """A dedicated server's link, if that is another rate."""
    latency_s: float = 100e-6
    """The time from one host to another, without queues."""
    bytes_per_elem: int = limit.BYTES_PER_ELEM
    """The bytes on the wire: 2 with ``wire_dtype``."""
    tables: Sequence[Table] = ()
    dense_gradients: bool = False
    """Tables are reduced whole with ``ddp``, too (``sparse=False``)."""
    slice_elems: int | None = None
    """The elements of a slice; None: as a session with so many servers cuts."""
    big_array_elems: int = BIG_ARRAY_ELEMS
    chunk_elems: int = _DEFAULT.chunk_elems
    chunks_in_flight: int = _DEFAULT.chunks_in_flight
    bucket_bytes: int = BUCKET_BYTES
    hosts: Hosts = _USUAL_HOSTS
    codecs: Sequence[KnownCodec] = ()
    """The codec of each array, in forward order, for ``p2p`` and ``ps``; empty: none is encoded.
    Each thread that encodes or decodes has a core to itself."""
    row_codec: KnownCodec | None = None
    """An exact codec of the tables' rows, for ``p2p`` and ``ps``; row numbers are not encoded."""

    def __post_init__(self) -> None:
        if self.architecture not in get_args(ModelledArchitecture):
            known = ", ".join(get_args(ModelledArchitecture))
            raise ConfigError(f"architecture is {self.architecture!r}; there are {known}")
        if self.preset not in PRESETS:
            raise ConfigError(f"preset is {self.preset!r}; there are {', '.join(PRESETS)}")
        if not self.layers:
            raise ConfigError("layers is empty; a model has at least one")
        least_of = {"nodes": 1, "workers_per_node": 1, "dedicated_servers": 0, "bytes_per_elem": 1}
        sizes = ("slice_elems", "big_array_elems", "chunk_elems", "chunks_in_flight")
        least_of |= dict.fromkeys((*sizes, "bucket_bytes"), 1)
        for name, least in least_of.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; at least {least}")
        if (self.architecture == "ps") != (self.dedicated_servers > 0):
            raise ConfigError(
                f"architecture is {self.architecture!r} and dedicated_servers is"
                f" {self.dedicated_servers}; 'ps' has some, the others have none"
            )
        for name in ("rate_bits_per_s", "server_rate_bits_per_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}; it must be positive")
        if not 0 <= self.latency_s < math.inf:
            raise ConfigError(f"latency_s is {self.latency_s}; it must be finite and at least 0")
        arrays = sum(len(layer.sizes_elems) for layer in self.layers)
        if self.codecs and len(self.codecs) != arrays:
            raise ConfigError(f"codecs has {len(self.codecs)}; there are {arrays} arrays")
        if (self.codecs or self.row_codec) and self.architecture not in ("p2p", "ps"):
            raise ConfigError(
                f"architecture is {self.architecture!r} and codecs are given; only 'p2p' and 'ps'"
                " send arrays that are encoded"
            )
        if self.row_codec is not None and not self.row_codec.facts.exact:
            raise ConfigError(
                f"row_codec is {self.row_codec.name!r}; rows take an exact one, as 'lossless'"
            )
        for layer, elems, row_elems, alpha in self.tables:
            if not 0 <= layer < len(self.layers):
                raise ConfigError(f"a table's layer is {layer}; there are {len(self.layers)}")
            if elems < 1 or row_elems < 1:
                raise ConfigError(f"a table has {elems} elements, {row_elems} per row")
            if not 0 <= alpha <= 1:
                raise ConfigError(f"a table's alpha is {alpha}; it must be from 0 to 1")

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node

    @property
    def servers(self) -> int:
        return self.dedicated_servers or self.nodes

    @property
    def pushes_per_node(self) -> int:
        """How often a node pushes each slice in a step."""
        return self.topology.pushes_per_node

    @property
    def topology(self) -> Topology:
        return Topology(
            self.nodes, self.workers_per_node, self.dedicated_servers, self.local_aggregation
        )

    @property
    def relayed(self) -> bool:
        several = self.workers_per_node > 1 and self.local_aggregation
        return several and self.architecture in ("p2p", "ps", "hybrid")

    def pushed_share(self, table: Table) -> float:
        """The share of a table's rows that each push to the servers has."""
        return self.topology.pushed_share(table.alpha)

    @property
    def message_s(self) -> float:
        """The time from the last byte sent until the receiver has it in hand."""
        return self.latency_s + self.hosts.receive_s

    @property
    def copied_bytes_per_s(self) -> float:
        return 1 / max(self.hosts.copy_byte_s, 1e-12)

    def link_bytes_per_s(self, *, server: bool = False) -> float:
        """What a link carries without headers, with acknowledgements of as much the other way."""
        dedicated = self.server_rate_bits_per_s if server else None
        return (dedicated or self.rate_bits_per_s) / 8 / (limit.HEADER_FACTOR + ACKNOWLEDGED)

    def partition(self) -> Partition:
        """How a session with this preset would cut and place the arrays."""
        preset = PRESETS[self.preset]
        return Partition(
            granularity=preset["granularity"],
            placement=preset["placement"],
            servers=self.servers,
            slice_elems=self.slice_elems
            or preset.get("slice_elems", usual_slice_elems(self.servers)),
            big_array_elems=self.big_array_elems,
        )


def without(deployment: Deployment, resource: Resource) -> Deployment:
    """The deployment as it were if a resource cost nothing."""
    hosts = deployment.hosts
    if resource == "compute":
        layers = [replace(layer, forward_s=0.0, backward_s=0.0) for layer in deployment.layers]
        return replace(deployment, layers=layers)
    if resource == "relays":
        free = replace(hosts, relay_byte_s=0.0, relay_worker_byte_s=0.0)
        return replace(deployment, hosts=free)
    if resource == "wire":
        server_rate = deployment.server_rate_bits_per_s or deployment.rate_bits_per_s
        return replace(deployment, rate_bits_per_s=_ENDLESS, server_rate_bits_per_s=server_rate)
    if resource == "server":
        free = replace(hosts, update_s=0.0, sum_elem_s=0.0, update_elem_s=0.0, server_byte_s=0.0)
        return replace(deployment, server_rate_bits_per_s=_ENDLESS, hosts=free)
    quick = replace(hosts, send_s=0.0, receive_s=0.0)
    return replace(deployment, latency_s=0.0, hosts=quick)


_ENDLESS = 1e18  # bits per second
ACKNOWLEDGED = limit.HEADERS_BYTES / (2 * limit.PACKET_BYTES)
"""The bytes of acknowledgements for each byte that TCP carries the other way: every second packet
has one of its own."""

"""What all processes of a session must agree on; each sends it as its manifest after the greeting.

Nothing is pickled: the manifest is JSON with a fixed schema, and the optimizer is a class name from
an allow-list with plain numbers. What follows from a manifest, such as slices, every process works
out for itself and gets the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import msgspec

from foreprop.core.codec import lossy_names
from foreprop.core.frames import Peers, each_worker, nodes
from foreprop.core.sendqueue import LaneRule, Order, Reply
from foreprop.core.slicing import (
    Granularity,
    Packs,
    Partition,
    Placement,
    Shard,
    Slice,
    packed_elems,
    places_in,
    plan_shards,
    plan_slices,
)

Reduction = Literal["mean", "sum"]

_CLIP_EPSILON = 1e-6  # torch's


class Aggregation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of how gradients become one, see `foreprop.Config`."""

    reduction: Reduction = "mean"
    sparse_reduction: Reduction | None = None
    """The reduction of sparse gradients (Parallax's average_sparse); None: the same."""
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    ema: float | None = None
    skip_nonfinite: bool = False
    """Gradients are of a scaled loss; a step in which some are not finite is left out."""

    check_finite: bool = False
    """A rank's gradient that is not finite ends the session, and the error names the rank."""

    @property
    def reports_nonfinite(self) -> bool:
        return self.check_finite and not self.skip_nonfinite  # a loss scaler makes some, as usual

    def reduction_of(self, *, sparse: bool) -> Reduction:
        return self.sparse_reduction or self.reduction if sparse else self.reduction

    @property
    def needs_norm(self) -> bool:
        """Whether no update of a step may begin before all its gradients are aggregated."""
        return self.clip_grad_norm is not None or self.skip_nonfinite

    def skips(self, norm: float) -> bool:
        """Whether a step with this global norm is left out."""
        return self.skip_nonfinite and not math.isfinite(norm)

    @property
    def needs_every_parameter(self) -> bool:
        """Whether ranks also push parameters that can have no gradient.

        The norm is of all of them, and moving averages move in every step.
        """
        return self.needs_norm or self.ema is not None

    def coefficient(self, norm: float) -> float:
        """The factor for gradients of this global norm, as torch's ``clip_grad_norm_`` has it."""
        if self.clip_grad_norm is None:
            return 1.0
        coefficient = self.clip_grad_norm / (norm + _CLIP_EPSILON)
        return 1.0 if coefficient > 1.0 else coefficient  # not a number stays that


ITEMSIZE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""The parameter types that can be synchronised."""

MOST_PROCESSES = 2**16
"""The most workers, and the most servers: a frame's header has 16 bits for the sender's number."""

WireDtype = Literal["bfloat16", "float16"]

BUFFERS_BLOB, FROZEN_BLOB = 0, 1
"""The numbers of the blob that holds all buffers, and of the first of a frozen parameter."""

SCALE = "grad_scale"
"""The factor of the loss: the one number of a group of its own, after the others."""

Number = bool | int | float | None | list[float]
Hyperparameters = dict[str, Number]


class Knobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The protocol's settings, see `foreprop.Config` for their meaning."""

    granularity: Granularity
    placement: Placement
    order: Order
    reply: Reply
    lanes: LaneRule = "peers"
    servers: int
    slice_elems: int
    big_array_elems: int
    shares: tuple[int, ...] = ()
    """How much each server owns, relative to the others; empty: all the same."""
    aggregation: Aggregation = Aggregation()
    wire_dtype: WireDtype | None = None
    compression: tuple[tuple[str, str], ...] = ()
    """Patterns of names, and their codecs (`core.codec`); empty: everything is sent as it is."""
    staleness: int | Literal["async"] = 0
    delay_compensation: float = 0.0
    elastic: bool = False
    max_workers: int = 0
    """How many ranks there may be; 0: as many as at the start."""
    backup_workers: int = 0
    counted_replay: bool = False
    packs: Packs = ()
    """Small parameters, by number, that share a slice: see `core.slicing`."""

    @property
    def counts_some(self) -> bool:
        """Whether a step may count some workers' pushes only."""
        return self.elastic or self.backup_workers > 0 or self.counted_replay

    @property
    def steps_apart(self) -> int:
        """How many steps workers may be apart; 0 if there is no bound."""
        return self.staleness if isinstance(self.staleness, int) else 0


class RingKnobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a session over collectives, where every rank updates by itself."""

    chunk_elems: int
    chunks_in_flight: int
    aggregation: Aggregation
    wire_dtype: WireDtype | None
    settings: tuple[dict[str, Any], ...]
    """The optimizer's, by group; they may be anything, as nobody makes the optimizer anew."""
    compression: tuple[tuple[str, str], ...] = ()
    packs: Packs = ()
    """Small parameters, by number, that are summed as one: see `core.slicing`."""


def wire_dtype_of(dtype: str, wire_dtype: WireDtype | None) -> str:
    """The type on the wire of gradients and new values of a parameter: only float32 is cast."""
    return wire_dtype if wire_dtype is not None and dtype == "float32" else dtype


def wire_dtypes_of(
    parameters: Sequence[ParameterInfo],
    wire_dtype: WireDtype | None,
    choices: Sequence[tuple[str, str]],
) -> list[str]:
    """Each parameter's type on the wire, or before it is encoded: lossy codecs take float32."""
    lossy: set[str] = set()
    if wire_dtype is not None and choices:
        lossy = lossy_names({info.name: info.shape for info in parameters}, choices)
    return [
        wire_dtype_of(info.dtype, None if info.name in lossy else wire_dtype) for info in parameters
    ]


NO_GROUP = -1
"""The group of a parameter that servers never update: workers do, or nobody does."""


Distribution = Literal["normal", "uniform", "constant"]


class RowInit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How servers make a remote table's rows (`core.rowinit`).

    ``first`` and ``second`` are mean and standard deviation of ``normal``, both ends of
    ``uniform``, or the value of ``constant``. The ``key``, below 2**64, follows from the seed and
    the table's name. A ``padding_row`` begins as zeros.
    """

    distribution: Distribution
    first: float
    second: float
    key: int
    padding_row: int | None = None


class ParameterInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int
    """One of the optimizer's groups, or `NO_GROUP`."""
    rows: bool = False
    """Servers hold it row-wise (an embedding's table), not in slices."""
    sparse: bool = False
    """Its gradients are sparse, as the model says; wherever it is held."""
    init: RowInit | None = None
    """How servers make the rows of a remote table, which no worker has."""
    requires_grad: bool = True
    """Its value at `parallelize`; ranks report later changes (`core.freezing`)."""

    @property
    def elems(self) -> int:
        total = 1
        for extent in self.shape:
            total *= extent
        return total


class OptimizerInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    groups: tuple[Hyperparameters, ...] = ()
    """The groups that servers make their optimizers from; none without servers."""


AnyKnobs = TypeVar("AnyKnobs", Knobs, RingKnobs)


class AnyManifest(
    msgspec.Struct, Generic[AnyKnobs], frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A session with servers has a `Manifest`, one over collectives a `RingManifest`."""

    foreprop: str
    torch: str
    byteorder: str
    session: str
    world_size: int
    knobs: AnyKnobs
    optimizer: OptimizerInfo
    parameters: tuple[ParameterInfo, ...]
    blob_bytes: tuple[int, ...]
    """Bytes of all buffers (first), and of each parameter that the optimizer does not have."""
    workers_per_push: int = 1
    """How many workers' gradients one push has: a node's with local aggregation."""

    @property
    def most_workers(self) -> int:
        """How many ranks there may be: an elastic session may grow."""
        more: int = getattr(self.knobs, "max_workers", 0)  # a ring has no such knob
        return max(self.world_size, more)

    @property
    def serves(self) -> bool:
        """Whether servers update anything; otherwise they do nothing but average."""
        return any(info.group != NO_GROUP for info in self.parameters)

    @property
    def needs_norm(self) -> bool:
        """Whether servers need the norm of a step, and so a push of every parameter."""
        return self.knobs.aggregation.needs_norm and self.serves

    @property
    def decay_per_update(self: Manifest) -> float | None:
        """The decay of moving averages, for one of the updates that a step has."""
        decay = self.knobs.aggregation.ema
        # with staleness each rank's push is an update by itself
        return decay ** (1 / self.world_size) if decay and self.knobs.staleness else decay

    def mean_over(self: Manifest, counted: Sequence[int] | None) -> int:
        """How many workers the mean of an update is over; ``counted`` None: it counts all."""
        # with staleness an update is one push, which is a share of all
        return self.most_workers if counted is None or self.knobs.staleness else len(counted)

    @property
    def outlives_servers(self: Manifest) -> bool:
        """Whether the session goes on without a server, as workers have all that it has."""
        return self.knobs.elastic and not self.serves

    def peers(self) -> Peers:
        """The workers, or the nodes' relays, that push to the servers."""
        if self.workers_per_push == 1:
            return each_worker(self.most_workers, self.world_size)
        return nodes(self.world_size, self.workers_per_push)

    def wire_dtypes(self) -> list[str]:
        return wire_dtypes_of(self.parameters, self.knobs.wire_dtype, self.knobs.compression)

    def reductions(self) -> list[Reduction]:
        reduction_of = self.knobs.aggregation.reduction_of
        return [reduction_of(sparse=info.sparse) for info in self.parameters]

    def slices(self: Manifest) -> tuple[Slice, ...]:
        partition = Partition(
            granularity=self.knobs.granularity,
            placement=self.knobs.placement,
            servers=self.knobs.servers,
            slice_elems=self.knobs.slice_elems,
            big_array_elems=self.knobs.big_array_elems,
            shares=self.knobs.shares,
        )
        itemsizes = [ITEMSIZE_BYTES[dtype] for dtype in self.wire_dtypes()]
        return plan_slices(self.sliced_elems(), itemsizes, partition)

    def sliced_elems(self: Manifest) -> list[int]:
        """How much is cut into slices by parameter: the first one of a pack has all of it."""
        own = [0 if info.rows else info.elems for info in self.parameters]
        return packed_elems(own, self.knobs.packs)

    def places_of(self: Manifest, piece: Slice) -> list[tuple[int, int]]:
        """Where each parameter's elements begin and end in a slice, which may be a pack."""
        pack = next((pack for pack in self.knobs.packs if pack[0] == piece.parameter), None)
        if pack is None:
            return [(0, piece.elems)]
        return list(places_in([self.parameters[number].elems for number in pack]))

    def is_served(self, piece: Slice) -> bool:
        return self.parameters[piece.parameter].group != NO_GROUP

    def shards(self: Manifest, slices: int) -> tuple[Shard, ...]:
        """The shards of the row-wise parameters, numbered after so many ``slices``."""
        tables = [
            (number, info.shape[0], info.shape[1])
            for number, info in enumerate(self.parameters)
            if info.rows
        ]
        remote = {n for n, info in enumerate(self.parameters) if info.init is not None}
        servers = self.knobs.servers
        return plan_shards(tables, servers=servers, first_number=slices, remote=remote)

    def slice_names(self: Manifest) -> list[str]:
        """The parameters' names by number of the slice or shard."""
        slices: tuple[Slice, ...] = self.slices()
        pieces: list[Slice | Shard] = [*slices, *self.shards(len(slices))]
        return [self.parameters[piece.parameter].name for piece in pieces]

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


Manifest: TypeAlias = AnyManifest[Knobs]
RingManifest: TypeAlias = AnyManifest[RingKnobs]

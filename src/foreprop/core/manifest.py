"""What all processes of a session must agree on, as it travels after the greeting.

Nothing is pickled: the manifest is JSON with a fixed schema, the optimizer is a class name from an
allow-list with plain numbers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

import msgspec

from foreprop.core.frames import Peers, each_worker, nodes
from foreprop.core.packs import Packs, packed_elems, places_in
from foreprop.core.sendqueue import LaneRule, Order, Reply
from foreprop.core.slicing import (
    Granularity,
    Partition,
    Placement,
    Slice,
    plan_slices,
)

if TYPE_CHECKING:
    from foreprop.core.shards import Shard

Reduction = Literal["mean", "sum"]

_CLIP_EPSILON = 1e-6  # torch's


class Aggregation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that all processes of a session must share, see `foreprop.Config`."""

    reduction: Reduction = "mean"
    sparse_reduction: Reduction | None = None
    """Of sparse gradients (Parallax's average_sparse); None: the same."""
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    ema: float | None = None
    skip_nonfinite: bool = False
    """Gradients are of a scaled loss; a step in which some are not finite is left out."""

    check_finite: bool = False
    """A rank's gradient that is not finite ends the session, with its name."""

    @property
    def reports_nonfinite(self) -> bool:
        """Whether gradients that are not finite are an error: with a scaler they are normal."""
        return self.check_finite and not self.skip_nonfinite

    def reduction_of(self, *, sparse: bool) -> Reduction:
        """For parameters whose gradients are sparse, or dense."""
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
        """Whether ranks tell also of parameters that can have no gradient.

        The norm is of all of them, and averages move in every step.
        """
        return self.needs_norm or self.ema is not None

    def coefficient(self, norm: float) -> float:
        """What to multiply gradients of this global norm by, as torch's ``clip_grad_norm_``."""
        if self.clip_grad_norm is None:
            return 1.0
        coefficient = self.clip_grad_norm / (norm + _CLIP_EPSILON)
        return 1.0 if coefficient > 1.0 else coefficient  # not a number stays that


ITEMSIZE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""The parameter types that can be synchronised."""

MOST_PROCESSES = 2**16
"""Workers, and servers: a frame's header has 16 bits for the sender's number."""

WireDtype = Literal["bfloat16", "float16"]

BUFFERS_BLOB, FROZEN_BLOB = 0, 1
"""The numbers of the blob that holds all buffers, and of the first of a frozen parameter."""

SCALE = "grad_scale"
"""What a loss is multiplied by: the one number of a group of its own, after the others."""

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
    placement_seed: int
    shares: tuple[int, ...] = ()
    """What each server owns, relative to the others; empty: all as much."""
    aggregation: Aggregation = Aggregation()
    wire_dtype: WireDtype | None = None
    compression: tuple[tuple[str, str], ...] = ()
    """Patterns of names, and their codecs (`core.codec`); empty: everything is sent as it is."""
    staleness: int | Literal["async"] = 0
    delay_compensation: float = 0.0
    elastic: bool = False
    max_workers: int = 0
    """Ranks that there may be; 0: as many as at the start."""
    backup_workers: int = 0
    counted_replay: bool = False
    packs: Packs = ()
    """Small parameters, by number, that share a slice: see `core.packs`."""


class RingKnobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a session over collectives, where every rank updates by itself."""

    chunk_elems: int
    chunks_in_flight: int
    aggregation: Aggregation
    wire_dtype: WireDtype | None
    settings: tuple[dict[str, Any], ...]
    """The optimizer's, of each of its groups; whatever they are, for nobody is to make it anew."""
    compression: tuple[tuple[str, str], ...] = ()


def wire_dtype_of(dtype: str, wire_dtype: WireDtype | None) -> str:
    """What gradients and new values of a parameter of this type travel in: only float32 is cast."""
    return wire_dtype if wire_dtype is not None and dtype == "float32" else dtype


NO_GROUP = -1
"""Of a parameter that servers never update: workers do, or nobody does."""


Distribution = Literal["normal", "uniform", "constant"]


class RowInit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How servers make a remote table's rows (`core.rowinit`).

    ``first`` and ``second``: of ``normal`` mean and standard deviation, of ``uniform`` from and
    to, of ``constant`` the value.
    """

    distribution: Distribution
    first: float
    second: float
    key: int
    """Below 2**64; of the seed and the table's name."""
    padding_row: int | None = None
    """A row that begins as zeros."""


class ParameterInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int
    """Of the optimizer's groups, or `NO_GROUP`."""
    rows: bool = False
    """Held row-wise by the servers (an embedding's table), not in slices."""
    sparse: bool = False
    """Its gradients are sparse, as the model says; wherever it is held."""
    init: RowInit | None = None
    """Of a remote table, whose rows no worker has: how servers make them."""
    requires_grad: bool = True
    """At `parallelize`. Changes are told as they come (`core.freezing`)."""

    @property
    def elems(self) -> int:
        total = 1
        for extent in self.shape:
            total *= extent
        return total


class OptimizerInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    groups: tuple[Hyperparameters, ...] = ()
    """What servers make theirs of; none without servers."""


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
    """How many workers' gradients are in one push to a server: with local aggregation, a node's."""

    @property
    def most_workers(self) -> int:
        """Ranks that there may be: more than at the start in an elastic session that may grow."""
        more: int = getattr(self.knobs, "max_workers", 0)  # a ring has no such knob
        return max(self.world_size, more)

    @property
    def serves(self) -> bool:
        """Whether servers update anything; else they do nothing but average."""
        return any(info.group != NO_GROUP for info in self.parameters)

    @property
    def needs_norm(self) -> bool:
        """Whether servers need the norm of a step, and word of every parameter for it."""
        return self.knobs.aggregation.needs_norm and self.serves

    @property
    def outlives_servers(self: Manifest) -> bool:
        """Whether the session goes on without a server: nothing is at any that workers lack."""
        return self.knobs.elastic and not self.serves

    def peers(self) -> Peers:
        """Who pushes to the servers."""
        if self.workers_per_push == 1:
            return each_worker(self.most_workers, self.world_size)
        return nodes(self.world_size, self.workers_per_push)

    def wire_dtypes(self) -> list[str]:
        """By parameter, what its gradients and new values travel in, or are encoded from."""
        on_wire, choices = self.knobs.wire_dtype, self.knobs.compression
        lossy: set[str] = set()
        if on_wire is not None and choices:
            from foreprop.core.codec import lossy_names

            lossy = lossy_names({info.name: info.shape for info in self.parameters}, choices)
        return [
            wire_dtype_of(info.dtype, None if info.name in lossy else on_wire)
            for info in self.parameters
        ]

    def reductions(self) -> list[Reduction]:
        """By parameter, what is made of the ranks' gradients."""
        reduction_of = self.knobs.aggregation.reduction_of
        return [reduction_of(sparse=info.sparse) for info in self.parameters]

    def slices(self: Manifest) -> tuple[Slice, ...]:
        partition = Partition(
            granularity=self.knobs.granularity,
            placement=self.knobs.placement,
            servers=self.knobs.servers,
            slice_elems=self.knobs.slice_elems,
            big_array_elems=self.knobs.big_array_elems,
            seed=self.knobs.placement_seed,
            shares=self.knobs.shares,
        )
        itemsizes = [ITEMSIZE_BYTES[dtype] for dtype in self.wire_dtypes()]
        return plan_slices(self.sliced_elems(), itemsizes, partition)

    def sliced_elems(self: Manifest) -> list[int]:
        """By parameter, what is cut into slices under its number: of a pack all is the first's."""
        own = [0 if info.rows else info.elems for info in self.parameters]
        return packed_elems(own, self.knobs.packs)

    def places_of(self: Manifest, piece: Slice) -> list[tuple[int, int]]:
        """Where the elements of each parameter in a slice begin and end in it."""
        pack = next((pack for pack in self.knobs.packs if pack[0] == piece.parameter), None)
        if pack is None:
            return [(0, piece.elems)]
        return list(places_in([self.parameters[number].elems for number in pack]))

    def is_served(self, piece: Slice) -> bool:
        """Whether servers may update the slice."""
        return self.parameters[piece.parameter].group != NO_GROUP

    def shards(self: Manifest, slices: int) -> tuple[Shard, ...]:
        """Of the row-wise parameters; ``slices`` is the number of slices."""
        tables = [
            (number, info.shape[0], info.shape[1])
            for number, info in enumerate(self.parameters)
            if info.rows
        ]
        if not tables:
            return ()
        from foreprop.core.shards import plan_shards

        remote = {n for n, info in enumerate(self.parameters) if info.init is not None}
        servers = self.knobs.servers
        return plan_shards(tables, servers=servers, first_number=slices, remote=remote)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


Manifest: TypeAlias = AnyManifest[Knobs]
RingManifest: TypeAlias = AnyManifest[RingKnobs]

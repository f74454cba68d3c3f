"""The candidates that could run on a cluster, and how long a step of each would take.

The refined model (`plan.refined`) predicts steps; `plan.recommendation` says which one to use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from foreprop.config import PRESETS, Config
from foreprop.core.parallax import Topology, prefers_servers
from foreprop.errors import ConfigError
from foreprop.plan import limit
from foreprop.plan.deployment import Deployment, ModelledArchitecture, Table
from foreprop.plan.profile import Layer, Profile, ProfiledArray
from foreprop.plan.refined import Prediction, predict, step_s
from foreprop.quantities import option

P3 = "p3"
PLANNED = tuple(name for name in PRESETS if name != "p3-2019")
"""The presets without the one for comparisons: the model has no single consumer."""
MOST_NODES = 256  # whose predictions take minutes
_MOST_NAMES = 4
_SAME = 0.001  # of a step: as good as nothing
TOLERANCE = 0.05
"""A step that is longer by no more than this share is as good: the model's errors are not much
smaller (lab/docs/model.md), and of steps that are as good the simplest is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSetting:
    """A model, its time on one worker, and a cluster. Raises `ConfigError` for what cannot be."""

    profile: Profile
    compute_s: float
    """The forward and backward pass of one batch on one worker."""
    nodes: int = option("Machines with workers.")
    rate_bits_per_s: float = option("Each node's link, each way, as 10Gbit or 800Mbit.")
    latency_s: float = option("One-way latency (half the ping time), as 50us.", 100e-6)
    workers_per_node: int = option("Workers on each node.", 1)
    servers: tuple[int, ...] = option(
        "Dedicated servers to consider, as 2, 0..8 or 0,2,4; 0: beside the workers.", (0,)
    )
    server_rate_bits_per_s: float | None = option(
        "Each dedicated server's link, if it is another one.", None
    )
    bytes_per_elem: int = limit.BYTES_PER_ELEM
    local_aggregation: bool = True
    raw_answers: bool = False
    """The same as `KnownCodec` has."""
    dense_gradients: bool = option(
        "Embeddings have sparse=False: all of their rows are sent in every step.", False
    )
    batch: int | None = option("Samples per worker and step, for throughput in samples/s.", None)

    def __post_init__(self) -> None:
        if self.nodes < 2:
            raise ConfigError(
                f"nodes is {self.nodes}; at least 2: inside one machine use DDP with NCCL"
            )
        if self.nodes > MOST_NODES:
            raise ConfigError(f"nodes is {self.nodes}; at most {MOST_NODES} are planned for")
        for name in ("workers_per_node", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; at least 1")
        for name in ("compute_s", "rate_bits_per_s", "server_rate_bits_per_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be positive and finite")
        if not 0 <= self.latency_s < math.inf:
            raise ConfigError(f"latency_s is {self.latency_s}; it must be finite and at least 0")
        if not self.servers or min(self.servers) < 0:
            raise ConfigError(
                f"servers is {list(self.servers)}; it must be numbers from 0, the servers beside"
                " the workers"
            )
        if max(self.servers) > MOST_NODES:
            raise ConfigError(
                f"servers has {max(self.servers)}; at most {MOST_NODES} are planned for, and more"
                f" than one for each of the {self.nodes} nodes seldom help"
            )

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node

    def is_table(self, array: ProfiledArray) -> bool:
        """Whether an array goes by rows, as ``architecture="auto"`` decides it."""
        if self.dense_gradients or array.alpha is None:
            return False
        row_bytes = array.row_elems * self.bytes_per_elem
        # as for servers beside the workers: all else would go through dedicated ones, too
        topology = Topology(
            self.nodes, self.workers_per_node, local_aggregation=self.local_aggregation
        )
        return prefers_servers(row_bytes, array.alpha, topology)

    @property
    def tables(self) -> list[Table]:
        """The tables that go by rows in all architectures that can."""
        return [
            Table(layer, array.rows * array.row_elems, array.row_elems, array.alpha or 0.0)
            for layer, arrays in enumerate(self.profile.arrays_by_layer())
            for array in filter(self.is_table, arrays)
        ]

    @property
    def table_names(self) -> str:
        """The names of the first tables, to be shown; empty if there are none."""
        names = [array.name for array in self.profile.arrays if self.is_table(array)]
        more = len(names) - _MOST_NAMES
        return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")

    @property
    def layers(self) -> list[Layer]:
        """The layers without the tables."""
        return self._layers(lambda array: 0.0 if self.is_table(array) else 1.0)

    @property
    def limit_s(self) -> float:
        """The step that no schedule can beat without dedicated servers.

        Only the rows of a table count that one worker touches, both ways like all other bytes.
        """
        touched = self._layers(lambda a: (a.alpha or 0.0) if self.is_table(a) else 1.0)
        return limit.limit_s(touched, nodes=self.nodes, rate_bits_per_s=self.rate_bits_per_s)

    def _layers(self, counted: Callable[[ProfiledArray], float]) -> list[Layer]:
        return self.profile.layers(scale=1, compute_s=self.compute_s, counted=counted)

    @property
    def throughput_unit(self) -> str:
        return "batches/s" if self.batch is None else "samples/s"

    def throughput(self, step_s: float) -> float:
        """The throughput of all workers, in samples/s if the batch is known, else in batches/s."""
        return self.workers * (self.batch or 1) / step_s


class Candidate(msgspec.Struct, frozen=True):
    """Something that could run: an architecture, with its preset and dedicated servers if any.

    With ``dense`` gradients ``ddp`` reduces tables, too.
    """

    architecture: ModelledArchitecture
    preset: str | None = None
    servers: int = 0
    dense: bool = False

    @property
    def kind(self) -> str:
        detail = "dense" if self.dense else self.preset
        return self.architecture if detail is None else f"{self.architecture} {detail}"

    @property
    def name(self) -> str:
        many = "s" * (self.servers > 1)
        return f"{self.kind}, {self.servers} server{many}" if self.servers else self.kind

    @property
    def simplicity(self) -> tuple[int, int]:
        """Less is simpler: plain DDP, our default, a setting, dedicated machines.

        Among settings, one way for all parameters is simpler than one for each kind.
        """
        if self.architecture == "ps":
            return (5 if self.preset == P3 else 6), self.servers
        if self.architecture == "p2p":
            return (1 if self.preset == P3 else 4), 0
        return {"ddp": 0, "ring": 2, "hybrid": 3}[self.architecture], 0

    @property
    def by_ring(self) -> bool:
        return self.architecture in ("ring", "hybrid")

    @property
    def holds_rows(self) -> bool:
        return self.architecture in ("p2p", "ps", "hybrid")

    @property
    def code(self) -> str:
        """What to write in a script for this candidate."""
        if self.architecture == "ddp":
            return "DistributedDataParallel(model)"
        settings = {
            "preset": None if self.preset == P3 else self.preset,
            "architecture": self.architecture if self.by_ring else None,
            "dedicated_servers": self.servers or None,
        }
        given = "".join(f", {name}={value!r}" for name, value in settings.items() if value)
        return f"foreprop.parallelize(model, optimizer{given})".replace("'", '"')


class Forecast(Prediction, frozen=True, kw_only=True):
    """One candidate's step; ``efficiency`` is the share of it in which the devices compute."""

    candidate: Candidate
    throughput: float
    efficiency: float


def deployment_for(setting: PlanSetting, candidate: Candidate) -> Deployment:
    return Deployment(
        layers=setting.layers,
        architecture=candidate.architecture,
        preset=candidate.preset or P3,
        nodes=setting.nodes,
        workers_per_node=setting.workers_per_node,
        local_aggregation=setting.local_aggregation,
        dedicated_servers=candidate.servers,
        rate_bits_per_s=setting.rate_bits_per_s,
        server_rate_bits_per_s=setting.server_rate_bits_per_s,
        latency_s=setting.latency_s,
        bytes_per_elem=setting.bytes_per_elem,
        tables=setting.tables,
        dense_gradients=candidate.dense,
    )


def deployment_of(setting: PlanSetting, candidate: Candidate, config: Config) -> Deployment:
    """The deployment of a candidate as a session with this ``config`` would run it."""
    return replace(
        deployment_for(setting, candidate),
        slice_elems=config.cut_elems(config.servers_on(setting.nodes)),
        big_array_elems=config.big_array_elems,
        chunk_elems=config.chunk_elems,
        chunks_in_flight=config.chunks_in_flight,
        local_aggregation=config.may_aggregate,
    )


def candidate_step_s(setting: PlanSetting, candidate: Candidate) -> float:
    """A candidate's step alone, at a fifth of the work of a forecast."""
    return step_s(deployment_for(setting, candidate))


def forecast(setting: PlanSetting, candidate: Candidate) -> Forecast:
    predicted = predict(deployment_for(setting, candidate))
    return Forecast(
        candidate=candidate,
        throughput=setting.throughput(predicted.step_s),
        efficiency=predicted.compute_s / predicted.step_s,
        **msgspec.structs.asdict(predicted),
    )


def forecasts(
    setting: PlanSetting, *, progress: Callable[[str], None] = lambda _: None
) -> list[Forecast]:
    """Forecasts of every architecture and preset, the fastest first.

    With p3 all numbers of dedicated servers are tried that the setting has, and with other presets
    the one number that suits p3.
    """

    def made(candidate: Candidate) -> Forecast:
        progress(candidate.name)
        return forecast(setting, candidate)

    found = [made(c) for c in collective_candidates(setting, bool(setting.tables))]
    if 0 in setting.servers:
        found += [made(Candidate("p2p", preset)) for preset in PLANNED]
    served = [made(Candidate("ps", P3, count)) for count in setting.servers if count]
    if served:
        count = choose({f.candidate: f.step_s for f in served}).servers
        others = [preset for preset in PLANNED if preset != P3]
        served += [made(Candidate("ps", preset, count)) for preset in others]
    return sorted(found + served, key=lambda f: f.step_s)


def collective_candidates(setting: PlanSetting, tables: bool) -> Iterator[Candidate]:
    """All candidates that reduce gradients, with those for models with ``tables``."""
    yield Candidate("ddp")
    if tables:
        yield Candidate("ddp", dense=True)
    yield Candidate("ring")
    # of a model that is all tables, hybrid would be p2p
    if tables and 0 in setting.servers and not all(map(setting.is_table, setting.profile.arrays)):
        yield Candidate("hybrid")


def plain_ddp(steps_s: Mapping[Candidate, float]) -> Candidate:
    """The DDP that all is compared with: of sparse or dense gradients, whichever is faster."""
    plain = [candidate for candidate in steps_s if candidate.architecture == "ddp"]
    return min(plain, key=steps_s.__getitem__)


def enough_servers(made: Sequence[Forecast]) -> int:
    """The fewest dedicated servers of those considered that are as fast as any; or 0."""
    steps_s = {f.candidate.servers: f.step_s for f in made if f.candidate.kind == f"ps {P3}"}
    enough_s = (1 + _SAME) * min(steps_s.values(), default=0.0)
    return min((count for count, seconds in steps_s.items() if seconds <= enough_s), default=0)


def choose(steps_s: Mapping[Candidate, float]) -> Candidate:
    """The simplest candidate of those as good as the fastest; the faster of equally simple ones."""
    enough_s = (1 + TOLERANCE) * min(steps_s.values())
    good = [candidate for candidate, seconds in steps_s.items() if seconds <= enough_s]
    return min(good, key=lambda candidate: (candidate.simplicity, steps_s[candidate]))

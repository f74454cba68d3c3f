"""``architecture="auto"`` and ``slice_elems="auto"``: the first steps and the links decide.

The first step shows the order of first uses. The next ones are watched (`plan.stepprobe`), and
every rank counts the rows that each embedding's gradient touches. Then the links are measured
(`plan.linkprobe`). Embeddings go by rows where `core.parallax` says so. Predictions decide among
architectures (`plan.planner`) and slice sizes (`plan.refined`), and codecs are chosen, too
(`plan.compressing`). Rank 0 decides, so all ranks do alike.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import msgspec

from foreprop.config import Config
from foreprop.config.combinations import FEATURES
from foreprop.core.codec import is_automatic
from foreprop.core.linkshares import as_setting, late_nodes_of, ready_in, shares_of
from foreprop.core.manifest import ITEMSIZE_BYTES, ParameterInfo, WireDtype, wire_dtype_of
from foreprop.core.parallax import Topology, Traffic, prefers_servers, traffic
from foreprop.engine.rendezvous import Board, Look, decode_entry, step_board
from foreprop.engine.stream import local_address
from foreprop.engine.world import World
from foreprop.errors import TransportError
from foreprop.params.parameter import Parameter
from foreprop.plan.compressing import codecs_as_setting
from foreprop.plan.limit import HEADER_FACTOR
from foreprop.plan.linkprobe import Links, conclude, exchange_reports
from foreprop.plan.planner import MOST_NODES, P3, Candidate, PlanSetting, deployment_of
from foreprop.plan.planner import choose as choose_candidate
from foreprop.plan.profile import Profile
from foreprop.plan.refined import choose_slice_elems, step_s
from foreprop.plan.stepprobe import LosslessProbe, SparsityCount, StepProbe, agree_on_shares
from foreprop.quantities import counted, rate_text, time_text

MEASURED_STEPS = 4
"""The steps that are measured; the first one, which shows first uses, is not watched."""
_PATIENCE_S = 60.0  # how long rank 0 may predict before anybody reports a stall


class Plan(msgspec.Struct, frozen=True):
    """What a session goes on with: tables by rows, and settings where these are to change.

    ``step_s`` is the step that the model predicts; without one only tables were planned.
    """

    row_wise: frozenset[str]
    architecture: str | None = None
    slice_elems: int | None = None
    step_s: float | None = None
    text: str = ""
    node_rates: str | None = None
    late_nodes: str | None = None
    compression: str | None = None

    def outlook(self) -> Outlook | None:
        return None if self.step_s is None else Outlook(self.step_s)

    def applied_to(self, config: Config) -> Config:
        begun_with = None if config.slice_elems == "auto" else config.slice_elems
        names = ("node_rates", "late_nodes", "architecture")
        planned = {name: getattr(self, name) for name in names}
        changes = {name: value for name, value in planned.items() if value is not None}
        changes["slice_elems"] = self.slice_elems or begun_with
        if is_automatic(config.compression):
            changes["compression"] = self.compression
        return config.replace(**changes)


class Planning:
    """Watches a session's first steps, and makes its plan.

    ``candidates`` are the tables that may go by rows; whether servers could update the parameters
    says ``servable``, and whether workers do ``by_workers``.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        parameters: Sequence[Parameter],
        infos: Sequence[ParameterInfo],
        candidates: Collection[str],
        name: str,
        *,
        servable: bool,
        by_workers: bool = False,
    ) -> None:
        self._config = config
        self._world = world
        self._infos = infos
        self._name = name
        self._servable = servable
        self._per_node = config.workers_per_node or world.local_size
        self.nodes = -(-world.size // self._per_node)
        self._candidates = frozenset(candidates)
        by_rows = {info.name for info in infos if info.rows}
        counted = [p for p in parameters if p.name in self._candidates | by_rows]
        self._count = SparsityCount(counted) if counted else None
        self.probe: StepProbe | None = None
        if self._obstacle is None:
            lossless = None
            if is_automatic(config.compression) and world.rank == 0:
                at = MEASURED_STEPS - 1
                about = {"by_workers": by_workers, "raw_answers": self._raw_answers}
                lossless = LosslessProbe(parameters, at=at, **about)
            self.probe = StepProbe(parameters, lossless)
        self._steps = 0

    @property
    def _obstacle(self) -> str | None:
        if self._config.dedicated_servers:
            return "with dedicated servers only tables are chosen"
        if self.nodes == 1:
            return "all workers are on one machine, so there is nothing to plan"
        if self.nodes > MOST_NODES:
            return f"more than {MOST_NODES} nodes cannot be planned for"
        return None

    def end_step(self) -> bool:
        """Note a step; returns whether enough of them are measured.

        There may be more: ranks in different steps decide where they meet.
        """
        self._steps += 1
        if self._count is not None:
            self._count.end_step()
        return self._steps >= MEASURED_STEPS

    def decide(
        self, session_id: str, look: Look, here: Callable[[], Collection[int]] | None = None
    ) -> Plan:
        """Make the plan: on every rank after as many steps, while nothing is under way.

        ``look`` raises what has gone wrong meanwhile. ``here`` gives the ranks of an elastic
        session: if one of the start is missing, nothing is chosen.
        """

        def board_of(*ranks: int) -> Board:  # to wait at, as long as these ranks are here

            def look_for_all() -> None:
                look()
                lost = set() if here is None else set(ranks).difference(here())
                if lost:
                    raise TransportError(f"rank {min(lost)} was lost before codecs were chosen")

            about = (self._world, self._config, f"plan/{session_id}", look_for_all)
            return step_board(*about, patience_s=_PATIENCE_S)

        board = board_of(*range(self._world.size))
        shares = {} if self._count is None else agree_on_shares(self._count.end(), board)
        row_wise, table = self._choose_tables(shares)
        if self.probe is None:
            return Plan(row_wise, text=_lines(table, self._obstacle or ""))
        plan = none = Plan(row_wise, text=table)
        try:
            plan = self._measured(self.probe, board, session_id, none, shares)
        except TransportError as error:
            if here is None:
                raise
            look()  # raises if the session itself has ended
            plan = _without(none, error)
        board = board_of(0)
        try:
            if self._world.rank == 0:
                board.publish("plan", msgspec.json.encode(plan).decode())
            return decode_entry(board.lookup("plan", "rank 0's plan"), Plan, "rank 0's plan")
        except TransportError as error:
            if here is None:
                raise
            look()
            return _without(none, error)  # the other ranks have no plan of rank 0, either

    def _measured(
        self,
        probe: StepProbe,
        board: Board,
        session_id: str,
        none: Plan,
        shares: Mapping[str, float],
    ) -> Plan:
        """This rank's plan, of which only rank 0's counts; ``none`` if there is nothing to plan."""
        links = self._measure(board, session_id)
        profile = probe.profile(self._name, {name: shares[name] for name in none.row_wise})
        compute_s = 0.0 if profile is None else profile.measured_s or 0.0
        texts = board.exchange("compute", json.dumps(compute_s), "time of a step")
        computed_s: list[float] = [
            decode_entry(text, float, "a rank's time of a step") for text in texts
        ]
        slowest_s = max(computed_s)
        if self._world.rank or profile is None or slowest_s <= 0 or links is None:
            return none
        each = self._per_node
        nodes_s = [computed_s[n : n + each] for n in range(0, len(computed_s), each)]
        return plan_session(
            self._setting(profile, slowest_s, links),
            self._config,
            none.row_wise,
            none.text,
            servable=self._servable,
            node_rates=links.node_rates,
            computed_s=[max(ranks_s) for ranks_s in nodes_s],
            infos=self._infos,
            lossless=probe.lossless.shares() if probe.lossless else {},
        )

    def _choose_tables(self, shares: Mapping[str, float]) -> tuple[frozenset[str], str]:
        """The names of the parameters that go by rows, and a printed table about them."""
        now = frozenset(info.name for info in self._infos if info.rows)
        if not self._candidates:
            return now, ""
        measured = {name: share for name, share in shares.items() if name in self._candidates}
        choices = choose_routes(self._infos, measured, self._topology, self._config.wire_dtype)
        wanted = now - self._candidates | {c.info.name for c in choices if c.row_wise}
        return wanted, describe_routes(choices, self._topology)

    @property
    def _topology(self) -> Topology:
        config = self._config
        return Topology(
            self.nodes,
            min(self._per_node, self._world.size),
            config.dedicated_servers,
            config.may_aggregate,
        )

    @property
    def _raw_answers(self) -> bool:
        # ranks with "late" uses are in the same step
        return self._config.steps_may_differ and self._config.staleness != "late"

    def _measure(self, board: Board, session_id: str) -> Links | None:
        node, place = divmod(self._world.rank, self._per_node)
        if place:
            return None
        reports = exchange_reports(
            board,
            node=node,
            nodes=self.nodes,
            address=local_address(self._world.host, self._config.interface),
            session=session_id,
            config=self._config,
        )
        return conclude(reports, paced_bits_per_s=self._config.link_rate_bits_per_s)

    def _setting(self, profile: Profile, compute_s: float, links: Links) -> PlanSetting:
        rate, paced = links.rate_bits_per_s, self._config.link_rate_bits_per_s
        return PlanSetting(
            profile=profile,
            compute_s=compute_s,
            nodes=self.nodes,
            workers_per_node=self._per_node,
            rate_bits_per_s=rate if paced is None else min(rate, paced),
            latency_s=links.latency_s,
            bytes_per_elem=4 if self._config.wire_dtype is None else 2,
            local_aggregation=self._config.may_aggregate,
            raw_answers=self._raw_answers,
        )


# Architectures and slices.
def plan_session(
    setting: PlanSetting,
    config: Config,
    row_wise: Collection[str],
    table: str = "",
    *,
    servable: bool = True,
    node_rates: Sequence[float] = (),
    computed_s: Sequence[float] = (),
    infos: Sequence[ParameterInfo] = (),
    lossless: Mapping[str, float] = MappingProxyType({}),
) -> Plan:
    """Predict what this session could go on with, and choose; pure.

    The choice is the simplest of those within 5 % of the fastest, as `foreprop plan` recommends.
    Plain DDP is another program: if it would do, the text says so. Servers are left out if the
    optimizer is not ``servable``. They own what suits the links if ``node_rates`` differ, and less
    on nodes that compute for longer (``computed_s``, by node). Codecs are for float32 parameters of
    ``infos``, with ``lossless`` as in `plan.compressing`.
    """
    slices = None
    rates_text = rates_as_setting(node_rates, config)
    suited = setting if rates_text is None else as_if_even(setting, node_rates)
    served = Candidate("p2p", preset_of(config))
    if config.slice_elems == "auto" and servable:
        slices = choose_slice_elems(deployment_of(suited, served, config))
        config = config.replace(slice_elems=slices)
    candidates = [served] if servable or config.architecture != "auto" else []
    if config.architecture == "auto":
        candidates.append(Candidate("hybrid" if row_wise else "ring"))
    steps_s = {
        candidate: step_s(
            deployment_of(suited if candidate == served else setting, candidate, config)
        )
        for candidate in (*candidates, Candidate("ddp"))
    }
    chosen = choose_candidate({candidate: steps_s[candidate] for candidate in candidates})
    is_served = chosen == served
    late = late_as_setting(setting, config, computed_s, node_rates, steps_s[chosen])
    uneven = {"node_rates": rates_text, "late_nodes": late} if is_served else {}
    more = "".join(f"; {name}={text}" for name, text in uneven.items() if text)
    codecs = None
    if is_automatic(config.compression):
        codecs, sentence = codecs_as_setting(setting, config, infos, lossless)
        more += f"; {sentence}"
    return Plan(
        row_wise=frozenset(row_wise),
        architecture=chosen.architecture if config.architecture == "auto" else None,
        slice_elems=slices,
        **uneven,
        compression=codecs,
        step_s=steps_s[chosen],
        text=_plan_text(setting, steps_s, chosen, slices if is_served else None, table) + more,
    )


def preset_of(config: Config) -> str:
    return config.preset or P3  # p3 also for knobs of no preset


def _without(plan: Plan, error: TransportError) -> Plan:
    return msgspec.structs.replace(plan, text=_lines(plan.text, f"compression: none; {error}"))


def _plan_text(
    setting: PlanSetting,
    steps_s: Mapping[Candidate, float],
    chosen: Candidate,
    slices: int | None,
    table: str,
) -> str:
    cut = "" if slices is None else f", slices of {slices:,} elements"
    others = ", ".join(
        f"{candidate.name} {time_text(seconds)}"
        for candidate, seconds in sorted(steps_s.items(), key=lambda entry: entry[1])
        if candidate != chosen
    )
    as_good = choose_candidate(steps_s) == Candidate("ddp")
    text = (
        f"a step computes for {time_text(setting.compute_s)}; links of"
        f" {rate_text(setting.rate_bits_per_s)}, latency {time_text(setting.latency_s)};"
        f" goes on with {chosen.name}{cut}, predicted {time_text(steps_s[chosen])} per step"
        f" ({others})" + ("; plain DDP would be as good" if as_good else "")
    )
    return _lines(table, text)


def _lines(*texts: str) -> str:
    return "\n".join(filter(None, texts))


class Outlook:
    """Compares the next `STEPS` steps with the predicted one."""

    STEPS = 50

    def __init__(self, predicted_s: float) -> None:
        self._predicted_s = predicted_s
        self._moments_s: list[float] = []

    def end_step(self) -> str | None:
        """Note a step; the last one returns the comparison in words."""
        self._moments_s.append(time.perf_counter())
        if len(self._moments_s) <= self.STEPS:
            return None
        steps_s = [later - earlier for earlier, later in itertools.pairwise(self._moments_s)]
        measured_s = statistics.median(steps_s)
        error = self._predicted_s / measured_s - 1
        return (
            f"{self.STEPS} steps took {time_text(measured_s)} each in the median, predicted were"
            f" {time_text(self._predicted_s)} ({error:+.1%})"
        )

    @property
    def is_over(self) -> bool:
        return len(self._moments_s) > self.STEPS


# Which embeddings go by rows, and a printed table about them.
_HEADINGS = ("parameter", "size", "alpha", "choice", "servers", "all-gather", "all-reduce")


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """Whether an embedding goes by rows, as a worker touches a share ``alpha`` of them in a step.

    ``moved`` are the bytes that would pass the busiest link, each way.
    """

    info: ParameterInfo
    alpha: float
    moved: Traffic
    row_wise: bool


def choose_routes(
    infos: Sequence[ParameterInfo],
    shares: Mapping[str, float],
    topology: Topology,
    wire_dtype: WireDtype | None = None,
) -> list[RouteChoice]:
    choices = []
    for info in infos:
        if info.name in shares:
            alpha = shares[info.name]
            size_bytes = info.elems * ITEMSIZE_BYTES[wire_dtype_of(info.dtype, wire_dtype)]
            row_bytes = max(1.0, size_bytes / max(1, info.shape[0]))
            moved = traffic(size_bytes, row_bytes, alpha, topology)
            row_wise = prefers_servers(row_bytes, alpha, topology)
            choices.append(RouteChoice(info, alpha, moved, row_wise))
    return choices


def describe_routes(choices: Sequence[RouteChoice], topology: Topology) -> str:
    """A printed table of the choices, with the bytes of a step on the busiest link."""
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for choice in choices:
        size_bytes = choice.info.elems * ITEMSIZE_BYTES[choice.info.dtype]
        way = "servers, by rows" if choice.row_wise else "all-reduce"
        cells = (choice.info.name, _readable(size_bytes), f"{choice.alpha:.4f}", way)
        rows.append((*cells, *map(_readable, choice.moved)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head = (
        f"embeddings, with bytes per step over the busiest link, each way"
        f" ({counted(topology.workers, 'worker')}):\n"
    )
    return head + "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _readable(size_bytes: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.3g} {unit}"
    return f"{size_bytes:.3g} B"


# What a session's servers own where nodes' links or compute differ.
def _stays_even(config: Config) -> bool:
    # newcomers of an elastic session would not hear of shares, and other placements have none
    return config.elastic or FEATURES["own placement"].is_asked(config)


def rates_as_setting(node_rates: Sequence[float], config: Config) -> str | None:
    """The setting ``node_rates`` for links that differ; None if it is given, or they do not."""
    if config.node_rates is not None or _stays_even(config):
        return None
    return as_setting(node_rates)


def late_as_setting(
    setting: PlanSetting,
    config: Config,
    computed_s: Sequence[float],
    node_rates: Sequence[float],
    step_s: float,
) -> str | None:
    """The setting ``late_nodes``; None if it is given, or no node's server is to own less."""
    if config.late_nodes is not None or _stays_even(config):
        return None
    rates = node_rates or [1.0] * len(computed_s)
    elems = sum(
        math.prod(array.shape) * ((array.alpha or 0.0) if setting.is_table(array) else 1.0)
        for array in setting.profile.arrays
    )
    fastest_bits_per_s = setting.rate_bits_per_s / min(rates, default=1.0)
    model_s = HEADER_FACTOR * 8 * setting.bytes_per_elem * elems / fastest_bits_per_s
    late = late_nodes_of(computed_s, rates, model_s=model_s, step_s=step_s) if computed_s else ()
    return ",".join(map(str, late)) or None


def as_if_even(setting: PlanSetting, node_rates: Sequence[float]) -> PlanSetting:
    """The setting with even links, on which even shares take as long as suited shares on these."""
    even = ready_in([1.0] * len(node_rates), [1.0] * len(node_rates))
    share = even / ready_in(node_rates, shares_of(node_rates)) / min(node_rates)
    return replace(setting, rate_bits_per_s=setting.rate_bits_per_s * share)

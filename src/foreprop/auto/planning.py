"""``architecture="auto"`` and ``slice_elems="auto"``: what the first steps and the links decide.

The first step shows the order of first uses. The next ones are watched (`auto.stepprobe`), and
every rank counts the rows that each embedding's gradient touches. Then the links are measured
(`auto.linkprobe`). By rows go the embeddings for which `core.parallax` says so
(`auto.routes`); among architectures the planner's prediction decides (`model.planner`), among
slice sizes the simulator's (`simulate.slicesize`). Rank 0 decides, so all ranks do alike.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from foreprop.auto.compressing import codecs_as_setting
from foreprop.auto.linkprobe import Links, conclude, exchange_reports
from foreprop.auto.losslessprobe import LosslessProbe
from foreprop.auto.routes import choose_routes, describe_routes
from foreprop.auto.stepprobe import SparsityCount, StepProbe, agree_on_shares
from foreprop.auto.unevennodes import (
    as_if_even,
    late_as_setting,
    rates_as_setting,
    with_touched_rows,
)
from foreprop.cluster.entries import decode_entry
from foreprop.cluster.rendezvous import Board, Look, step_board
from foreprop.cluster.world import World
from foreprop.config import Config
from foreprop.core.codec import is_automatic
from foreprop.core.manifest import ParameterInfo
from foreprop.core.parallax import Topology
from foreprop.link.stream import local_address
from foreprop.model.deployment import Deployment
from foreprop.model.planner import MOST_NODES, P3, Candidate, PlanSetting, deployment_for
from foreprop.model.planner import choose as choose_candidate
from foreprop.model.refined import step_s
from foreprop.quantities import rate_text, time_text
from foreprop.simulate.slicesize import choose_slice_elems
from foreprop.workload.profile import Profile

if TYPE_CHECKING:
    from foreprop.path.managedparameter import Watched

MEASURED_STEPS = 4
"""The first of them, which shows the order of first uses, is not watched."""
_PATIENCE_S = 60.0
"""Rank 0 may simulate for so long before anybody reports a stall."""


class Plan(msgspec.Struct, frozen=True):
    """What a session goes on with, and the step that the model predicts for it, seconds.

    Without a prediction nothing was planned but what goes by rows.
    """

    row_wise: frozenset[str]
    architecture: str | None = None
    slice_elems: int | None = None
    step_s: float | None = None
    text: str = ""
    node_rates: str | None = None
    """As the setting, if links differ."""
    late_nodes: str | None = None
    """Likewise, if compute does."""
    compression: str | None = None
    """As the setting, if that is ``"auto"``."""

    def outlook(self) -> Outlook | None:
        return None if self.step_s is None else Outlook(self.step_s)

    def applied_to(self, config: Config) -> Config:
        begun_with = None if config.slice_elems == "auto" else config.slice_elems
        changes: dict[str, Any] = {"slice_elems": self.slice_elems or begun_with}
        if self.node_rates is not None:
            changes["node_rates"] = self.node_rates
        if self.late_nodes is not None:
            changes["late_nodes"] = self.late_nodes
        if self.architecture is not None:
            changes["architecture"] = self.architecture
        if is_automatic(config.compression):
            changes["compression"] = self.compression
        return config.replace(**changes)


class Planning:
    """One session's first steps, until its plan is made."""

    def __init__(
        self,
        config: Config,
        world: World,
        parameters: Sequence[Watched],
        infos: Sequence[ParameterInfo],
        candidates: Collection[str],
        name: str,
        *,
        servable: bool,
        by_workers: bool = False,
    ) -> None:
        """``candidates``: tables that may go by rows; ``servable``: as `can_be_served` says.

        ``by_workers``: they update.
        """
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
            sampled = is_automatic(config.compression) and world.rank == 0
            lossless = None
            if sampled:
                at = MEASURED_STEPS - 1
                lossless = LosslessProbe(parameters, at=at, by_workers=by_workers)
            self.probe = StepProbe(parameters, lossless)
        self._steps = 0

    @property
    def _obstacle(self) -> str | None:
        """Why nothing can be predicted, if so."""
        if self._config.dedicated_servers:
            return "with dedicated servers only tables are chosen"
        if self.nodes == 1:
            return "all workers are on one machine, so there is nothing to plan"
        if self.nodes > MOST_NODES:
            return f"more than {MOST_NODES} nodes cannot be planned for"
        return None

    def end_step(self) -> bool:
        """A step is made; returns whether it was the last one that is measured."""
        self._steps += 1
        if self._count is not None:
            self._count.end_step()
        return self._steps == MEASURED_STEPS

    def decide(self, session_id: str, look: Look) -> Plan:
        """On every rank after the same step, while nothing is under way.

        ``look`` raises what has gone wrong meanwhile.
        """
        key = f"plan/{session_id}"
        board = step_board(self._world, self._config, key, look, patience_s=_PATIENCE_S)
        shares = {} if self._count is None else agree_on_shares(self._count.end(), board)
        row_wise, table = self._choose_tables(shares)
        if self.probe is None:
            return Plan(row_wise, text=_lines(table, self._obstacle or ""))
        links = self._measure(board, session_id)
        profile = self.probe.profile(self._name, {name: shares[name] for name in row_wise})
        compute_s = 0.0 if profile is None else profile.measured_s or 0.0
        told = board.exchange("compute", json.dumps(compute_s), "time of a step")
        if self._world.rank == 0:
            computed_s: list[float] = [
                decode_entry(text, float, "a rank's time of a step") for text in told
            ]
            slowest_s = max(computed_s)
            plan = Plan(row_wise, text=table)
            if profile is not None and slowest_s > 0 and links is not None:
                setting = self._setting(profile, slowest_s, links)
                plan = plan_session(
                    setting,
                    self._config,
                    row_wise,
                    table,
                    servable=self._servable,
                    node_rates=links.node_rates,
                    computed_s=self._by_node(computed_s),
                    infos=self._infos,
                    lossless=self.probe.lossless.shares() if self.probe.lossless else {},
                )
            board.publish("plan", msgspec.json.encode(plan).decode())
        return decode_entry(board.lookup("plan", "rank 0's plan"), Plan, "rank 0's plan")

    def _by_node(self, computed_s: Sequence[float]) -> list[float]:
        """The slowest rank's on each."""
        starts = range(0, len(computed_s), self._per_node)
        return [max(computed_s[start : start + self._per_node]) for start in starts]

    def _choose_tables(self, shares: Mapping[str, float]) -> tuple[frozenset[str], str]:
        """The names of what goes by rows, and a table about it."""
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
            config.local_aggregation != "off",
        )

    def _measure(self, board: Board, session_id: str) -> Links | None:
        """On one rank of each node; None on the others."""
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
        return conclude(reports)

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
            local_aggregation=self._config.local_aggregation != "off",
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

    The simplest of those within 5 % of the fastest, as `foreprop plan` recommends, but for plain
    DDP, which is another program: if it would do, the text says so. Servers are left out if the
    optimizer is not ``servable``. They own what suits the links, if ``node_rates`` differ, and less
    on nodes that compute for longer (``computed_s``, by node). Codecs are for float32 of ``infos``;
    ``lossless``: by name, what the exact one has left.
    """
    slices = None
    rates_text = rates_as_setting(node_rates, config)
    suited = setting if rates_text is None else as_if_even(setting, node_rates)
    if config.slice_elems == "auto" and servable:
        slices = choose_slice_elems(
            with_touched_rows(setting),
            compute_s=setting.compute_s,
            nodes=setting.nodes,
            rate_bits_per_s=suited.rate_bits_per_s,
            latency_s=setting.latency_s,
            config=config,
        ).slice_elems
    served = Candidate("p2p", preset_of(config))
    candidates = [served] if servable or config.architecture != "auto" else []
    if config.architecture == "auto":
        candidates.append(Candidate("hybrid" if row_wise else "ring"))
    steps_s = {
        candidate: step_s(
            _deployment(suited if candidate == served else setting, candidate, config, slices)
        )
        for candidate in (*candidates, Candidate("ddp"))
    }
    chosen = choose_candidate({candidate: steps_s[candidate] for candidate in candidates})
    is_served = chosen == served
    late = late_as_setting(setting, config, computed_s, node_rates, steps_s[chosen])
    uneven = {"node_rates": rates_text, "late_nodes": late} if is_served else {}
    told = "".join(f"; {name}={text}" for name, text in uneven.items() if text)
    codecs = None
    if is_automatic(config.compression):
        codecs, sentence = codecs_as_setting(setting, config, slices, infos, lossless)
        told += f"; {sentence}"
    return Plan(
        row_wise=frozenset(row_wise),
        architecture=chosen.architecture if config.architecture == "auto" else None,
        slice_elems=slices,
        **uneven,
        compression=codecs,
        step_s=steps_s[chosen],
        text=_plan_text(setting, steps_s, chosen, slices if is_served else None, table) + told,
    )


def preset_of(config: Config) -> str:
    """The one whose knobs are set; p3 if it is nobody's."""
    return config.preset or P3


def _deployment(
    setting: PlanSetting, candidate: Candidate, config: Config, slices: int | None
) -> Deployment:
    return replace(
        deployment_for(setting, candidate),
        slice_elems=slices or config.cut_elems(config.servers_on(setting.nodes)),
        big_array_elems=config.big_array_elems,
        chunk_elems=config.chunk_elems,
        chunks_in_flight=config.chunks_in_flight,
        local_aggregation=config.local_aggregation != "off",
    )


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
    ddp = Candidate("ddp")
    as_good = choose_candidate(steps_s) == ddp
    told = (
        f"a step computes for {time_text(setting.compute_s)}; links of"
        f" {rate_text(setting.rate_bits_per_s)}, latency {time_text(setting.latency_s)};"
        f" goes on with {chosen.name}{cut}, predicted {time_text(steps_s[chosen])} per step"
        f" ({others})" + ("; plain DDP would be as good" if as_good else "")
    )
    return _lines(table, told)


def _lines(*texts: str) -> str:
    return "\n".join(filter(None, texts))


class Outlook:
    """Compares the steps that follow with what was predicted for them."""

    STEPS = 50

    def __init__(self, predicted_s: float) -> None:
        self._predicted_s = predicted_s
        self._moments_s: list[float] = []

    def end_step(self) -> str | None:
        """What to tell after the last of them."""
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

"""Moves of slices when a link's rate has changed for good (``rebalance_s``).

Rank 0 sees at the end of a window that links are to be measured (`core.linkshares`), and says so
with its next pace. So all ranks measure them after the same step (`plan.linkprobe`). Rank 0 decides
what servers own from then on. If that is something else, the session goes on with other servers
where it was: optimizer state and averages take the same way as in a checkpoint.

In an elastic session nobody is waited for that may be lost. Links are measured now and then: the
lowest rank that has a server tells all to measure before a step that they are yet to make, and
decides what they find. A link is slow if two measurements in a row say so: one alone may be of a
node that was busy. Slices then move one by one, while all train on (`core.takeover`). If somebody
is lost while they measure, slices stay where they are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

import msgspec

from foreprop.backends.composedworker import ServedBackend
from foreprop.backends.elastic import Membership
from foreprop.config import LOGGER
from foreprop.core.frames import PACE_STEPS
from foreprop.core.linkshares import (
    LinkWatch,
    as_setting,
    describe_loads,
    describe_move,
    is_worth_moving,
    parse_late_nodes,
    rates_on,
    shares_of,
    spare,
    too_few,
)
from foreprop.core.takeover import LEAD_STEPS, MovePlan, loads_of, plan_moves
from foreprop.engine.rendezvous import Board, decode_entry
from foreprop.engine.stream import local_address
from foreprop.errors import ForepropError, TransportError
from foreprop.features.members.membershipview import MemberNotices
from foreprop.features.members.survival import Moves
from foreprop.features.uneven.pace import PaceKeeper
from foreprop.plan.linkprobe import Report, conclude, exchange_reports
from foreprop.session.meeting import MOVE
from foreprop.session.reconnecting import reconnect
from foreprop.session.training import Training

_MOST_WAIT_S = 10.0
"""The longest wait for another one that was to measure, and has heard of a loss."""


def rebalance(training: Training, pause_s: float) -> None:
    """Measure links if that is due after a step, and move slices."""
    composition = training.composition
    if training.config.elastic:
        moves = composition.elastic_moves
        if moves is None or moves.backend is not training.backends.all[0]:
            moves = composition.elastic_moves = ElasticMoves(training, pause_s)
        moves.end_step()
    elif training.completed % PACE_STEPS == 0:
        if composition.rebalancing is None:
            composition.rebalancing = Rebalancing(training, pause_s)
        composition.rebalancing.end_window()


class Rebalancing:
    """The moves of one session, whatever servers it has meanwhile. Training thread."""

    def __init__(self, training: Training, pause_s: float) -> None:
        config, world = training.config, training.world
        self._training = training
        self._per_node = config.workers_per_node or world.local_size
        self._nodes = -(-world.size // self._per_node)
        self._watch = LinkWatch(pause_s=pause_s, uneven=config.node_rates is not None)
        self._leaves_out = False  # the next measurement, to which not all ranks come
        self._obstacle = self._find_obstacle()
        if self._obstacle is not None:
            training.report(f"rebalance_s does nothing here: {self._obstacle}")

    def _find_obstacle(self) -> str | None:
        # why no slices can move, if so
        if self._nodes <= 2:
            return too_few(self._nodes)
        if self._training.remote is not None:
            return "remote tables stay on the servers where they are"
        if self._maybe_pace() is None:
            return "all-reduce and local aggregation do not show whose link is slow"
        return None

    def _maybe_pace(self) -> PaceKeeper | None:
        # servers that hear from every worker have one; collectives and relays have none
        backend = self._training.backends.all[0]
        return backend.pace if isinstance(backend, ServedBackend) else None

    def end_window(self) -> None:
        """Measure if that is due. All ranks call it after a window's last step."""
        pace = None if self._obstacle is not None else self._maybe_pace()
        if pace is None:
            return
        if pace.measure_due:
            pace.measure_due = False
            self._measure()
        elif self._training.world.rank == 0:
            pace.asks_to_measure |= self._watch.observe(pace.suspect, time.monotonic())

    def leave_out(self) -> None:
        """Leave this rank's next measurement out.

        The others have come for theirs when this rank met them for something else, and have gone
        on.
        """
        self._leaves_out = True

    def _measure(self) -> None:
        training, before = self._training, self._training.config.node_rates
        if self._leaves_out or not training.composition.meet(MOVE):
            self._leaves_out = False
            self._watch.measured(time.monotonic(), moved=False, uneven=before is not None)
            return
        training.settle_all()  # what is measured is to be the links, and not what is under way
        board = training.board(f"links/{training.completed}")
        reports = self._reports(board)
        if training.world.rank == 0:
            found = msgspec.json.encode(self._decide(reports, before))
            board.publish("node_rates", found.decode())
        told = board.lookup("node_rates", "rank 0 to say what servers own")
        after: str | None = decode_entry(told, str | None, "what servers are to own")
        if after != before:
            training.config = training.config.replace(node_rates=after)
            with training.state.quietly():
                reconnect(training, {info.name for info in training.infos if info.rows})
        moved, uneven = after != before, after is not None
        self._watch.measured(time.monotonic(), moved=moved, uneven=uneven)

    def _reports(self, board: Board) -> Sequence[Report]:
        # what the nodes have measured, on one rank of each; nothing on the others
        training = self._training
        node, place = divmod(training.world.rank, self._per_node)
        if place:
            return ()
        address = local_address(training.world.host, training.config.interface)
        return exchange_reports(
            board,
            node=node,
            nodes=self._nodes,
            address=address,
            session=training.backends.session_id,
            config=training.config,
        )

    def _decide(self, reports: Sequence[Report], before: str | None) -> str | None:
        # rank 0: the setting ``node_rates`` from now on
        training = self._training
        try:
            paced = training.config.link_rate_bits_per_s
            rates = conclude(reports, paced_bits_per_s=paced).node_rates
        except TransportError as error:
            LOGGER.warning("slices stay where they are: %s", error)
            return before
        rates_before, measured = rates_on(self._nodes, before), as_setting(rates)
        if not is_worth_moving(rates, shares_of(rates_before)):
            training.report(
                f"links measured, slices stay where they are: {measured or 'all are as fast'}"
            )
            return before
        step = training.completed_before + training.completed + 1
        for line in describe_move(rates_before, rates, step=step):
            training.report(line)
        return measured


class ElasticMoves:
    """The moves of one connection of an elastic session. Training thread."""

    def __init__(self, training: Training, pause_s: float) -> None:
        self.backend = backend = cast(ServedBackend, training.backends.all[0])
        self._training = training
        self._engine = backend.engine
        self._members = cast(Membership, backend.members)
        self._moves = cast(Moves, self._members.moves)
        self._rank = training.world.rank
        self._per_node = backend.connections.workers_per_node
        self._servers = backend.connections.servers
        self._watch = LinkWatch(pause_s=pause_s, uneven=True)
        self._rates_before: dict[int, float] = {}  # of servers, as they were measured last
        if self._servers <= 2:
            training.report(f"rebalance_s does nothing here: {too_few(self._servers)}")

    def end_step(self) -> None:
        """Move slices if it is time. All ranks call it after each step."""
        done = self._engine.steps
        if self._moves.begin_step(done + 1):
            self._measure(done + 1)
            return
        is_looked_at = done % PACE_STEPS == 0 and self._is_leader()
        if is_looked_at and self._watch.observe(None, time.monotonic()):
            self._moves.tell(MovePlan(done + LEAD_STEPS + 1, self._rank))

    def _servers_alive(self) -> list[int]:
        lost = self._moves.survival.lost
        return [server for server in range(self._servers) if server not in lost]

    def _is_leader(self) -> bool:
        alive, here = self._servers_alive(), cast(MemberNotices, self._members.notices).members
        able = (rank for rank in here if rank // self._per_node in alive)
        return len(alive) > 2 and self._rank == next(able, None)

    def _measure(self, step: int) -> None:
        # each rank that has a server measures, before the same step
        alive, changes = self._servers_alive(), False
        node, place = divmod(self._rank, self._per_node)
        if node in alive and not place and len(alive) > 2:
            self._moves.await_answers()  # the links are to be measured, and not what is under way
            measured = self._rates(step, alive)
            changes = measured is not None and self._decide(step, alive, measured)
        self._watch.measured(time.monotonic(), moved=changes, uneven=True)

    def _rates(self, step: int, alive: Sequence[int]) -> Sequence[float] | None:
        # relative, of the servers alive; None if they could not be measured
        training = self._training
        config, session = training.config, training.backends.session_id

        def look() -> None:
            training.backends.raise_if_failed()
            if self._servers_alive() != list(alive):
                raise TransportError("a node was lost meanwhile")

        board = Board(
            training.world,
            f"links/{session}/{step}/{'-'.join(map(str, alive))}",
            timeout_s=min(_MOST_WAIT_S, config.step_timeout_s / 4),
            look=look,
        )
        try:
            reports = exchange_reports(
                board,
                node=alive.index(self._rank // self._per_node),
                nodes=len(alive),
                address=local_address(training.world.host, config.interface),
                session=session,
                config=config,
            )
            return conclude(reports, paced_bits_per_s=config.link_rate_bits_per_s).node_rates
        except ForepropError as error:
            training.backends.raise_if_failed()
            LOGGER.warning("rank %d: slices stay where they are: %s", self._rank, error)
            return None

    def _decide(self, step: int, alive: Sequence[int], measured: Sequence[float]) -> bool:
        # whether servers are to own other slices, now or if the next measurement agrees
        before, self._rates_before = self._rates_before, dict(zip(alive, measured, strict=True))
        rates = [max(rate, before.get(s, 1.0)) for s, rate in zip(alive, measured, strict=True)]
        made = list(self._moves.survival.moves)
        loads = self._loads(made)
        owned = [loads[server] for server in alive]
        is_worth = is_worth_moving(rates, owned)
        wanted = self._plan(alive, rates, made) if is_worth else made
        if wanted == made:
            if self._is_leader():
                LOGGER.info("links measured, slices stay where they are")
            return not is_worth and is_worth_moving(measured, owned)
        if self._is_leader():
            first, rates_of = step + LEAD_STEPS, dict(zip(alive, rates, strict=True))
            self._moves.tell(MovePlan(first, self._rank, tuple(wanted)))
            for line in describe_loads(loads, self._loads(wanted), rates_of, step=first):
                LOGGER.info("%s", line)
        return True

    def _loads(self, moves: Sequence[int]) -> list[int]:
        lost = self._moves.survival.lost
        return loads_of(self._engine.slices, moves, servers=self._servers, lost=lost)

    def _plan(self, alive: Sequence[int], rates: Sequence[float], made: list[int]) -> list[int]:
        # how many moves each slice is to have made
        text = self._training.config.late_nodes
        late = () if text is None else parse_late_nodes(text)
        suited = spare(shares_of(rates), [alive.index(node) for node in late if node in alive])
        by_server = dict(zip(alive, suited, strict=True))
        shares = [by_server.get(server, 0) for server in range(self._servers)]
        return plan_moves(self._engine.slices, made, shares, lost=self._moves.survival.lost)

"""``rebalance_s``: slices move at a step border when a link's rate has changed for good.

Rank 0 sees at the end of a window that links are to be measured (`core.linkwatch`), and tells it
with its next pace. So all ranks measure them after the same step (`auto.linkprobe`). Rank 0 decides
what servers own from then on. If that is something else, the session goes on with other servers
where it was: optimizer state and averages take the same way as in a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from foreprop.auto.linkprobe import Report, conclude, exchange_reports
from foreprop.cluster.entries import decode_entry
from foreprop.cluster.rendezvous import Board
from foreprop.config import LOGGER
from foreprop.core.linkshares import as_setting, rates_on, shares_of
from foreprop.core.linkwatch import LinkWatch, describe_move, is_worth_moving
from foreprop.errors import TransportError
from foreprop.link.stream import local_address
from foreprop.quantities import counted
from foreprop.servers.served import ServedBackend
from foreprop.session.reconnecting import reconnect

if TYPE_CHECKING:
    from foreprop.session.training import Training
    from foreprop.stragglers.pace import PaceKeeper


class Rebalancing:
    """One session's, whatever servers it has meanwhile. Training thread."""

    def __init__(self, training: Training, pause_s: float) -> None:
        config, world = training.config, training.world
        self._training = training
        self._per_node = config.workers_per_node or world.local_size
        self._nodes = -(-world.size // self._per_node)
        self._watch = LinkWatch(pause_s=pause_s, uneven=config.node_rates is not None)
        self._obstacle = self._find_obstacle()
        if self._obstacle is not None:
            training.report(f"rebalance_s does nothing here: {self._obstacle}")

    def _find_obstacle(self) -> str | None:
        """Why no slices can move, if so."""
        if self._nodes <= 2:
            return f"of {counted(self._nodes, 'node')} no server can own what spares a link"
        if self._training.remote is not None:
            return "remote tables stay on the servers where they are"
        if self._maybe_pace() is None:
            return "all-reduce and local aggregation do not show whose link is slow"
        return None

    def _maybe_pace(self) -> PaceKeeper | None:
        """Of servers that hear from every worker: collectives and relays have none."""
        backend = self._training.backends.all[0]
        return backend.pace if isinstance(backend, ServedBackend) else None

    def end_window(self) -> None:
        """On all ranks after the last step of a window, when the pace has been told."""
        pace = None if self._obstacle is not None else self._maybe_pace()
        if pace is None:
            return
        if pace.measure_due:
            pace.measure_due = False
            self._measure()
        elif self._training.world.rank == 0:
            pace.asks_to_measure |= self._watch.observe(pace.suspect, time.monotonic())

    def _measure(self) -> None:
        """On all ranks after the same step."""
        training = self._training
        training.settle_all()  # what is measured is to be the links, and not what is under way
        before = training.config.node_rates
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
        """What the nodes have measured, on one rank of each; nothing on the others."""
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
        """Rank 0: the setting ``node_rates`` from now on."""
        training = self._training
        try:
            rates = conclude(reports).node_rates
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


def rebalance(training: Training, pause_s: float) -> None:
    """After the last step of a window: see `Rebalancing.end_window`."""
    if training.rebalancing is None:
        training.rebalancing = Rebalancing(training, pause_s)
    training.rebalancing.end_window()

"""What a server beside a worker has, so that its slices and others' outlive a node."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from foreprop.buddies.snapshots import LoadedStates, Snapshots
from foreprop.buddies.substitutes import Adoption, DeferredStates, Substitutes, Substitution
from foreprop.core.buddy import BuddiedServer
from foreprop.core.wire import Kind

if TYPE_CHECKING:
    from foreprop.config import Config
    from foreprop.core.manifest import OptimizerInfo
    from foreprop.elastic.counting import Counting
    from foreprop.link.connection import Connection, Service
    from foreprop.path.calls import States
    from foreprop.path.executor import Executor
    from foreprop.path.joining import Composer
    from foreprop.path.server import Server

_GOODBYE_S = 1.0


def keeps_state(optimizer: OptimizerInfo) -> bool:
    """Whether there is anything to lose: plain SGD's updates leave nothing behind."""
    momentum = any(group.get("momentum") for group in optimizer.groups)
    return optimizer.name != "SGD" or momentum


class Recovery:
    """Of one server. ``slices`` are the numbers of its own.

    ``substitution``: of a substitute's, whom it stands in for. ``every``: see `core.buddy`; 0:
    nobody keeps copies, and what a lost server had of the optimizer's state begins anew.
    ``connections`` are the workers', by rank; ``session`` is its id.
    """

    def __init__(
        self,
        counting: Counting,
        slices: Sequence[int],
        index: int,
        substitution: Substitution | None,
        connections: Mapping[int, Connection],
        *,
        every: int,
        session: str,
    ) -> None:
        self._connections = connections
        self._session = session
        self._counting = counting
        self._slices = slices
        self._index = index
        self._substitution = substitution
        self._every = every
        self._substitutes: Substitutes | None = None
        self.snapshots: Snapshots | None = None
        members, node = counting.members, index
        if substitution is not None:
            node = substitution.node
            for rank in members.here - set(substitution.members):
                members.drop(rank)
            members.here.update(substitution.members)
            members.ever.update(substitution.members)
        if every:
            about = (counting.machine, slices)
            having = members.here & members.started  # the others have no server
            counting.machine = BuddiedServer(*about, node=node, members=having, every=every)

    def services(
        self,
        executor: Executor,
        states: States,
        config: Config,
        composer_of: Callable[[Substitution], Composer],
    ) -> list[Service]:
        """``states`` are the usual ones, and among these."""
        found: list[Service] = [states]
        store = self._counting.store
        if self._every:
            self.snapshots = Snapshots(executor, store.export_state)
            found = [LoadedStates(executor, states), self.snapshots]
        if self._substitution is None:
            own = (self._counting.members, self._index, self._session)
            self._substitutes = Substitutes(executor, config, *own, composer_of)
            return [*found, self._substitutes]
        found[0] = deferred = DeferredStates(executor, found[0], self._slices)
        about = (self._counting.machine, executor, store, self._slices, self._substitution)
        return [*found, Adoption(*about, deferred)]

    @property
    def substitutes(self) -> list[Server]:
        """Those that this server has started."""
        return [] if self._substitutes is None else self._substitutes.servers

    def close(self, *, failed: bool) -> None:
        """Its session is over. If all workers have left, they are told that this is no loss."""
        if failed:
            self.stop(failed=True)
        if failed or not self._counting.members.all_left:
            return
        goodbyes = [
            self._connections[rank].start_sending_past_queue("foreprop-goodbye", Kind.BYE)
            for rank in sorted(self._counting.members.left)
        ]
        deadline = time.monotonic() + _GOODBYE_S
        for goodbye in goodbyes:
            goodbye.join(max(0.0, deadline - time.monotonic()))

    def stop(self, *, failed: bool) -> None:
        if self._substitutes is not None:
            self._substitutes.stop(failed=failed)

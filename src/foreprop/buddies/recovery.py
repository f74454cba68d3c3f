"""What a server beside a worker has, so that its slices and others' outlive a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from foreprop.buddies.snapshots import LoadedStates, Snapshots
from foreprop.buddies.substitutes import Adoption, Substitutes, Substitution
from foreprop.core.buddy import BuddiedServer

if TYPE_CHECKING:
    from foreprop.config import Config
    from foreprop.core.manifest import OptimizerInfo
    from foreprop.elastic.counting import Counting
    from foreprop.link.connection import Service
    from foreprop.path.calls import States
    from foreprop.path.executor import Executor
    from foreprop.path.joining import Composer
    from foreprop.path.server import Server


def keeps_state(optimizer: OptimizerInfo) -> bool:
    """Whether there is anything to lose: plain SGD's updates leave nothing behind."""
    momentum = any(group.get("momentum") for group in optimizer.groups)
    return optimizer.name != "SGD" or momentum


class Recovery:
    """Of one server. ``slices`` are the numbers of its own.

    ``substitution``: of a substitute's, whom it stands in for. ``every``: see `core.buddy`; 0:
    nobody keeps copies, and what a lost server had of the optimizer's state begins anew.
    """

    def __init__(
        self,
        counting: Counting,
        slices: Sequence[int],
        index: int,
        substitution: Substitution | None,
        *,
        every: int,
    ) -> None:
        self._counting = counting
        self._slices = slices
        self._index = index
        self._substitution = substitution
        self._every = every
        self._substitutes: Substitutes | None = None
        members, node = counting.members, index
        if substitution is not None:
            node = substitution.node
            for rank in members.here - set(substitution.members):
                members.drop(rank)
        if every:
            about = (counting.machine, slices)
            counting.machine = BuddiedServer(*about, node=node, members=members.here, every=every)

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
            found = [LoadedStates(executor, states), Snapshots(executor, store.export_state)]
        if self._substitution is None:
            self._substitutes = Substitutes(executor, config, self._index, composer_of)
            return [*found, self._substitutes]
        about = (self._counting.machine, executor, store, self._slices, self._substitution)
        return [*found, Adoption(*about)]

    @property
    def substitutes(self) -> list[Server]:
        """Those that this server has started."""
        return [] if self._substitutes is None else self._substitutes.servers

    def stop(self, *, failed: bool) -> None:
        """Its session is over."""
        if self._substitutes is not None:
            self._substitutes.stop(failed=failed)

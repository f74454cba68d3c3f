"""Words that all ranks of a session leave for each other while it trains."""

from __future__ import annotations

from foreprop.cluster.world import Look, World
from foreprop.config import Config


class Board:
    """Words that all ranks leave for each other in the store, under one key."""

    def __init__(
        self, world: World, config: Config, key: str, look: Look, *, patience_s: float = 0.0
    ) -> None:
        """``patience_s``: a wait is reported as a stall only after that, if it is longer."""
        self._world = world
        self._config = config
        self._key = key
        self._look = look
        self._report_s = max(patience_s, config.stall_report_s)

    def tell(self, key: str, value: str) -> None:
        self._world.publish(f"{self._key}/{key}", value)

    def hear(self, key: str, what: str) -> str:
        """Raises `StepTimeout`, and what has gone wrong meanwhile."""
        found = self._world.lookup(
            f"{self._key}/{key}",
            timeout_s=self._config.step_timeout_s,
            setting="step_timeout_s",
            what=what,
            look=self._look,
            report_s=self._report_s,
        )
        return found.decode()

    def exchange(self, name: str, mine: str, what: str) -> list[str]:
        """What every rank has to say, by rank."""
        self.tell(f"{name}/{self._world.rank}", mine)
        return [
            self.hear(f"{name}/{rank}", f"rank {rank}'s {what}") for rank in range(self._world.size)
        ]

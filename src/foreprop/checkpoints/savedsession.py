"""What checkpoints ask of a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from foreprop.checkpoints.stored import Checkpoint


class SavedSession(Protocol):
    """A session, as far as its checkpoints are concerned. Training thread, but for ``failed``."""

    rank: int
    world_size: int
    timeout_s: float
    """For what other ranks are to do."""
    report_s: float
    """After so long it is said that others are waited for."""
    resumed: Checkpoint | None
    """From where it has gone on."""
    name: str
    """The same on all ranks, and no other training's."""
    joined_at: int | None
    """Of a newcomer: its first step, as its session counts."""
    is_elastic: bool
    """Whether ranks may leave, and others join."""

    @property
    def before(self) -> int:
        """How many steps were made before the session's first one."""

    @property
    def step(self) -> int:
        """How many the optimizer has made, those before it was resumed included."""

    def shared_state(self) -> dict[str, Any]:
        """A copy of what is alike on all ranks. One rank alone calls it."""

    def own_state(self) -> dict[str, Any]:
        """A copy of what is this rank's alone."""

    def save_tables(self, folder: Path) -> None:
        """Its remote tables, if there are some. One rank alone calls it."""

    def meet(self) -> None:
        """Ranks that may be apart come together; every rank calls it."""

    def failed(self) -> bool:
        """Whether it is over with an error. Any thread."""

    def present(self, step: int) -> Sequence[int]:
        """The ranks that have made this step, and have not left since. Any thread."""

    def behind(self, step: int) -> Sequence[int]:
        """The ranks that have left before they have made this step. Any thread."""

    def is_settled(self) -> bool:
        """Whether nobody is just about to be known to have left. Any thread."""

    def left(self) -> Sequence[tuple[int, int]]:
        """The ranks that have left, and within which step of the session. Any thread."""

    def coming(self) -> Sequence[int]:
        """The next step, as the session counts, if somebody joins at it."""

    def numbers(self) -> list[dict[str, Any]]:
        """A copy of the optimizer's, by group."""

    def come(self, before: int, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Of a newcomer: take the optimizer's from the others.

        ``before``: so many steps were made before the session's first one.
        """

    def look(self) -> None:
        """Raise what has ended the session."""

    def exchange(self, name: str, mine: str, what: str) -> list[str]:
        """What every rank says under this name, by rank."""

    def at_end(self, function: Callable[[], None]) -> None:
        """Call it when the session ends."""

    def at_early_end(self, function: Callable[[Sequence[int]], None]) -> None:
        """Call it when the session ends before these steps, at which others were to join."""

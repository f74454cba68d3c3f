"""The optimizer's settings by step: every rank's are compared while gradients are summed."""

from __future__ import annotations

import contextlib
import json
import zlib
from typing import Any, NamedTuple

from foreprop.cluster.rendezvous import Board
from foreprop.errors import StepTimeout, TrainingLoopError
from foreprop.path.optimizer import describe_groups

DIGEST_BITS = 18
_OTHERS_S = 5.0


class _Settings(NamedTuple):
    since: int
    text: str
    """JSON."""
    digest: list[int]
    """Bits that can be summed: of equal ones each is summed to nothing or the number of ranks."""
    scale: float
    """Of the loss."""


def _settings(since: int, text: str, scale: float = 1.0) -> _Settings:
    digest = zlib.crc32(text.encode())
    return _Settings(since, text, [digest >> bit & 1 for bit in range(DIGEST_BITS)], scale)


class StepSettings:
    """One rank's, of the last two steps at which they changed. Any thread."""

    def __init__(self, board: Board, *, ranks: int) -> None:
        self._board = board
        self._ranks = ranks
        self._kept = [_settings(0, "")]

    def announce(self, step: int, text: str, scale: float = 1.0) -> None:
        """From ``step`` on the optimizer has these settings."""
        self._kept = [self._kept[-1], _settings(step, text, scale)]

    def _at(self, step: int) -> _Settings:
        return next(settings for settings in reversed(self._kept) if settings.since <= step)

    def scale_at(self, step: int) -> float:
        return self._at(step).scale

    def digest_at(self, step: int, alike: int) -> list[int]:
        """With what else must be the same on every rank, as a number."""
        code = zlib.crc32(str(alike).encode()) if alike else 0
        return [bit ^ (code >> n & 1) for n, bit in enumerate(self._at(step).digest)]

    def how_they_differ(self, step: int) -> TrainingLoopError:
        """Every rank comes to this, and publishes what it has."""
        self._board.publish(f"settings/{self._board.rank}", self._at(step).text)
        found: list[Any] = []
        with contextlib.suppress(StepTimeout):  # but not of what another rank publishes meanwhile
            for rank in range(self._ranks):
                text = self._board.lookup(f"settings/{rank}", "its settings", timeout_s=_OTHERS_S)
                found.append(json.loads(text))
        for rank, groups in enumerate(found):
            if groups != found[0]:
                return TrainingLoopError(describe_groups(step, (0, rank), found[0], groups))
        return TrainingLoopError(
            f"step {step}: the ranks use their gradients differently: the optimizer's settings"
            " differ, or some have run other backward passes, or read or edited gradients, and"
            " others have not"
        )

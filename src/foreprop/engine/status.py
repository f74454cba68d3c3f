"""What each rank leaves in the folder ``watch`` for `foreprop top`: a small file, now and then."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from foreprop.core.manifest import MOST_PROCESSES
from foreprop.durable import read_regular, replace_file
from foreprop.engine.metrics import Metrics
from foreprop.errors import ConfigError

State = Literal["starting", "training", "closed", "failed"]


_Rank = Annotated[int, msgspec.Meta(ge=0, lt=MOST_PROCESSES)]
_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_MOST_BYTES = 1 << 20


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says of itself; None where that is not known yet."""

    session: str
    rank: _Rank
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_PROCESSES)]
    host: Annotated[str, msgspec.Meta(max_length=255)]
    pid: int
    at_s: _Amount
    """Seconds since 1970, by the rank's clock."""
    state: State
    step: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    step_s: _Amount | None = None
    waiting_share: _Amount | None = None
    sent_bits_per_s: _Amount | None = None
    received_bits_per_s: _Amount | None = None
    queue_depth: int = 0
    straggler: _Rank | None = None
    """The rank that the others wait for, if this one knows."""
    error: str = ""


_STATUS = msgspec.json.Decoder(RankStatus)


class StatusFile:
    """One rank's status file, written whole each time. Raises `OSError`."""

    def __init__(self, folder: str, session: str, rank: int, world_size: int) -> None:
        self._path = Path(folder) / f"rank-{rank}.status.json"
        self._first = RankStatus(
            session=session,
            rank=rank,
            world_size=world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            at_s=0.0,
            state="starting",
        )
        self._last = self._first

    def write(
        self, state: State, step: int, metrics: Metrics | None = None, error: str = ""
    ) -> None:
        """Write what is known; without metrics the last ones stay."""
        found: dict[str, object] = {"step": step}
        if metrics is not None and metrics.steps:
            scalars = metrics.scalars()
            names = ("step_s", "waiting_share", "sent_bits_per_s", "received_bits_per_s")
            found |= {name: scalars.get(name) for name in names}
            found["queue_depth"] = metrics.queue_depth
            straggler = metrics.straggler
            found["straggler"] = None if straggler is None else straggler.rank
        self._last = msgspec.structs.replace(
            self._last, at_s=time.time(), state=state, error=error, **found
        )
        replace_file(self._path, msgspec.json.encode(self._last))


def read_statuses(folder: Path) -> list[RankStatus]:
    """Read the newest session in the folder, by rank; raises `ConfigError` for files of others."""
    found = []
    for path in sorted(folder.glob("rank-*.status.json")):
        try:
            found.append(_STATUS.decode(read_regular(path, _MOST_BYTES)))
        except (OSError, ValueError, RecursionError) as error:  # msgspec's are ValueErrors
            raise ConfigError(f"{path} is no rank's status: {error}") from error
    if not found:
        return []
    newest = max(found, key=lambda status: status.at_s).session
    return sorted((s for s in found if s.session == newest), key=lambda status: status.rank)

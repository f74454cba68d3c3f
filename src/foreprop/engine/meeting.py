"""Where the ranks of a session meet before they are connected: keys of the rendezvous store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping

import torch.distributed as dist

from foreprop.config import Config
from foreprop.engine.failure import decode_failure, failure_of
from foreprop.engine.world import World
from foreprop.errors import HandshakeError


class Meeting:
    """One session's part of the store: who takes part, what is told, and what went wrong.

    A named ``part`` belongs to the session that was begun last.
    """

    def __init__(self, world: World, config: Config, part: str = "") -> None:
        self.key = f"session/{world.sessions - 1}/{part}"
        if not part:
            self.key = f"session/{world.next_session()}"
        self._world = world
        self._config = config
        self._refused_key = f"{self.key}/refused"

    def agree(self, session_id: str, shape: Mapping[str, object]) -> str:
        """Rank 0's session id; raises `HandshakeError` if this rank has another cluster in mind.

        ``shape`` is what decides who connects to whom: who does not agree on that could never meet.
        """
        if self._world.rank == 0:
            self._world.publish(self.key, json.dumps([session_id, shape]))
            return session_id
        what = "rank 0 to start the session; does every rank call parallelize() equally often?"
        session_id, theirs = json.loads(self.lookup(self.key, what))
        differing = [
            f"{name}: rank 0 has {theirs.get(name)}, rank {self._world.rank} has {ours}"
            for name, ours in shape.items()
            if theirs.get(name) != ours
        ]
        if differing:
            raise HandshakeError(
                f"rank 0 and rank {self._world.rank} do not agree: {'; '.join(differing)}"
            )
        return session_id

    def publish(self, name: str, value: str) -> None:
        self._world.publish(f"{self.key}/{name}", value)

    def refuse(self, error: BaseException) -> None:
        """Tell those who cannot be told otherwise that the session is over, and why."""
        text = failure_of(error, by=f"rank {self._world.rank}").encode().decode()
        with contextlib.suppress(dist.DistError, RuntimeError):  # the store may be what is gone
            if self._world.size > 1 and not self._world.store.check([self._refused_key]):
                self._world.publish(self._refused_key, text)

    def check_refused(self) -> None:
        """Raise what has ended the session on another rank."""
        store = self._world.store
        with contextlib.suppress(dist.DistError):
            if store.check([self._refused_key]):
                raise decode_failure(store.get(self._refused_key)).as_error()

    def lookup(self, key: str, what: str, *, raw: bool = False) -> str:
        """A key's value, waiting for it for at most ``join_timeout_s``."""
        found = self._world.lookup(
            key,
            timeout_s=self._config.join_timeout_s,
            what=what,
            raw=raw,
            look=self.check_refused,
            report_s=self._config.stall_report_s,
        )
        return found.decode()

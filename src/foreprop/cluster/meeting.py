"""Where the ranks of a session meet before they are connected: keys of the rendezvous store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping

from foreprop.cluster.world import World
from foreprop.config import Config
from foreprop.errors import HandshakeError, RemoteProtocolError, TransportError
from foreprop.link.failure import decode_failure, failure_of
from foreprop.observe.trace import check_trace_folder


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
        world.limit_store(config)
        self._refused_key = f"{self.key}/refused"

    def agree(self, session_id: str, shape: Mapping[str, object]) -> str:
        """Rank 0's session id; raises `HandshakeError` if this rank has another cluster in mind.

        ``shape`` is what decides who connects to whom: who does not agree on that could never meet.
        `ConfigError` if this rank's traces cannot be written: better now than after the training.
        """
        if self._config.trace is not None:
            check_trace_folder(self._config.trace)
        if self._world.rank == 0:
            self._world.publish(self.key, json.dumps([session_id, shape]))
            return session_id
        what = "rank 0 to start the session; does every rank call parallelize() equally often?"
        session_id, theirs = _parse_shape(self.lookup(self.key, what))
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
        with contextlib.suppress(TransportError):  # the store may be what is gone
            if self._world.size > 1 and not self._world.entries.check(self._refused_key):
                self._world.publish(self._refused_key, text)

    def check_refused(self) -> None:
        """Raise what has ended the session on another rank."""
        told = None
        with contextlib.suppress(TransportError):
            told = self._world.entries.maybe_get(self._refused_key)
        if told is not None:
            raise decode_failure(told).as_error()

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


def _parse_shape(text: str) -> tuple[str, Mapping[str, object]]:
    try:
        session_id, shape = json.loads(text)
    except (ValueError, TypeError) as error:
        raise RemoteProtocolError(f"the store has {text[:100]!r} for a session: {error}") from error
    if not isinstance(session_id, str) or not isinstance(shape, dict):
        raise RemoteProtocolError(f"the store has {text[:100]!r} for a session")
    return session_id, shape

"""A key-value board shared by all ranks, with timeouts, that ends when a rank has failed.

It is a part of torch.distributed's store: all keys of a board begin alike. Keys that nobody
publishes are waited for until the board's timeout, a failure of this rank, or one of another.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping

from foreprop.cluster.world import World
from foreprop.config import LOGGER, Config
from foreprop.errors import (
    StepTimeout,
    TransportError,
    decode_failure,
    failure_of,
)

Look = Callable[[], None]
"""Called now and then while something is waited for; raises what has happened meanwhile."""

_FIRST_LOOK_S, _LAST_LOOK_S = 0.002, 0.1
_REPORT_S = 10.0
_FAILURE = "refused"


class Board:
    """One rank's view of the keys that begin with ``key``."""

    def __init__(
        self,
        world: World,
        key: str,
        *,
        timeout_s: float,
        setting: str = "join_timeout_s",
        report_s: float = _REPORT_S,
        look: Look | None = None,
        raw: bool = False,
    ) -> None:
        """A wait ends after ``timeout_s`` (the setting of that name), and is reported before.

        ``look`` raises what ends a wait sooner, as a failure published on this board does.
        ``raw``: outside foreprop's part of the store, where torchrun's restarts do not start anew.
        """
        self.key = key
        self.rank = world.rank
        self._size = world.size
        self.entries = world.raw_entries if raw else world.entries
        self._timeout_s = timeout_s
        self._setting = setting
        self._report_s = report_s
        self._look = look

    def publish(self, name: str, value: str) -> None:
        self.entries.set(self.key_of(name), value)

    def key_of(self, name: str) -> str:
        """In ``entries``. The board's own, for no name: see `agree_on_session`."""
        return f"{self.key}/{name}" if name else self.key

    def lookup(
        self, name: str, what: str, look: Look | None = None, *, timeout_s: float | None = None
    ) -> str:
        """A value, waiting for it; raises `StepTimeout` that names ``what`` is missing.

        Raises what ``look`` or the board's own raises meanwhile, and `TransportError` if the store
        is gone.
        """
        return self.wait_for(name, what, look, timeout_s).decode()

    def peek(self, name: str) -> bytes | None:
        """A value if it is there; raises `TransportError` if the store is gone."""
        return self.entries.maybe_get(self.key_of(name))

    def exchange(self, name: str, mine: str, what: str) -> list[str]:
        """What every rank publishes under this name, by rank."""
        self.publish(f"{name}/{self.rank}", mine)
        ranks = range(self._size)
        return [self.lookup(f"{name}/{rank}", f"rank {rank}'s {what}") for rank in ranks]

    def meet(self, what: str) -> None:
        """Return when every rank has come so far."""
        self.publish(f"{what}/{self.rank}", "")
        deadline, pause_s = time.monotonic() + self._timeout_s, _FIRST_LOOK_S
        while missing := self.missing(what):
            self._check(None)
            if time.monotonic() > deadline:
                self.entries.check_refused(self.key_of(f"{what}/{missing[0]}"))
                raise StepTimeout(
                    f"rank {self.rank} waited {self._timeout_s:g} s ({self._setting}) for"
                    f" rank {', '.join(map(str, missing))}, which has not {what}; does every rank"
                    " call parallelize()?"
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LAST_LOOK_S)

    def missing(self, name: str) -> list[int]:
        """The ranks that have published nothing under this name."""
        check = self.entries.check
        try:
            return [r for r in range(self._size) if not check(self.key_of(f"{name}/{r}"))]
        except TransportError as error:
            raise TransportError(f"rank {self.rank} {error}") from error

    def forget(self, name: str) -> None:
        """Remove a value that nobody will look up any more."""
        self.entries.delete(self.key_of(name))

    # Failures.
    def publish_failure(self, error: BaseException) -> None:
        """For those who cannot be reached otherwise: it is over, and why. The first one counts."""
        text = failure_of(error, by=f"rank {self.rank}").encode().decode()
        with contextlib.suppress(TransportError):  # the store may be what is gone
            if self._size > 1 and not self.entries.check(self.key_of(_FAILURE)):
                self.publish(_FAILURE, text)

    def check_failed(self) -> None:
        """Raise the failure that a rank has published."""
        found = None
        with contextlib.suppress(TransportError):
            found = self.peek(_FAILURE)
        if found is not None:
            raise decode_failure(found).as_error()

    # Waiting.
    def _check(self, look: Look | None) -> None:
        for check in filter(None, (look, self._look, self.check_failed)):
            check()

    def wait_for(
        self, name: str, what: str, look: Look | None, timeout_s: float | None = None
    ) -> bytes:
        """What `lookup` has, in bytes."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        started = time.monotonic()
        report_at, pause_s = started + self._report_s, _FIRST_LOOK_S
        while (found := self._maybe_value(name, what, look)) is None:
            now = time.monotonic()
            self._check(look)
            if now >= started + timeout_s:
                self.entries.check_refused(self.key_of(name))
                raise StepTimeout(
                    f"rank {self.rank} waited {timeout_s:g} s ({self._setting}) for {what}"
                )
            if now >= report_at:
                report_at = float("inf")
                waited_s = now - started
                LOGGER.warning("rank %d for %.0f s waits for %s", self.rank, waited_s, what)
            # Store.wait() would block Ctrl-C, and torch prints a warning whenever it times out
            time.sleep(min(pause_s, started + timeout_s - now))
            pause_s = min(pause_s * 1.5, _LAST_LOOK_S)
        return found

    def _maybe_value(self, name: str, what: str, look: Look | None) -> bytes | None:
        try:
            return self.peek(name)
        except TransportError as error:
            for check in filter(None, (look, self._look)):
                check()  # it may know better who is lost
            raise TransportError(f"rank {self.rank}, which waited for {what}, {error}") from error


def session_board(world: World, config: Config, part: str = "") -> Board:
    """For the ranks of a new session while they join it, and for what ends it.

    A named ``part`` belongs to the session that was begun last.
    """
    world.limit_store(config)
    key = f"session/{world.sessions - 1}/{part}" if part else f"session/{world.next_session()}"
    return Board(world, key, timeout_s=config.join_timeout_s, report_s=config.stall_report_s)


def step_board(
    world: World,
    config: Config,
    key: str,
    look: Look | None = None,
    *,
    patience_s: float = 0.0,
) -> Board:
    """For ranks that train; a wait is reported as a stall after ``patience_s``, if that is more."""
    return Board(
        world,
        key,
        timeout_s=config.step_timeout_s,
        setting="step_timeout_s",
        report_s=max(patience_s, config.stall_report_s),
        look=look,
    )


def agree_on_session(
    board: Board, config: Config, session_id: str, shape: Mapping[str, object]
) -> str:
    """Rank 0's session id; raises `HandshakeError` if this rank has another cluster in mind.

    ``shape`` is what decides who connects to whom: who does not agree on that could never meet.
    `ConfigError` if what it is to record cannot be written: better now than after the training.
    """
    if config.trace is not None or config.watch is not None:
        from foreprop.observe.trace import check_folders

        check_folders(config)
    if board.rank == 0:
        board.publish("", json.dumps([session_id, shape]))
        return session_id
    from foreprop.cluster.entries import agreed_session

    what = "rank 0 to start the session; does every rank call parallelize() equally often?"
    return agreed_session(board.lookup("", what), shape, board.rank)

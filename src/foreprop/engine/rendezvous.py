"""A key-value board shared by all ranks, with timeouts, that ends when a rank has failed.

It is a part of torch.distributed's store: all keys of a board begin alike. Keys that nobody
publishes are waited for until the board's timeout, a failure of this rank, or one of another.

Whoever can write to the store may have written its entries, if no secret is set
(docs/security.md). So what is read has a type and a bound, or is an error that names it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
import threading
import time
from collections.abc import Callable, Container, Mapping
from typing import Any, TypeVar

import msgspec

from foreprop.config import LOGGER, Config
from foreprop.engine.world import World
from foreprop.errors import (
    HandshakeError,
    RemoteProtocolError,
    StepTimeout,
    TransportError,
    decode_failure,
    failure_of,
)

T = TypeVar("T")
Look = Callable[[], None]
"""Called now and then while something is awaited; raises what has happened meanwhile."""

_VALUE_BYTES = 4_194_304
"""The most bytes of one entry: torch's store takes less than 8 MiB."""
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

        ``look`` raises what ends a wait sooner, as a failure published on this board does. With
        ``raw`` the board is outside foreprop's part of the store, where torchrun's restarts do not
        start anew.
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
        """The key of a name in ``entries``; without one the board's own (`agree_on_session`)."""
        return f"{self.key}/{name}" if name else self.key

    def lookup(
        self, name: str, what: str, look: Look | None = None, *, timeout_s: float | None = None
    ) -> str:
        """Wait for a value; raises `StepTimeout` that names ``what`` is missing.

        Raises what ``look`` or the board's own raises meanwhile, and `TransportError` if the store
        is gone.
        """
        return self.wait_for(name, what, look, timeout_s).decode()

    def peek(self, name: str) -> bytes | None:
        """A value if it is there; raises `TransportError` if the store is gone."""
        return self.entries.maybe_get(self.key_of(name))

    def exchange(self, name: str, mine: str, what: str) -> list[str]:
        """Publish a value under this name; returns every rank's, by rank."""
        self.publish(f"{name}/{self.rank}", mine)
        ranks = range(self._size)
        return [self.lookup(f"{name}/{rank}", f"rank {rank}'s {what}") for rank in ranks]

    def meet(
        self,
        what: str,
        look: Look | None = None,
        members: Callable[[], Container[int]] | None = None,
    ) -> None:
        """Return when every rank has come so far; raises what ``look`` does meanwhile.

        ``members`` gives those that are waited for at that moment, who may fail; by default all.
        """
        self.publish(f"{what}/{self.rank}", "")
        deadline, pause_s = time.monotonic() + self._timeout_s, _FIRST_LOOK_S
        while missing := self.missing(what, members() if members is not None else None):
            self._check(look, failures=members is None)
            if time.monotonic() > deadline:
                self.entries.check_refused(self.key_of(f"{what}/{missing[0]}"))
                raise StepTimeout(
                    f"rank {self.rank} waited {self._timeout_s:g} s ({self._setting}) for"
                    f" rank {', '.join(map(str, missing))}, which has not {what}; does every rank"
                    " call parallelize()?"
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LAST_LOOK_S)

    def missing(self, name: str, members: Container[int] | None = None) -> list[int]:
        """The ranks, of these members, that have published nothing under this name."""
        check = self.entries.check
        ranks = [r for r in range(self._size) if members is None or r in members]
        try:
            return [r for r in ranks if not check(self.key_of(f"{name}/{r}"))]
        except TransportError as error:
            raise TransportError(f"rank {self.rank} {error}") from error

    def forget(self, name: str) -> None:
        self.entries.delete(self.key_of(name))

    # Bytes of any number, in several entries.
    def publish_bytes(self, name: str, data: bytes) -> None:
        starts, key = range(0, len(data), _VALUE_BYTES), self.key_of(name)
        for number, start in enumerate(starts[:-1]):  # each call has a time of its own
            self.entries.set(f"{key}/{number}", data[start : start + _VALUE_BYTES])
        last = {f"{key}/{len(starts) - 1}": data[starts[-1] :]} if starts else {}
        self.entries.set_all({**last, key: str(len(starts))})

    def lookup_bytes(self, name: str, what: str, look: Look | None = None) -> memoryview:
        numbers = decode_parts(self.lookup(name, what, look), what)
        return memoryview(b"".join(self.wait_for(f"{name}/{n}", what, look) for n in numbers))

    def forget_bytes(self, name: str) -> None:
        if (count := self.peek(name)) is not None:
            key = self.key_of(name)
            numbers = decode_parts(count.decode(), name)
            self.entries.delete(key, *(f"{key}/{number}" for number in numbers))

    # Failures.
    def publish_failure(self, error: BaseException) -> None:
        """Tell why it is over who cannot be reached otherwise. The first failure counts."""
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
    def _check(self, look: Look | None, *, failures: bool = True) -> None:
        for check in filter(None, (look, self._look, self.check_failed if failures else None)):
            check()

    def wait_for(
        self, name: str, what: str, look: Look | None, timeout_s: float | None = None
    ) -> bytes:
        """Wait for a value's bytes, as `lookup` does."""
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
    """The board where a new session's ranks meet while they join, and say what ends it.

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
    Raises `ConfigError` if what the session is to record cannot be written: better now than after
    the training.
    """
    if config.trace is not None or config.watch is not None:
        from foreprop.engine.trace import check_folders

        check_folders(config)
    if board.rank == 0:
        board.publish("", json.dumps([session_id, shape]))
        return session_id
    what = "rank 0 to start the session; does every rank call parallelize() equally often?"
    text = board.lookup("", what)
    try:
        agreed, theirs = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise RemoteProtocolError(
            f"the store has {text[:_SHOWN]!r} for a session: {error}"
        ) from error
    named = isinstance(agreed, str) and _ID.fullmatch(agreed) is not None
    if not named or not isinstance(theirs, dict):
        raise RemoteProtocolError(f"the store has {text[:_SHOWN]!r} for a session")
    differing = [
        f"{name}: rank 0 has {theirs.get(name)}, rank {board.rank} has {ours}"
        for name, ours in shape.items()
        if theirs.get(name) != ours
    ]
    if differing:
        text = "; ".join(differing)
        raise HandshakeError(f"rank 0 and rank {board.rank} do not agree: {text}")
    return str(agreed)


# What entries say.
MOST_PARTS = 4096
"""The most parts of one value: 16 GiB."""
_SHOWN = 100
_ID = re.compile("[0-9A-Za-z][0-9A-Za-z-]{0,63}")
"""What a session's id may be: it is in files' names."""
_decoding = threading.Lock()
"""Held while msgspec decodes: two threads at a type's first use end the process."""


def decode_entry(text: str | bytes, kind: type[T] | Any, what: str) -> T:
    """Decode JSON of this type; raises `RemoteProtocolError` that names ``what``."""
    try:
        with _decoding:
            found: T = msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"the store has {text[:_SHOWN]!r} for {what}: {error}") from error
    return found


def decode_order(text: str, count: int, what: str) -> list[int]:
    order: list[int] = decode_entry(text, list[int], what)
    if sorted(order) != list(range(count)):
        raise RemoteProtocolError(
            f"the store has {text[:_SHOWN]!r} for {what}, which is no order of {count} numbers"
        )
    return order


def decode_parts(text: str, what: str) -> range:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) > MOST_PARTS:
        raise RemoteProtocolError(
            f"the store has {text[:_SHOWN]!r} for the number of parts of {what}; it must be"
            f" {MOST_PARTS} at most"
        )
    return range(int(text))


def parse_address(text: str, what: str) -> tuple[str, int]:
    """The address and port that a server has published; raises `RemoteProtocolError`."""
    try:
        address, port = text.split()
        ipaddress.ip_address(address)
        if not 0 < (number := int(port)) < 2**16:
            raise ValueError(f"port {number}")
    except ValueError as error:
        raise RemoteProtocolError(
            f"the store has {text[:100]!r} for the address of {what}: {error}"
        ) from error
    return address, number

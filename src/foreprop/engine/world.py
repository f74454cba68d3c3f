"""A process's peers: rank, world size, node, and torch.distributed's store to meet in.

A call of a `TCPStore` whose server cannot be reached blocks for the store's own timeout, minutes,
and so does the next. Here they are made by one helper thread, and nobody waits longer for that than
``limit_s``; while a call hangs, others fail at once.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
    rendezvous,
)

from foreprop.config import LOGGER, Config, LaunchInfo, launch_info
from foreprop.config.environment import may_grow
from foreprop.core.wire import SIGNED
from foreprop.engine.stream import is_loopback
from foreprop.errors import ConfigError, ForepropError, HandshakeError, TransportError

if TYPE_CHECKING:
    from foreprop.engine.secret import Seal

LIMIT_S = 30.0
_HURRIED_S, _HURRY_S = 1.0, 10.0
T = TypeVar("T")
_all_partings: weakref.WeakSet[Partings] = weakref.WeakSet()


class Partings:
    """A world's sessions that are closed here and not yet on every other rank.

    Ranks leave a session together. A process with several would wait in one for a rank that waits
    in another; so only the last one that it closes is waited for, and with it all the others. What
    is begun ends by itself within the session's ``step_timeout_s``.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._errors: list[ForepropError] = []
        _all_partings.add(self)

    def begin(self, part: Callable[[], None]) -> None:
        """Leave a session in a thread of its own."""
        thread = threading.Thread(target=self._run, args=(part,), name="foreprop-part", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, part: Callable[[], None]) -> None:
        try:
            part()
        except ForepropError as error:
            LOGGER.error("%s", error)
            self._errors.append(error)

    def wait(self) -> None:
        """Return when all have ended; raises the first of their errors."""
        while self._threads:
            self._threads.pop().join()
        errors, self._errors = self._errors, []
        if errors:
            raise errors[0]


def wait_for_all_partings() -> None:
    """Wait at the process's end for all worlds' partings, whose errors have been printed."""
    for partings in list(_all_partings):
        with contextlib.suppress(ForepropError):
            partings.wait()


@dataclass(kw_only=True)
class World:
    """One process's view of its peers. ``in_process``: servers are threads, not processes."""

    rank: int
    size: int
    local_size: int
    host: str
    store: Store
    raw_store: Store
    in_process: bool = False
    private_network: ClassVar[bool] = False
    """Whether nobody else reaches this process's network, as in a namespace of one's own."""
    scope: str = ""
    """The name of ``store`` in the raw one: an entry signed for one is not signed for the other."""
    sessions: int = 0
    loaders: int = 0
    partings: Partings = field(default_factory=Partings, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self._caller = StoreCaller(self.raw_store, self.host)
        self.entries = StoreClient(self.store, self._caller, self.rank)
        self.raw_entries = StoreClient(self.raw_store, self._caller, self.rank)
        reached = self.size > self.local_size and not is_loopback(self.host)
        self._warned = self.rank > 0 or not reached or self.private_network

    def limit_store(self, config: Config) -> None:
        """Have no call of the store take longer than this session would wait for anything."""
        limits_s = (self._caller.limit_s, config.join_timeout_s, config.step_timeout_s)
        self._caller.limit_s = min(limits_s)
        self.use_secret(config)

    def hurry_store(self) -> None:
        """Have no call of the store take long for a while: somebody is lost, perhaps with it.

        This also holds for calls under way. Any thread.
        """
        self._caller.hurried_until_s = time.monotonic() + _HURRY_S

    def use_secret(self, config: Config) -> None:
        """Sign what this process has in the store from now on, and take only what is signed.

        Without a secret rank 0 tells what follows from that, once.
        """
        if config.secret_file is not None:
            from foreprop.engine.secret import Seal, load_key

            for entries, scope in ((self.entries, self.scope), (self.raw_entries, "raw")):
                if entries.seal is None:
                    entries.seal = Seal(load_key(config.secret_file), scope, f"rank {self.rank}")
        elif not self._warned:
            report_no_secret()
        self._warned = True

    def next_session(self) -> int:
        """The number of the session about to start, the same on all ranks by program order."""
        with self._lock:
            self.sessions += 1
            return self.sessions - 1

    def next_loader(self) -> int:
        """The number of the loader about to be sharded, likewise."""
        with self._lock:
            self.loaders += 1
            return self.loaders - 1


def report_no_secret() -> None:
    """Warn, once per job of several machines, that nobody is authenticated."""
    LOGGER.warning(
        "no secret is set: whoever can reach these machines' ports may join as a rank, read and"
        " change gradients, or end the training. Make a file by (umask 077 && openssl rand -hex 32"
        " > job.secret), copy it to every machine, and set FOREPROP_SECRET_FILE to its path;"
        " `foreprop run` does so by itself (docs/security.md)"
    )


_current: World | None = None
_current_lock = threading.Lock()


def current_world(timeout_s: float | None = None, *, joins: str | None = None) -> World:
    """This process's world: torchrun's, an existing process group's, or one of one.

    The first call waits for the rendezvous for ``timeout_s`` at most, by default
    ``join_timeout_s``. A worker that ``joins`` a session that runs (`Config.join`) meets nobody.
    """
    global _current  # noqa: PLW0603 - one rendezvous per process
    with _current_lock:
        if joins or _current is None:
            config = Config.resolve()
            if joins := joins or config.join:
                _current = _newcomers_world(joins)
                return _current
            _current = _meet(launch_info(), timeout_s or config.join_timeout_s)
            if config.secret_file is not None:
                _current.use_secret(config)
        return _current


def is_alone() -> bool:
    """Whether `current_world` is one of one; found out without meeting anybody."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() == 1
    return launch_info().world_size == 1 and not may_grow()


def solitary_world() -> World:
    """A world of one, in this process."""
    store = HashStore()
    return World(
        rank=0,
        size=1,
        local_size=1,
        host="127.0.0.1",
        store=store,
        raw_store=store,
        in_process=True,
    )


def _meet(info: LaunchInfo, timeout_s: float) -> World:
    if dist.is_available() and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        rank, size = dist.get_rank(), dist.get_world_size()
    elif not info.launched:
        return solitary_world()
    else:
        try:
            timeout = timedelta(seconds=timeout_s)
            store, rank, size = next(rendezvous("env://", timeout=timeout))
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise TransportError(
                f"rank {info.rank} cannot reach the rendezvous at {info.master_address}:"
                f"{info.master_port} within {timeout_s:g} s (join_timeout_s): {error}"
            ) from error
    scope = f"foreprop/{info.attempt}"  # torchrun's restarts start anew
    return World(
        rank=rank,
        size=size,
        local_size=info.local_world_size if info.launched else size,
        host=info.master_address,
        store=PrefixStore(scope, store),
        scope=scope,
        raw_store=unwrap(store),
    )


@functools.cache
def _newcomers_world(join: str) -> World:
    """The world of a worker that joins a running session, and meets nobody, nor any store.

    It is the same for one ``join``. Raises `ConfigError` if nothing says which worker it is to be.
    """
    from foreprop.config.checks import parse_addresses

    info = launch_info()
    if not info.launched:
        raise ConfigError(
            f"join is {join!r}, and RANK or WORLD_SIZE is not set: set RANK to that of the worker"
            " that was lost, or to a new one, and WORLD_SIZE to how many there were at the start"
        )
    if info.rank < 0 or info.world_size < 1:
        raise ConfigError(
            f"RANK is {info.rank} and WORLD_SIZE {info.world_size}: ranks count from 0, and there"
            " was a worker at the start"
        )
    store = HashStore()
    return World(  # one on its machine, where nothing says how many (LOCAL_WORLD_SIZE)
        rank=info.rank,
        size=info.world_size,
        local_size=info.local_world_size if info.local_world_size < info.world_size else 1,
        host=parse_addresses(join)[0][0],
        store=store,
        raw_store=store,
    )


# The store, with calls that end in time.
class TimedCall:
    """A call of the store that somebody waits for only so long."""

    def __init__(self, make: Callable[[], Any], name: str) -> None:
        self.name = name
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self._make = make

    def run(self) -> None:
        try:
            self.result = self._make()
        except BaseException as error:  # raised again where it was called
            self.error = error
        finally:
            self._make = lambda: None  # it holds no reference to what has been done
            self.done.set()


class StoreCaller:
    """Makes the calls of one process, whichever part of the store they are for."""

    def __init__(self, store: Store, host: str) -> None:
        self.limit_s = LIMIT_S
        """The shortest of the sessions' timeouts."""
        self.hurried_until_s = 0.0
        self._host = host
        self._is_local = isinstance(unwrap(store), HashStore)
        self._calls: queue.SimpleQueue[TimedCall] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stuck: TimedCall | None = None
        self._lock = threading.Lock()

    def call(self, name: str, make: Callable[[], T]) -> T:
        """Make a call; raises `TransportError` if the store is gone, or silent for ``limit_s``."""
        call = TimedCall(make, name)
        if self._is_local:
            call.run()
        else:
            self._wait_for(call)
        error = call.error
        if isinstance(error, (dist.DistError, RuntimeError)):
            why = str(error).partition("\n")[0]
            raise self._lost(f"{name}: {why}") from error
        if error is not None:
            raise error
        result: T = call.result
        return result

    def _wait_for(self, call: TimedCall) -> None:
        with self._lock:
            stuck = self._stuck
            if stuck is not None and not stuck.done.is_set():
                raise self._lost(f"{stuck.name} has not been answered")
            self._stuck = None
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="foreprop-store", daemon=True
                )
                self._thread.start()
        self._calls.put(call)
        begun_s = time.monotonic()
        while not call.done.wait(min(_HURRIED_S, self.limit_s)):
            now_s = time.monotonic()
            waited_s = now_s - begun_s
            if waited_s >= (_HURRIED_S if now_s < self.hurried_until_s else self.limit_s):
                self._stuck = call
                raise self._lost(f"{call.name} has not been answered within {waited_s:.3g} s")

    def _run(self) -> None:
        while True:
            self._calls.get().run()

    def _lost(self, why: str) -> TransportError:
        return TransportError(
            f"lost the rendezvous store at {self._host}: the process that holds it (torchrun's, or"
            f" rank 0) is gone, or out of reach ({why})"
        )


class StoreClient:
    """A store, or a part of it. With a ``seal`` only entries signed with the job's secret count."""

    def __init__(self, store: Store, caller: StoreCaller, rank: int = 0) -> None:
        self.seal: Seal | None = None
        self._store: Any = store  # torch's annotations know only str
        self._caller = caller
        self._rank = rank

    def set(self, key: str, value: str | bytes) -> None:
        self.set_all({key: value})

    def set_all(self, values: Mapping[str, str | bytes]) -> None:
        """Set entries in this order, which others see, for the price of one call."""
        if (seal := self.seal) is not None:
            values = {key: seal.sign(key, value) for key, value in values.items()}
        self._caller.call("set", lambda: [self._store.set(*entry) for entry in values.items()])

    def maybe_get(self, key: str) -> bytes | None:
        """A key's value; None if there is none, or none that is signed.

        Raises `HandshakeError` if only others sign.
        """
        store = self._store
        found: bytes | None = self._caller.call(
            "get", lambda: bytes(store.get(key)) if store.check([key]) else None
        )
        return open_entry(self.seal, key, found, f"rank {self._rank}")

    def check(self, key: str) -> bool:
        if self.seal is not None:
            return self.maybe_get(key) is not None
        return bool(self._caller.call("check", lambda: self._store.check([key])))

    def check_refused(self, key: str) -> None:
        """Raise `HandshakeError` if an entry that was waited for in vain did not count."""
        if self.seal is not None:
            self.seal.check_refused(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a count, which cannot be signed: nothing of what it says may be trusted."""
        return int(self._caller.call("add", lambda: self._store.add(key, amount)))

    def delete(self, *keys: str) -> None:
        self._caller.call("delete_key", lambda: [self._store.delete_key(key) for key in keys])


def open_entry(seal: Seal | None, key: str, entry: bytes | None, who: str) -> bytes | None:
    """An entry's value, if it counts; raises `HandshakeError` if only the other side signs."""
    if seal is not None:
        return seal.maybe_open(key, entry)
    if entry is not None and entry.startswith(SIGNED):
        raise HandshakeError(
            f"{who} has no secret, and the store's entry {key!r} is signed with one: set"
            " FOREPROP_SECRET_FILE to a copy of the same file on every machine, or use another"
            " rendezvous, if that is another job's"
        )
    return entry


def unwrap(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store

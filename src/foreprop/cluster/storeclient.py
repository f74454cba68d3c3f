"""torch's rendezvous store with calls that end in time.

A call of a `TCPStore` whose server cannot be reached blocks for the store's own timeout, minutes,
and so does the next. Here they are made by one helper thread, and nobody waits longer for that than
``limit_s``; while a call hangs, others fail at once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from foreprop.errors import TransportError

LIMIT_S = 30.0
T = TypeVar("T")


class _Call:
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
            self._make = _nothing
            self.done.set()


class StoreCaller:
    """Makes the calls of one process, whichever part of the store they are for."""

    def __init__(self, store: Store, host: str) -> None:
        self.limit_s = LIMIT_S
        """The shortest of the sessions' timeouts."""
        self._host = host
        self._is_local = isinstance(unwrap(store), HashStore)
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stuck: _Call | None = None
        self._lock = threading.Lock()

    def call(self, name: str, make: Callable[[], T]) -> T:
        """Raises `TransportError` if the store is gone or does not answer within ``limit_s``."""
        call = _Call(make, name)
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

    def _wait_for(self, call: _Call) -> None:
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
        if not call.done.wait(self.limit_s):
            self._stuck = call
            raise self._lost(f"{call.name} has not been answered within {self.limit_s:g} s")

    def _run(self) -> None:
        while True:
            self._calls.get().run()

    def _lost(self, why: str) -> TransportError:
        return TransportError(
            f"lost the rendezvous store at {self._host}: the process that holds it (torchrun's, or"
            f" rank 0) is gone, or out of reach ({why})"
        )


class StoreClient:
    """A store, or a part of it."""

    def __init__(self, store: Store, caller: StoreCaller) -> None:
        self._store: Any = store  # torch's annotations know only str
        self._caller = caller

    def set(self, key: str, value: str | bytes) -> None:
        self._caller.call("set", lambda: self._store.set(key, value))

    def set_all(self, values: Mapping[str, str | bytes]) -> None:
        """In this order, which others see; for the price of one call."""
        self._caller.call("set", lambda: [self._store.set(*entry) for entry in values.items()])

    def maybe_get(self, key: str) -> bytes | None:
        """None if the key is not there."""
        store = self._store
        found: bytes | None = self._caller.call(
            "get", lambda: bytes(store.get(key)) if store.check([key]) else None
        )
        return found

    def check(self, key: str) -> bool:
        return bool(self._caller.call("check", lambda: self._store.check([key])))

    def add(self, key: str, amount: int) -> int:
        return int(self._caller.call("add", lambda: self._store.add(key, amount)))

    def delete(self, *keys: str) -> None:
        self._caller.call("delete_key", lambda: [self._store.delete_key(key) for key in keys])


def unwrap(store: Store) -> Store:
    """The store behind all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def within(timeout_s: float, what: str, make: Callable[[], T]) -> T:
    """What ``make`` returns; `TransportError` if that takes too long, and it goes on in vain."""
    call = _Call(make, what)
    threading.Thread(target=call.run, name="foreprop-within", daemon=True).start()
    if not call.done.wait(timeout_s):
        raise TransportError(f"{what} took longer than {timeout_s:g} s")
    if call.error is not None:
        raise call.error
    result: T = call.result
    return result


def _nothing() -> None:
    """In the place of what has been done: holds no reference."""

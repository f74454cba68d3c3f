"""Services: who owns the frames of a kind, gives them room and handles them.

A worker, a server or a relay is its connections (`link.connection`) and some services. Each kind of
frame has exactly one owner, so that to add a frame, or a feature, is to add a service. What a
session does not use is not even imported: see `Later`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from foreprop.core.wire import MAX_CONTROL_BYTES, Header, Kind
from foreprop.errors import InternalError, RemoteProtocolError
from foreprop.link.connection import Connection, FrameOwner
from foreprop.link.failure import Failure, decode_failure

EMPTY = memoryview(b"")


class Service(FrameOwner, Protocol):
    """Part of a session: owns the frames of some kinds."""

    @property
    def kinds(self) -> frozenset[Kind]: ...


class Collecting(Protocol):
    """A service that waits for pushes: of slices, or of shards of rows."""

    def __contains__(self, number: int) -> bool: ...

    def incomplete(self) -> Sequence[tuple[int, int]]:
        """What some peers have pushed and others not: (number, step). With the lock held."""

    def describe_wait(self, number: int, step: int) -> str:
        """What a slice or shard waits for at this step, in words. With the lock held."""


def owners_of(services: Iterable[Service]) -> dict[int, Service]:
    """By kind of frame; raises `InternalError` if one has two owners."""
    owners: dict[int, Service] = {}
    for service in services:
        for kind in service.kinds:
            other = owners.setdefault(kind, service)
            if other is not service:
                names = " and ".join(type(each).__name__ for each in (other, service))
                raise InternalError(f"frames of kind {kind.name} have two owners: {names}")
    return owners


S = TypeVar("S", bound=Service)


class Later(Generic[S]):
    """A service that is made when somebody needs it: its module is then imported, and not before.

    It can own its kinds without being there: then its first frame makes it.
    """

    def __init__(self, kinds: Iterable[Kind], make: Callable[[], S]) -> None:
        self.kinds = frozenset(kinds)
        self.made: S | None = None
        self._make = make
        self._lock = threading.Lock()

    @property
    def service(self) -> S:
        with self._lock:
            if self.made is None:
                self.made = self._make()
            return self.made

    def room(self, peer: Connection, header: Header) -> memoryview:
        return self.service.room(peer, header)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        self.service.on_frame(peer, header, payload)


class FailureReports:
    """The other side says why the session has failed."""

    kinds = frozenset({Kind.FAILURE})

    def __init__(self, on_failure: Callable[[Connection, Failure], None]) -> None:
        self._on_failure = on_failure

    def room(self, peer: Connection, header: Header) -> memoryview:
        return bounded(header, MAX_CONTROL_BYTES)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        self._on_failure(peer, decode_failure(payload))


# Room for payloads.
def check_size(header: Header, size_bytes: int) -> None:
    if header.payload_bytes != size_bytes:
        raise RemoteProtocolError(
            f"{Kind(header.kind).name} of slice {header.slice} carries {header.payload_bytes}"
            f" bytes, not {size_bytes}"
        )


def exactly(header: Header, size_bytes: int) -> memoryview:
    check_size(header, size_bytes)
    return memoryview(bytearray(size_bytes))


def bounded(header: Header, limit_bytes: int) -> memoryview:
    if header.payload_bytes > limit_bytes:
        raise RemoteProtocolError(
            f"{Kind(header.kind).name} of {header.payload_bytes} bytes; at most {limit_bytes}"
        )
    # untouched memory: who only says that much will come takes none
    return np.empty(header.payload_bytes, np.uint8).data


def nothing(header: Header) -> memoryview:
    """For a frame that has no payload."""
    if header.payload_bytes:
        raise unexpected_bytes(header)
    return EMPTY


def unexpected_bytes(header: Header) -> RemoteProtocolError:
    return RemoteProtocolError(f"{Kind(header.kind).name} carries {header.payload_bytes} bytes")

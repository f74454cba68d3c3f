"""Servers with buddies in a simulation: their machine, and what its instructions take."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from foreprop.core.buddy import BuddiedServer, KeepState, SnapshotHeld, StateKept
from foreprop.core.collect import UpdateSlice
from foreprop.core.counting_server import CountingServer
from foreprop.core.frames import CONTROL_PRIORITY, NO_TOKEN, MessageReady, SendFrame
from foreprop.core.membership import AnswerSlice, Members, UpdateCounted
from foreprop.core.wire import HEADER_BYTES, Kind
from foreprop.errors import ConfigError, InternalError

if TYPE_CHECKING:
    from foreprop.simulate.served import Agreement

SNAPSHOTS = frozenset({Kind.SNAPSHOT, Kind.SNAPSHOT_HELD})


def buddied_machine(agreement: Agreement, index: int) -> BuddiedServer:
    """Of a server beside a worker. Raises `ConfigError` where a node stands for several."""
    if any(members > 1 for members in agreement.members):
        raise ConfigError(
            f"buddy_steps is {agreement.buddy_steps}, but a node stands for several: ask for"
            " symmetric=False (--every-node)"
        )
    workers = len(agreement.members)
    machine = CountingServer(
        agreement.slices,
        index=index,
        members=Members(workers),
        order=agreement.order,
        names=[f"parameter {number}" for number in range(agreement.parameters)],
        turns=agreement.turns(index, workers),
    )
    own = [piece.number for piece in agreement.slices if piece.server == index]
    every = agreement.buddy_steps
    return BuddiedServer(machine, own, node=index, members=range(workers), every=every)


def snapshot_bytes(agreement: Agreement, frame: SendFrame) -> int:
    """Of a frame with a slice's state, or of word that it is held; with its header."""
    if frame.kind == Kind.SNAPSHOT_HELD:
        return HEADER_BYTES
    return HEADER_BYTES + agreement.slices[frame.slice].elems * agreement.state_bytes_per_elem


def held(server: int, frame: SendFrame) -> MessageReady:
    """A worker has received a snapshot, and says so."""
    place = (frame.step, CONTROL_PRIORITY, frame.slice, NO_TOKEN)
    return MessageReady(server, Kind.SNAPSHOT_HELD, *place)


def holds(rank: int, frame: SendFrame) -> SnapshotHeld:
    return SnapshotHeld(rank, frame.slice, frame.step)


def do(
    instruction: Any, handle: Callable[[Any], None], update: Callable[[UpdateSlice], None]
) -> None:
    """Carry out what only such servers say; a copy of a slice's state takes no time."""
    if isinstance(instruction, UpdateCounted):
        update(instruction.update)
    elif isinstance(instruction, AnswerSlice):
        slice_, step, priority, ranks, flags = instruction
        for rank in ranks:
            handle(MessageReady(rank, Kind.REPLY, step, priority, slice_, NO_TOKEN, flags))
    elif isinstance(instruction, KeepState):
        handle(StateKept(*instruction))
    else:
        raise InternalError(f"a simulated server cannot do {instruction!r}")

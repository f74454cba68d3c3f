"""Servers with buddies in a simulation: their machine, and what snapshots take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreprop.core.buddy import BuddiedServer, SnapshotHeld
from foreprop.core.frames import CONTROL_PRIORITY, NO_TOKEN, MessageReady, SendFrame
from foreprop.core.wire import HEADER_BYTES, Kind
from foreprop.simulate.counted import counting_machine

if TYPE_CHECKING:
    from foreprop.simulate.served import Agreement


def buddied_machine(agreement: Agreement, index: int) -> BuddiedServer:
    """Of a server beside a worker. Raises `ConfigError` where a node stands for several."""
    machine, members = counting_machine(agreement, index), range(len(agreement.members))
    own = [piece.number for piece in agreement.slices if piece.server == index]
    every = agreement.buddy_steps
    return BuddiedServer(machine, own, node=index, members=members, every=every)


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

"""A worker's half of buddies: it keeps others' snapshots, and outlives the loss of a server.

A lost server's connection ends. Then nothing is sent to it any more, and what it has not answered
stays kept (`buddies.replaceable`). The worker on its buddy's node has its own server start a
substitute, and that server tells all where it is. Each survivor connects, claims what it has, hears
where each slice goes on, and sends what is lost. The machines of training know nothing of this: a
reply comes a little later.

A worker that has closed its session takes part until the servers end, for others may need what it
has. A server that ends because all workers have left says so. One that says nothing is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from foreprop.buddies.replaceable import ReplaceableStream, SentFrame
from foreprop.buddies.snapshots import HeldSnapshots
from foreprop.buddies.substitutes import (
    Substitution,
    decode_settled,
    decode_substitution,
    room_for_words,
    substitute_id,
)
from foreprop.config import LOGGER
from foreprop.core.buddy import NOBODY, buddy_of
from foreprop.core.frames import CONTROL_PRIORITY
from foreprop.core.takeover import RESTS, Settled
from foreprop.core.wire import Header, Kind, encode_header, sealed
from foreprop.errors import (
    ForepropError,
    PeerLost,
    RemoteProtocolError,
    StepTimeout,
    TransportError,
    failure_of,
)
from foreprop.link.connection import EMPTY, Connection, FrameOwner, nothing
from foreprop.link.stream import Stream
from foreprop.path.ending import GOODBYE_S
from foreprop.quantities import counted

if TYPE_CHECKING:
    from foreprop.path.worker import WorkerEngine

_LOOK_S = 0.01
Reach = Callable[[Substitution, Callable[[], None]], Stream]
"""Connects to a substitute and greets it; raises `ForepropError`. It calls the second meanwhile."""


class WholeReplies:
    """Owns what servers answer, and hands it on when it is whole.

    A reply that ends in the middle leaves the values before it as they were. So it is received
    beside them and then copied, once.
    """

    kinds = frozenset({Kind.REPLY, Kind.STATE_REPLY, Kind.BLOB_REPLY})

    def __init__(
        self,
        engine: WorkerEngine,
        streams: Sequence[ReplaceableStream],
        inner: Mapping[int, FrameOwner],
    ) -> None:
        self.steps = [0] * len(engine.slices)
        """By slice, the last one whose values are here."""
        self._inner: dict[int, FrameOwner] = {kind: inner[kind] for kind in self.kinds}
        self._streams = streams
        self._beside = [bytearray() for _ in streams]
        self._rooms: list[memoryview] = [EMPTY for _ in streams]

    def room(self, peer: Connection, header: Header) -> memoryview:
        server = peer.number
        room = self._inner[header.kind].room(peer, header)
        if header.kind != Kind.REPLY or not len(room):
            return room
        if len(room) > len(self._beside[server]):
            self._beside[server] = bytearray(len(room))
        self._rooms[server] = room
        return memoryview(self._beside[server])[: len(room)]

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.REPLY:
            if len(payload):
                room, self._rooms[peer.number] = self._rooms[peer.number], EMPTY
                room[:] = payload
                payload = room
            self.steps[header.slice] = header.step
        self._streams[peer.number].answered(header.kind, header.slice)
        self._inner[header.kind].on_frame(peer, header, payload)


class Loss:
    """One server's, until its substitute has gone on."""

    def __init__(self, server: int, node: int) -> None:
        self.server = server
        self.node = node
        self.since_s = time.monotonic()
        self.joining = False
        self.welcomed = threading.Event()
        self.settled: dict[int, Settled] = {}
        self.is_settled = threading.Event()


class Survival:
    """Owns word of substitutes, and goes on with them.

    ``reach`` connects to one; ``address`` is where this node's would listen; ``members_now`` are
    the ranks that have not been dropped; ``newcomers_now`` the first steps of those that came
    later, whose nodes have no server. One worker and one server to a node, of the same number at
    the start; or ``nodes`` says by server where it is.
    """

    kinds = frozenset({Kind.TAKEOVER, Kind.SETTLED, Kind.WELCOME, Kind.BYE})

    def __init__(
        self,
        engine: WorkerEngine,
        streams: Sequence[ReplaceableStream],
        inner: Mapping[int, FrameOwner],
        reach: Reach,
        address: str,
        members_now: Callable[[], Sequence[int]],
        newcomers_now: Callable[[], Mapping[int, int]],
        on_takeover: Callable[[Substitution], None],
        nodes: Sequence[int] = (),
    ) -> None:
        self._engine = engine
        self._reach = reach
        self._address = address
        self._members_now = members_now
        self._newcomers_now = newcomers_now
        self._on_takeover = on_takeover
        self._ending = engine.ending
        self._lock = engine.lock
        self._timeout_s = engine.config.step_timeout_s
        self._streams = streams
        self._leaves = False
        """An error has ended its part: the others go on without this worker."""
        self._node_of = list(nodes or range(len(self._streams)))  # by server
        self._losses: dict[int, Loss] = {}
        self._gone, self._parted = set[int](), set[int]()  # nodes; servers that all have left
        self._threads: list[threading.Thread] = []
        self._told: dict[int, Substitution] = {}  # by server, of losses
        self._takeovers: list[dict[str, Any]] = []
        self._own: dict[int, list[int]] = {server: [] for server in range(len(self._streams))}
        for piece in engine.slices:
            self._own[piece.server].append(piece.number)
        self._welcomes = inner[Kind.WELCOME]
        self.held = HeldSnapshots(engine)
        self.replies = WholeReplies(engine, streams, inner)

    # A loss.
    def outlives(self, peer: Connection) -> bool:
        """Whether this worker goes on although a server is gone. In its receiving thread."""
        engine, server = self._engine, peer.number
        with self._lock:
            node = self._node_of[server]
            others = [loss for loss in self._losses.values() if loss.node != node]
            refused = self._leaves or others or self._is_over(server)
            if node == engine.rank or server in self._losses or refused:
                return False  # this node is going itself, or a second one, or all end
            newcomers = self._newcomers_now()
            gone = {*self._gone, node} - newcomers.keys()  # dropped or not: it may have left before
            members = tuple(rank for rank in self._whole(newcomers) if rank not in gone)
            successor = buddy_of(node, [rank for rank in members if rank not in newcomers])
            if engine.rank not in members or successor == NOBODY:
                return False
            self._gone.add(node)
            self._streams[server].lose()
            loss = self._losses[server] = Loss(server, node)
        if successor == engine.rank:
            self._ask_for(
                Substitution(
                    server,
                    successor,
                    members,
                    substitute_id(engine.manifest.session, server, node),
                    self._address,
                    0,
                )
            )
        LOGGER.warning(
            "rank %d: server %d is gone with node %d; it is to go on beside rank %d",
            *(engine.rank, server, node, successor),
        )
        self._join_if_told(loss)
        return True

    def cut(self, peer: Connection) -> None:
        """It is silent: nothing more is sent to it."""
        self._streams[peer.number].lose()

    def _is_over(self, server: int) -> bool:
        """Whether it ends with the session, or this worker's part of that does."""
        ended = server in self._parted or self._streams[server].closed
        return ended or self._ending.failed.is_set() or self._engine.progress.failed

    def _whole(self, newcomers: Mapping[int, int]) -> list[int]:
        """The members, without newcomers of whose second step nothing is answered.

        The others have all values: they have ended their first one.
        """
        newest = max(self.replies.steps, default=0)
        return [rank for rank in self._members_now() if newcomers.get(rank, 0) < newest]

    def _ask_for(self, wish: Substitution) -> None:
        """Have this node's server start a substitute."""
        own, data = self._engine.rank, msgspec.json.encode(wish)
        about = (own, Kind.TAKEOVER, 0, CONTROL_PRIORITY, data)
        self._engine.send_message(*about, slice_=wish.server)

    def _join_if_told(self, loss: Loss) -> None:
        with self._lock:
            told = self._told.get(loss.server)
            if told is None or loss.joining:
                return
            loss.joining = True
        name = f"foreprop-takeover-{loss.server}"
        thread = threading.Thread(target=self._go_on, args=(loss, told), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    # Frames.
    def room(self, peer: Connection, header: Header) -> memoryview:
        if header.kind == Kind.WELCOME:
            return self._welcomes.room(peer, header)
        return nothing(header) if header.kind == Kind.BYE else room_for_words(header)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.TAKEOVER:
            self._on_substitution(peer, decode_substitution(payload))
            return
        if header.kind == Kind.BYE:
            self._parted.add(peer.number)
            return
        loss = self._losses.get(peer.number)
        if header.kind == Kind.WELCOME and loss is None:
            self._welcomes.on_frame(peer, header, payload)
        elif loss is None or not loss.joining:
            kind = Kind(header.kind).name
            raise RemoteProtocolError(f"server {peer.number} sent {kind}, and was not lost")
        elif header.kind == Kind.WELCOME:
            loss.welcomed.set()
        else:
            loss.settled = decode_settled(payload, self._own[peer.number])
            loss.is_settled.set()

    def _on_substitution(self, peer: Connection, told: Substitution) -> None:
        with self._lock:
            known = 0 <= told.server < len(self._node_of)
            if not known or self._node_of[peer.number] != told.node:
                raise RemoteProtocolError(
                    f"server {peer.number} tells of a substitute for server {told.server} on node"
                    f" {told.node}"
                )
            if self._engine.rank not in told.members:
                text = f"server {told.server} was lost before rank {self._engine.rank} had all"
                raise PeerLost(f"{text} values: start it again", peer=f"server {told.server}")
            self._told[told.server] = told
            loss = self._losses.get(told.server)
        if loss is not None:
            self._join_if_told(loss)
        else:  # others have seen it first: the receiving thread follows
            self._streams[told.server].lose()

    # Going on. In a thread of its own.
    def _go_on(self, loss: Loss, told: Substitution) -> None:
        try:
            self._take_part(loss, told)
        except ForepropError as error:
            self._engine.fail(failure_of(error))
        except BaseException as error:
            self._engine.broke(error)

    def _take_part(self, loss: Loss, told: Substitution) -> None:
        engine, server = self._engine, loss.server
        peer, stream = engine.connections[server], self._streams[server]
        self._ending.threads[server].join(self._timeout_s)  # what had come is read
        new = self._reach(told, lambda: self._check_under_way(server))
        manifest = msgspec.structs.replace(engine.manifest, session=told.session).encode()
        new.send(*self._frame(Kind.MANIFEST, 0, 0, CONTROL_PRIORITY, memoryview(manifest)))
        stream.receive_from(new)
        receiver = threading.Thread(
            target=peer.receive,
            args=(self._ending,),
            name=f"foreprop-receive-{server}",
            daemon=True,
        )
        receiver.start()
        self._ending.threads[server] = receiver
        self._await(loss.welcomed, loss, "all survivors to join it")
        slices = self._own[server]
        claim = msgspec.json.encode([self._claimed(number) for number in slices])
        new.send(*self._frame(Kind.CLAIM, 0, 0, CONTROL_PRIORITY, memoryview(claim)))
        self._await(loss.is_settled, loss, "it to say where slices go on")
        behind: list[int] = []
        first = self._brought(loss, told, behind)
        again = stream.resume(first, {n: each.step for n, each in loss.settled.items()})
        self._finish(loss, told, again, behind)

    def _claimed(self, slice_: int) -> int:
        """The last answered step; a newcomer has none of a slice that it has never pushed."""
        step = self.replies.steps[slice_]
        stream = self._streams[self._engine.slices[slice_].server]
        first = self._newcomers_now().get(self._engine.rank, 0)
        return RESTS if step == first - 1 and not stream.has_pushed(slice_) else step

    def _frame(
        self, kind: Kind, step: int, slice_: int, priority: int, payload: memoryview
    ) -> SentFrame:
        place = (kind, 0, self._engine.rank, step, slice_, priority, len(payload))
        checksum = self._streams[0].checksum  # all connections have the same
        return SentFrame(sealed(encode_header(*place), payload, checksum), payload)

    def _await(self, event: threading.Event, loss: Loss, what: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not event.wait(_LOOK_S):
            self._check_under_way(loss.server)
            if time.monotonic() > deadline:
                raise StepTimeout(
                    f"rank {self._engine.rank} waited {self._timeout_s:g} s (step_timeout_s) at the"
                    f" substitute for server {loss.server} for {what}"
                )

    def _check_under_way(self, server: int) -> None:
        self._engine.progress.raise_if_failed()
        if self._streams[server].closed:
            raise TransportError(f"rank {self._engine.rank} has left the session")

    def _brought(self, loss: Loss, told: Substitution, behind: list[int]) -> Iterator[SentFrame]:
        """States before values: once all have pushed a slice, it is updated."""
        engine = self._engine
        for number in self._own[loss.server] if told.node == engine.rank else ():
            with self._lock:
                found = self.held.states.newest(number, loss.settled[number].step)
            step, data = found or (0, EMPTY)  # nothing is word of it, too
            behind.append(loss.settled[number].step - step)
            yield self._frame(Kind.STATE_TAKEN_OVER, step, number, CONTROL_PRIORITY, data)
        for number in self._own[loss.server]:
            settled = loss.settled[number]
            if settled.giver == engine.rank:
                priority = engine.priority_of(engine.slices[number].parameter)
                values = engine.memory.values(number)
                yield self._frame(Kind.TAKEN_OVER, settled.step, number, priority, values)

    def _finish(self, loss: Loss, told: Substitution, again: int, behind: list[int]) -> None:
        took_s = time.monotonic() - loss.since_s
        steps = sorted({each.step for each in loss.settled.values()})
        done: dict[str, Any] = {
            "server": loss.server,
            "lost_node": loss.node,
            "node": told.node,
            "steps": steps,
            "pushed_again": again,
            "seconds": took_s,
        }
        if behind:
            done["most_state_steps_lost"] = max(behind)
        with self._lock:
            self._node_of[loss.server] = told.node
            del self._losses[loss.server], self._told[loss.server]
            self._takeovers.append(done)
        self._on_takeover(told)
        LOGGER.warning(
            "rank %d: server %d goes on beside rank %d after %.2f s, from step %s; %d pushes were"
            " sent again%s",
            *(self._engine.rank, loss.server, told.node, took_s),
            "/".join(map(str, steps)),
            again,
            f"; optimizer state is up to {counted(max(behind), 'step')} older"
            if any(behind)
            else "",
        )

    def close(self, *, failure: BaseException | None) -> None:
        """In the engine's place: see `path.ending`."""
        if failure is not None or self._engine.progress.failed:
            self._leaves = True
        else:
            self._await_takeovers()
        try:
            self._engine.close(failure=failure)
        finally:
            for thread in self._threads:
                thread.join(GOODBYE_S)

    def _await_takeovers(self) -> None:
        """For at most ``step_timeout_s``: until then this rank may still be owed something."""
        deadline = time.monotonic() + self._timeout_s
        while self._losses and not self._engine.progress.failed and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def stats(self) -> dict[str, Any]:
        """For `Session.stats`."""
        with self._lock:
            takeovers = [dict(each) for each in self._takeovers]
        return {
            "snapshots": self.held.count,
            "snapshot_bytes": self.held.bytes,
            "takeovers": takeovers,
        }

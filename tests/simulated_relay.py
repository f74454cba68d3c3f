"""A relay in the simulated cluster: between the workers of one node and one server."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from foreprop.core.collect import SliceUpdated, UpdateSlice
from foreprop.core.frames import (
    CONTROL_PRIORITY,
    SERVER,
    Finish,
    FrameSent,
    InstallValue,
    MessageReady,
    NotifyArrived,
    PeerLeft,
    PullArrived,
    PushArrived,
    ReplyArrived,
    SendFrame,
    ValueArrived,
)
from foreprop.core.relay_machine import relay_machine, workers_of_node
from foreprop.core.sendqueue import USUAL_TURNS
from foreprop.core.wire import Flag, Kind

if TYPE_CHECKING:
    from tests.simulator import Action, Cluster, Story


class Relay:
    """``stories`` are the slices' as the server has told them, or rank 0 at the start."""

    def __init__(self, cluster: Cluster, node: int, server: int) -> None:
        setup = cluster.setup
        peers = workers_of_node(node, setup.workers, setup.workers_per_node)
        self.node = node
        self.sums: list[tuple[int, int, tuple[int, ...]]] = []
        self._cluster = cluster
        self._server = server
        self._first_rank = peers.first_rank(0)
        self._workers = len(peers.ranks)
        self._stories: dict[int, Story] = {}
        self._machine = relay_machine(
            cluster.slices,
            server=server,
            peers=peers,
            order=setup.order,
            reply=setup.reply,
            names=[f"p{i}" for i in range(len(setup.sizes_elems))],
        )
        self.links = cluster.links(self._workers, USUAL_TURNS)
        self.up = cluster.links(0, USUAL_TURNS)
        self.up.queues[SERVER] = deque()
        self._summing: UpdateSlice | None = None
        self._priorities: dict[tuple[int, int], int] = {}
        self._parts: list[Any] = []  # by token
        self._left = False

    def actions(self) -> Iterator[Action]:
        where = f"{self.node}/{self._server}"
        if self._summing is not None:
            yield f"relay {where} sums", self._summed
        for links in (self.links, self.up):
            for peer in links.busy_with:
                yield f"relay {where} sends to {peer}", self._sending(links, peer)
            for peer, queue in links.queues.items():
                if queue:
                    yield f"relay {where} to {peer}", self._arriving(peer, queue)

    def _sending(self, links: Any, peer: int) -> Callable[[], None]:
        def sent() -> None:
            frame = links.busy_with.pop(peer)
            queue = links.queues[peer]
            if peer != SERVER and queue and queue[-1][0] is frame:
                self._check_untouched(*queue[-1])
            self._do(self._machine.handle(FrameSent(peer)))

        return sent

    def _arriving(self, peer: int, queue: deque[tuple[SendFrame, Story]]) -> Callable[[], None]:
        def arrive() -> None:
            frame, story = queue.popleft()
            if peer == SERVER:
                self._cluster.servers[self._server].receive(self.node, frame, story)
            else:
                if self.links.busy_with.get(peer) is frame:
                    self._check_untouched(frame, story)
                rank = self._first_rank + peer
                self._cluster.workers[rank].receive(self._server, frame, story)

        return arrive

    def _check_untouched(self, frame: SendFrame, story: Story) -> None:
        if frame.kind == Kind.REPLY:  # others carry no values
            assert self._stories[frame.slice] == story, f"{frame} changed while a relay sent it"

    def receive(self, rank: int, frame: SendFrame, story: Story) -> None:
        """From a worker."""
        _, kind, step, slice_, priority, flags, _ = frame
        worker, key = rank - self._first_rank, (slice_, step)
        event: object
        if kind == Kind.PUSH:
            event = PushArrived(worker, slice_, step, priority, flags)
            self._priorities[key] = min(priority, self._priorities.get(key, priority))
        elif kind == Kind.VALUE:
            event = ValueArrived(worker, slice_, step, priority)
            self._stories[slice_] = story
            self._priorities[key] = priority
            self.up.expect(step, priority, slice_, SERVER)
            self._expect(key, without=worker)
        elif kind == Kind.PULL:
            event = PullArrived(worker, slice_, step, priority)
        elif kind == Kind.NORM:
            event = MessageReady(SERVER, Kind.NORM, step, CONTROL_PRIORITY, 0, 0)
            self.up.expect(step, CONTROL_PRIORITY, 0, SERVER)
        else:
            event = PeerLeft(worker)
        self._do(self._machine.handle(event))

    def answer(self, frame: SendFrame, story: Story) -> None:
        """From the server."""
        _, kind, step, slice_, priority, flags, _ = frame
        key = (slice_, step)
        event: object
        if kind == Kind.NORM_PART:
            self._parts.append(story)
            for worker in range(self._workers if self._cluster.setup.measures else 1):
                self._pass_norm_part(worker, step)
            return
        if kind == Kind.NOTIFY:
            event = NotifyArrived(slice_, step, SERVER, flags)
        else:
            assert self._machine.closing.awaits(slice_, step)
            if not flags & Flag.UNCHANGED:
                self._stories[slice_] = story
            self._priorities.setdefault(key, priority)
            self._expect(key)
            event = ReplyArrived(slice_, step, SERVER, priority, flags)
        self._do(self._machine.handle(event))

    def _pass_norm_part(self, worker: int, step: int) -> None:
        token = len(self._parts) - 1
        self.links.expect(step, CONTROL_PRIORITY, 0, worker)
        event = MessageReady(worker, Kind.NORM_PART, step, CONTROL_PRIORITY, 0, token)
        self._do(self._machine.handle(event))

    def _expect(self, key: tuple[int, int], without: int = -1) -> None:
        for worker in range(self._workers):
            if worker != without:
                self.links.expect(key[1], self._priorities[key], key[0], worker)

    def _summed(self) -> None:
        summed, self._summing = self._summing, None
        assert summed is not None
        key = (summed.slice, summed.step)
        self.up.expect(summed.step, self._priorities[key], summed.slice, SERVER)
        self._do(self._machine.handle(SliceUpdated()))

    def _do(self, instructions: Sequence[object]) -> None:
        for instruction in instructions:
            if isinstance(instruction, SendFrame):
                self._send(instruction)
            elif isinstance(instruction, UpdateSlice):
                assert self._summing is None, "two sums at once"
                self._summing = instruction
                ranks = tuple(self._first_rank + worker for worker in instruction.ranks)
                self.sums.append((instruction.slice, instruction.step, ranks))
            elif isinstance(instruction, Finish) and not self._left:
                self._left = True
                assert not self.up.busy_with
                self.up.queues[SERVER].append((SendFrame(SERVER, Kind.BYE, 0, 0, 0, 0, -1), ()))
            else:
                assert isinstance(instruction, InstallValue | Finish), instruction
        for links in (self.links, self.up):
            links.check_none_waits_for_another()

    def _send(self, frame: SendFrame) -> None:
        if frame.peer == SERVER:
            self.up.send(frame, self._stories.get(frame.slice, ()))
        elif frame.kind == Kind.NORM_PART:
            self.links.send(frame, self._parts[frame.token])
        else:
            self.links.send(frame, self._stories[frame.slice])

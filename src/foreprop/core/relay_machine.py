"""A relay: a server of one node's workers that pushes what it has combined on to another server.

Theory of operation ("Local aggregation": Kim et al., Parallax, section 5.3.2). A relay stands
between the workers of one node and one server: to the workers it is that server, to the server it
is one worker. A slice that all workers of the node have pushed is summed in rank order, and the sum
is pushed on, once; the server's answer goes to all of them. So a relay is a `ServerMachine` with
the closing rule `AllMembers`, except that a combined round is not answered at once: it is passed
upwards, and answered when the server has answered. Many rounds may wait for that. The server is one
more peer (`SERVER`) among those that frames go to. A relay needs no push window: its workers'
windows have let go what it pushes.

With ``reply="notify"`` or ``"pull"`` nothing crosses the node's link unless somebody asks for it:
the first worker's pull is passed on, and the others get a copy of its answer.

Rules: what the relay has pushed on is awaited; an answer to anything else is the server's protocol
error. When every worker has said goodbye, `Finish` comes as soon as all is passed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from foreprop.core.closing import AllMembers, States
from foreprop.core.collect import SliceState, UpdateSlice
from foreprop.core.frames import (
    NO_TOKEN,
    SERVER,
    MessageReady,
    NotifyArrived,
    Peers,
    PullArrived,
    PushArrived,
    ReplyArrived,
    ValueArrived,
    nodes,
)
from foreprop.core.sendqueue import Order, Reply, Turns
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Slice
from foreprop.core.wire import ROUND_SHIFT, Flag, Kind
from foreprop.errors import RemoteProtocolError

_COMMON = Flag.VALUE_CHANGED | Flag.GRADIENT | Flag.MEASURE | -1 << ROUND_SHIFT
"""The flags that all pushes of a round have or do not have."""
_ANYBODYS = Flag.EXPOSED | Flag.BUILDS_ON
"""The flags that a node's push has if any worker's has them."""


def workers_of_node(node: int, world_size: int, workers_per_node: int) -> Peers:
    """The peers of a node's relay."""
    ranks = nodes(world_size, workers_per_node).ranks
    if not 0 <= node < len(ranks):
        raise RemoteProtocolError(f"there is no node {node} among {len(ranks)}")
    return Peers(tuple(range(rank, rank + 1) for rank in ranks[node]))


def relay_machine(
    slices: Sequence[Slice],
    *,
    server: int,
    peers: Peers,
    order: Order,
    reply: Reply,
    names: Sequence[str],
) -> ServerMachine[PassedUpwards]:
    """The machine of a relay between ``peers``, a node's workers, and the server of this index.

    Its `UpdateSlice` asks for a sum, and `SliceUpdated` says that this is made.
    """
    return ServerMachine(
        slices,
        index=server,
        workers=peers.count,
        order=order,
        reply=reply,
        names=names,
        peers=peers,
        turns=Turns(at_once=peers.count + 1),  # its workers share no link
        closing=partial(PassedUpwards, server=server, reply=reply),
    )


@dataclass(slots=True, eq=False)
class _Awaited:
    """A round that was passed upwards and is not answered."""

    update: UpdateSlice
    announced: bool = False
    pulled: bool = False
    pulls: list[PullArrived] = field(default_factory=list)  # since the announcement


class PassedUpwards(AllMembers):
    """The closing rule of a node's workers, whose sums go on, and what the ``server`` owes."""

    passes_on = True

    def __init__(self, states: States, peers: Peers, *, server: int, reply: Reply) -> None:
        super().__init__(states, peers)
        self.handlers |= {
            ReplyArrived: self._on_reply_arrived,
            NotifyArrived: self._on_notify_arrived,
        }
        self.measures = False  # the last push has asked for its round's sums of squares
        self._server = server
        self._reply = reply
        self._has_rank_zero = peers.first_rank(0) == 0
        self._flags: dict[int, int] = {}  # by slice: the flags that its node's push will have
        self._pulled_early: set[int] = set()  # slices that were pulled before their sum is made
        self._awaited: dict[int, _Awaited] = {}  # by slice

    # Read-only views.
    def awaits(self, slice_: int, step: int) -> bool:
        """Whether the server may send this slice's values now."""
        if step == 0:
            has_none = slice_ in self._states and self._states[slice_].done_step < 0
            return has_none and not self._has_rank_zero
        awaited = self._awaited.get(slice_)
        if awaited is None or awaited.update.step != step:
            return False
        return self._reply == "broadcast" or awaited.pulled

    def has_pushed(self, slice_: int, step: int) -> bool:
        """Whether the slice's sum has gone to the server, and no answer is here."""
        return slice_ in self._awaited and self._awaited[slice_].update.step == step

    def awaited(self) -> list[tuple[int, int]]:
        """The slices, with their steps, that the server owes answers to."""
        return [(slice_, each.update.step) for slice_, each in self._awaited.items()]

    def describe(self, state: SliceState, step: int) -> str:
        if waits := super().describe(state, step):
            return waits
        is_passed_on = self.has_pushed(state.number, step)
        return f"is summed and waits for server {self._server}" if is_passed_on else ""

    # What comes from the workers.
    def add(self, state: SliceState, push: PushArrived) -> Sequence[Any]:
        instructions = super().add(state, push)
        self.measures = bool(push.flags & Flag.MEASURE)
        anybodys = (self._flags.get(push.slice, 0) | push.flags) & _ANYBODYS
        self._flags[push.slice] = push.flags & _COMMON | anybodys
        return instructions

    def updated(self, state: SliceState, update: UpdateSlice, flags: int) -> Sequence[Any]:
        slice_, step, ranks = update[:3]
        place = (step, slice_, state.priority)
        # values that rank 0 has set by hand go before the sum
        instructions = [_up(Kind.VALUE, *place)] if state.valued == step else []
        flags = self._flags.pop(slice_) | (0 if ranks else Flag.NO_GRADIENT)
        instructions.append(_up(Kind.PUSH, *place, int(flags)))
        self._awaited[slice_] = _Awaited(update)
        if slice_ in self._pulled_early:
            self._pulled_early.remove(slice_)
            instructions.append(self._pull(slice_, state.priority))
        return instructions

    def pull(self, state: SliceState, event: PullArrived) -> Sequence[Any]:
        awaited = self._awaited.get(event.slice)
        if awaited is None or self._reply == "broadcast":
            if self._reply == "pull" and event.rank in state.at(event.step):
                self._pulled_early.add(event.slice)
            return [event]
        instructions: list[Any] = [event]
        if self._reply == "notify":
            rank, slice_, step = event[:3]
            again = any(pull.rank == rank for pull in awaited.pulls)
            if step != awaited.update.step or not awaited.announced or again:
                raise RemoteProtocolError(
                    f"worker {rank} of this node pulled slice {slice_} for step {step}: twice, or"
                    " before it was announced"
                )
            awaited.pulls.append(event)
            instructions.clear()
        if not awaited.pulled:
            instructions.append(self._pull(event.slice, event.priority))
        return instructions

    def _pull(self, slice_: int, priority: int) -> MessageReady:
        awaited = self._awaited[slice_]
        awaited.pulled = True
        return _up(Kind.PULL, awaited.update.step, slice_, priority)

    # What comes from the server.
    def _on_reply_arrived(self, event: ReplyArrived) -> Sequence[Any]:
        slice_, step, _, priority, flags = event
        if not self.awaits(slice_, step):
            raise RemoteProtocolError(
                f"server {self._server} sent a reply for slice {slice_}, step {step}, which is not"
                " awaited"
            )
        if step == 0:
            return [ValueArrived(SERVER, slice_, 0, priority)]
        awaited = self._awaited.pop(slice_)
        return awaited.pulls if self._reply == "notify" else self._answer(awaited.update, flags)

    def _on_notify_arrived(self, event: NotifyArrived) -> Sequence[Any]:
        slice_, step, _, flags = event
        awaited = self._awaited.get(slice_)
        known = awaited is not None and awaited.update.step == step and not awaited.announced
        if awaited is None or not known or self._reply != "notify":
            raise RemoteProtocolError(
                f"server {self._server} announced slice {slice_} of step {step}, which is not"
                " awaited"
            )
        awaited.announced = True
        if flags & Flag.UNCHANGED:
            del self._awaited[slice_]
        return self._answer(awaited.update, flags)

    def _answer(self, update: UpdateSlice, flags: int) -> Sequence[Any]:
        return super().updated(self._states[update.slice], update, flags & Flag.UNCHANGED)


def _up(kind: int, step: int, slice_: int, priority: int, flags: int = 0) -> MessageReady:
    return MessageReady(SERVER, kind, step, priority, slice_, NO_TOKEN, flags)

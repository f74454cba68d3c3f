"""The events and instructions of the protocol's machines, and the names of their peers.

Theory of operation. A machine gets events, in the past tense, and answers with instructions, in the
imperative. What means the same to several machines has one name, and stands here. The events and
instructions that only servers know are in `core.collect`; those of relays, rows or rings stand
beside their machines.

A ``rank`` is the number that a server knows a worker or a relay by (`Peers`): without local
aggregation, a worker's rank. A ``slice`` is the number of a slice, or of a shard of rows: they do
not collide. A ``token`` names a payload that the shell keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from foreprop.errors import RemoteProtocolError

CONTROL_PRIORITY = -1
LAST_PRIORITY = 2**31 - 1
NO_TOKEN = -1
RESTS = (-1, 0)
"""What a newcomer claims for a slice that it has never pushed (`core.takeover`)."""
Round = tuple[int, int]
"""A step, and which of its rounds."""
PACE_STEPS = 8
"""Every so many steps workers report how long these took (`core.lateness`)."""


class Stage(Enum):
    """The stages of a slice's step, in their order, for traces and messages; see docs/path.md."""

    GRADIENT_READY = "gradient_ready"
    PUSH_QUEUED = "push_queued"
    PUSH_SENT = "push_sent"
    PUSH_RECEIVED = "push_received"
    UPDATED = "updated"
    REPLY_QUEUED = "reply_queued"
    REPLY_SENT = "reply_sent"
    REPLY_RECEIVED = "reply_received"
    PARAMETER_READY = "parameter_ready"


# The peers of a server or a relay.
SERVER = -1
"""A relay's server, in the place of a peer's number."""


@dataclass(frozen=True, slots=True)
class Peers:
    """Workers, or relays that each stand for a node's workers; numbered in the order of sums.

    A machine knows a peer by this number, the wire by the first of its ``ranks``. The ``absent``
    are not waited for: they had left before (`core.takeover`), or may join later.
    """

    ranks: tuple[range, ...]
    are_nodes: bool = False
    absent: frozenset[int] = frozenset()

    @property
    def count(self) -> int:
        return len(self.ranks)

    @property
    def present(self) -> list[int]:
        return [peer for peer in range(len(self.ranks)) if peer not in self.absent]

    def first_rank(self, peer: int) -> int:
        return self.ranks[peer].start

    def number_of(self, rank: int) -> int:
        """The peer whose first rank this is; raises `RemoteProtocolError`."""
        for peer, ranks in enumerate(self.ranks):
            if ranks.start == rank:
                return peer
        raise RemoteProtocolError(f"rank {rank} is not among {self.listed(range(self.count))}")

    def name(self, peer: int) -> str:
        """``rank 3``, or ``node 1 (ranks 2, 3)``."""
        if not self.are_nodes:
            return f"rank {self.first_rank(peer)}"
        return f"node {peer} ({_ranks(self.ranks[peer])})"

    def names(self, peers: Iterable[int]) -> str:
        """``ranks 1, 3``, or ``node 0 (ranks 0, 1), node 1 (ranks 2, 3)``."""
        if not self.are_nodes:
            return _ranks([self.first_rank(peer) for peer in peers])
        return ", ".join(map(self.name, peers))

    def listed(self, peers: Iterable[int]) -> str:
        """``ranks [1, 3]``, or ``nodes [0, 1]``."""
        if self.are_nodes:
            return f"nodes {list(peers)}"
        return f"ranks {[self.first_rank(peer) for peer in peers]}"


def _ranks(ranks: range | list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def each_worker(world_size: int, started: int | None = None) -> Peers:
    """Peers that are one worker each; the first ``started`` of an elastic world start it."""
    later = range(world_size if started is None else started, world_size)
    return Peers(tuple(range(n, n + 1) for n in range(world_size)), absent=frozenset(later))


def nodes(world_size: int, workers_per_node: int) -> Peers:
    """The nodes' relays; the last node may have fewer workers."""
    starts = range(0, world_size, workers_per_node)
    return Peers(
        tuple(range(start, min(start + workers_per_node, world_size)) for start in starts),
        are_nodes=True,
    )


# Events: what has happened.
class MessageReady(NamedTuple):
    """A control frame is to be sent."""

    peer: int
    kind: int
    step: int
    priority: int
    slice: int
    token: int
    flags: int = 0


class FrameSent(NamedTuple):
    peer: int


class GradientReady(NamedTuple):
    """A parameter has its gradient, or it is certain that it has none in this step."""

    parameter: int
    step: int
    flags: int = 0
    with_value: bool = False
    """Send the parameter's values before the gradient (rank 0, after a change by hand)."""


class PushArrived(NamedTuple):
    """The gradient of a slice is in, or the last part of a shard's."""

    rank: int
    slice: int
    step: int
    priority: int
    flags: int


class ValueArrived(NamedTuple):
    """The values of a slice are in, or the last part of a shard's.

    To a relay they may come from its `SERVER`, in the place of a ``rank``.
    """

    rank: int
    slice: int
    step: int
    priority: int


class PullArrived(NamedTuple):
    """A peer wants the values as they are after this step; ``request`` names a pull of rows."""

    rank: int
    slice: int
    step: int
    priority: int
    request: int = 0


class ReplyArrived(NamedTuple):
    """A slice's values or average are in, or word that nothing has changed.

    To a relay they come from ``server`` `SERVER`: it has only one.
    """

    slice: int
    step: int
    server: int
    priority: int = 0
    flags: int = 0


class NotifyArrived(NamedTuple):
    """The server announces that the slice is updated (``reply="notify"``)."""

    slice: int
    step: int
    server: int
    flags: int


class NormArrived(NamedTuple):
    """The global norm of all gradients of a step is known; ``rank`` has sent it.

    With ``skip`` nothing is updated in this step. The ``norm`` itself is for a ring's updates: a
    server's shell keeps it.
    """

    rank: int
    step: int
    skip: bool = False
    norm: float = 0.0


class PrioritiesLearned(NamedTuple):
    """The parameters are first used in this order in the forward pass."""

    order: tuple[int, ...]


class PeerLeft(NamedTuple):
    """A worker or relay has said goodbye."""

    rank: int


class Closing(NamedTuple):
    """No further step begins."""


# Events that only workers know.
class ValuesOffered(NamedTuple):
    """The session starts, and this is rank 0: every slice's values go to the servers as step 0."""


class ValuesAwaited(NamedTuple):
    """The servers send all slices: at the start as step 0, to a newcomer as a later one."""

    step: int = 0


class CameAfter(NamedTuple):
    """A newcomer has all values as they are after this step."""

    step: int


class SlicesLost(NamedTuple):
    """A server is lost, and its slices may not be pushed to their next ``owners`` yet.

    Without a ``server`` they move instead, between two rounds, from any servers.
    """

    server: int | None
    owners: Mapping[int, int]


class SlicesGoOn(NamedTuple):
    """These slices go on at their owners, after these rounds."""

    rounds: Mapping[int, tuple[int, int]]


class PullsDue(NamedTuple):
    """The next step starts: with ``reply="pull"`` it is time to ask for the parameters."""


# Instructions: what the shell is to do.
class SendFrame(NamedTuple):
    peer: int
    kind: int
    step: int
    slice: int
    priority: int
    flags: int
    token: int


class InstallValue(NamedTuple):
    """Take the received values as the parameters (start of the session)."""

    slice: int


class CompleteParameter(NamedTuple):
    """Let whoever waits for the parameter go on."""

    parameter: int
    step: int


class FailSession(NamedTuple):
    """End the session for this reason; ``rank`` is to blame, or nobody if it is -1."""

    reason: str
    rank: int
    step: int


class Finish(NamedTuple):
    """End: all is done, and all peers that should have said goodbye."""

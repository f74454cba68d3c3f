"""The words of workers, servers and relays: their names, frames, events, and instructions.

Theory of operation. A machine is told events, in the past tense, and answers with instructions, in
the imperative. What means the same to several machines has one name. What only servers know stands
in `core.collect`, and what only relays, rows or rings know beside their machines.

A ``rank`` is the number that a server knows a worker or a relay by (`Peers`): without local
aggregation, a worker's rank. A ``slice`` is the number of a slice, or of a shard of rows: they do
not collide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from foreprop.errors import RemoteProtocolError

if TYPE_CHECKING:
    from foreprop.core.norm import SquareSum

CONTROL_PRIORITY = -1
LAST_PRIORITY = 2**31 - 1
NO_TOKEN = -1
RESTS = (-1, 0)
"""Claimed by who has come later, of a slice that it has never pushed: see `core.takeover`."""
PACE_STEPS = 8
"""So often workers tell how long their steps took (`core.lateness`)."""


class Stage(Enum):
    """What a slice passes, in this order: for traces and messages; see docs/path.md."""

    GRADIENT_READY = "gradient_ready"
    PUSH_QUEUED = "push_queued"
    PUSH_SENT = "push_sent"
    PUSH_RECEIVED = "push_received"
    UPDATED = "updated"
    REPLY_QUEUED = "reply_queued"
    REPLY_SENT = "reply_sent"
    REPLY_RECEIVED = "reply_received"
    PARAMETER_READY = "parameter_ready"


# Who pushes to a server or a relay, and what they are called in messages.
SERVER = -1
"""In the place of a peer's number: a relay's server."""


@dataclass(frozen=True, slots=True)
class Peers:
    """Workers, or relays that each stand for a node's workers; numbered in the order of sums.

    A machine knows them by these numbers, the wire by the rank of their first worker.
    """

    ranks: tuple[range, ...]
    """By number: the ranks that it stands for."""
    are_nodes: bool = False
    absent: frozenset[int] = frozenset()
    """Those that are not awaited: they had gone before (`core.takeover`), or come later."""

    @property
    def count(self) -> int:
        return len(self.ranks)

    @property
    def present(self) -> list[int]:
        """The numbers of who comes."""
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
    """Every worker by itself; of an elastic world the first ``started`` are there at the start."""
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
    """A control frame; the payload stays with the shell under ``token``."""

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
    """Its gradient is there, or it is certain that this step has none."""

    parameter: int
    step: int
    flags: int = 0
    with_value: bool = False
    """Send the parameter's values before the gradient (rank 0, after a change by hand)."""


class PushArrived(NamedTuple):
    """The gradient of a slice, or the last part of one of a shard."""

    rank: int
    slice: int
    step: int
    priority: int
    flags: int


class ValueArrived(NamedTuple):
    """The values of a slice, or the last part of those of a shard."""

    rank: int
    """`SERVER` for a relay that has them from there."""
    slice: int
    step: int
    priority: int


class PullArrived(NamedTuple):
    """Somebody wants the values as they are after this step."""

    rank: int
    slice: int
    step: int
    priority: int
    request: int = 0
    """With rows: the number that the worker knows the pull by."""


class ReplyArrived(NamedTuple):
    """A slice's values, or word that they are unchanged."""

    slice: int
    step: int
    server: int
    """`SERVER` for a relay, which has only one."""
    priority: int = 0
    flags: int = 0


class NotifyArrived(NamedTuple):
    """The server announces that the slice is updated (``reply="notify"``)."""

    slice: int
    step: int
    server: int
    flags: int


class NormArrived(NamedTuple):
    """The global norm of all gradients of a step is known."""

    rank: int
    """Who has sent it; only rank 0 may."""
    step: int
    skip: bool = False
    """Nothing is to be updated in this step."""
    norm: float = 0.0
    """For a ring, which hands it to its updates; a server's shell keeps it."""


class PrioritiesLearned(NamedTuple):
    order: tuple[int, ...]
    """The parameters in the order of their first use in the forward pass."""


class PeerLeft(NamedTuple):
    """This worker or relay has said goodbye."""

    rank: int


class Closing(NamedTuple):
    """No further step begins."""


# Events that only workers know.
class ValuesOffered(NamedTuple):
    """Rank 0 at the start: every slice's values go to the servers as step 0."""


class ValuesAwaited(NamedTuple):
    """All slices come from the servers: at the start as step 0, to a newcomer as a later one."""

    step: int = 0


class CameAfter(NamedTuple):
    """A newcomer has all values as they are after this step."""

    step: int


class SlicesLost(NamedTuple):
    """A server is gone, and these slices are not to be pushed before they are settled."""

    server: int
    owners: Mapping[int, int]
    """By slice: the server that has it next."""


class SlicesGoOn(NamedTuple):
    """These go on at their owners, after these rounds."""

    rounds: Mapping[int, tuple[int, int]]


class PullsDue(NamedTuple):
    """The next step starts: with ``reply="pull"`` now is the time to ask for the parameters."""


# Instructions: what the shell is to do.
class SendFrame(NamedTuple):
    peer: int
    kind: int
    step: int
    slice: int
    priority: int
    flags: int
    token: int


class SendNormPart(NamedTuple):
    """Send rank 0 this part of the sum of the squares of a step's gradients."""

    step: int
    part: SquareSum


class InstallValue(NamedTuple):
    """Take the received values as the parameters (start of the session)."""

    slice: int


class CompleteParameter(NamedTuple):
    """Whoever waits for the parameter may go on."""

    parameter: int
    step: int


class FailSession(NamedTuple):
    """End the session for this reason."""

    reason: str
    rank: int
    """Who is to blame, or -1."""
    step: int


class Finish(NamedTuple):
    """All is done, and everybody has said goodbye who should: end."""

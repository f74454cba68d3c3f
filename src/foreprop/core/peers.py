"""Who pushes to a server or a relay, and what they are called in messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from foreprop.errors import RemoteProtocolError

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

    @property
    def count(self) -> int:
        return len(self.ranks)

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


def each_worker(world_size: int) -> Peers:
    """Every worker by itself."""
    return Peers(tuple(range(rank, rank + 1) for rank in range(world_size)))


def nodes(world_size: int, workers_per_node: int) -> Peers:
    """The nodes' relays; the last node may have fewer workers."""
    starts = range(0, world_size, workers_per_node)
    return Peers(
        tuple(range(start, min(start + workers_per_node, world_size)) for start in starts),
        are_nodes=True,
    )


def workers_of_node(node: int, world_size: int, workers_per_node: int) -> Peers:
    """A relay's: the workers of its node."""
    ranks = nodes(world_size, workers_per_node).ranks
    if not 0 <= node < len(ranks):
        raise RemoteProtocolError(f"there is no node {node} among {len(ranks)}")
    return Peers(tuple(range(rank, rank + 1) for rank in ranks[node]))

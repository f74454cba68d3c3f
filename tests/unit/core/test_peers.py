"""The peers that push to a server or a relay, and their names."""

from __future__ import annotations

import pytest

from foreprop.core.frames import each_worker, nodes
from foreprop.core.relay_machine import workers_of_node
from foreprop.errors import RemoteProtocolError


def test_workers_are_called_by_their_ranks() -> None:
    peers = each_worker(3)
    assert (peers.count, peers.first_rank(2), peers.number_of(2)) == (3, 2, 2)
    assert (peers.name(1), peers.names([1]), peers.names([0, 2])) == (
        "rank 1",
        "rank 1",
        "ranks 0, 2",
    )
    assert peers.listed([0, 2]) == "ranks [0, 2]"


def test_workers_that_come_later_are_absent_at_the_start() -> None:
    peers = each_worker(4, 2)
    assert (peers.count, peers.present, peers.absent) == (4, [0, 1], {2, 3})
    assert each_worker(4).absent == set()


def test_relays_stand_for_nodes_the_last_of_which_may_be_smaller() -> None:
    peers = nodes(5, 2)
    assert [list(ranks) for ranks in peers.ranks] == [[0, 1], [2, 3], [4]]
    assert [peers.number_of(rank) for rank in (0, 2, 4)] == [0, 1, 2]
    assert peers.name(1) == "node 1 (ranks 2, 3)"
    assert peers.names([0, 2]) == "node 0 (ranks 0, 1), node 2 (rank 4)"
    assert peers.listed([0, 2]) == "nodes [0, 2]"


def test_a_relay_s_workers_have_numbers_from_zero_and_names_by_rank() -> None:
    peers = workers_of_node(1, 5, 2)
    assert (peers.count, peers.first_rank(0), peers.number_of(3)) == (2, 2, 1)
    assert (peers.name(1), peers.listed([0, 1])) == ("rank 3", "ranks [2, 3]")


@pytest.mark.parametrize("rank", [1, 3, 5, -1])
def test_a_rank_that_no_relay_has_as_its_first_is_refused(rank: int) -> None:
    with pytest.raises(RemoteProtocolError, match=rf"rank {rank} is not among nodes \[0, 1, 2\]"):
        nodes(5, 2).number_of(rank)


def test_a_node_that_is_not_there_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="no node 3 among 3"):
        workers_of_node(3, 5, 2)

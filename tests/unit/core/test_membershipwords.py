"""The members' changes, from servers' words in any order; and what members tell a newcomer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreprop.core.dealing import Deal, DealtEpoch, MemberChange, PassProgress
from foreprop.core.membershipwords import MembershipWord, MembershipWords
from foreprop.errors import ConfigError, RemoteProtocolError
from foreprop.features.members.messages import PassPosition, Positions, decode_positions

SERVERS = (0, 1, 2)
Said = tuple[int, int, MembershipWord]


def left(step: int) -> MembershipWord:
    return MembershipWord(joins=False, step=step)


def joined(step: int) -> MembershipWord:
    return MembershipWord(joins=True, step=step)


SESSION: dict[int, dict[int, list[MembershipWord]]] = {
    1: {
        0: [left(4), joined(9), left(8), joined(20)],
        1: [left(5), joined(9), left(8), joined(20)],
        2: [left(4), joined(9), left(8), joined(14), left(13), joined(20)],
    },
    3: {0: [left(11)], 1: [left(10)], 2: [left(12)]},
}
"""By rank and server. Rank 1 dies, comes and dies at once; comes once more, and dies before all
servers have settled; and stays then."""
CHANGES = [
    MemberChange(1, 5),
    MemberChange(1, 9, joins=True),
    MemberChange(1, 9),
    MemberChange(1, 20, joins=True),
]


@st.composite
def in_any_order(draw: st.DrawFn) -> list[Said]:
    """Any order that connections make, with each server's words of a rank in turn."""
    left_over = {
        (rank, server): list(words)
        for rank, by_server in SESSION.items()
        for server, words in by_server.items()
    }
    said = []
    while left_over:
        rank, server = draw(st.sampled_from(sorted(left_over)))
        said.append((rank, server, left_over[rank, server].pop(0)))
        if not left_over[rank, server]:
            del left_over[rank, server]
    return said


def words() -> MembershipWords:
    return MembershipWords(frozenset(SERVERS), workers_per_node=None)


@given(in_any_order())
def test_all_ranks_find_the_same_changes(said: list[Said]) -> None:
    """Whatever is heard first."""
    made = words()
    news = [change for each in said for change in made.hear(*each)]
    assert [change for change in news if change.rank == 1] == CHANGES
    assert [change for change in news if change.rank == 3] == [MemberChange(3, 12)]
    assert made.changes == news
    assert made.gone == {3}
    assert made.partly(100) == []


@given(in_any_order(), in_any_order(), st.data())
def test_a_newcomer_finds_what_members_have_found(
    here: list[Said], there: list[Said], data: st.DataObject
) -> None:
    """It hears what comes after it has come; some of that the member has heard before it tells."""
    member, newcomer = words(), words()
    newcomer.waits = True
    for each in there[: data.draw(st.integers(0, len(there)), label="told")]:
        member.hear(*each)
    come = {(rank, server): 0 for rank, server, _ in here}
    for rank, by_server in member.said.items():
        for server, its in by_server.items():
            come[rank, server] = data.draw(st.integers(0, len(its)), label="of these it misses")
    own = [
        (rank, server, word)
        for rank, server, word in here
        if SESSION[rank][server].index(word) >= come[rank, server]
    ]
    early = data.draw(st.integers(0, len(own)), label="before it is told")
    assert [change for each in own[:early] for change in newcomer.hear(*each)] == []
    newcomer.begin_with(member.said)
    for each in own[early:]:
        if each[2] not in newcomer.said.get(each[0], {}).get(each[1], []):
            newcomer.hear(*each)
    assert [change for change in newcomer.changes if change.rank == 1] == CHANGES


def test_a_join_that_a_server_has_still_to_tell_of_is_waited_for() -> None:
    made = words()
    for server in SERVERS:
        made.hear(1, server, left(4))
    made.hear(1, 0, joined(9))
    assert made.joining() == {(1, 9)}
    assert (made.partly(8), made.partly(9)) == ([], [1])
    made.hear(1, 0, left(8))
    assert made.partly(9) == [], "the others may never say it"


ABSENT = frozenset({4, 5})
"""They have not come yet."""


def test_who_was_never_there_joins_and_leaves() -> None:
    """Rank 4 is lost once before all servers have settled."""
    made = MembershipWords(frozenset(SERVERS), workers_per_node=None, absent=ABSENT)
    assert made.gone == ABSENT
    made.hear(4, 2, joined(6))
    made.hear(4, 2, left(5))
    for server in SERVERS:
        assert made.changes == []
        made.hear(4, server, joined(9))
    assert made.changes == [MemberChange(4, 9, joins=True)]
    assert made.gone == {5}
    for server in SERVERS:
        made.hear(4, server, left(12))
    assert made.changes[1:] == [MemberChange(4, 12)]
    newcomer = MembershipWords(frozenset(SERVERS), workers_per_node=None, absent=ABSENT)
    newcomer.waits = True
    newcomer.begin_with(made.said)
    assert (newcomer.changes, newcomer.gone) == (made.changes, ABSENT)


# What members tell a newcomer.
PROGRESS = PassProgress(
    given=3,
    drawn=5,
    ended=False,
    deals=(Deal(0, (0, 1, 2)), Deal(4, (0, 2), ((1, 3),), (), 4)),
    steps=((2, 3), (3, 4)),
    applied=(MemberChange(1, 2),),
)


def told(progress: PassProgress | None = PROGRESS, rank: str = "1") -> bytes:
    said = {rank: {"0": [left(2), joined(6)]}}
    return msgspec.json.encode(Positions((PassPosition(0, 4, progress),), said))


def test_what_is_told_is_read_as_it_was() -> None:
    found = decode_positions(memoryview(told()), 3)
    assert found.loaders == (PassPosition(0, 4, PROGRESS),)
    assert found.words() == {1: {0: [left(2), joined(6)]}}


@pytest.mark.parametrize(
    "payload",
    [
        b"[" * 5000,
        b"\xff",
        b"{}",
        told(rank="-1"),
        told(rank="3"),
        told(PROGRESS._replace(given=6)),
        told(PROGRESS._replace(deals=())),
        told(PROGRESS._replace(deals=(Deal(0, ()),))),
        told(PROGRESS._replace(deals=(Deal(0, (0, 3)),))),
        told(PROGRESS._replace(deals=(Deal(1, (0, 1)),))),
        told(PROGRESS._replace(applied=(MemberChange(-1, 2),))),
    ],
    ids=range(11),
)
def test_what_no_member_can_have_said_is_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="not where"):
        decode_positions(memoryview(payload), 3)


def test_other_data_than_the_others_are_found() -> None:
    epoch: DealtEpoch[Any] = DealtEpoch(3, (), 0, rank=1, rounds=1)
    with pytest.raises(ConfigError, match="ends after 2 batches of its pass, of which others have"):
        epoch.join(PROGRESS._replace(deals=(Deal(0, (0, 1, 2)),)), iter(range(6)))

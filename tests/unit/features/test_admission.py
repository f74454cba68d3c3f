"""What a server tells newcomers of where the others are."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from foreprop.core.membership import Members
from foreprop.core.newcomers import MemberJoined
from foreprop.core.wire import Header, Kind
from foreprop.features.members.admission import Admission
from foreprop.features.members.messages import (
    Arrival,
    ServerDirectory,
    ServerPlace,
    decode_arrival,
    decode_directory,
)


def test_only_members_words_of_lost_servers_count() -> None:
    members = Members(3)
    machine = SimpleNamespace(has_sent_all=lambda rank: True)
    counting: Any = SimpleNamespace(members=members, machine=machine, connections={})
    manifest: Any = SimpleNamespace(session="s")
    admission = Admission(manifest, 2, counting)
    executor: Any = SimpleNamespace(lock=threading.RLock(), doers={})
    admission.begin(executor)

    def tell(rank: int, *lost: int) -> None:
        places = tuple(ServerPlace("a", 1, "s", node, is_lost=node in lost) for node in range(3))
        data = memoryview(ServerDirectory("s", places).encode())
        peer: Any = SimpleNamespace(number=rank)
        admission.on_frame(peer, Header(Kind.SERVERS, 0, 0, 0, 0, 0, len(data)), data)

    def lost() -> list[int]:
        directory = decode_directory(admission.directory())
        return [number for number, place in enumerate(directory.places) if place.is_lost]

    tell(1, 0)
    tell(2)
    assert lost() == [0], "the word of one that has not heard of it yet takes nothing back"
    tell(0, 1)  # node 0 goes: its worker loses its connections one after another
    members.drop(0)
    assert lost() == [0]
    assert decode_directory(admission.directory()).free == (0,)


def test_a_newcomer_hears_of_those_that_have_joined_before_it_is_told() -> None:
    """Where two join at once, the one announced last may count first: it gives to the other."""
    members = Members(4, started=2)
    machine = SimpleNamespace(priorities=list)
    counting: Any = SimpleNamespace(
        members=members, machine=machine, newcomers=set(), add_voter=lambda rank: None
    )
    admission = Admission(SimpleNamespace(session="s"), 0, counting)  # type: ignore[arg-type]
    sent: list[tuple[int, Arrival]] = []

    def send(peer: int, kind: Kind, step: int, priority: int, slice_: int, data: bytes) -> None:
        assert kind == Kind.JOINED
        sent.append((peer, decode_arrival(data)))

    executor: Any = SimpleNamespace(lock=threading.RLock(), doers={}, send=send)
    admission.begin(executor)
    for rank, step in ((2, 11), (3, 10)):
        members.here.add(rank)
        members.since[rank] = step
        executor.doers[MemberJoined](MemberJoined(rank, step))
    to_third = [(arrival.rank, arrival.step) for peer, arrival in sent if peer == 3]
    assert to_third == [(2, 11), (3, 10)]
    assert [arrival.rank for peer, arrival in sent if peer == 2] == [2, 3]
    assert [arrival.rank for peer, arrival in sent if peer == 0] == [2, 3]

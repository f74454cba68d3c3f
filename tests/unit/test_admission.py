"""What a server tells newcomers of where the others are."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from foreprop.core.membership import Members
from foreprop.core.wire import Header, Kind
from foreprop.elastic.admission import Admission
from foreprop.elastic.whereabouts import ServerPlace, Whereabouts, decode_whereabouts


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
        data = memoryview(Whereabouts("s", places).encode())
        peer: Any = SimpleNamespace(number=rank)
        admission.on_frame(peer, Header(Kind.SERVERS, 0, 0, 0, 0, 0, len(data)), data)

    def lost() -> list[int]:
        told = decode_whereabouts(admission.whereabouts())
        return [number for number, place in enumerate(told.places) if place.is_lost]

    tell(1, 0)
    tell(2)
    assert lost() == [0], "the word of one that has not heard of it yet takes nothing back"
    tell(0, 1)  # node 0 goes: its worker loses its connections one after another
    members.drop(0)
    assert lost() == [0]
    assert decode_whereabouts(admission.whereabouts()).free == (0,)

"""Which member's buffers a newcomer gets, and what a server passes on."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from foreprop.core.manifest import BUFFERS_BLOB, FROZEN_BLOB
from foreprop.core.membership import Members
from foreprop.core.wire import Header, Kind
from foreprop.features.members.admission import NewcomersBlobs
from foreprop.features.members.statetransfer import GivenBlobs
from foreprop.params.modelhooks import ModelBuffers, pack

FIRST = 9
"""The newcomer's first step."""


class Outbox:
    """Keeps what would be sent: to whom, kind, step, slice and bytes."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.sent: list[tuple[int, int, int, int, bytes]] = []

    def send(self, peer: int, kind: int, step: int, _: int, slice_: int, data: Any) -> None:
        self.sent.append((peer, kind, step, slice_, bytes(data)))


# A server.
def passing(members: Members) -> tuple[NewcomersBlobs, Outbox, list[Header]]:
    outbox, inner = Outbox(), []
    usual: Any = SimpleNamespace(
        executor=outbox, on_frame=lambda peer, header, payload: inner.append(header)
    )
    return NewcomersBlobs(usual, members), outbox, inner


def come(owner: NewcomersBlobs, rank: int, *, step: int = FIRST - 1, kind: int = Kind.BLOB) -> None:
    peer: Any = SimpleNamespace(number=rank)
    owner.on_frame(
        peer, Header(kind, 0, rank, step, BUFFERS_BLOB, 0, 4), memoryview(b"%04d" % rank)
    )


def test_a_server_passes_on_the_first_of_each_to_whom_it_counts() -> None:
    members = Members(5)
    members.since[2] = FIRST
    owner, outbox, inner = passing(members)
    come(owner, 1)
    come(owner, 0)
    assert outbox.sent == [(2, Kind.BLOB_REPLY, FIRST - 1, BUFFERS_BLOB, b"0001")]
    members.since[3] = FIRST
    come(owner, 0)
    assert outbox.sent[1:] == [(3, Kind.BLOB_REPLY, FIRST - 1, BUFFERS_BLOB, b"0000")]
    assert not inner


@pytest.mark.parametrize("name", ["another step", "gone", "new itself", "not settled"])
def test_a_server_passes_on_nothing_else(name: str) -> None:
    members = Members(5)
    members.since[2] = FIRST
    rank, step = 1, FIRST - 1
    if name == "another step":
        step = FIRST
    elif name == "gone":
        members.drop(1)
    elif name == "new itself":
        members.since[1] = FIRST
    else:
        members.promised[2] = FIRST + 2
    owner, outbox, _ = passing(members)
    come(owner, rank, step=step)
    assert outbox.sent == []


def test_blobs_of_the_start_are_rank_0_s() -> None:
    owner, outbox, inner = passing(Members(3))
    come(owner, 0, step=0)
    come(owner, 1, step=0, kind=Kind.BLOB_PULL)
    assert [header.kind for header in inner] == [Kind.BLOB, Kind.BLOB_PULL]
    assert outbox.sent == []


# Members.
class Member:
    """One rank of four, of which rank 2 has been lost; servers 1 and 3 have slices."""

    def __init__(self, rank: int, *, joins: bool = False) -> None:
        self.outbox, self.rank = Outbox(), rank
        self.here = {0: 0, 1: 0, 3: 0}
        self.model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        pieces = [SimpleNamespace(number=0, server=3), SimpleNamespace(number=1, server=1)]
        self.engine: Any = SimpleNamespace(
            rank=rank,
            steps=4,
            slices=pieces,
            config=SimpleNamespace(join="a:1" if joins else None),
            executor=self.outbox,
            lock=self.outbox.lock,
            connections=[None] * 4,
            machine=SimpleNamespace(owner_of=lambda slice_: pieces[slice_].server),
        )
        frozen = [self.model[1].weight]
        about = (self.engine, lambda: dict(self.here), ModelBuffers(self.model), frozen)
        self.given = GivenBlobs(*about)

    def hear_joined(self) -> None:
        self.here[2] = FIRST
        for server in (0, 1, 3):
            self.given.hear_joined(2, server, FIRST)

    def end_steps(self, last: int) -> None:
        while self.engine.steps < last:
            self.engine.steps += 1
            self.model[0].running_mean.add_(1)  # type: ignore[union-attr, operator]
            self.given.end_step(self.engine.steps)

    @property
    def sent(self) -> list[tuple[int, int]]:
        """Step and number of each blob."""
        assert {each[:2] for each in self.outbox.sent} <= {(1, Kind.BLOB)}, "by the first server"
        return [(step, which) for _, _, step, which, _ in self.outbox.sent]


def test_the_lowest_member_sends_frozen_parameters_first_and_buffers_at_the_border() -> None:
    one = Member(0)
    one.hear_joined()
    assert one.sent == [(FIRST - 1, FROZEN_BLOB)]
    one.end_steps(FIRST - 1)
    assert one.sent[1:] == [(FIRST - 1, BUFFERS_BLOB)]
    buffers = [one.model[0].running_mean, one.model[0].running_var]
    assert one.outbox.sent[1][-1].startswith(pack(buffers))  # type: ignore[arg-type]
    one.end_steps(FIRST + 3)
    assert len(one.sent) == 2


def test_the_next_one_has_kept_its_own_until_the_newcomer_must_have_them() -> None:
    one = Member(1)
    one.hear_joined()
    one.end_steps(FIRST - 1)
    then = pack(list(one.model.buffers()))
    one.model[0].running_mean.add_(1)  # type: ignore[union-attr, operator]
    assert one.sent == []
    del one.here[0]
    one.given.hear_left(0)
    assert one.sent == [(FIRST - 1, FROZEN_BLOB), (FIRST - 1, BUFFERS_BLOB)]
    assert one.outbox.sent[1][-1] == then
    late = Member(1)
    late.hear_joined()
    late.end_steps(FIRST + 1)
    del late.here[0]
    late.given.hear_left(0)
    assert late.sent == [], "its values count the newcomer"


def test_nobody_sends_to_who_is_lost_again_and_no_newcomer_what_it_has_not() -> None:
    one = Member(0)
    one.here[2] = FIRST
    one.given.hear_joined(2, 0, FIRST)  # not by the server that is waited for
    one.given.hear_left(2)
    one.end_steps(FIRST)
    assert one.sent == []
    new = Member(0, joins=True)
    new.hear_joined()
    assert new.sent == []
    new.given.has_own = True
    new.end_steps(FIRST - 1)
    assert sorted(new.sent) == [(FIRST - 1, BUFFERS_BLOB), (FIRST - 1, FROZEN_BLOB)]


def test_who_ends_before_gives_to_all_servers() -> None:
    one = Member(3)
    one.given.end([FIRST])
    servers = [(peer, which) for peer, _, _, which, _ in one.outbox.sent]
    assert sorted(servers) == [(s, b) for s in range(4) for b in (BUFFERS_BLOB, FROZEN_BLOB)]

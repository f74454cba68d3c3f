"""Which member gives what to a newcomer, when, and what that makes of it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from foreprop.core.slicing import Partition, Slice, plan_slices
from foreprop.core.wire import Header, Kind
from foreprop.errors import RemoteProtocolError, TrainingLoopError
from foreprop.features.members.statetransfer import GivenModel

FIRST = 9
"""The newcomer's first step."""
SIZES = [12, 3]
SLICES = plan_slices(SIZES, [4, 4], Partition(servers=3, slice_elems=5))


class Rank:
    """A member, or (``joins``) a newcomer, of three; frames go out here."""

    def __init__(self, rank: int, *, joins: bool = False, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.rank, self.lock = rank, threading.RLock()
        self.model = nn.Linear(4, 3)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.01)
        self.config = SimpleNamespace(join="a:1" if joins else None)
        self.slices, self.steps = SLICES, FIRST - 1
        self.owners = [piece.server for piece in SLICES]
        self.machine = SimpleNamespace(owner_of=self.owners.__getitem__, priority_of=lambda p: p)
        self.executor = self.progress = self
        self.members = {0: 0, 1: 0, 2: FIRST}
        self.sent: dict[int, tuple[int, int, bytes]] = {}
        """By part: server, step and bytes."""
        engine: Any = self
        about = (self.optimizer, self.parameters, lambda: self.members, rank)
        self.model_given = GivenModel(engine, *about)

    def notify(self) -> None: ...

    def send(self, server: int, kind: int, step: int, _: int, part: int, data: Any) -> None:
        assert kind == Kind.GIVEN
        self.sent[part] = server, step, bytes(data)

    def train(self) -> None:
        self.model(torch.ones(4)).sum().backward()
        self.optimizer.step()

    def take(self, giver: Rank) -> None:
        peer: Any = SimpleNamespace(number=0)
        for part, (_, step, data) in giver.sent.items():
            header = Header(Kind.GIVEN, 0, 0, step, part, 0, len(data))
            room = self.model_given.room(peer, header)
            room[:] = data
            self.model_given.on_frame(peer, header, room)


def member(rank: int) -> Rank:
    made = Rank(rank)
    made.train()
    made.steps = FIRST - 1
    made.model_given.hear_joined(2, 0, FIRST)
    return made


PARTS = {*range(len(SLICES) + 3)}
"""Values, two parameters' state, and the optimizer's numbers."""


def test_members_share_what_there_is_and_it_is_all() -> None:
    one, other = member(0), member(1)
    settled: list[int] = []
    for each in (one, other):
        each.model_given.begin_step(FIRST, lambda: settled.append(FIRST))
    assert settled == [FIRST, FIRST], "the last step's updates are made first"
    assert one.sent.keys() | other.sent.keys() == PARTS
    assert not one.sent.keys() & other.sent.keys()
    assert {(server, step) for server, step, _ in one.sent.values()} == {(0, FIRST - 1)}
    new = Rank(2, joins=True, seed=1)
    assert not new.model_given.is_complete
    for each in (other, one):
        new.take(each)
    assert new.model_given.is_complete
    new.model_given.install_state()
    for mine, theirs in zip(new.parameters, one.parameters, strict=True):
        assert torch.equal(mine, theirs)
    mine, theirs = new.optimizer.state_dict()["state"], one.optimizer.state_dict()["state"]
    for number in (0, 1):
        for name, value in theirs[number].items():
            assert torch.equal(mine[number][name], value), name
    new.model_given.begin_step(FIRST, lambda: pytest.fail("it has nothing to give"))


def test_it_is_given_once_and_not_before_its_time() -> None:
    one = member(0)
    one.model_given.begin_step(FIRST - 1, lambda: pytest.fail("not yet"))
    assert not one.sent
    one.model_given.begin_step(FIRST, lambda: None)
    one.sent.clear()
    one.model_given.begin_step(FIRST, lambda: pytest.fail("again"))
    one.model_given.begin_step(FIRST + 1, lambda: pytest.fail("too late"))
    assert not one.sent


def test_when_a_giver_is_lost_the_others_give_all() -> None:
    one = member(0)
    one.model_given.begin_step(FIRST, lambda: None)
    assert one.sent.keys() < PARTS
    del one.members[1]
    one.model_given.hear_left(1)
    assert one.sent.keys() == PARTS


def test_a_giver_may_be_lost_after_the_others_have_ended_the_newcomers_first_step() -> None:
    """They have no answer yet, but their scheduler may have gone on."""
    one = member(0)
    one.model_given.begin_step(FIRST, lambda: None)
    one.model_given.end_step(FIRST)
    one.optimizer.param_groups[0]["lr"] = 0.5
    del one.members[1]
    one.model_given.hear_left(1)
    assert one.sent.keys() == PARTS
    new = Rank(2, joins=True)
    new.take(one)
    new.model_given.install_state()
    new.model_given.begin_step(FIRST, lambda: None)  # its numbers are those of its first step


def test_what_a_lost_server_may_have_had_is_given_again_by_another_one() -> None:
    one = member(0)
    one.model_given.begin_step(FIRST, lambda: None)
    before = set(one.sent)
    one.sent.clear()
    one.owners[:] = [2 if owner == 0 else owner for owner in one.owners]
    one.model_given.give_again()
    assert one.sent.keys() == before
    assert {server for server, *_ in one.sent.values()} <= {1, 2}


def test_nobody_gives_to_a_newcomer_that_is_lost_or_that_has_all() -> None:
    one = member(0)
    one.model_given.hear_left(2)
    one.model_given.begin_step(FIRST, lambda: pytest.fail("it is gone"))
    other = member(0)
    other.model_given.begin_step(FIRST, lambda: None)
    other.model_given.end_step(FIRST)
    other.model_given.end_step(FIRST + 1)
    other.sent.clear()
    other.model_given.give_again()
    assert not one.sent
    assert not other.sent


def test_who_ends_before_gives_what_there_is() -> None:
    one = member(0)
    one.model_given.end([FIRST + 2])
    assert one.sent
    assert {step for _, step, _ in one.sent.values()} == {FIRST + 1}


def test_a_part_that_comes_again_changes_nothing() -> None:
    one = member(0)
    one.model_given.begin_step(FIRST, lambda: None)
    new = Rank(2, joins=True, seed=1)
    new.take(one)
    with torch.no_grad():
        for parameter in new.parameters:
            parameter.add_(1)
    now = [parameter.clone() for parameter in new.parameters]
    new.take(one)
    assert all(map(torch.equal, new.parameters, now))


def test_a_newcomer_with_other_numbers_is_told_both() -> None:
    one = member(0)
    del one.members[1]
    one.model_given.begin_step(FIRST, lambda: None)
    new = Rank(2, joins=True)
    new.take(one)
    new.model_given.install_state()
    new.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(TrainingLoopError, match=r"lr=0.5 in group 0, and the others have lr=0.01"):
        new.model_given.begin_step(FIRST, lambda: None)


@pytest.mark.parametrize(("part", "size"), [(0, 3), (len(PARTS), 0)])
def test_what_does_not_fit_is_refused(part: int, size: int) -> None:
    peer: Any = SimpleNamespace(number=1)
    header = Header(Kind.GIVEN, 0, 1, FIRST - 1, part, 0, size)
    with pytest.raises(RemoteProtocolError):
        Rank(2, joins=True).model_given.room(peer, header)
    with pytest.raises(RemoteProtocolError, match="server 1 gave part"):
        Rank(0).model_given.room(peer, header._replace(slice=0))


def test_state_that_is_no_state_is_refused() -> None:
    one = member(0)
    del one.members[1]
    one.model_given.begin_step(FIRST, lambda: None)
    part = len(SLICES)
    one.sent[part] = (0, FIRST - 1, b"cos\nsystem\n(S'true'\ntR.")
    new = Rank(2, joins=True)
    new.take(one)
    with pytest.raises(RemoteProtocolError, match="cannot be read"):
        new.model_given.install_state()


def test_slices_are_as_this_test_thinks() -> None:
    assert all(isinstance(piece, Slice) for piece in SLICES)
    assert {piece.server for piece in SLICES} == {0, 1, 2}


def test_a_parameter_that_is_not_contiguous_is_given_in_the_order_of_its_elements() -> None:
    one, other, new = member(0), member(1), Rank(2, joins=True, seed=1)
    for each in (one, other, new):
        weight = each.parameters[0]
        weight.data = weight.detach().t().contiguous().t()
        assert not weight.is_contiguous()
    for each in (one, other):
        each.model_given.begin_step(FIRST, lambda: None)
        new.take(each)
    assert torch.equal(new.parameters[0], one.parameters[0])
    assert not new.parameters[0].is_contiguous()

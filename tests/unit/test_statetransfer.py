"""A newcomer gets what is of the step before its first, and nobody goes ahead of that."""

from __future__ import annotations

from typing import Any

import pytest

from foreprop.core.retention import ViewEntered
from foreprop.core.statetransfer import (
    InstallPart,
    MakeUpdate,
    Part,
    PartSent,
    StateTransfer,
    UpdateDue,
    UpdateMade,
)
from foreprop.core.views import SLOTS, EndMember, SendTo, View, first_view
from foreprop.errors import InternalError, RemoteProtocolError
from tests.unit.repair_world import explore_repair

LONG = pytest.mark.long
NEWCOMER = SLOTS + 1
FOUR = tuple((step, 0) for step in range(1, 5))
JOINED = View(1, 0, (0, 2, NEWCOMER), (0, 0, 7))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("members", "about"),
    [
        (1, {}),
        pytest.param(1, {"lost": (NEWCOMER,)}, marks=LONG),
        pytest.param(1, {"homes": (0, 1), "rounds": FOUR[:3]}, marks=LONG),
        pytest.param(2, {"newcomer": SLOTS + 2}, marks=LONG),
        pytest.param(2, {"newcomer": SLOTS + 2, "lost": (1,), "rounds": FOUR[:2]}, marks=LONG),
    ],
    ids=str,
)
def test_in_any_order_a_newcomer_has_what_the_others_have(members: int, about: Any) -> None:
    """`OracleWorld` looks at the step of all that it gets, and at who goes ahead."""
    assert explore_repair(members, **{"newcomer": NEWCOMER, "rounds": FOUR} | about) > 100


def survivor_of(slices: tuple[int, ...] = (5, 6, 7)) -> StateTransfer:
    """Member 0 of three, of which 1 is lost and has come again."""
    transfer = StateTransfer(0, first_view(range(3)), slices)
    assert transfer.handle(ViewEntered(JOINED)) == []
    return transfer


def test_each_gives_its_share_in_the_order_of_use_values_first() -> None:
    transfer, sent = survivor_of(), []
    for step in (5, 6):
        for slice_ in (5, 6, 7):
            assert transfer.handle(UpdateDue(slice_, step)) == [MakeUpdate(slice_, step)]
            sent += transfer.handle(UpdateMade(slice_, step))
    assert sent == [
        SendTo((NEWCOMER,), Part(0, 1, 5, 6, "values")),
        SendTo((NEWCOMER,), Part(0, 1, 5, 6, "state")),
        SendTo((NEWCOMER,), Part(0, 1, 7, 6, "values")),
        SendTo((NEWCOMER,), Part(0, 1, 7, 6, "state")),
    ], "slice 6 is member 2's"


def test_no_slice_is_updated_before_its_share_has_left() -> None:
    transfer = survivor_of()
    transfer.handle(UpdateMade(5, 6))
    assert transfer.handle(UpdateDue(5, 7)) == []
    assert transfer.handle(UpdateDue(6, 7)) == [MakeUpdate(6, 7)]
    assert transfer.handle(PartSent(NEWCOMER, 5, "values")) == []
    assert transfer.handle(PartSent(NEWCOMER, 5, "state")) == [MakeUpdate(5, 7)]


def test_nobody_waits_for_a_newcomer_that_is_lost() -> None:
    transfer = survivor_of()
    transfer.handle(UpdateMade(5, 6))
    transfer.handle(UpdateDue(5, 7))
    lost = View(2, 1, (0, 2), (0, 0))
    assert transfer.handle(ViewEntered(lost)) == [MakeUpdate(5, 7)]
    assert transfer.handle(PartSent(NEWCOMER, 5, "state")) == []


def test_shares_are_divided_anew_while_nothing_was_sent() -> None:
    transfer = survivor_of()
    assert transfer.handle(UpdateMade(6, 5)) == []
    alone = View(2, 1, (0, NEWCOMER), (0, 7))
    assert transfer.handle(ViewEntered(alone)) == []
    assert len(transfer.handle(UpdateMade(6, 6))) == 2


def newcomer_of() -> StateTransfer:
    transfer = StateTransfer(NEWCOMER, None, (5, 6))
    transfer.handle(ViewEntered(JOINED))
    return transfer


def test_a_newcomer_updates_a_slice_when_its_state_is_there() -> None:
    transfer = newcomer_of()
    assert not transfer.has_values(5)
    assert transfer.handle(Part(0, 0, 5, 6, "values")) == [], "of another view"
    assert transfer.handle(Part(0, 1, 5, 6, "values")) == [InstallPart(5, "values")]
    assert transfer.handle(Part(0, 1, 5, 6, "values")) == [], "twice"
    assert transfer.has_values(5)
    assert transfer.handle(UpdateDue(5, 7)) == []
    installed = [InstallPart(5, "state"), MakeUpdate(5, 7)]
    assert transfer.handle(Part(0, 1, 5, 6, "state")) == installed


def test_a_newcomer_without_everything_ends_with_its_view() -> None:
    transfer = newcomer_of()
    view = View(2, 1, (0, NEWCOMER), (0, 7))
    (ended,) = transfer.handle(ViewEntered(view))
    assert isinstance(ended, EndMember)
    assert "start this node again" in ended.reason
    transfer = newcomer_of()
    for slice_ in (5, 6):
        transfer.handle(Part(0, 1, slice_, 6, "values"))
        transfer.handle(Part(0, 1, slice_, 6, "state"))
    assert transfer.handle(ViewEntered(view)) == []


def test_what_nobody_may_give_it() -> None:
    transfer = newcomer_of()
    for part in (Part(0, 1, 5, 7, "values"), Part(0, 1, 9, 6, "values")):
        with pytest.raises(RemoteProtocolError, match="member 0 gave what nobody lacks"):
            transfer.handle(part)
    with pytest.raises(InternalError, match="does not know the event"):
        transfer.handle("hello")

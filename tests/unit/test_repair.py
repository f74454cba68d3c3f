"""After a loss every average is counted once and lost by nobody, in any order of events."""

from __future__ import annotations

from typing import Any

import pytest

from foreprop.core.collect import NEVER
from foreprop.core.repair import CloseRound, EmptyResidual, Repair
from foreprop.core.retention import (
    Average,
    Claim,
    Claims,
    Contribution,
    SettleResidual,
    ViewEntered,
    Wanted,
)
from foreprop.core.views import SendTo, View, first_view
from foreprop.errors import InternalError, RemoteProtocolError
from tests.unit.repair_world import explore_repair

LONG = pytest.mark.long
THREE_ROUNDS = ((1, 0), (2, 0), (3, 0))
PASSES = ((1, 0), (2, 0), (2, 1), (3, 0))
"""A step of which the first round is closed by another pass, or that is skipped once."""
UNUSED = ((0, 0, (1, 0)), (1, 0, (2, 0)), (0, 0, (2, 0)))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("members", "about"),
    [
        (2, {"lost": (0,)}),
        (2, {"lost": (1,), "rounds": THREE_ROUNDS}),
        (2, {"lost": (0,), "rounds": PASSES[:3]}),
        (2, {"lost": (1,), "rounds": THREE_ROUNDS, "unused": UNUSED}),
        (3, {"lost": (0,), "rounds": ((1, 0),)}),
        (3, {"lost": (0,), "rounds": ((1, 0),), "silenced": True}),
        pytest.param(2, {"lost": (0,), "homes": (0, 1)}, marks=LONG),
        pytest.param(2, {"lost": (0,), "homes": (0, 0), "rounds": PASSES[:3]}, marks=LONG),
        pytest.param(2, {"lost": (0,), "rounds": PASSES, "prompt": False}, marks=LONG),
        pytest.param(3, {"lost": (0,)}, marks=LONG),
        pytest.param(3, {"lost": (1,), "rounds": PASSES[1:]}, marks=LONG),
        pytest.param(3, {"lost": (0, 1), "rounds": ((1, 0),)}, marks=LONG),
        pytest.param(3, {"lost": (0, 1), "rounds": ((1, 0),), "silenced": True}, marks=LONG),
        pytest.param(3, {"lost": (0,), "rounds": ((1, 0), (1, 1))}, marks=LONG),
    ],
    ids=str,
)
def test_in_any_order_the_others_have_the_same_averages(members: int, about: Any) -> None:
    """Also with a second loss during the claims, and when the lost live on in their old view."""
    assert explore_repair(members, **about) > 100


# One server by itself.
VIEW = View(1, 0, (0, 2), (0, 0))
BEFORE, NEWEST, OPEN = (4, 0), (5, 0), (5, 1)


def server_of(view: View | None = None) -> Repair:
    """Server 0 of three, with slice 0; slice 1 is server 1's."""
    return Repair(0, view or first_view(range(3)), {0: 0, 1: 1})


def push(member: int, round_: Any, *, view: int = 0, workers: int = 1, **more: Any) -> Contribution:
    return Contribution(member, view, more.get("slice_", 0), round_, workers, more.get("had", True))


def claim(member: int, answered: Any, pushed: Any, *slices: int) -> Claims:
    return Claims(member, 1, tuple(Claim(slice_, answered, pushed) for slice_ in slices or (0,)))


def settle(server: Repair, *claims: Claims) -> list[Any]:
    """What it does when the last of these is there; before, it does nothing."""
    for each in claims[:-1]:
        assert server.handle(each) == []
    return list(server.handle(claims[-1]))


def test_a_round_is_closed_when_all_have_pushed_it() -> None:
    server = server_of()
    server.handle(push(2, BEFORE, workers=4))
    server.handle(push(0, BEFORE, had=False))
    assert server.missing() == {0: [1]}
    closed = CloseRound(0, BEFORE, 0, (0, 1, 2), workers=7, having=(1, 2))
    assert server.handle(push(1, BEFORE, workers=2)) == [closed]
    for member in (0, 1):
        server.handle(push(member, NEWEST, had=False))
    assert server.handle(push(2, NEWEST, had=False)) == [
        SettleResidual(0, BEFORE, counted=True),
        CloseRound(0, NEWEST, 0, (0, 1, 2), workers=3, having=()),
    ]


def test_who_has_the_newest_average_gives_it_to_who_lacks_it() -> None:
    """Its own node first; and who has pushed the round after it pushes the same again."""
    server = server_of()
    server.handle(ViewEntered(VIEW))
    server.handle(ViewEntered(VIEW))  # another worker tells it, too
    settled = settle(server, claim(0, BEFORE, NEWEST, 0), claim(2, NEWEST, OPEN, 0))
    assert settled == [
        SendTo((2,), Wanted(0, 1, 0, NEWEST)),
        SendTo((2,), Wanted(0, 1, 0, OPEN)),
    ]
    assert server.handle(Average(2, 1, 0, NEWEST)) == [SendTo((0,), Average(0, 1, 0, NEWEST))]
    assert server.handle(push(2, OPEN, view=1)) == []
    closed = CloseRound(0, OPEN, 1, (0, 2), workers=2, having=(0, 2))
    assert server.handle(push(0, OPEN, view=1)) == [closed]


def test_what_nobody_has_is_made_anew_of_the_same_bytes() -> None:
    """The pushes that are here are not asked for; the residual is as before."""
    server = server_of()
    for member in (0, 1, 2):
        server.handle(push(member, BEFORE))
    for member in (0, 2):
        server.handle(push(member, NEWEST))
    assert settle_after_loss(server, NEWEST) == [
        SettleResidual(0, BEFORE, counted=True),
        CloseRound(0, NEWEST, 1, (0, 2), workers=2, having=(0, 2)),
    ]
    server = server_of()
    for member in (0, 1, 2):
        server.handle(push(member, BEFORE))
    for member in (0, 1, 2):
        server.handle(push(member, NEWEST))  # closed, and every answer is lost
    assert settle_after_loss(server, NEWEST) == [
        SendTo((0,), Wanted(0, 1, 0, NEWEST)),
        SendTo((2,), Wanted(0, 1, 0, NEWEST)),
    ]
    server.handle(push(0, NEWEST, view=1))
    assert server.handle(push(2, NEWEST, view=1)) == [
        SettleResidual(0, NEWEST, counted=False),
        CloseRound(0, NEWEST, 1, (0, 2), workers=2, having=(0, 2)),
    ]


def settle_after_loss(server: Repair, pushed: Any) -> list[Any]:
    assert server.handle(ViewEntered(VIEW)) == []
    return settle(server, claim(2, BEFORE, pushed), claim(0, BEFORE, pushed))


def test_a_new_owner_begins_with_an_empty_residual() -> None:
    server = server_of()
    lost = View(1, 0, (0,), (0,))
    assert server.handle(ViewEntered(lost)) == [EmptyResidual(1)]
    assert settle(server, claim(0, NEVER, NEVER, 0, 1)) == []
    skipped = View(9, 7, (0, 2), (0, 0))
    assert server.handle(ViewEntered(skipped)) == [EmptyResidual(0)], "others may have had it"


def test_a_second_loss_has_all_claim_again() -> None:
    server = server_of()
    server.handle(ViewEntered(View(1, 0, (0, 1, 2), (0, 0, 0))))
    server.handle(claim(0, BEFORE, NEWEST))
    server.handle(ViewEntered(View(2, 1, (0, 2), (0, 0))))
    assert server.missing() == {0: [0, 2]}
    assert server.handle(claim(2, BEFORE, NEWEST)) == [], "of the view before"
    assert server.missing() == {0: [0, 2]}


def test_a_push_before_the_last_claim_waits() -> None:
    """Even if all others' are here from the view before."""
    server = server_of()
    for member in (0, 1, 2):
        server.handle(push(member, BEFORE))
    server.handle(push(0, NEWEST))
    server.handle(ViewEntered(VIEW))
    server.handle(claim(2, BEFORE, BEFORE))
    assert server.handle(push(2, NEWEST, view=1)) == []
    assert server.handle(claim(0, BEFORE, NEWEST)) == [
        SettleResidual(0, BEFORE, counted=True),
        CloseRound(0, NEWEST, 1, (0, 2), workers=2, having=(0, 2)),
    ]


def test_a_newcomer_is_waited_for_from_its_first_step_on() -> None:
    view = View(1, 0, (0, 2, 65537), (0, 0, 6))
    server = server_of()
    server.handle(ViewEntered(view))
    claims = claim(0, NEWEST, NEWEST), claim(2, NEWEST, NEWEST), claim(65537, NEVER, NEVER)
    assert settle(server, *claims) == [], "it lacks nothing"
    server.handle(push(0, OPEN, view=1))
    assert server.handle(push(2, OPEN, view=1))[-1].counted == (0, 2)  # type: ignore[union-attr]
    server.handle(push(65537, (6, 0), view=1))
    server.handle(push(0, (6, 0), view=1))
    assert server.missing() == {0: [2]}


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (claim(0, BEFORE, BEFORE), "claims slices .* out of turn"),
        (push(0, BEFORE, view=1, slice_=1), "slice 1 is not this server's"),
        (push(2, NEWEST, view=1), "member 2 pushed round"),
        (push(2, BEFORE, view=1), "member 2 pushed round"),
        (push(0, OPEN, view=1), "member 0 pushed round"),
        (Average(2, 1, 0, NEWEST), "which nobody has asked for"),
    ],
)
def test_what_nobody_may_tell_it(event: Any, message: str) -> None:
    server = server_of()
    server.handle(ViewEntered(VIEW))
    settle(server, claim(0, NEWEST, NEWEST), claim(2, NEWEST, NEWEST))
    server.handle(push(0, OPEN, view=1))
    with pytest.raises(RemoteProtocolError, match=message):
        server.handle(event)


def test_claims_that_cannot_be() -> None:
    server = server_of()
    server.handle(ViewEntered(VIEW))
    server.handle(claim(0, BEFORE, BEFORE))
    with pytest.raises(RemoteProtocolError, match="nobody can be more than one round behind"):
        server.handle(claim(2, NEWEST, NEWEST))
    server = server_of()
    server.handle(ViewEntered(VIEW))
    with pytest.raises(RemoteProtocolError, match="out of turn"):
        server.handle(claim(0, BEFORE, BEFORE, 1))
    with pytest.raises(InternalError, match="does not know the event"):
        server.handle("hello")


def test_frames_of_another_view_change_nothing() -> None:
    server = server_of()
    frames = [push(0, BEFORE, view=2), Average(0, 2, 0, BEFORE), claim(0, BEFORE, BEFORE)]
    assert [server.handle(frame) for frame in frames] == [[], [], []]
    assert server.missing() == {}

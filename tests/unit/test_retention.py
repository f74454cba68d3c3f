"""What a worker keeps until when, and what it claims: one worker's machine by itself."""

from __future__ import annotations

from typing import Any

import pytest

from foreprop.core.collect import NEVER
from foreprop.core.retention import (
    Average,
    Claim,
    Claims,
    Contribution,
    ContributionReady,
    EncodePush,
    KeepAverage,
    Retention,
    SettleResidual,
    ViewEntered,
    Wanted,
)
from foreprop.core.views import LeaveView, SendTo, View, first_view
from foreprop.errors import InternalError, LocalProtocolError, RemoteProtocolError

NEXT = View(3, 0, (0, 2), (0, 0))


def worker_of(**about: Any) -> Retention:
    """Member 2 of three; server 0 has slice 0, server 1 slice 1."""
    return Retention(2, first_view(range(3)), {0: 0, 1: 1}, **about)


def push(slice_: int, round_: Any, *, owner: int, view: int = 0, gradient: bool = True) -> SendTo:
    return SendTo((owner,), Contribution(2, view, slice_, round_, 1, gradient))


def answered(worker: Retention, slice_: int, round_: Any, view: int = 0) -> Any:
    return worker.handle(Average(slice_, view, slice_, round_))


def test_a_push_is_kept_until_it_is_answered_and_an_average_until_the_next() -> None:
    worker = worker_of()
    first, second = (1, 0), (2, 0)
    assert worker.handle(ContributionReady(0, first)) == [
        EncodePush(0, first),
        push(0, first, owner=0),
    ]
    assert worker.unanswered() == [(0, first)]
    assert answered(worker, 0, first) == [KeepAverage(0, first)]
    assert worker.unanswered() == []
    assert worker.handle(ContributionReady(0, second)) == [
        SettleResidual(0, first, counted=True),
        EncodePush(0, second),
        push(0, second, owner=0),
    ]
    average = SendTo((0,), Average(2, 0, 0, first))
    assert worker.handle(Wanted(0, 0, 0, first)) == [average], "it has it still"
    assert worker.handle(Wanted(0, 0, 0, second)) == [push(0, second, owner=0)], "the same bytes"
    answered(worker, 0, second)
    with pytest.raises(RemoteProtocolError, match="member 0 wants round"):
        worker.handle(Wanted(0, 0, 0, first))


def test_a_round_that_another_pass_closes_leaves_no_residual() -> None:
    """Nor does a skipped step; and a slice's rounds go one after the other."""
    worker = worker_of()
    worker.handle(ContributionReady(0, (1, 0)))
    assert worker.handle(ContributionReady(0, (1, 1))) == [], "the round before is unanswered"
    assert answered(worker, 0, (1, 0)) == [
        KeepAverage(0, (1, 0)),
        SettleResidual(0, (1, 0), counted=False),
        EncodePush(0, (1, 1)),
        push(0, (1, 1), owner=0),
    ]


def test_without_a_gradient_the_residual_stays() -> None:
    worker = worker_of(workers=1)
    worker.handle(ContributionReady(0, (1, 0)))
    answered(worker, 0, (1, 0))
    assert worker.handle(ContributionReady(0, (2, 0), has_gradient=False)) == [
        SettleResidual(0, (1, 0), counted=True),
        push(0, (2, 0), owner=0, gradient=False),
    ]
    answered(worker, 0, (2, 0))
    assert worker.handle(ContributionReady(0, (3, 0)))[0] == EncodePush(0, (3, 0))


def test_a_node_says_how_many_workers_it_counts() -> None:
    (_, sent) = worker_of(workers=4).handle(ContributionReady(0, (1, 0)))
    assert isinstance(sent, SendTo)
    assert sent.frame.workers == 4


def test_what_it_has_is_claimed_when_the_view_before_is_left() -> None:
    worker = worker_of()
    for slice_ in (0, 1):
        worker.handle(ContributionReady(slice_, (1, 0)))
    answered(worker, 0, (1, 0))
    worker.handle(LeaveView(0))
    assert answered(worker, 1, (1, 0)) == [], "of a view that it has left"
    assert worker.handle(Wanted(1, 0, 1, (1, 0))) == []
    late = worker.handle(ContributionReady(0, (2, 0)))
    assert late == [SettleResidual(0, (1, 0), counted=True), EncodePush(0, (2, 0))]
    claims = (Claim(0, (1, 0), (2, 0)),), (Claim(1, NEVER, (1, 0)),)
    assert worker.handle(ViewEntered(NEXT)) == [
        SendTo((0,), Claims(2, 3, claims[0])),
        SendTo((2,), Claims(2, 3, claims[1])),
    ], "its own server has slice 1 now"
    assert answered(worker, 1, (1, 0)) == [], "of the view before"
    assert worker.handle(Wanted(2, 3, 1, (1, 0))) == [push(1, (1, 0), owner=2, view=3)]
    assert answered(worker, 1, (1, 0), view=3) == [KeepAverage(1, (1, 0))]


@pytest.mark.parametrize(
    ("event", "error", "message"),
    [
        (Average(0, 0, 0, (2, 0)), RemoteProtocolError, "came to who has pushed"),
        (Average(0, 0, 7, (2, 0)), RemoteProtocolError, "there is no slice 7"),
        (Wanted(0, 0, 0, NEVER), RemoteProtocolError, "member 0 wants round"),
        (ContributionReady(0, (1, 0)), LocalProtocolError, "ready for round"),
        ("hello", InternalError, "does not know the event 'hello'"),
    ],
)
def test_what_nobody_may_tell_it(event: Any, error: type[Exception], message: str) -> None:
    worker = worker_of()
    worker.handle(ContributionReady(0, (1, 0)))
    with pytest.raises(error, match=message):
        worker.handle(event)

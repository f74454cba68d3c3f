"""Words that are well formed and cannot be meant, from who has a part in the session.

Of a rank, a server or a member that is wrong, and not of a stranger: the error names it, and is
none of ours (`InternalError`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch

from foreprop.core.manifest import OptimizerInfo
from foreprop.core.wire import Kind
from foreprop.engine.stream import connect, listen
from foreprop.engine.tensors import encode_state
from foreprop.errors import RemoteProtocolError, TransportError
from foreprop.features.members.membershipview import MemberNotices
from foreprop.features.members.messages import decode_answer, decode_settled
from foreprop.features.uneven.pace import PaceKeeper
from tests.faults.wire_peers import GROUP, engine, gradient, manifest_of, session
from tests.tiers import long_cases

SGD = {**GROUP, "momentum": 0.9}
ADAM = {"lr": 0.1, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
ADAM |= {"maximize": False}
Said = tuple[Kind, int, bytes]
"""A frame: what it is, of which step, and its payload."""


def said_numbers(group: dict[str, Any], **changes: Any) -> Said:
    return Kind.HYPERPARAMETERS, 1, json.dumps([{**group, **changes}]).encode()


def failure_after(
    said: Sequence[Said], name: str, group: dict[str, Any], *, both: bool = False, **knobs: Any
) -> str:
    """What ends a session in which rank 0, or ``both``, say that before their first pushes."""
    manifest = manifest_of(optimizer=OptimizerInfo(name=name, groups=(group,)))
    manifest = msgspec.structs.replace(
        manifest, knobs=msgspec.structs.replace(manifest.knobs, **knobs)
    )
    with session(joined=False, join_timeout_s=10.0, step_timeout_s=5.0) as running:
        workers = [running.stranger(rank) for rank in (0, 1)]
        for worker in workers:
            worker.hello(manifest)
        for worker in workers:
            worker.expect(Kind.WELCOME)
        workers[0].send(Kind.VALUE, gradient(0.0))
        workers[1].expect(Kind.REPLY)
        for worker in workers:
            for kind, step, data in said if both or worker is workers[0] else ():
                worker.send(kind, data, step=step)
        if not both:
            workers[1].send(*said_numbers(group)[::2], step=1)
        for worker in workers:
            worker.send(Kind.PUSH, gradient(1.0), step=1)
        if both:
            for worker in workers:
                assert worker.expect(Kind.REPLY) != gradient(0.0)
            for worker in workers:
                worker.close()
        running.wait()
        (failure,) = running.failure
    assert failure is not None
    return f"{failure.kind}: {failure.message}"


NUMBERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "none": ("SGD", SGD, {"lr": None}),
    "a weight decay of none": ("SGD", SGD, {"weight_decay": None}),
    "huge": ("SGD", SGD, {"lr": 10**400}),
    "a list": ("SGD", SGD, {"lr": [0.1]}),
    "no list": ("Adam", ADAM, {"betas": 0.9}),
    "a shorter list": ("Adam", ADAM, {"betas": [0.9]}),
}


@pytest.mark.parametrize("knobs", [{}, *long_cases({"staleness": 2})])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_no_optimizer_takes(name: str, knobs: dict[str, Any]) -> None:
    optimizer, group, changes = NUMBERS[name]
    (key,) = changes
    text = failure_after([said_numbers(group, **changes)], optimizer, group, **knobs)
    wrong = "RemoteProtocolError: rank 0 broke the protocol: hyperparameters: "
    assert text.startswith(f"{wrong}{key} is {str(changes[key])[:40]}, and was {group[key]}"), text


ARRAY = torch.zeros(6)
STATES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a number": ("SGD", SGD, {"momentum_buffer": 3}),
    "another type": ("SGD", SGD, {"momentum_buffer": torch.zeros(6, dtype=torch.bool)}),
    "another shape": ("SGD", SGD, {"momentum_buffer": torch.tensor(1.0)}),
    "half of it": ("Adam", ADAM, {"exp_avg": ARRAY}),
    "a step that is no array": ("Adam", ADAM, {"exp_avg": ARRAY, "exp_avg_sq": ARRAY, "step": 3}),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_of_another_optimizer(name: str) -> None:
    """As after `load_state_dict` of another training's: torch itself looks at none of it."""
    optimizer, group, state = STATES[name]
    said = [(Kind.STATE, 0, encode_state(state)), said_numbers(group)]
    text = failure_after(said, optimizer, group)
    assert text.startswith("TrainingLoopError: parameter a: the optimizer state that rank 0"), text
    assert f"does not fit {optimizer}" in text


@pytest.mark.parametrize(
    ("optimizer", "group", "changes"),
    [("SGD", {**SGD, "nesterov": True}, {"momentum": 0.0}), ("Adam", ADAM, {"lr": -0.1})],
)
def test_numbers_that_only_a_schedule_gives(
    optimizer: str, group: dict[str, Any], changes: dict[str, Any]
) -> None:
    """torch refuses them where an optimizer is made, and not later."""
    said = [said_numbers(group, **changes)]
    text = failure_after(said, optimizer, group, both=True)
    assert text.startswith("PeerLost: rank"), text  # all went well until both had gone


# What a server says.
GONE, COME = Kind.LEFT, Kind.JOINED
PACES = [{"step_s": 1.0, "busy_s": 1.0}] * 2
REPORT: dict[str, Any] = {"slices": 1, "late_s": [0.0, 1.0], "answer_s": 0.0, "paces": PACES}


def report_of(step: int, **changes: Any) -> Said:
    return Kind.PACE_REPORT, step, json.dumps({**REPORT, **changes}).encode()


def order_of(*order: int) -> list[dict[str, Any]]:
    return [{**PACES[0], "order": order}, PACES[1]]


WORDS: dict[str, tuple[Said, str]] = {
    "an unknown rank has left": ((GONE, 1, b'[9,1,0,1,""]'), "word of rank 9 of 2"),
    "a rank below 0 has left": ((GONE, 1, b'[-1,1,0,1,""]'), "word of rank -1 of 2"),
    "an unknown rank has come": ((COME, 1, b"[2,3,[0,2]]"), "word of rank 2 of 2"),
    "a report before its step": (report_of(16), "a report of step 16, after 8 steps"),
    "a report of no window": (report_of(7), "a report of step 7, after 8 steps"),
    "a report of step 0": (report_of(0), "a report of step 0, after 8 steps"),
    "slices beyond number": (report_of(8, slices=10**400), "not a report of paces"),
    "slices below 0": (report_of(8, slices=-1), "not a report of paces"),
    "an order of twice the same": (report_of(8, paces=order_of(1, 1)), "rank 0's order of 2"),
    "an order of others": (report_of(8, paces=order_of(0, 7)), "rank 0's order of 2 parameters is"),
}


@pytest.mark.parametrize("name", WORDS)
def test_what_a_server_cannot_mean(name: str) -> None:
    (kind, step, data), says = WORDS[name]
    elastic = kind in (GONE, COME)
    with engine(elastic=elastic) as (made, (server,)):
        if elastic:
            made.receivers.add(MemberNotices(made, None))
        else:
            made.receivers.add(PaceKeeper(made, [0]))
        made.steps = 8
        made.push(0, 1)
        server.expect(Kind.PUSH)
        server.send(kind, data, step=step)
        with pytest.raises(RemoteProtocolError, match="server 0 broke the protocol: ") as error:
            made.wait(0, 1)
        assert says in str(error.value)


def test_all_have_left_and_this_one_too() -> None:
    """Nobody is left to say so; it goes on, and hears more."""
    with engine(elastic=True) as (made, (server,)):
        notices = MemberNotices(made, None)
        made.receivers.add(notices)
        made.push(0, 1)
        server.expect(Kind.PUSH)
        for rank in (1, 0):
            server.send(Kind.LEFT, b'[%d,1,0,1,""]' % rank, step=1)
        server.send(Kind.REPLY, gradient(1.0), step=1)
        made.wait(0, 1)
        assert notices.members == []


@pytest.mark.parametrize("data", [b"[1,0,%d,2]" % 2**70, b"[1,0,3,%d]" % 2**40, b"[1,-2,3,2]"])
def test_a_step_that_nobody_reaches_is_no_answer_to_a_newcomer(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="not an answer to who wants to join"):
        decode_answer(memoryview(data))
    assert decode_answer(memoryview(b"[1,0,3,2]")).least == 3


@pytest.mark.parametrize(
    "data", [b"[[-1,4,0,1]]", b"[[0,-2,0,1]]", b"[[0,4,%d,1]]" % 2**16, b"[[0,4,0,-2]]", b"[[0,4]]"]
)
def test_what_is_settled_is_a_round_and_who_gives(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="settled"):
        decode_settled(memoryview(data))
    assert decode_settled(memoryview(b"[[0,4,1,-1]]"))[0].round == (4, 1)


@pytest.mark.parametrize(
    ("address", "port"), [("a" * 70 + ".b", 80), ("..", 80), ("127.0.0.1", 2**70)]
)
def test_where_nobody_can_be_is_an_error_at_once(address: str, port: int) -> None:
    with pytest.raises(TransportError, match="no connection to"):
        connect(address, port, timeout_s=600.0)


def test_an_address_that_cannot_be_is_not_listened_at() -> None:
    for listening in (lambda: listen(".."), lambda: listen("..", "29600-29601")):
        with pytest.raises(TransportError, match="cannot listen on"):
            listening()

"""Which slices move so that servers own what suits them, and who hears of a plan."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreprop.core.membership import Members
from foreprop.core.slicing import Slice
from foreprop.core.takeover import MovePlan, MoveState, loads_of, owner_of, plan_moves
from foreprop.core.wire import Header, Kind
from foreprop.errors import RemoteProtocolError
from foreprop.features.members.counting import MovesPassedOn
from foreprop.features.members.survival import Moves


def sliced(servers: int, count: int, elems: int = 10) -> list[Slice]:
    return [Slice(n, n, 0, elems, n % servers) for n in range(count)]


# A plan.
def test_a_slow_servers_slices_go_to_the_others_and_come_back() -> None:
    slices = sliced(4, 80)
    away = plan_moves(slices, [0] * 80, [1, 1, 1, 0])
    assert loads_of(slices, away, servers=4) == [270, 270, 260, 0]
    assert all(moves == 0 for n, moves in enumerate(away) if n % 4 != 3)
    back = plan_moves(slices, away, [1, 1, 1, 1])
    assert loads_of(slices, back, servers=4) == [200, 200, 200, 200]
    assert plan_moves(slices, back, [1, 1, 1, 1]) == back


@given(
    servers=st.integers(3, 6),
    count=st.integers(0, 40),
    data=st.data(),
)
def test_each_server_comes_nearer_to_its_share(servers: int, count: int, data: Any) -> None:
    draw = data.draw
    lost = draw(st.sets(st.integers(0, servers - 1), max_size=servers - 2))
    shares = [0 if s in lost else draw(st.integers(0, 9)) for s in range(servers)]
    shares[next(s for s in range(servers) if s not in lost)] += 1
    slices = [
        piece._replace(stop_elems=draw(st.integers(1, 9))) for piece in sliced(servers, count)
    ]
    moves = [draw(st.integers(0, 2 * servers)) for _ in slices]
    planned = plan_moves(slices, moves, shares, lost=lost)
    assert all(then - now >= 0 for now, then in zip(moves, planned, strict=True))
    owners = [owner_of(n, p.server, servers, lost, planned[n]) for n, p in enumerate(slices)]
    assert not lost & set(owners)
    before, after = (
        loads_of(slices, each, servers=servers, lost=lost) for each in (moves, planned)
    )
    assert sum(before) == sum(after)
    for server, share in enumerate(shares):
        wanted = sum(before) * share / sum(shares)
        assert abs(after[server] - wanted) <= max(abs(before[server] - wanted), 4.5)


# Word of it.
SLICES = sliced(3, 3)


class Engine:
    """What `Moves` asks of an engine and of who takes slices over."""

    def __init__(self, joins: str | None = None) -> None:
        self.config = SimpleNamespace(join=joins, step_timeout_s=1.0)
        self.slices, self.parameters, self.steps = SLICES, (), 0
        self.lock = threading.RLock()
        self.progress = self.machine = self
        self.sent: list[MovePlan] = []
        self.moves = [0, 0, 0]

    def send_to_all(self, kind: int, step: int, priority: int, data: bytes) -> None:
        plan = msgspec.json.decode(data, type=MovePlan)
        assert (kind, step) == (Kind.MOVES, plan.first)
        self.sent.append(plan)

    def wait_until(self, *_: Any) -> None: ...

    def begin_after(self, made: Any) -> None:
        self.moves = list(made)

    def move(self, slices: Any) -> None:
        for slice_ in slices:
            self.moves[slice_] += 1


def moves_of(engine: Engine) -> Moves:
    return Moves(engine, engine)  # type: ignore[arg-type]


def hear(receiver: Any, plan: MovePlan, rank: int = 0) -> None:
    data = msgspec.json.encode(plan)
    header = Header(Kind.MOVES, 0, rank, plan.first, 0, 0, len(data))
    peer: Any = SimpleNamespace(number=rank)
    room = receiver.room(peer, header)
    room[:] = data
    receiver.on_frame(peer, header, room)


def test_who_hears_of_a_plan_tells_all_once_and_moves_in_its_steps() -> None:
    engine = Engine()
    moves = moves_of(engine)
    plan = MovePlan(5, 0, (2, 0, 1))
    hear(moves, plan)
    hear(moves, plan)
    moves.tell(plan)
    assert engine.sent == [plan]
    made = [(moves.begin_step(step), list(engine.moves))[1] for step in (4, 5, 6, 7)]
    assert made == [[0, 0, 0], [1, 0, 1], [2, 0, 1], [2, 0, 1]]
    assert moves.begin_step(8) is False


def test_of_two_plans_for_one_step_all_follow_the_same() -> None:
    plans = [MovePlan(5, 0, (1, 0, 0)), MovePlan(5, 1, (0, 1, 0)), MovePlan(5, 0)]
    for order in (plans, plans[::-1]):
        engine = Engine()
        moves = moves_of(engine)
        for plan in order:
            hear(moves, plan)
        assert moves.begin_step(5), "links are measured, too"
        assert engine.moves == [0, 1, 0]


def test_a_newcomer_goes_on_where_the_others_are() -> None:
    engine, newcomer = Engine(), Engine("host:1")
    moves, others = moves_of(engine), moves_of(newcomer)
    assert moves.is_told
    assert not others.is_told
    for plan in (MovePlan(5, 0, (2, 0, 0)), MovePlan(7, 0, (2, 1, 0))):
        hear(moves, plan)
    moves.begin_step(5)
    engine.steps = 5
    others.begin_with(moves.state())
    assert others.is_told
    for each in (moves, others):
        assert not any(each.begin_step(step) for step in (6, 7))
    assert newcomer.moves == engine.moves == [2, 1, 0]
    with pytest.raises(RemoteProtocolError, match="2 moves of 3 slices"):
        others.begin_with(MoveState((0, 0), (0, 0), ()))


def test_a_server_passes_each_plan_on_once_to_all_who_are_here() -> None:
    members, sent = Members(4), []
    members.drop(2)
    executor = SimpleNamespace(
        lock=threading.RLock(), send=lambda rank, kind, *_: sent.append((rank, kind))
    )
    server = MovesPassedOn(3, members, executor)  # type: ignore[arg-type]
    for rank in (2, 0, 1):
        hear(server, MovePlan(5, 0, (1, 0, 0)), rank)
    assert sent == [(rank, Kind.MOVES) for rank in (0, 1, 3)]


@pytest.mark.parametrize("text", ["[5,0,[1]]", "[5,0,[-1,0,0]]", "[5]", "[5,-1,[]]", '"x"'])
def test_a_plan_that_does_not_fit_is_refused(text: str) -> None:
    data = memoryview(text.encode())
    peer: Any = SimpleNamespace(number=0)
    with pytest.raises(RemoteProtocolError):
        moves_of(Engine()).on_frame(peer, Header(Kind.MOVES, 0, 0, 5, 0, 0, len(data)), data)

"""Dealing out items one by one gives what torch's DistributedSampler gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from foreprop.data.turns import Turn


def dealt(items: int, rank: int, size: int, *, fill: bool = True, rounds: int = 1) -> list[int]:
    turn = Turn(rank=rank, size=size, fill=fill, rounds=rounds)
    share = list(turn.deal(iter(range(items)), nullcontext()))
    assert len(share) == turn.count(items)
    return share


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 7))
def test_filled_up_as_by_distributed_sampler(items: int, size: int, rounds: int) -> None:
    for rank in range(size):
        torchs = DistributedSampler(range(items), size, rank, shuffle=False)  # type: ignore[arg-type]
        assert dealt(items, rank, size, rounds=rounds) == list(torchs)


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 7))
def test_else_the_incomplete_round_is_left_out(items: int, size: int, rounds: int) -> None:
    shares = [dealt(items, rank, size, fill=False, rounds=rounds) for rank in range(size)]
    whole = items // size
    assert shares == [list(range(rank, whole * size, size)) for rank in range(size)]


def test_of_nothing_nobody_gets_anything() -> None:
    assert [dealt(0, rank, 3) for rank in range(3)] == [[], [], []]


def test_no_more_is_drawn_than_the_rounds_need_and_only_inside() -> None:
    inside = False
    drawn: list[int] = []

    @contextmanager
    def drawing() -> Iterator[None]:
        nonlocal inside
        inside = True
        yield
        inside = False

    def items() -> Iterator[int]:
        for number in range(100):
            assert inside
            drawn.append(number)
            yield number

    class Again:
        def __enter__(self) -> None:
            self.context = drawing()
            self.context.__enter__()

        def __exit__(self, *error: object) -> None:
            self.context.__exit__(None, None, None)

    share = Turn(rank=1, size=2, rounds=3).deal(items(), Again())
    assert [next(share) for _ in range(3)] == [1, 3, 5]
    assert not inside
    assert len(drawn) == 6
    assert next(share) == 7
    assert len(drawn) == 12

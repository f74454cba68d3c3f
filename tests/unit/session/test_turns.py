"""Items are dealt out as by torch's DistributedSampler, and all ranks draw alike."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from foreprop.session.shares import CommonRandomness, Turn


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


# Random numbers that all ranks draw alike, beside those that the program draws.
def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def seed_program(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def test_alike_whatever_the_program_draws() -> None:
    drawn = []
    for program in (1, 2):
        seed_program(program)
        common = CommonRandomness(7)
        values = []
        for _ in range(3):
            with common:
                values.append(draw())
            draw()
        drawn.append(values)
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 3  # it goes on where it was left
    with CommonRandomness(8):
        assert draw() not in drawn[0]


def test_the_program_goes_on_as_if_nothing_had_been_drawn() -> None:
    seed_program(3)
    expected = [draw(), draw()]
    seed_program(3)
    found = [draw()]
    with CommonRandomness(7):
        draw()
        with CommonRandomness(9):
            draw()
    found.append(draw())
    assert found == expected


def test_torchs_generator_is_as_distributed_samplers() -> None:
    expected = torch.randperm(9, generator=torch.Generator().manual_seed(5)).tolist()
    with CommonRandomness(5):
        assert torch.randperm(9).tolist() == expected


def test_threads_take_turns() -> None:
    seen: list[list[tuple[float, float, float]]] = []

    def work() -> None:
        common = CommonRandomness(4)
        mine = []
        for _ in range(50):
            with common:
                mine.append(draw())
        seen.append(mine)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen[0] == seen[1] == seen[2]

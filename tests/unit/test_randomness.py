"""Random numbers that all ranks draw alike, beside those that the program draws."""

from __future__ import annotations

import random
import threading

import numpy as np
import torch

from foreprop.data.randomness import CommonRandomness


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

"""Rows updated by themselves, beside torch's optimizer of the whole table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foreprop.features.tables.rowtable import RowOptimizer, RowTable

torch.sparse.check_sparse_tensor_invariants.disable()  # torch's Adagrad warns until one chooses

ROWS, ELEMS = 12, 5
CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "maximize": True}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5, "lr_decay": 0.2}),
    (torch.optim.SparseAdam, {"lr": 0.1, "betas": [0.7, 0.8]}),
]


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


def updates(count: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for step in range(count):
        size = 0 if step == 2 else 1 + step % 4
        numbers = torch.randperm(ROWS, generator=generator)[:size].sort().values
        made.append((numbers, torch.randn(size, ELEMS, generator=generator)))
    return made


class Whole:
    """Torch's own, with a sparse gradient."""

    def __init__(self, cls: Any, options: dict[str, Any]) -> None:
        self.table = torch.nn.Parameter(torch.ones(ROWS, ELEMS))
        self.optimizer = cls([self.table], **options)

    def step(self, numbers: torch.Tensor, gradient: torch.Tensor) -> None:
        self.table.grad = torch.sparse_coo_tensor(
            numbers[None], gradient, self.table.shape, is_coalesced=True
        )
        self.optimizer.step()


def make(numbers: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(numbers), ELEMS)


class ByRows:
    def __init__(self, cls: Any, options: dict[str, Any], *, remote: bool = False) -> None:
        self.rows = RowTable(ROWS, ELEMS, torch.float32, make if remote else None)
        self.rows.put(torch.arange(0 if remote else ROWS), torch.ones(0 if remote else ROWS, ELEMS))
        self.options = options
        self.optimizer = RowOptimizer(cls, self.rows, options)

    @property
    def table(self) -> torch.Tensor:
        return self.rows.take(torch.arange(ROWS))

    def step(self, numbers: torch.Tensor, gradient: torch.Tensor) -> None:
        self.optimizer.step(numbers, self.rows.take(numbers), gradient, self.options)


def check_same(ours: ByRows, theirs: Whole) -> None:
    assert torch.equal(ours.table, theirs.table)
    state = ours.optimizer.state_of(torch.arange(ROWS))
    wanted = theirs.optimizer.state[theirs.table]
    for key, value in wanted.items():
        if value is not None:
            assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(("cls", "options"), CASES)
def test_the_same_bits(cls: Any, options: dict[str, Any], remote: bool) -> None:
    ours, theirs = ByRows(cls, options, remote=remote), Whole(cls, options)
    for numbers, gradient in updates(10):
        for each in (ours, theirs):
            each.step(numbers, gradient)
        check_same(ours, theirs)


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(("cls", "options"), CASES)
def test_state_goes_to_another_one(cls: Any, options: dict[str, Any], remote: bool) -> None:
    """State goes as a whole, or some rows at a time; the others begin as they always do."""
    ours, theirs = ByRows(cls, options, remote=remote), Whole(cls, options)
    for numbers, gradient in updates(3):
        for each in (ours, theirs):
            each.step(numbers, gradient)
    by_rows, whole = ByRows(cls, options, remote=remote), ByRows(cls, options)
    touched = torch.unique(torch.cat([numbers for numbers, _ in updates(3)]))
    for some in touched.split(2):
        by_rows.optimizer.put(some, ours.optimizer.state_of(some))
    whole.optimizer.replace(ours.optimizer.state_of(torch.arange(ROWS)))
    for other in (by_rows, whole):
        other.rows.put(torch.arange(ROWS), ours.table)
    for numbers, gradient in updates(8, seed=1):
        for each in (ours, theirs, by_rows, whole):
            each.step(numbers, gradient)
    for other in (ours, by_rows, whole):
        check_same(other, theirs)


def test_an_empty_state_is_a_new_beginning() -> None:
    cls, options = CASES[3]
    ours, theirs = ByRows(cls, options), Whole(cls, options)
    ours.step(*updates(1)[0])
    ours.optimizer.replace({})
    ours.rows.put(torch.arange(ROWS), torch.ones(ROWS, ELEMS))
    for numbers, gradient in updates(4):
        for each in (ours, theirs):
            each.step(numbers, gradient)
    check_same(ours, theirs)


def test_the_learning_rate_may_change() -> None:
    cls, options = CASES[2]
    ours, theirs = ByRows(cls, options), Whole(cls, options)
    for number, (numbers, gradient) in enumerate(updates(4)):
        ours.options = {"lr": 0.1 * number}
        theirs.optimizer.param_groups[0]["lr"] = 0.1 * number
        for each in (ours, theirs):
            each.step(numbers, gradient)
    check_same(ours, theirs)

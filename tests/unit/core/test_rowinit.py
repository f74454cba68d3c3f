"""How the rows of a remote table begin: by their numbers alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreprop.core.manifest import RowInit
from foreprop.core.rowinit import key_of, row_init_of
from foreprop.errors import ConfigError
from foreprop.features.tables.rowtable import make_rows

INITS = ["normal(1, 2)", "uniform(-3, 4)", "constant(0.5)"]


@given(
    st.lists(st.integers(0, 10**12), max_size=20),
    st.integers(1, 9),
    st.sampled_from(INITS),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_a_row_depends_on_its_number_alone(
    numbers: list[int], row_elems: int, text: str, dtype: torch.dtype
) -> None:
    init = row_init_of("table", text, padding_row=numbers[0] if numbers else 3)
    together = make_rows(init, torch.tensor(numbers, dtype=torch.int64), row_elems, dtype)
    assert together.shape == (len(numbers), row_elems)
    assert together.dtype == dtype
    for row, number in zip(together, numbers, strict=True):
        assert torch.equal(make_rows(init, torch.tensor([number]), row_elems, dtype)[0], row)
        assert number != init.padding_row or not row.any()


def test_many_rows_at_once_are_as_few(monkeypatch: pytest.MonkeyPatch) -> None:
    init = row_init_of("table", None)
    wanted = make_rows(init, torch.arange(100), 7, torch.float32)
    monkeypatch.setattr("foreprop.features.tables.rowtable._MADE_AT_ONCE_ELEMS", 20)
    assert torch.equal(make_rows(init, torch.arange(100), 7, torch.float32), wanted)


@pytest.mark.parametrize("first", [0, 10**9, 2**40])
def test_moments(first: int) -> None:
    """200,000 numbers: mean, deviation, skewness, kurtosis, and no correlation of neighbours."""
    numbers = torch.arange(first, first + 2000)
    rows = make_rows(row_init_of("table", "normal(3, 0.5)"), numbers, 100, torch.float64)
    normal = (rows - 3) / 0.5
    for power, wanted in ((1, 0), (2, 1), (3, 0), (4, 3)):
        assert float((normal**power).mean()) == pytest.approx(wanted, abs=0.05)
    for a, b in ((normal[1:], normal[:-1]), (normal[:, 1:], normal[:, :-1])):
        assert abs(float((a * b).mean())) < 0.02
    assert 4 < normal.abs().max() < 7
    uniform = make_rows(row_init_of("table", "uniform(-1, 3)"), numbers, 100, torch.float64)
    assert -1 <= uniform.min() < -0.999
    assert 2.999 < uniform.max() <= 3
    assert float(uniform.mean()) == pytest.approx(1, abs=0.02)
    assert float(uniform.std()) == pytest.approx(4 / math.sqrt(12), abs=0.02)


def test_the_same_on_every_machine() -> None:
    """These very numbers, or a table that is loaded elsewhere would begin otherwise."""
    rows = make_rows(row_init_of("table", None), torch.tensor([0, 123456789012]), 2, torch.float32)
    wanted = torch.tensor([[-0.3792614, 0.7655556], [0.0875267, 0.5476522]])
    torch.testing.assert_close(rows, wanted, rtol=1e-6, atol=1e-6)


def test_which_entry_counts() -> None:
    text = "words.*=uniform(-0.1, 0.1); *=constant(2);normal(5, 6)"
    assert row_init_of("words.weight", text, seed=3, padding_row=1) == RowInit(
        distribution="uniform",
        first=-0.1,
        second=0.1,
        key=key_of("words.weight", 3),
        padding_row=1,
    )
    assert row_init_of("users.weight", text).distribution == "constant"
    for nothing in (None, "", " ; ", "words.*=constant(2)"):
        found = row_init_of("users.weight", nothing)
        assert (found.distribution, found.first, found.second) == ("normal", 0, 1)


def test_keys() -> None:
    keys = {key_of(name, seed) for name in "abc" for seed in range(3)}
    assert len(keys) == 9
    assert all(0 <= key < 2**64 for key in keys)


@pytest.mark.parametrize(
    "text",
    [
        "normal",
        "normal(1)",
        "uniform(1, 2, 3)",
        "constant()",
        "constant(x)",
        "normal(0, inf)",
        "gauss(0, 1)",
        "a=b",
        "=constant(1)",
        "normal(0, 1), constant(2)",
    ],
)
def test_what_is_no_distribution(text: str) -> None:
    with pytest.raises(ConfigError, match=r"table_init has .*; it must be normal\(mean, std\)"):
        row_init_of("table", text)

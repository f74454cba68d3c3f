"""Gradients that are copied before they leave, by a thread of C++'s in the place of a GPU."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator

import pytest
import torch

from foreprop.config import Config
from foreprop.errors import ConfigError
from foreprop_lab.benchmarks import staged
from foreprop_lab.benchmarks.staged import Copier
from foreprop_lab.benchmarks.trainer import WAITS, measure_trainer
from foreprop_lab.benchmarks.wire import WirePair

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(120),
    pytest.mark.leaks_ok(reason="the store's client has a thread as long as the process"),
]


@pytest.fixture
def copier() -> Iterator[Copier]:
    made = Copier()
    yield made
    made.close()


def test_copies_are_over_in_their_order(copier: Copier) -> None:
    sources = [torch.full((1 << 20,), float(n)) for n in range(8)]
    target = torch.zeros(1 << 20)
    copying = [copier.start_counted([(target, source)], None) for source in sources]
    word = ctypes.c_int64.from_address(copying[0].word)
    assert [each.number for each in copying] == list(range(1, 9))
    copier.mark().synchronize()
    assert word.value == 8
    assert torch.equal(target, sources[-1])
    nothing = copier.start_counted((), None)  # what has gone before is over
    assert nothing.number <= word.value


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    staged._compiled.cache_clear()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match="install g\\+\\+"):
        Copier()


@pytest.mark.parametrize("plane", ["native", "python"])
def test_what_is_copied_first_is_what_is_averaged(plane: str) -> None:
    config = Config.resolve("p3", slice_elems=100, update="workers", plane=plane)
    pair = WirePair(9, config, staged=True)
    try:
        before = [parameter.detach().clone() for parameter in pair.parameters]
        for _ in range(3):
            pair.step()
        assert pair.arrived() == len(pair.parameters)
        assert pair._copier is not None
        assert pair._copier._asked == 3 * len(pair.parameters)
        for parameter, then in zip(pair.parameters, before, strict=True):
            expected = then.clone()
            for _ in range(3):
                expected.add_(torch.ones_like(then), alpha=-1e-3)
            assert torch.equal(parameter.detach(), expected)
    finally:
        pair.close()


def test_both_planes_are_measured_with_copies() -> None:
    costs = measure_trainer(slices_kb=[0.4], servers=[1], slices=9, rounds=1, staged=True)
    waits = [cost for cost in costs if cost.thread == WAITS]
    assert [cost.plane.partition(",")[0] for cost in waits] == ["native", "python", "gloo"]
    assert all(cost.bits_per_s > 0 for cost in costs)

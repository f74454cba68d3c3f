"""Checkpoints that somebody has changed, and their sums with them: told by file, or taken."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import foreprop
from foreprop.engine.world import World
from foreprop.errors import ConfigError, ForepropError
from foreprop.session.stored import INDEX, SHARED, part_name
from tests.cluster import run_cluster
from tests.conformance.parity import seeded, servers_only
from tests.tiers import long_cases

pytestmark = servers_only  # in a ring who has fewer batches is waited for until the time limit

JUNK: list[Any] = [None, True, -1, 0, 10**18, 0.5, float("nan"), "x", [], {}, [1], {"a": 1}]
JUNK += [torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(())]


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def train(folder: Path, world: World | None = None, stop_at: int | None = None) -> int:
    """Two epochs of four; how many steps were made in all."""
    with seeded(0):
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)
    data = TensorDataset(torch.ones(16, 4), torch.zeros(16, dtype=torch.int64))
    order = torch.Generator().manual_seed(5)
    with foreprop.parallelize(model, optimizer, world=world, resume=folder):
        loader = DataLoader(data, 4, shuffle=True, generator=order)
        loop = foreprop.checkpoint(folder, every=2, loader=loader)
        for _ in loop.epochs(2):
            for x, y in loop:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if loop.step == stop_at:
                    return loop.step
        return loop.step


def places(value: Any) -> list[tuple[Any, Any]]:
    """All containers and keys within; but not what users' own objects have."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    found = [(value, key) for key, _ in items]
    for key, item in items:
        if isinstance(item, dict | list) and key != "objects" and len(item) < 100:
            found += places(item)
    return found


def change(step: Path, name: str, data: st.DataObject) -> str:
    """One place of a file; the sums are right again."""
    content = torch.load(step / name, weights_only=True)
    container, key = data.draw(st.sampled_from(places(content)))
    drops = data.draw(st.booleans())
    junk = data.draw(st.sampled_from(JUNK))
    if drops:
        del container[key]
    else:
        container[key] = junk
    torch.save(content, step / name)
    index = msgspec.json.decode((step / INDEX).read_bytes())
    stored = (step / name).read_bytes()
    about = {"bytes": len(stored), "sha256": hashlib.sha256(stored).hexdigest()}
    index["files"][name] = about
    (step / INDEX).write_bytes(msgspec.json.encode(index))
    return f"{name}: {key!r} {'dropped' if drops else f'becomes {junk!r}'}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Stopped in the middle of an epoch, after a checkpoint; by how many ranks."""
    folders = {size: tmp_path_factory.mktemp(f"of-{size}") for size in (1, 2)}
    train(folders[1], stop_at=3)
    run_cluster(2, lambda world: train(folders[2], world, stop_at=3))
    return folders


def copy_of(folder: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "changed"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    return copy


@pytest.mark.parametrize("examples", [40, *long_cases(400)])
def test_changed_contents_are_told_or_taken(
    saved: dict[int, Path], tmp_path: Path, examples: int
) -> None:
    told = []

    @given(data=st.data(), name=st.sampled_from([SHARED, part_name(0)]))
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    def check(data: st.DataObject, name: str) -> None:
        folder = copy_of(saved[1], tmp_path)
        what = change(folder / "step-000000002", name, data)
        try:
            assert train(folder) >= 0
        except ConfigError as error:
            told.append((what, str(error)))

    check()
    assert len(told) > examples // 3
    where = str(tmp_path / "changed")
    assert [each for each in told if where not in each[1] and "loader " not in each[1]] == []


@pytest.mark.parametrize("examples", [5, *long_cases(60)])
def test_changed_contents_are_told_on_every_rank(
    saved: dict[int, Path], tmp_path: Path, examples: int
) -> None:
    @given(data=st.data(), name=st.sampled_from([SHARED, part_name(0), part_name(1)]))
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    def check(data: st.DataObject, name: str) -> None:
        folder = copy_of(saved[2], tmp_path)
        what = change(folder / "step-000000002", name, data)
        found = run_cluster(2, lambda world: outcome(folder, world))
        if any(isinstance(each, ConfigError) for each in found):  # else a rank has fewer batches
            assert all(isinstance(each, ForepropError) for each in found), (what, found)

    check()


def outcome(folder: Path, world: World) -> int | ForepropError:
    try:
        return train(folder, world)
    except ForepropError as error:
        return error


@pytest.mark.parametrize("world_size", [0, -1, 10**18])
def test_an_index_of_odd_worlds(saved: dict[int, Path], tmp_path: Path, world_size: int) -> None:
    """Such a checkpoint is damaged, and there is no other one."""
    folder = copy_of(saved[1], tmp_path)
    path = folder / "step-000000002" / INDEX
    index = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode({**index, "world_size": world_size}))
    with pytest.raises(ConfigError, match="none of them is whole: there is nothing to go on from"):
        train(folder)

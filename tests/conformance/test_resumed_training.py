"""A training that was stopped and goes on has the bits of one that was not."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import foreprop
from foreprop.engine.world import World
from foreprop.errors import ConfigError, ForepropError, StorageError
from foreprop.quantities import counted
from foreprop.session import stored, writing
from foreprop.session.stored import SHARED, CheckpointFolder
from tests.cluster import run_cluster
from tests.conformance.parity import check_same_bits, check_same_optimizer_state, once, seeded
from tests.tiers import long_cases

torch.sparse.check_sparse_tensor_invariants.disable()  # torch's Adagrad warns until one chooses

EPOCHS = 3
SAMPLES = 46
BATCH = 4
"""With two ranks: 6 batches in an epoch, the last of 3 samples; 18 steps in all."""


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Stopped(Exception):
    """In the place of a kill: nothing after it is done."""


class Net(nn.Module):
    """With running averages, which are each rank's own while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return self.last(torch.tanh(self.norm(self.first(x))) * (1 + self.calls / 100))


def data() -> TensorDataset:
    numbers = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 5, generator=numbers)
    return TensorDataset(x, torch.randint(3, (SAMPLES,), generator=numbers))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02, amsgrad=True)


OPTIMIZERS = {"adam": adam, "momentum": momentum}


@dataclass
class Training:
    """What each rank does. ``stop_at``: after this step, within the body of the loop."""

    folder: Path
    optimizer: str = "momentum"
    stop_at: int | None = None
    every: int = 4
    evaluates: bool = False
    scaled: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    saved: threading.Event = field(default_factory=threading.Event)

    def __call__(self, world: World) -> dict[str, Any]:
        with seeded(world.rank):
            model = Net()
        optimizer = OPTIMIZERS[self.optimizer](model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.7)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4, enabled=self.scaled)
        losses: list[Any] = []
        with foreprop.parallelize(
            model, optimizer, world=world, scaler=scaler, resume=self.folder, **self.settings
        ) as session:
            loader = foreprop.shard(DataLoader(data(), BATCH, shuffle=True), world=world)
            loop = foreprop.checkpoint(
                self.folder, every=self.every, loader=loader, schedule=schedule, scaler=scaler
            )
            first = loop.step
            for epoch in loop.epochs(EPOCHS):
                for x, y in loop:
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(x), y)
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    losses.append((loop.step, float(loss.detach()), scaler.get_scale()))
                    if loop.step == self.stop_at:
                        self.end(world, loop)
                    schedule.step()
                if self.evaluates:
                    losses.append((epoch, self.evaluate(model)))
            found = {
                "first": first,
                "losses": losses,
                "buffers": {name: one.clone() for name, one in model.named_buffers()},
                "model": copy.deepcopy(dict(model.state_dict())),
                "optimizer": copy.deepcopy(optimizer.state_dict()),
                "lr": schedule.get_last_lr(),
                "steps": loop.step,
            }
            if session.config.ema is not None:
                found["ema"] = session.ema_state_dict()
            return found

    def end(self, world: World, loop: Any) -> None:
        """When the last checkpoint is whole: one that others stop in is not."""
        loop.wait()
        if world.rank == 0:
            self.saved.set()
        assert self.saved.wait(60)
        raise Stopped

    def evaluate(self, model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            result = float(model(data().tensors[0]).sum())
        model.train()
        return result


def run(size: int, training: Training) -> list[dict[str, Any]]:
    return run_cluster(size, training)


def stop(size: int, training: Training) -> None:
    """All ranks at the same step: whoever is later may hear of another rank's end first."""
    with pytest.raises((Stopped, ForepropError)):
        run(size, training)


def check_goes_on(size: int, tmp_path: Path, stop_at: int, first: int, **changes: Any) -> None:
    whole = run(size, Training(tmp_path / "whole", **changes))
    folder = tmp_path / "stopped"
    stop(size, Training(folder, stop_at=stop_at, **changes))
    check_same(run(size, Training(folder, **changes)), whole, first)


def check_same(got: list[dict[str, Any]], wanted: list[dict[str, Any]], first: int) -> None:
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours["first"] == first
        assert ours["losses"] == theirs["losses"][-len(ours["losses"]) :]
        assert len(ours["losses"]) >= theirs["steps"] - first
        assert ours["steps"] == theirs["steps"]
        assert ours["lr"] == theirs["lr"]
        check_same_bits(ours["model"], theirs["model"])
        check_same_bits(ours["buffers"], theirs["buffers"])
        check_same_optimizer_state(ours["optimizer"], theirs["optimizer"])
        if "ema" in theirs:
            check_same_bits(ours["ema"], theirs["ema"])


LAYOUTS: dict[str, dict[str, Any]] = {
    "p2p, servers": {"architecture": "p2p", "update": "servers"},
    "p2p, workers": {"architecture": "p2p", "update": "workers"},
    "ring, engine": {"architecture": "ring", "update": "servers"},
    "ring, workers": {"architecture": "ring", "update": "workers"},
}


FIRST = [("p2p, servers", "adam"), ("ring, workers", "momentum")]
REST = [(one, other) for one in sorted(LAYOUTS) for other in sorted(OPTIMIZERS)]


@once
@pytest.mark.parametrize(
    "case", [*FIRST, *long_cases(*(case for case in REST if case not in FIRST))]
)
def test_in_the_middle_of_an_epoch(tmp_path: Path, case: tuple[str, str]) -> None:
    layout, optimizer = case
    settings = LAYOUTS[layout]
    check_goes_on(2, tmp_path, 10, 8, optimizer=optimizer, evaluates=True, settings=settings)


@once
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize(("saved_by", "update"), [("servers", "workers"), ("workers", "servers")])
def test_who_updates_may_change(tmp_path: Path, saved_by: str, update: str, optimizer: str) -> None:
    """SGD and Adam have the same bits on servers and on workers."""
    whole = run(2, Training(tmp_path / "whole", optimizer, settings={"update": update}))
    folder = tmp_path / "stopped"
    stop(2, Training(folder, optimizer, stop_at=10, settings={"update": saved_by}))
    check_same(run(2, Training(folder, optimizer, settings={"update": update})), whole, 8)


@once
@pytest.mark.parametrize("architecture", ["p2p", *long_cases("ring")])
@pytest.mark.parametrize("stop_at", [1, *long_cases(4, 6, 7, 18)])
def test_stopped_at_any_border(tmp_path: Path, architecture: str, stop_at: int) -> None:
    """Before the first checkpoint, at one, at the end of an epoch, and after the last step."""
    first = (stop_at - 1) // 3 * 3  # the body of the loop was not through with its step
    settings = {"architecture": architecture}
    check_goes_on(2, tmp_path, stop_at, first, every=3, evaluates=True, settings=settings)


BOTH, LOSSY = "averages, half the bytes", "lossy averages of gradients"
SETTINGS: dict[str, dict[str, Any]] = {
    "averages": {"architecture": "p2p", "ema": 0.9},
    BOTH: {
        "architecture": "p2p",
        "ema": 0.9,
        "wire_dtype": "bfloat16",
        "update": "servers",
    },
    "averages in a ring": {"architecture": "ring", "ema": 0.9},
    "clipped by norm": {"architecture": "p2p", "clip_grad_norm": 0.1},
    "exact codec": {"architecture": "p2p", "compression": "lossless"},
    LOSSY: {"architecture": "p2p", "compression": "int4"},
    "half the bytes": {"architecture": "p2p", "wire_dtype": "bfloat16", "update": "servers"},
    "half the bytes in a ring": {"architecture": "ring", "wire_dtype": "bfloat16"},
}


@once
@pytest.mark.parametrize(
    "name",
    [BOTH, LOSSY, *long_cases(*sorted(SETTINGS.keys() - {BOTH, LOSSY}))],
)
def test_with_what_servers_keep_beside(tmp_path: Path, name: str) -> None:
    check_goes_on(2, tmp_path, 10, 8, optimizer="adam", settings=SETTINGS[name])


@once
def test_masters_are_there_before_the_first_step(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"wire_dtype": "bfloat16", "update": "servers"}
    stop(2, Training(tmp_path, stop_at=6, settings=settings))
    saved = CheckpointFolder(tmp_path).open(4).read(SHARED)["sessions"][0]
    assert not torch.equal(saved["masters"]["first.weight"], saved["model"]["first.weight"])
    wanted = {name: one for name, one in saved["masters"].items() if name.startswith("first.")}

    def resumed(world: World) -> None:
        with seeded(world.rank):
            model = Net()
        with foreprop.parallelize(
            model, momentum(model), world=world, resume=tmp_path, **settings
        ) as session:
            check_some(session.master_state_dict(), wanted)
            with torch.no_grad():
                model.first.weight[0, 0] = 7.0
            weight = wanted["first.weight"].clone()
            weight[0, 0] = 7.0
            check_some(session.master_state_dict(), {**wanted, "first.weight": weight})

    run_cluster(2, resumed)


@once
@pytest.mark.parametrize(
    "settings", [{"architecture": "ring"}, *long_cases({"update": "workers"})], ids=str
)
def test_who_has_no_masters_goes_on_from_those(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Where workers update they have the values in full, whatever the wire's type is."""
    before: dict[str, Any] = {"wire_dtype": "bfloat16", "update": "servers"}
    stop(2, Training(tmp_path, stop_at=6, settings=before))
    saved = CheckpointFolder(tmp_path).open(4).read(SHARED)["sessions"][0]

    def resumed(world: World) -> dict[str, Any]:
        with seeded(world.rank):
            model = Net()
        about = {"wire_dtype": "bfloat16", **settings}
        with foreprop.parallelize(model, momentum(model), world=world, resume=tmp_path, **about):
            return copy.deepcopy(dict(model.state_dict()))

    for values in run_cluster(2, resumed):
        check_some(values, {name: saved["masters"][name] for name in ("first.weight", "last.bias")})


def check_some(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    check_same_bits({name: got[name] for name in wanted}, wanted)


@once
@pytest.mark.parametrize("architecture", long_cases("p2p", "ring"))
def test_a_scaler_goes_on(tmp_path: Path, architecture: str) -> None:
    settings = {"architecture": architecture}
    check_goes_on(2, tmp_path, 11, 8, scaled=True, settings=settings)


@once
@pytest.mark.long
def test_stopped_again_and_again(tmp_path: Path) -> None:
    """Each try makes two checkpoints more; a relay's node goes on, too."""
    settings = {"architecture": "p2p", "workers_per_node": 2}

    def work(folder: str, stop_at: int | None = None) -> list[dict[str, Any]]:
        training = Training(tmp_path / folder, stop_at=stop_at, every=2, settings=settings)
        return run_cluster(4, training, local_size=2)

    whole = work("whole")
    for stop_at in (3, 6, 8):
        with pytest.raises((Stopped, ForepropError)):
            work("stopped", stop_at)
    check_same(work("stopped"), whole, first=6)


# A world of one, which draws random numbers in every step.
class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.4), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x + 0.01 * torch.rand_like(x))


def train_alone(folder: Path | None, stop_at: int | None = None) -> dict[str, Any]:
    """With plain PyTorch's own shuffling; ``folder`` None: without any checkpoint."""
    torch.manual_seed(1 if stop_at or folder is None else 2)
    model = Dropping()
    optimizer = adam(model)
    loader = DataLoader(data(), 8, shuffle=True)
    losses: list[float] = []
    with foreprop.parallelize(model, optimizer, resume=folder, ema=0.9) as session:
        loop: Any = None
        if folder is not None:
            loop = foreprop.checkpoint(folder, every=3, loader=loader)
        for _ in range(EPOCHS) if loop is None else loop.epochs(EPOCHS):
            for x, y in loader if loop is None else loop:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
                if loop is not None and loop.step == stop_at:
                    raise Stopped
        return {
            "losses": losses,
            "model": dict(model.state_dict()),
            "ema": session.ema_state_dict(),
            "drawn": float(torch.rand(())),
        }


def test_a_world_of_one_draws_the_same_random_numbers(tmp_path: Path) -> None:
    whole = train_alone(None)
    for stop_at in (2, 4, 8, 14, 18):
        folder = tmp_path / str(stop_at)
        with pytest.raises(Stopped):
            train_alone(folder, stop_at)
        got = train_alone(folder)
        done = (stop_at - 1) // 3 * 3
        if done == 0:
            continue  # nothing had been saved: it has begun with another seed
        assert got["losses"] == whole["losses"][done:], stop_at
        assert got["drawn"] == whole["drawn"]
        check_same_bits(got["model"], whole["model"])
        check_same_bits(got["ema"], whole["ema"])


# Other worlds.
@once
@pytest.mark.parametrize("sizes", [(2, 3), *long_cases((3, 2), (2, 1), (1, 2))])
def test_with_another_number_of_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sizes: tuple[int, int]
) -> None:
    """All ranks go on alike, from the same values, and it is said that the bits are others."""
    before, after = sizes
    every = 3 if before == 3 else 4  # in the middle of an epoch
    settings = {"architecture": "p2p", "update": "servers"}
    stop(before, Training(tmp_path, stop_at=8, every=every, settings=settings))
    saved = CheckpointFolder(tmp_path).newest(lambda _: None)
    assert saved is not None
    wanted = saved.read(SHARED)["sessions"][0]

    def look(world: World) -> Any:
        with seeded(world.rank):
            model = Net()
        optimizer = momentum(model)
        with foreprop.parallelize(model, optimizer, world=world, resume=tmp_path, **settings):
            return copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))

    for values, state in run_cluster(after, look):
        check_same_bits(values, wanted["model"])
        check_same_optimizer_state(state, wanted["optimizer"])
    with caplog.at_level(logging.INFO, "foreprop"):
        first, *others = run(after, Training(tmp_path, every=every, settings=settings))
    assert first["first"] == 7 // every * every
    for other in others:
        check_same_bits(other["model"], first["model"])
    made = f"which {counted(before, 'rank')} made: {after} do not make the same bits"
    assert made in caplog.text
    assert "samples are divided anew from" in caplog.text


def buffer_after(world: World | None, folder: Path) -> float:
    """The one that no ``state_dict()`` has, of a session that goes on."""
    with seeded():
        model = Net()
    with foreprop.parallelize(model, momentum(model), world=world, resume=folder):
        return float(model.calls)


@once
def test_who_has_no_part_has_the_lowest_ranks_buffers(tmp_path: Path) -> None:
    stop(2, Training(tmp_path, stop_at=6))
    assert run_cluster(3, lambda world: buffer_after(world, tmp_path)) == [4, 4, 4]


@once
def test_alone_where_rank_0_had_left(tmp_path: Path) -> None:
    stop(2, Training(tmp_path, stop_at=6))
    path = tmp_path / "step-000000004" / stored.INDEX
    index = json.loads(path.read_bytes())
    del index["files"]["rank-0.pt"]
    path.write_text(json.dumps({**index, "ranks": [1]}))
    assert buffer_after(None, tmp_path) == 4


@once
@pytest.mark.long
def test_workers_apart_are_saved_together(tmp_path: Path) -> None:
    """Their bits differ from run to run; what is saved is what all ranks go on from."""
    settings = {"architecture": "p2p", "update": "servers", "staleness": 1}
    stop(2, Training(tmp_path, stop_at=10, settings=settings))
    saved = CheckpointFolder(tmp_path).newest(lambda _: None)
    assert saved is not None
    assert saved.step == 8
    wanted = saved.read(SHARED)["sessions"][0]["model"]

    def look(world: World) -> Any:
        with seeded(world.rank):
            model = Net()
        options = {"world": world, "resume": tmp_path, **settings}
        with foreprop.parallelize(model, momentum(model), **options) as session:
            session.flush()
            return {name: value.clone() for name, value in model.named_parameters()}

    for values in run_cluster(2, look):
        check_same_bits(values, {name: wanted[name] for name in values})
    assert [found["steps"] for found in run(2, Training(tmp_path, settings=settings))] == [18, 18]


# What else is saved.
@once
@pytest.mark.parametrize("codec", ["int8", *long_cases("topk:0.2")])
def test_residuals_of_codecs_go_on(tmp_path: Path, codec: str) -> None:
    """Not to the bit, as a session's first step differs; but nothing that was kept back is lost."""
    settings = {"architecture": "p2p", "compression": codec, "update": "servers"}
    stop(2, Training(tmp_path, stop_at=10, settings=settings))
    saved = CheckpointFolder(tmp_path).newest(lambda _: None)
    assert saved is not None
    masters = saved.read(SHARED)["sessions"][0]["masters"]

    def look(world: World) -> Any:
        with seeded(world.rank):
            model = Net()
        settings_ = {**settings, "resume": tmp_path}
        with foreprop.parallelize(model, momentum(model), world=world, **settings_) as session:
            return session.state_dict(), session.master_state_dict()

    for rank, (state, values) in enumerate(run_cluster(2, look)):
        own = saved.rank_part(rank)["sessions"][0]["residuals"]
        assert own
        for name, arrays in own.items():
            check_same_bits(state["residuals"][name], arrays)
        check_same_bits(values, masters)


class Words(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 4, sparse=True).to(device)
        self.last = nn.Linear(4, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(words).sum(1))


TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    "by rows": ("cpu", {"architecture": "p2p"}),
    "by rows, in a ring": ("cpu", {"architecture": "hybrid"}),
    "remote": ("meta", {"architecture": "p2p", "ema": 0.9, "table_init": "normal(0, 0.1)"}),
}


@once
@pytest.mark.parametrize("name", ["remote", *long_cases("by rows", "by rows, in a ring")])
def test_tables_go_on(tmp_path: Path, name: str) -> None:
    device, settings = TABLES[name]
    words = torch.randint(40, (SAMPLES, 3), generator=torch.Generator().manual_seed(5))
    told = TensorDataset(words, data().tensors[1])

    def work(folder: Path, stop_at: int | None = None) -> Callable[[World], Any]:
        def train(world: World) -> Any:
            with seeded(world.rank):
                model = Words(device)
            optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
            options = {"world": world, "resume": folder, **settings}
            with foreprop.parallelize(model, optimizer, **options) as session:
                loader = foreprop.shard(DataLoader(told, BATCH, shuffle=True), world=world)
                loop = foreprop.checkpoint(folder, every=4, loader=loader)
                for _ in loop.epochs(2):
                    for x, y in loop:
                        optimizer.zero_grad()
                        F.cross_entropy(model(x), y).backward()
                        optimizer.step()
                        if loop.step == stop_at:
                            raise Stopped
                rows = session.rows("table.weight", torch.arange(40))
                return rows.clone(), model.last.weight.detach().clone()

        return train

    whole = run_cluster(2, work(tmp_path / "whole"))
    with pytest.raises((Stopped, ForepropError)):
        run_cluster(2, work(tmp_path / "stopped", 7))
    for ours, theirs in zip(run_cluster(2, work(tmp_path / "stopped")), whole, strict=True):
        for got, wanted in zip(ours, theirs, strict=True):
            assert torch.equal(got, wanted)


def test_two_models_with_two_sessions(tmp_path: Path) -> None:
    def work(folder: Path, stop_at: int | None = None) -> Callable[[World], Any]:
        def train(world: World) -> Any:
            with seeded(world.rank):
                models = [nn.Linear(5, 4), nn.Linear(4, 3)]
            optimizers = [momentum(models[0]), adam(models[1])]
            sessions = [
                foreprop.parallelize(model, optimizer, world=world, resume=folder)
                for model, optimizer in zip(models, optimizers, strict=True)
            ]
            loader = foreprop.shard(DataLoader(data(), BATCH, shuffle=True), world=world)
            try:
                loop = foreprop.checkpoint(folder, every=4, loader=loader, session=sessions)
                for _ in loop.epochs(2):
                    for x, y in loop:
                        loss = F.cross_entropy(models[1](torch.tanh(models[0](x))), y)
                        for optimizer in optimizers:
                            optimizer.zero_grad()
                        loss.backward()
                        for optimizer in optimizers:
                            optimizer.step()
                        if loop.step == stop_at:
                            raise Stopped
                return [copy.deepcopy(dict(model.state_dict())) for model in models]
            finally:
                for session in sessions:
                    session.close()

        return train

    whole = run_cluster(2, work(tmp_path / "whole"))
    with pytest.raises((Stopped, ForepropError)):
        run_cluster(2, work(tmp_path / "stopped", 7))
    for ours, theirs in zip(run_cluster(2, work(tmp_path / "stopped")), whole, strict=True):
        for got, wanted in zip(ours, theirs, strict=True):
            check_same_bits(got, wanted)


@pytest.mark.parametrize(("before", "after"), [({}, {"ema": 0.9}), ({"ema": 0.9}, {})])
def test_averages_that_come_or_go_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: Any, after: Any
) -> None:
    def work(**settings: Any) -> None:
        model = nn.Linear(3, 2)
        optimizer = momentum(model)
        with foreprop.parallelize(model, optimizer, resume=tmp_path, **settings):
            loop = foreprop.checkpoint(tmp_path, every=1, loader=range(2))
            for _ in loop:
                optimizer.zero_grad()
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()

    work(**before)
    assert "moving averages" not in caplog.text
    work(**after)
    says = (
        "no moving averages, and ema=0.9: they begin" if after else "has moving averages, and ema"
    )
    assert says in caplog.text


@once
@pytest.mark.parametrize("after", [None, *long_cases("dgc:0.3")])
def test_what_another_codec_does_not_take_is_told(
    after: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop(2, Training(tmp_path, stop_at=6, settings={"compression": "int8"}))

    def work(world: World) -> None:
        with seeded():
            model = Net()
        foreprop.parallelize(
            model, momentum(model), world=world, resume=tmp_path, compression=after
        ).close()

    run_cluster(2, work)
    told = [text for text in caplog.messages if "kept back of the gradients of" in text]
    assert len(told) == 1
    assert "first.bias, first.weight, last.bias" in told[0]
    assert f"is dropped: compression is {after!r} now" in told[0]


# What goes wrong.
@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A folder with checkpoints of steps 4 and 8."""
    stop(2, Training(tmp_path, stop_at=10))
    return tmp_path


def test_the_one_before_a_damaged_one_is_taken(
    stopped: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(2, Training(tmp_path / "whole"))
    assert CheckpointFolder(stopped).steps() == [8, 4]
    part = stopped / "step-000000008" / "rank-1.pt"
    part.write_bytes(part.read_bytes()[:-100])
    check_same(run(2, Training(stopped)), whole, first=4)
    assert "the checkpoint of step 8 is damaged, and the one before it is taken" in caplog.text


def test_where_none_is_whole_that_is_told(stopped: Path) -> None:
    for part in stopped.glob("step-*/rank-1.pt"):
        part.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"of 2 steps, and none of them is whole"):
        on_both(lambda world: begin(world, stopped))


def test_a_fork_may_be_saved_at_once(stopped: Path, tmp_path: Path) -> None:
    """In a folder of its own, which has nothing yet."""
    forked = tmp_path / "forked"

    def work(world: World) -> None:
        with seeded():
            model = Net()
        optimizer = momentum(model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        with foreprop.parallelize(model, optimizer, world=world, resume=stopped):
            objects = {"schedule": schedule, "scaler": scaler}
            loop = foreprop.checkpoint(forked, every=4, **objects)
            loop.save()

    run_cluster(2, work)
    assert CheckpointFolder(forked).steps() == [8]


@pytest.mark.parametrize("key", ["model", "sessions"])
def test_what_another_program_wrote_is_named_on_all_ranks(stopped: Path, key: str) -> None:
    """With sums that are right. The folder that is named is removed, and training goes on."""
    newest = stopped / "step-000000008"
    shared, index = newest / "shared.pt", newest / "index.json"
    state = torch.load(shared, weights_only=True)
    del (state if key == "sessions" else state["sessions"][0])[key]
    torch.save(state, shared)
    sums = json.loads(index.read_text())
    sha256 = hashlib.sha256(shared.read_bytes()).hexdigest()
    sums["files"]["shared.pt"] = {"bytes": shared.stat().st_size, "sha256": sha256}
    index.write_text(json.dumps(sums))
    with pytest.raises(ConfigError, match=rf"shared\.pt is not as .* `{key}`") as raised:
        on_both(lambda world: begin(world, stopped))
    assert f"Remove the folder {newest}" in str(raised.value)
    shutil.rmtree(newest)
    assert [found["first"] for found in run(2, Training(stopped))] == [4, 4]


def on_both(work: Callable[[World], Any]) -> None:
    """Both ranks are told the same."""

    def checked(world: World) -> str:
        with pytest.raises(ConfigError) as caught:
            work(world)
        return str(caught.value)

    first, second = (re.sub(r"^rank \d: ", "", text) for text in run_cluster(2, checked))
    assert first == second
    raise ConfigError(first)


def begin(world: World, folder: Path, **changes: Any) -> None:
    with seeded():
        model = changes.pop("model", Net)()
    optimizer = changes.pop("optimizer", momentum)(model)
    resume = changes.pop("resume", folder)
    with foreprop.parallelize(model, optimizer, world=world, resume=resume):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        objects: dict[str, Any] = {"every": 4, "schedule": schedule, **changes}
        foreprop.checkpoint(folder, **objects)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model": lambda: nn.Linear(5, 3)}, "is of another model or optimizer"),
    "another optimizer": (
        {"optimizer": lambda model: torch.optim.SGD([{"params": [p]} for p in model.parameters()])},
        "is of another model or optimizer",
    ),
    "another kind of optimizer": (
        {"optimizer": adam},
        "of another model or optimizer: it was made with SGD, and the optimizer is Adam",
    ),
    "not resumed": ({"resume": None}, r"has checkpoints already, the newest of step 8: go on from"),
    "another object": (
        {"more": nn.Linear(1, 1)},
        r"has \['scaler', 'schedule'\], and .* \['more',",
    ),
    "another state": ({"scaler": torch.amp.GradScaler("cpu")}, "scaler cannot go on from"),
}


@pytest.mark.parametrize("name", sorted(MISTAKES))
def test_mistakes_are_named_on_all_ranks(stopped: Path, name: str) -> None:
    changes, says = MISTAKES[name]
    with pytest.raises(ConfigError, match=says):
        on_both(lambda world: begin(world, stopped, **dict(changes)))
    assert CheckpointFolder(stopped).steps() == [8, 4]


@pytest.mark.parametrize("architecture", ["p2p", *long_cases("ring")])
def test_numbers_of_another_optimizer_are_not_taken(tmp_path: Path, architecture: str) -> None:
    """torch takes them, and SGD would go on without the momentum that Adam's groups have not."""
    settings = {"architecture": architecture}
    stop(2, Training(tmp_path, optimizer="adam", stop_at=6, settings=settings))
    with pytest.raises(ConfigError, match="was made with Adam, and the optimizer is SGD"):
        on_both(lambda world: begin(world, tmp_path))


class Unsaveable:
    def state_dict(self) -> dict[str, Any]:
        return {"path": Path()}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "every": ({"every": 0}, "every is 0; it must be a whole number of at least 1"),
    "keep": ({"keep": 1.5}, "keep is 1.5; it must be"),
    "no state": ({"schedule": 3}, r"schedule is a int, which has no state_dict\(\)"),
    "no data": ({"schedule": Unsaveable()}, r"schedule.state_dict\(\) cannot be read back by"),
    "no session": ({"session": []}, "session is an empty list"),
    "another thing": ({"session": 3}, "session is a int; give what"),
}


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_arguments_that_cannot_be(tmp_path: Path, name: str) -> None:
    changes, says = ARGUMENTS[name]
    with pytest.raises(ConfigError, match=says):
        on_both(lambda world: begin(world, tmp_path, **changes))


def test_a_folder_that_is_not_shared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rank 1 does not see what rank 0 writes into"):
        run_cluster(2, lambda world: begin(world, tmp_path / str(world.rank)))


def test_without_a_session_or_an_optimizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="saves the session that is open here, and none is"):
        foreprop.checkpoint(tmp_path, every=1)
    with (
        foreprop.parallelize(nn.Linear(2, 2)),
        pytest.raises(ConfigError, match="was given no optimizer"),
    ):
        foreprop.checkpoint(tmp_path, every=1)


def test_the_last_one_is_waited_for_also_while_an_older_error_is_handled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, or a loop that tries again; other ranks' parts come then as ever."""
    own, ended = writing.CheckpointWriter.end, []

    def end(self: Any, *, failed: bool) -> None:
        ended.append(failed)
        own(self, failed=failed)

    monkeypatch.setattr(writing.CheckpointWriter, "end", end)
    monkeypatch.setattr(sys, "last_value", KeyError("a cell before"), raising=False)

    def work(world: World) -> None:
        try:
            raise KeyError("a try before")
        except KeyError:
            Training(tmp_path)(world)

    run_cluster(2, work)
    stop(2, Training(tmp_path / "stopped", stop_at=6))
    assert ended == [False, False, True, True]


def test_a_full_disk_is_an_error_and_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rank 1's disk, at the second checkpoint."""
    monkeypatch.setattr(writing, "_AFTER_FAILURE_S", 0.1)
    own, wrote = stored.UnfinishedCheckpoint.write_part, []

    def write_part(self: Any, rank: int, contents: Any) -> None:
        if rank == 1 and self.step == 8:
            wrote.append(self.step)
            raise OSError(28, "No space left on device")
        own(self, rank, contents)

    monkeypatch.setattr(stored.UnfinishedCheckpoint, "write_part", write_part)

    def work(world: World) -> Any:
        with pytest.raises(ForepropError) as caught:
            Training(tmp_path)(world)
        return caught.value

    first, second = run_cluster(2, work)
    assert wrote == [8]
    assert isinstance(second, StorageError)
    assert "rank 1 cannot write the checkpoint of step 8" in str(second)
    assert "No space left on device; the one before it is still there" in str(second)
    assert "rank 1" in str(first)
    assert CheckpointFolder(tmp_path).steps() == [4]


def test_a_loop_without_a_loader(tmp_path: Path) -> None:
    """It says itself when a step is through, and saves when it wants."""

    def work(stop_at: int | None) -> int:
        torch.manual_seed(4)
        model = nn.Linear(3, 2)
        optimizer = momentum(model)
        with foreprop.parallelize(model, optimizer, resume=tmp_path):
            loop = foreprop.checkpoint(tmp_path, every=5)
            first = loop.step
            with pytest.raises(ConfigError, match="was given no loader"):
                iter(loop).__next__()
            for step in range(first, stop_at or 9):
                optimizer.zero_grad()
                model(torch.full((1, 3), float(step))).sum().backward()
                optimizer.step()
                loop.end_step()
            if stop_at:
                loop.save()
            return first

    assert work(stop_at=7) == 0
    assert CheckpointFolder(tmp_path).steps() == [7, 5]
    assert work(stop_at=None) == 7


def test_epochs_that_are_left_early(tmp_path: Path) -> None:
    """What follows is saved at the end of a pass, as where nobody has asked for epochs."""
    torch.manual_seed(4)
    model = nn.Linear(5, 3)
    optimizer = momentum(model)

    def train(loop: Any) -> None:
        for x, y in loop:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    with foreprop.parallelize(model, optimizer):
        loop = foreprop.checkpoint(tmp_path, every=6, loader=DataLoader(data(), BATCH))
        for _ in loop.epochs(5):
            train(loop)
            break
        train(loop)
        assert loop.step == 24
    assert CheckpointFolder(tmp_path).steps() == [24, 18, 12]

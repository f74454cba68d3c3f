"""Checkpoints of sessions whose workers leave and join: they go on, and nothing is read twice."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import foreprop
from foreprop.engine.world import World
from foreprop.errors import ConfigError, PeerLost
from foreprop.session.stored import SHARED, Checkpoint, CheckpointFolder
from tests.cluster import run_cluster
from tests.conformance.counting_runs import (
    ELASTIC,
    Died,
    dedicated,
    die,
    make_step,
    newcomers_world,
    wait_for,
)
from tests.conformance.node_losses import BESIDE, lose_node
from tests.conformance.parity import (
    check_same_bits,
    check_same_optimizer_state,
    seeded,
    servers_only,
    snapshot,
)
from tests.conformance.shares import numbers
from tests.tiers import long_cases

pytestmark = servers_only  # each test names the architecture that it needs

RANKS, BATCH, SAMPLES, EPOCHS = 4, 2, 104, 2
"""13 steps in an epoch of all ranks."""
PLAIN: dict[str, Any] = {"architecture": "p2p", "update": "servers"}


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Stopped(Exception):
    """In the place of a kill of all."""


def of_tensors(batch: Any) -> Any:
    """Only the numbers of samples."""
    return torch.stack([torch.as_tensor(each[0]) for each in batch])


def table() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(3)
    return torch.randn(SAMPLES, 5, generator=drawn), torch.arange(SAMPLES) % 3


class Centred(nn.Module):
    """Has a running average, which is each rank's own; also of a batch of one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


Read = tuple[int, int, list[int]]
"""Epoch, step and samples of a batch."""


class Script:
    """What the same script does on every rank, from its start or from its newest checkpoint."""

    def __init__(
        self,
        folder: Path,
        *,
        deaths: dict[int, int] | None = None,
        stop_at: int | None = None,
        every: int = 4,
        ranks: int = RANKS,
        workers: int = 0,
        settings: dict[str, Any] | None = None,
    ) -> None:
        """``deaths``: by rank, after which step. ``workers``: of each loader.

        Whoever dies comes again in a step or two, if `comes_again`.
        """
        self.folder, self.deaths, self.stop_at = folder, deaths or {}, stop_at
        self.every, self.ranks, self.workers = every, ranks, workers
        self.settings = ELASTIC if settings is None else settings
        self.comes_again = False
        self.back = threading.Event()
        self.stops: set[str] = set()
        self.all_stop = threading.Event()
        """Whoever is left alone by the stops of others has no majority, and would fail instead."""
        self.servers: list[str] = []
        self.read: dict[str, list[Read]] = {}
        """By rank, and "again"."""
        self.began: dict[str, tuple[int, int, int]] = {}
        """Step, epoch and batch."""
        self.lr: dict[str, list[float]] = {}
        self.models: dict[str, Any] = {}
        self.first: dict[str, Any] = {}
        """The values and the optimizer's state when the loop begins."""
        self.left_within: dict[int, int] = {}
        self.joined_at: dict[str, int | None] = {}

    @property
    def has_dedicated(self) -> bool:
        return bool(self.settings.get("dedicated_servers"))

    def run(self) -> Script:
        run_cluster(self.ranks, self._work, timeout_s=120)
        return self

    def _work(self, world: World) -> None:
        with dedicated(world) if self.has_dedicated else contextlib.nullcontext():
            try:
                self._train(world, str(world.rank), {})
            except (Stopped, Died, PeerLost):
                if not self.comes_again or world.rank not in self.deaths:
                    return
                try:
                    again = newcomers_world(world.rank, self.ranks)
                    with contextlib.suppress(Stopped):
                        self._train(again, "again", {"join": ",".join(self.servers)})
                finally:
                    self.back.set()

    def _train(self, world: World, name: str, more: dict[str, Any]) -> None:
        with seeded(world.rank):
            model = nn.Sequential(nn.Linear(5, 7), Centred(), nn.Linear(7, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
        x, y = table()
        read = self.read[name] = []
        about = {**self.settings, **more}
        with foreprop.parallelize(
            model, optimizer, world=world, resume=self.folder, **about
        ) as session:
            if about.get("elastic"):
                self._listen(session)
                self.servers[:] = session.stats()["servers"]
            self.joined_at[name] = session.joined_at
            loader = foreprop.shard(self.loader(), world=world, seed=5)
            loop = foreprop.checkpoint(
                self.folder, every=self.every, loader=loader, schedule=schedule
            )
            self.began[name] = loop.step, loop.epoch, loop.batch
            if not more:
                session.flush()
                state = copy.deepcopy(optimizer.state_dict())
                self.first[name] = snapshot(dict(model.named_parameters())), state
            for epoch in loop.epochs(EPOCHS):
                for samples in loop:
                    step = loop.step + 1
                    read.append((epoch, step, samples.tolist()))
                    if self.comes_again and not more and step == max(self.deaths.values()) + 2:
                        wait_for(self.back)
                    self.lr.setdefault(name, []).append(optimizer.param_groups[0]["lr"])
                    make_step(model, optimizer, (x[samples], y[samples]))
                    if self.deaths.get(world.rank) == step and not more:
                        session.flush()
                        (die if self.has_dedicated else lose_node)(session)
                    if step == self.stop_at:
                        loop.wait()
                        self._stop_with_others(name)
                    schedule.step()
            self.models[name] = snapshot(model.state_dict())
        if about.get("elastic"):
            left = session.stats()["left"]
            self.left_within |= {rank: about["step"] for rank, about in left.items()}

    def _stop_with_others(self, name: str) -> None:
        self.stops.add(name)
        if len(self.stops) == self.ranks - (0 if self.comes_again else len(self.deaths)):
            self.all_stop.set()
        wait_for(self.all_stop)
        raise Stopped

    def loader(self) -> Any:
        about: Any = {"batch_size": BATCH, "shuffle": True, "collate_fn": of_tensors}
        return DataLoader(numbers(SAMPLES), num_workers=self.workers, **about)

    def _listen(self, session: Any) -> None:
        def call(change: Any, members: Any) -> None:
            if change.joins:
                self.back.set()

        session._training.backends.all[0].members.notices.view.on_membership.append(call)


def newest(folder: Path) -> Checkpoint:
    found = CheckpointFolder(folder).newest(lambda text: pytest.fail(text))
    assert found is not None
    return found


def until(script: Script, saved: Checkpoint, epoch: int) -> list[int]:
    """What is in the values of a checkpoint, of this epoch."""
    before = min(began[0] for began in script.began.values())  # the session counts from there
    left = {rank: before + step for rank, step in saved.left}
    return [
        sample
        for name, read in script.read.items()
        for at, step, samples in read
        if at == epoch and step <= min(saved.step, left.get(int(name), saved.step))
        for sample in samples
    ]


def check_once(seen: Sequence[int], deals: int) -> None:
    """Each sample of an epoch; what fills up a last round comes twice, once for each deal."""
    assert set(seen) == set(range(SAMPLES))
    assert len(seen) - SAMPLES < deals * RANKS


def of_epoch(script: Script, epoch: int) -> list[int]:
    return [s for read in script.read.values() for at, _, each in read if at == epoch for s in each]


def weights_of(values: dict[str, Any]) -> dict[str, Any]:
    """Running averages are each rank's own."""
    return {key: value for key, value in values.items() if not key.startswith("1.")}


AFTERWARDS: list[tuple[int, int, dict[str, Any]]] = [
    (0, 4, ELASTIC),
    (0, 2, PLAIN),
    (1, 4, PLAIN),
    (3, 3, ELASTIC),
]
"""Who dies; how many ranks go on, and how."""


@pytest.mark.parametrize(
    ("victim", "after", "settings"),
    [(1, 3, PLAIN), *[pytest.param(*case, marks=pytest.mark.long) for case in AFTERWARDS]],
)
def test_checkpoints_go_on_after_a_death_and_so_does_what_is_resumed(
    tmp_path: Path, victim: int, after: int, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Parts are those of the ranks that are there, and no sample is lost or comes twice."""
    with caplog.at_level(logging.INFO, "foreprop"):
        before = Script(tmp_path, deaths={victim: 3}, stop_at=10).run()
    saved = newest(tmp_path)
    survivors = tuple(rank for rank in range(RANKS) if rank != victim)
    assert (saved.step, saved.ranks, saved.world_size) == (8, survivors, RANKS)
    left = [(rank, within) for rank, within in saved.left if rank not in saved.ranks]
    assert left in ([(victim, 3)], [(victim, 4)]), "others may have stopped meanwhile"
    assert f"is of 3 ranks; rank {victim} has left" in caplog.text
    wanted = saved.read(SHARED)["sessions"][0]
    seen = until(before, saved, 0)
    with caplog.at_level(logging.INFO, "foreprop"):
        resumed = Script(tmp_path, ranks=after, settings=settings).run()
    assert "samples are divided anew from batch 8 of epoch 0 on" in caplog.text
    names = ", ".join(map(str, survivors))
    assert f"which rank {names} of 4 made: {after} do not make the same bits" in caplog.text
    assert set(resumed.began.values()) == {(8, 0, 8)}
    for values, state in resumed.first.values():
        check_same_bits(values, {name: wanted["model"][name] for name in values})
        check_same_optimizer_state(state, wanted["optimizer"])
    check_once([*seen, *of_epoch(resumed, 0)], deals=3)
    check_once(of_epoch(resumed, 1), deals=1)
    for model in resumed.models.values():
        check_same_bits(weights_of(model), weights_of(resumed.models["0"]))


@pytest.mark.parametrize("workers", [0, *long_cases(2)])
def test_a_death_that_nobody_has_dealt_with_is_known_to_the_checkpoint(
    tmp_path: Path, workers: int
) -> None:
    """The batches that it was still to read of the last steps come first after the stop."""
    before = Script(tmp_path, deaths={2: 3}, stop_at=5, workers=workers).run()
    saved = newest(tmp_path)
    assert (saved.step, saved.ranks) == (4, (0, 1, 3))
    seen = until(before, saved, 0)
    resumed = Script(tmp_path, ranks=3, settings=PLAIN).run()
    check_once([*seen, *of_epoch(resumed, 0)], deals=2)


def test_stopped_again_and_again_in_one_epoch(tmp_path: Path) -> None:
    """By other numbers of ranks: 4 of which one dies, 3, the same 3, and 2 at the end."""
    before = Script(tmp_path, deaths={2: 3}, stop_at=8, every=3).run()
    saved = newest(tmp_path)
    seen = until(before, saved, 0)
    assert saved.step == 6
    for ranks, stop_at, every in ((3, 9, 1), (3, 12, 1), (2, None, 100)):
        one = Script(tmp_path, ranks=ranks, stop_at=stop_at, every=every, settings=ELASTIC).run()
        assert {began[0] for began in one.began.values()} == {saved.step}
        if stop_at is not None:
            saved = newest(tmp_path)
            assert saved.step >= stop_at - 2
            seen += until(one, saved, 0)
    check_once([*seen, *of_epoch(one, 0)], deals=4)
    check_once(of_epoch(one, 1), deals=1)


@pytest.mark.long
def test_a_stop_after_such_a_stop_changes_no_bit(tmp_path: Path) -> None:
    """With as many ranks the batches are read again that the ranks have had since."""
    Script(tmp_path, deaths={1: 3}, stop_at=8, every=3).run()
    assert newest(tmp_path).step == 6
    other = tmp_path.with_name("other")
    shutil.copytree(tmp_path, other)
    whole = Script(tmp_path, ranks=3, settings=PLAIN).run()
    Script(other, ranks=3, settings=PLAIN, stop_at=12, every=2).run()
    assert newest(other).step == 10
    stopped = Script(other, ranks=3, settings=PLAIN).run()
    assert set(stopped.began.values()) == {(10, 0, 10)}
    for name, model in stopped.models.items():
        assert stopped.read[name] == [each for each in whole.read[name] if each[1] > 10]
        check_same_bits(model, whole.models[name])


@pytest.mark.parametrize("victim", [1, *long_cases(0)])
@pytest.mark.parametrize("resumes", [False, *long_cases(True)])
def test_the_same_script_joins_and_saves(tmp_path: Path, victim: int, resumes: bool) -> None:
    """A newcomer has the progress of the session that it joins, and a part of its checkpoints."""
    before = 0
    if resumes:
        Script(tmp_path, stop_at=5, ranks=3).run()
        before = newest(tmp_path).step
    script = Script(tmp_path, deaths={victim: before + 3}, ranks=3)
    script.comes_again = True
    script.run()
    first = script.joined_at["again"]
    assert first is not None
    assert script.began["again"] == (before + first - 1, 0, before + first - 1)
    survivors = [str(rank) for rank in range(3) if rank != victim]
    lead = script.read[survivors[0]]
    steps = [each[:2] for each in lead if each[1] >= before + first]
    assert [each[:2] for each in script.read["again"]] == steps
    assert script.lr["again"] == script.lr[survivors[0]][-len(steps) :]
    for name in survivors:
        check_same_bits(weights_of(script.models["again"]), weights_of(script.models[name]))
    saved = newest(tmp_path)
    assert saved.is_whole
    assert saved.step == steps[-1][1] // 4 * 4
    of_second = {name: read for name, read in script.read.items() if name != str(victim)}
    check_once([s for read in of_second.values() for at, _, each in read if at for s in each], 1)
    assert not list(tmp_path.glob("unfinished-*"))


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_with_servers_beside_the_workers(tmp_path: Path, victim: int) -> None:
    """A node is lost with its server, and what is saved has the state that the others have."""
    settings = BESIDE
    script = Script(tmp_path, deaths={victim: 3}, ranks=3, settings=settings, stop_at=14)
    script.comes_again = True
    script.run()
    saved = newest(tmp_path)
    assert (saved.step, saved.is_whole) == (12, True)
    wanted = saved.read(SHARED)["sessions"][0]
    first = script.joined_at["again"]
    assert script.began["again"] == ((first or 0) - 1, 0, (first or 0) - 1)
    resumed = Script(tmp_path, ranks=3, settings=settings).run()
    for values, state in resumed.first.values():
        check_same_bits(values, {name: wanted["model"][name] for name in values})
        check_same_optimizer_state(state, wanted["optimizer"])
    check_once(of_epoch(resumed, 1), deals=1)


def test_who_joins_between_two_epochs_begins_with_the_next_one(tmp_path: Path) -> None:
    script = Script(tmp_path, deaths={2: 15}, ranks=3)  # then the epoch has 19 steps
    script.comes_again = True
    script.run()
    first = script.joined_at["again"]
    assert first == 20
    assert script.began["again"] == (19, 1, 0)
    lead = script.read["0"]
    steps = [each[:2] for each in lead if each[1] >= first]
    assert [each[:2] for each in script.read["again"]] == steps
    check_same_bits(weights_of(script.models["again"]), weights_of(script.models["0"]))


def test_who_comes_after_the_last_step_makes_none(tmp_path: Path) -> None:
    script = Script(tmp_path, deaths={1: 34}, ranks=3)
    script.comes_again = True
    script.run()
    assert script.read["again"] == []
    assert script.began["again"][1] == EPOCHS
    check_same_bits(weights_of(script.models["again"]), weights_of(script.models["0"]))


def test_a_newcomer_with_another_folder_is_told(tmp_path: Path) -> None:
    script = Script(tmp_path / "one", deaths={1: 3}, ranks=2)
    script.comes_again, told = True, []
    train = script._train

    def elsewhere(world: World, name: str, more: dict[str, Any]) -> None:
        if more:
            script.folder = tmp_path / "other"
            with pytest.raises(ConfigError, match="rank 1, which has joined, does not see in"):
                train(world, name, more)
            told.append(name)
        else:
            train(world, name, more)

    script._train = elsewhere  # type: ignore[method-assign]
    script.run()
    assert told == ["again"]
    assert newest(tmp_path / "one").ranks == (0,)

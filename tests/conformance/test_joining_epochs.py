"""A worker that joins in the middle of an epoch takes its part: lists of all samples."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import foreprop
from foreprop.engine.world import World
from foreprop.errors import PeerLost
from foreprop.features.members.membershipview import MembershipView
from foreprop.features.members.messages import Positions
from tests.cluster import run_cluster
from tests.conformance.counting_runs import (
    ELASTIC,
    SERVERS,
    Died,
    dedicated,
    die,
    make_step,
    newcomers_world,
    wait_for,
)
from tests.conformance.node_losses import BESIDE, lose_node
from tests.conformance.parity import build_seeded, check_same_bits, servers_only, snapshot, with_sgd
from tests.conformance.shares import numbers
from tests.tiers import long_cases

pytestmark = servers_only  # each test names the architecture that it needs

RANKS, BATCH, SAMPLES, EPOCHS = 3, 2, 150, 3
MOST_AHEAD = 4
"""Batches that a loader with two workers has drawn."""


def of_tensors(batch: Any) -> Any:
    """Only the numbers of samples."""
    return torch.stack([torch.as_tensor(each[0]) for each in batch])


def usual(**options: Any) -> Any:
    about = {"batch_size": BATCH, "shuffle": True, "collate_fn": of_tensors, **options}
    return DataLoader(numbers(SAMPLES), **about)


class Lives:
    """All ranks run the same loop over epochs; one dies after a step, and comes again.

    The others wait two steps later until it has been promised a step.
    """

    def __init__(
        self,
        make_loader: Callable[[], Any],
        victim: int,
        death: int,
        *,
        shards_first: bool = False,
        epochs: int = EPOCHS,
        validates: bool = False,
        steps: int = 10**6,
        beside: bool = False,
    ) -> None:
        """``beside``: servers are beside the workers, and one dies with its worker."""
        self.make_loader, self.victim, self.death = make_loader, victim, death
        self.shards_first, self.epochs, self.validates = shards_first, epochs, validates
        self.steps, self.beside = steps, beside
        self.settings = BESIDE if beside else ELASTIC
        self.back = threading.Event()
        self.servers: list[str] = []
        self.read: dict[str, list[tuple[int, int, list[int]]]] = {}
        """By rank, and "again": epoch, step and samples of each batch."""
        self.validated: dict[str, list[int]] = {}
        self.models: dict[str, Any] = {}
        self.first = 0
        self.left_within = 0
        run_cluster(RANKS, self._work, timeout_s=120)

    def _work(self, world: World) -> None:
        with contextlib.nullcontext() if self.beside else dedicated(world):
            try:
                self._live(world, str(world.rank), {})
            except (Died, PeerLost):
                try:
                    again = newcomers_world(world.rank, RANKS)
                    self._live(again, "again", {"join": ",".join(self.servers)})
                finally:
                    self.back.set()

    def _live(self, world: World, name: str, more: dict[str, Any]) -> None:
        model, optimizer = build_seeded(with_sgd(), seed=world.rank)
        loader = None
        if self.shards_first:
            loader = foreprop.shard(self.make_loader(), world=world, seed=5)
        about = {**self.settings, **more}
        with foreprop.parallelize(model, optimizer, world=world, **about) as session:
            if loader is None:
                loader = foreprop.shard(self.make_loader(), world=world, seed=5)
            self._listen(session)
            self.servers[:] = session.stats()["servers"]
            if more:
                self.first = session.joined_at or 0
            self._train(world, name, model, optimizer, session, loader)
            self.models[name] = snapshot(model.state_dict())
        if world.rank != self.victim:
            self.left_within = session.stats()["left"][self.victim]["step"]

    def _listen(self, session: Any) -> None:
        def call(change: Any, members: Any) -> None:
            if change.joins:
                self.back.set()

        session._training.backends.all[0].members.notices.view.on_membership.append(call)

    def _train(
        self, world: World, name: str, model: Any, optimizer: Any, session: Any, loader: Any
    ) -> None:
        drawn = torch.Generator().manual_seed(3)
        x, y = torch.randn(SAMPLES, 5, generator=drawn), torch.arange(SAMPLES) % 3
        validation = foreprop.shard(usual(shuffle=False), world=world) if self.validates else ()
        read = self.read[name] = []
        validated = self.validated[name] = []
        step = (session.joined_at or 1) - 1
        for epoch in range(loader.epoch, self.epochs):
            for batch in loader:
                step += 1
                samples = torch.as_tensor(batch).reshape(-1)
                read.append((epoch, step, samples.tolist()))
                if step == self.death + 2 and name != "again":
                    wait_for(self.back)
                make_step(model, optimizer, (x[samples], y[samples]))
                if step == self.death and name == str(self.victim):
                    session.flush()
                    (lose_node if self.beside else die)(session)
                if step == self.steps:
                    return
            validated.append(sum(len(batch) for batch in validation))

    @property
    def survivors(self) -> list[str]:
        return [str(rank) for rank in range(RANKS) if rank != self.victim]

    def check(self, ahead: int = 0) -> None:
        """Equally many steps, and every sample once in each epoch.

        But for what the newcomer reads until it is a member, which is the first member's.
        """
        for name in (*self.survivors, "again"):
            read = [each for each in self.read[name] if each[1] >= self.first]
            assert [each[:2] for each in read] == [
                each[:2] for each in self.read["0" if self.victim else "1"] if each[1] >= self.first
            ]
            check_same_bits(self.models[name], self.models[self.survivors[0]])
        lead = self.read[self.survivors[0]]
        of_lead = {each[1]: each[2] for each in lead}
        copied = [each for each in self.read["again"] if each[2] == of_lead[each[1]]]
        assert [each[1] for each in copied] == [*range(self.first, self.first + 1 + ahead)]
        for epoch in range(self.epochs):
            seen: Counter[int] = Counter()
            for name, read in self.read.items():
                for at, step, samples in read:
                    is_copy = name == "again" and (at, step, samples) in copied
                    is_lost = name == str(self.victim) and step > self.left_within
                    if at == epoch and not is_copy and not is_lost:
                        seen.update(samples)
            assert seen.keys() == set(range(SAMPLES))
            assert sum(seen.values()) < SAMPLES + RANKS * (1 + BATCH), "only to fill up a round"


@pytest.mark.parametrize("victim", [0, *long_cases(1)])
def test_who_joins_in_an_epoch_takes_its_part_of_the_rest(
    victim: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "foreprop"):
        found = Lives(usual, victim, 3, shards_first=victim == 1)
    found.check()
    assert found.read["again"][0][:2] == (0, found.first)
    assert "epoch 0 of a DataLoader is dealt out anew among rank 0, 1, 2, from batch" in caplog.text


@pytest.mark.parametrize("victim", [1, *long_cases(0)])
def test_a_worker_comes_back_without_its_server(victim: int) -> None:
    found = Lives(usual, victim, 3, epochs=2, beside=True)
    found.check()


@pytest.mark.long
def test_loaders_that_draw_ahead() -> None:
    found = Lives(lambda: usual(num_workers=2), 1, 3, epochs=2)
    found.check(ahead=MOST_AHEAD)


@pytest.mark.parametrize("back_within", [0, *long_cases(1)])
def test_who_joins_at_the_end_of_an_epoch(back_within: int) -> None:
    """Its first pass may have no batch at all: then it goes on with the next one, as all do."""
    steps = SAMPLES // (BATCH * RANKS)
    found = Lives(usual, 2, steps + back_within, validates=True)
    found.check()
    for validated in [found.validated[name][-2:] for name in (*found.survivors, "again")]:
        assert validated == [SAMPLES // RANKS] * 2


def test_who_comes_after_the_last_step_makes_none() -> None:
    """The others end before the step that it was promised: it is told that no epoch is left."""
    found = Lives(usual, 1, 23, epochs=1)
    last = found.read["0"][-1][1]
    assert found.first > last + 1
    assert found.read["again"] == []
    check_same_bits(found.models["again"], found.models["0"])


def own_way() -> Any:
    class Twice(DataLoader[Any]):
        """A loader that does as it likes."""

        def __iter__(self) -> Any:
            return super().__iter__()

    return Twice(numbers(SAMPLES), batch_size=BATCH, collate_fn=of_tensors)


def test_what_cannot_be_dealt_anew_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """The newcomer begins a pass of its own, so such a loop must end by steps."""
    with caplog.at_level(logging.WARNING, "foreprop"):
        found = Lives(own_way, 1, 3, steps=20)
    assert "rank 1 has joined and begins a pass of its own of a Twice" in caplog.text
    assert "it draws its batches in a way of its own" in caplog.text
    of_steps = [each[:2] for each in found.read["again"]]
    assert of_steps == [(0, step) for step in range(found.first, 21)]


def test_any_member_s_word_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 says nothing, as if it were lost just then; servers pass on one word each."""
    end_step, passed_on = MembershipView.end_step, []
    hear = MembershipView.hear_positions

    def end_unless_first(self: MembershipView, done: int) -> None:
        if self.rank:
            end_step(self, done)

    def count(self: MembershipView, told: Positions) -> None:
        passed_on.append(self.rank)
        hear(self, told)

    monkeypatch.setattr(MembershipView, "end_step", end_unless_first)
    monkeypatch.setattr(MembershipView, "hear_positions", count)
    Lives(usual, 1, 3, epochs=1).check()
    assert passed_on == [1] * SERVERS

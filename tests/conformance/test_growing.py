"""A session that grows beyond the ranks of its start: `max_workers`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import foreprop
from foreprop.config import Config
from foreprop.engine.world import World
from foreprop.errors import ConfigError, HandshakeError
from foreprop.session.stored import CheckpointFolder
from tests.cluster import run_cluster
from tests.conformance.counting_runs import (
    ELASTIC,
    SERVERS,
    dedicated,
    make_step,
    newcomers_world,
)
from tests.conformance.growing_runs import STEPS, Grown
from tests.conformance.parity import (
    build_seeded,
    check_same_bits,
    servers_only,
    small_model,
    snapshot,
    with_sgd,
)
from tests.conformance.shares import numbers

pytestmark = servers_only  # each test names the architecture that it needs


def test_a_session_grows_from_two_to_four(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two come at once. What is said of them is true: they were not lost."""
    grown = Grown(2, {2: 6, 3: 6})
    with caplog.at_level(logging.INFO, "foreprop"):
        grown.run(tmp_path)
    grown.check(tmp_path)
    assert grown.began[2] > 6 < grown.began[3]
    for rank in range(4):
        assert grown.stats[rank]["left"] == {}
    assert grown.stats[0]["joined"] == {rank: grown.began[rank] for rank in (2, 3)}
    assert "2 workers on 2 nodes, 2 servers dedicated" in caplog.text
    assert "elastic (a worker that dies leaves, up to 4 workers)" in caplog.text
    assert f"rank 2 has joined, and counts from step {grown.began[2]} on" in caplog.text
    assert "; 4 of 4 workers are here" in caplog.text
    assert "lost" not in caplog.text


def test_one_worker_alone_has_servers_to_grow_with(tmp_path: Path) -> None:
    """It asks before the first step, and has the buffers and frozen parameters of rank 0."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small_model()
        model.register_buffer("where", torch.rand(3))
        model.register_parameter("frozen", nn.Parameter(torch.rand(4), requires_grad=False))
        model[2].bias.requires_grad_(False)
        rest = [p for name, p in model.named_parameters() if name != "frozen"]
        return model, torch.optim.Adam(rest, lr=0.01)

    grown = Grown(1, {1: 1}, build, beside=True)
    grown.run(tmp_path)
    assert grown.found.keys() == {0, 1}
    check_same_bits(grown.found[1], grown.found[0])
    assert grown.began[1] > 5
    assert grown.stats[0]["members"] == grown.stats[1]["members"] == [0, 1]


@pytest.mark.parametrize("beside", [False, pytest.param(True, marks=pytest.mark.long)])
def test_it_grows_although_one_is_lost(
    tmp_path: Path, beside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With its server, where these are beside the workers: those that came go on, too.

    Each of them knows that the other one, which came sooner, has no server either.
    """
    grown = Grown(3, {3: 4, 4: 8}, deaths={2: 20}, beside=beside)
    with caplog.at_level(logging.WARNING, "foreprop"):
        grown.run(tmp_path)
    grown.check(tmp_path)
    assert grown.found.keys() == {0, 1, 3, 4}
    assert grown.stats[4]["left"][2]["step"] in (20, 21)
    assert len(grown.stats[4].get("takeovers", ())) == beside
    assert "4 of 5 workers are left" in caplog.text
    asked = [
        line
        for line in caplog.messages
        if "slices are to go on at" in line and not line.startswith("rank 2")
    ]
    assert len(asked) == 4 * beside
    assert all(line.endswith("at servers [0, 1]") for line in asked)


def test_a_lost_one_comes_back_as_another(tmp_path: Path) -> None:
    """Rank 1 dies before rank 2 comes; a place for a fourth one stays free."""
    grown = Grown(2, {2: 6}, deaths={1: 3}, max_workers=4)
    grown.run(tmp_path)
    assert grown.found.keys() == {0, 2}
    grown.check(tmp_path)


def test_checkpoints_are_of_all_who_have_come(tmp_path: Path) -> None:
    """Whoever was not there at the start has a part of each from its first step on."""
    folder = tmp_path / "checkpoints"

    def begin(session: Any) -> Callable[[], object]:
        return foreprop.checkpoint(folder, every=2, session=session).end_step

    grown = Grown(2, {2: 6})
    grown.begin = begin
    grown.run(tmp_path)
    grown.check(tmp_path)
    newest = CheckpointFolder(folder).newest(print)
    assert newest is not None
    assert (newest.step, newest.ranks, newest.is_whole) == (STEPS, (0, 1, 2), True)


# The data.
SAMPLES, BATCH, EPOCHS = 120, 2, 3


class Epochs(Grown):
    """Its loop is over epochs, whose samples are dealt out anew."""

    def __init__(self, started: int, comes: Mapping[int, int], **settings: Any) -> None:
        super().__init__(started, comes, **settings)
        self.read: dict[int, list[tuple[int, int, list[int]]]] = {}
        """By rank: epoch, step and samples of each batch."""

    def train(self, world: World, **more: Any) -> None:
        rank = world.rank
        model, optimizer = build_seeded(self.build, seed=rank)
        drawn = torch.Generator().manual_seed(3)
        x, y = torch.randn(SAMPLES, 5, generator=drawn), torch.arange(SAMPLES) % 3
        settings = {**self.settings, **more}
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            loader: Any = DataLoader(numbers(SAMPLES), batch_size=BATCH, shuffle=True)
            loader = foreprop.shard(loader, world=world, seed=5)
            self.servers[:] = session.stats()["servers"]
            self._listen(session)
            self.began[rank] = step = session.joined_at or 1
            read = self.read[rank] = []
            for epoch in range(loader.epoch, EPOCHS):
                for (samples,) in loader:
                    read.append((epoch, step, samples.tolist()))
                    if session.joined_at is None:
                        self._let_come(step)
                    make_step(model, optimizer, (x[samples], y[samples]))
                    step += 1
            self.found[rank] = snapshot(model.state_dict())


@pytest.mark.parametrize(
    ("started", "comes"),
    [(1, {1: 8, 2: 8}), pytest.param(2, {2: 10, 3: 25}, marks=pytest.mark.long)],
    ids=str,
)
def test_each_sample_is_read_once_while_it_grows(
    tmp_path: Path, started: int, comes: dict[int, int]
) -> None:
    """What one that comes reads until it is dealt to is the first member's."""
    grown = Epochs(started, comes, beside=started == 1)
    grown.run(tmp_path)
    steps = [[each[:2] for each in grown.read[rank]] for rank in range(grown.most)]
    for rank in range(1, grown.most):
        check_same_bits(grown.found[rank], grown.found[0])
        assert steps[rank] == [each for each in steps[0] if each[1] >= grown.began[rank]]
    for epoch in range(EPOCHS):
        seen: Counter[int] = Counter()
        for rank, read in grown.read.items():
            for at, step, samples in read:
                is_copy = rank >= started and step == grown.began[rank]
                if at == epoch and not is_copy:
                    seen.update(samples)
        assert seen.keys() == set(range(SAMPLES))
        assert sum(seen.values()) < SAMPLES + grown.most * (1 + BATCH), "only to fill up a round"
    last = [
        len(read) - read.index(next(e for e in read if e[0] == 2)) for read in grown.read.values()
    ]
    assert last == [SAMPLES // (BATCH * grown.most)] * grown.most, "the last epoch is everybody's"


# Who is not taken in.
@pytest.mark.parametrize(
    ("rank", "settings", "error", "message"),
    [
        (
            4,
            {},
            ConfigError,
            "RANK is 4, WORLD_SIZE 2 and max_workers 4: a newcomer has the RANK of a worker that"
            " was lost, or of one of those that may come, 2 to 3",
        ),
        pytest.param(
            *(1, {}, HandshakeError),
            "rank 1 wants to join, and is in the session, as server 0 sees it",
            marks=pytest.mark.long,  # test_joining has it, too
        ),
        (
            3,
            {"max_workers": 5},
            HandshakeError,
            "rank 3 of 5 in a world of 4",
        ),
    ],
    ids=["beyond", "taken", "other"],
)
def test_who_is_refused_harms_nobody(
    tmp_path: Path, rank: int, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    grown = Grown(2, {3: 6})

    def come(_: int) -> None:
        with pytest.raises(error) as caught:
            grown.train(
                newcomers_world(rank, 2),
                **{"join": grown.servers[0], "join_timeout_s": 0.5, **settings},
            )
        assert message in str(caught.value)

    grown.come = come
    grown.run(tmp_path)
    assert grown.found.keys() == {0, 1}
    grown.check(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_workers": 4}, "max_workers is 4, and elastic is False: only an elastic session"),
        ({**ELASTIC, "max_workers": 0}, "max_workers is 0; it must be at least 1"),
        ({**ELASTIC, "max_workers": 65_537}, "max_workers is 65537; it must be at most 65536"),
    ],
    ids=str,
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**settings)


def test_fewer_than_there_are_at_the_start_are_refused() -> None:
    def work(world: World) -> None:
        model, optimizer = build_seeded(with_sgd())
        with pytest.raises(ConfigError, match="max_workers is 1, and there are 2 workers at"):
            foreprop.parallelize(model, optimizer, world=world, **{**ELASTIC, "max_workers": 1})

    run_cluster(2, work)


def test_one_that_grows_with_dedicated_servers_is_replayed(tmp_path: Path) -> None:
    """The log counts who had come: a session of all of them, from the start, has the same bits."""
    grown = Grown(1, {1: 4}, max_workers=3)
    grown.run(tmp_path)
    grown.check(tmp_path)

    def work(world: World) -> Any:
        model, optimizer = build_seeded(grown.build, seed=world.rank)
        settings = {name: value for name, value in grown.settings.items() if name != "elastic"}
        del settings["max_workers"]
        with (
            dedicated(world, counted_replay=str(tmp_path)),
            foreprop.parallelize(
                model, optimizer, world=world, counted_replay=str(tmp_path), **settings
            ),
        ):
            for batch in grown.by_rank[world.rank]:
                make_step(model, optimizer, batch)
            return snapshot(model.state_dict())

    for found in run_cluster(2, work):
        check_same_bits(found, grown.found[0])
    assert len({piece.server for piece in grown.pieces}) == SERVERS

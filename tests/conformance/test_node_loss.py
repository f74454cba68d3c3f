"""A node dies with its worker and its server, and the others go on: `elastic`, `buddy_steps`."""

from __future__ import annotations

import logging
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import foreprop
from foreprop.cluster.world import World
from foreprop.config import Config
from foreprop.core.membership import CountedReplay
from foreprop.core.slicing import Slice
from foreprop.elastic.countedfile import read_replay
from foreprop.errors import ConfigError, PeerLost
from foreprop.servers import surviving
from foreprop.servers.surviving import greet_at
from tests.cluster import run_cluster
from tests.conformance.counting_runs import (
    Died,
    by_arithmetic,
    make_step,
    pieces_of,
)
from tests.conformance.node_losses import BESIDE, lose_node
from tests.conformance.parity import (
    Build,
    batches_of,
    build_seeded,
    check_same_bits,
    run_foreprop,
    servers_only,
    small_model,
    snapshot,
    train_classifier,
    with_sgd,
)
from tests.countedlogs import counted_by
from tests.secretfile import secret_file
from tests.tiers import long_cases

pytestmark = servers_only  # each test names the architecture that it needs

STEPS = 7


def with_adam() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small_model()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


Victims = dict[int, tuple[int, int | None]]
"""By rank: in which step, and at which layer of its backward pass, or after it."""


class Loss:
    """What was left of a run that has lost a node."""

    def __init__(
        self, folder: Path, ranks: int, victims: dict[int, tuple[int, int | None]]
    ) -> None:
        self.ranks = ranks
        self.victims = victims
        self.survivors = [rank for rank in range(ranks) if rank not in victims]
        self.found: list[Any] = []
        self.stats: list[dict[str, Any]] = [{} for _ in range(ranks)]
        self.pieces: list[Slice] = []
        self._folder = folder

    def run(self, build: Build, **settings: Any) -> Loss:
        by_rank = batches_of(self.ranks, count=STEPS)

        def work(world: World) -> Any:
            model, optimizer = build_seeded(build, seed=world.rank)
            step, layer = self.victims.get(world.rank, (0, None))
            log = {"counted_log": str(self._folder)}
            about: Any = {**BESIDE, **log, **settings}
            try:
                with foreprop.parallelize(model, optimizer, world=world, **about) as session:
                    self.pieces[:] = pieces_of(session)
                    for number, batch in enumerate(by_rank[world.rank], 1):
                        if number == step and layer is not None:
                            model[layer].register_full_backward_hook(lambda *_: lose_node(session))
                        make_step(model, optimizer, batch)
                        if number == step and layer is None:
                            session.flush()
                            lose_node(session)
                    found = snapshot(model.state_dict()), snapshot(optimizer.state_dict())
                self.stats[world.rank] = session.stats()
                return found
            except Died:
                return None

        self.found = run_cluster(self.ranks, work)
        assert [rank for rank, each in enumerate(self.found) if each is None] == [*self.victims]
        first = self.found[self.survivors[0]]
        for rank in self.survivors:
            check_same_bits(self.found[rank][0], first[0])
        return self

    def counted(self) -> list[CountedReplay]:
        """By server's number, with its substitutes'."""
        found = []
        for index in range(self.ranks):
            own = [piece.number for piece in self.pieces if piece.server == index]
            found.append(counted_by(self._folder, index, self.ranks, own))
        return found


def at_length(*cases: tuple[int, int | None]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.long) for case in cases]


@pytest.mark.parametrize(
    ("victim", "layer"),
    [
        (0, 2),
        (1, None),
        *[pytest.param(*c, marks=pytest.mark.long) for c in [(0, None), (1, 2), (2, 2), (2, 4)]],
    ],
)
def test_with_k_of_one_nothing_of_a_lost_node_is_lost(
    tmp_path: Path, victim: int, layer: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever node: its slices go on with momentum, and the counted sets say the bits."""
    with caplog.at_level(logging.WARNING, "foreprop"):
        loss = Loss(tmp_path, 3, {victim: (3, layer)}).run(with_sgd(), buddy_steps=1)
    wanted = by_arithmetic(with_sgd(), batches_of(3, count=STEPS), loss.pieces, loss.counted())
    for rank in loss.survivors:
        check_same_bits(loss.found[rank][0], wanted)
        stats = loss.stats[rank]
        assert stats["members"] == loss.survivors
        (takeover,) = stats["takeovers"]
        assert (takeover["server"], takeover["lost_node"]) == (victim, victim)
        assert takeover["node"] == (victim + 1) % 3
        assert set(takeover["steps"]) <= {2, 3}
    assert len([*tmp_path.glob(f"server-{victim}.*-{victim}-{victim}.counted")]) == 1
    with pytest.raises(ConfigError, match=f"there are 2 logs of server {victim}; there must be"):
        read_replay(str(tmp_path), victim, 3, [])
    beside = loss.stats[(victim + 1) % 3]
    assert beside["takeovers"][0]["most_state_steps_lost"] == 0
    assert len([*tmp_path.glob(f"server-{victim}.*-{victim}-{victim}.counted")]) == 1
    with pytest.raises(ConfigError, match=f"there are 2 logs of server {victim}; there must be"):
        read_replay(str(tmp_path), victim, 3, [])
    assert beside["snapshots"] > 0
    assert f"server {victim} goes on beside rank {(victim + 1) % 3}" in caplog.text


@pytest.mark.parametrize("build", [with_adam, *long_cases(with_sgd())])
@pytest.mark.parametrize("every", [2, *long_cases(3, 50)])
def test_at_most_k_steps_of_optimizer_state_are_lost(
    tmp_path: Path, build: Build, every: int
) -> None:
    loss = Loss(tmp_path, 3, {0: (5, 2)}).run(build, buddy_steps=every)
    (takeover,) = loss.stats[1]["takeovers"]
    assert takeover["most_state_steps_lost"] <= min(every, 5)
    states = [loss.found[rank][1]["state"] for rank in loss.survivors]
    assert states[0].keys() == states[1].keys()


def test_plain_sgd_has_nothing_to_lose(tmp_path: Path) -> None:
    build = with_sgd(momentum=0.0)
    loss = Loss(tmp_path, 3, {1: (3, 2)}).run(build)
    wanted = by_arithmetic(build, batches_of(3, count=STEPS), loss.pieces, loss.counted())
    check_same_bits(loss.found[0][0], wanted)
    assert loss.stats[2]["snapshots"] == 0


def test_a_server_without_slices_is_outlived(tmp_path: Path) -> None:
    build = with_sgd(lambda: nn.Sequential(nn.Linear(5, 3)))
    loss = Loss(tmp_path, 3, {2: (3, None)}).run(build, slice_elems=100)
    assert {piece.server for piece in loss.pieces} == {0, 1}
    assert [each["steps"] for each in loss.stats[0]["takeovers"]] == [[]]


@pytest.mark.parametrize("encryption", [None, *long_cases("tls")])
def test_a_substitute_asks_for_the_secret(tmp_path: Path, encryption: str | None) -> None:
    settings = {"secret_file": secret_file(tmp_path), "encryption": encryption}
    loss = Loss(tmp_path, 3, {0: (3, 2)}).run(with_sgd(), buddy_steps=1, **settings)
    wanted = by_arithmetic(with_sgd(), batches_of(3, count=STEPS), loss.pieces, loss.counted())
    check_same_bits(loss.found[1][0], wanted)


@pytest.mark.long
def test_one_node_after_another_until_one_is_left(tmp_path: Path) -> None:
    """A substitute's node may be lost, too: then two servers go on elsewhere."""
    victims: Victims = {0: (2, 2), 1: (4, None), 2: (6, 2)}
    loss = Loss(tmp_path, 4, victims).run(with_sgd(), buddy_steps=1)
    wanted = by_arithmetic(with_sgd(), batches_of(4, count=STEPS), loss.pieces, loss.counted())
    check_same_bits(loss.found[3][0], wanted)
    servers = [each["server"] for each in loss.stats[3]["takeovers"]]
    assert sorted(servers) == [0, 0, 0, 1, 1, 2]


def test_without_a_loss_buddies_change_no_bit() -> None:
    by_rank = batches_of(3)
    usual = run_foreprop(with_adam, train_classifier, by_rank, architecture="p2p")
    found = run_foreprop(with_adam, train_classifier, by_rank, **BESIDE, buddy_steps=1)
    for each in found:
        check_same_bits(each.model, usual[0].model)
        assert each.stats["takeovers"] == []
        assert each.stats["snapshots"] > 0
        assert each.stats["snapshot_bytes"] > 0


def test_two_nodes_lost_at_once_are_told() -> None:
    """The promise is for one at a time: who is left says so, and ends."""
    by_rank = batches_of(4)
    told: list[str] = []

    def work(world: World) -> None:
        model, optimizer = build_seeded(with_sgd(), seed=world.rank)
        try:
            with foreprop.parallelize(model, optimizer, world=world, **BESIDE) as session:
                make_step(model, optimizer, by_rank[world.rank][0])
                session.flush()
                both.wait()
                if world.rank in (0, 1):
                    lose_node(session)
                for batch in by_rank[world.rank][1:]:
                    make_step(model, optimizer, batch)
        except Died:
            return
        except PeerLost as error:
            told.append(str(error))

    both = threading.Barrier(4)
    run_cluster(4, work)
    assert len(told) == 2, told


def test_a_substitute_that_is_gone_is_not_waited_for_when_the_session_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its node may go, too: then its port refuses, and the thread that calls there must end."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    asked: list[int] = []

    def look() -> None:
        asked.append(len(asked))
        if len(asked) > 1:
            raise PeerLost("a second node is gone")

    monkeypatch.setattr(surviving, "_TRY_S", 0.1)
    config = Config(**BESIDE, join_timeout_s=600.0)  # this test's own is shorter
    about: Any = (None, config, 1, 0, "session-0-0", "127.0.0.1", port)
    with pytest.raises(PeerLost, match="a second node is gone"):
        greet_at(*about, look)


@pytest.mark.parametrize("settings", [{}, {"elastic": True, "dedicated_servers": 1}])
def test_buddies_are_for_servers_beside_elastic_workers(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="buddy_steps is 5"):
        Config(buddy_steps=5, **settings)

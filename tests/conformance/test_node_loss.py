"""Nodes die with their workers and their servers, and the others go on: nothing is lost."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.backends.composedworker import ServedBackend
from foreprop.config import Config
from foreprop.core.collect import AnswerSlice
from foreprop.core.membership import CountedReplay
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Slice
from foreprop.engine.world import World
from foreprop.errors import ConfigError, ForepropError, PeerLost, TransportError
from foreprop.features.members.countedlog import read_replay
from foreprop.params.averaged import Averages
from tests.cluster import run_cluster
from tests.conformance.averaging_by_hand import check_alike
from tests.conformance.counting_runs import (
    ELASTIC,
    Died,
    by_arithmetic,
    dedicated,
    make_step,
    parts_of,
    pieces_of,
    trained_by_arithmetic,
    wait_for,
)
from tests.conformance.node_losses import BESIDE, cut_off, lose_node
from tests.conformance.parity import (
    Batch,
    Build,
    batches_of,
    build_seeded,
    check_same_bits,
    check_same_optimizer_state,
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
LONG = pytest.mark.long

Victims = dict[int, tuple[int, int | None]]
"""By rank: in which step, and at which layer of its backward pass, or after it."""
Step = Callable[[nn.Module, torch.optim.Optimizer, Batch, int], None]


def with_adam() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small_model()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


# Training loops.
def usual(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, number: int) -> None:
    make_step(model, optimizer, batch)


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, number: int) -> None:
    x, y = batch
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    clip(model)
    optimizer.step()


def accumulated(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, number: int
) -> None:
    optimizer.zero_grad()
    for x, y in parts_of(batch, 2):
        F.cross_entropy(model(x), y).backward()
    optimizer.step()


def skipped(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, number: int) -> None:
    """Some gradients are of no use, as those that overflow: a step has two rounds then."""
    if number in (2, 3):
        x, y = batch
        F.cross_entropy(model(2 * x), y).backward()
        optimizer.zero_grad()
    make_step(model, optimizer, batch)


class Loss:
    """What was left of a run that has lost nodes.

    ``claiming``: a rank that is lost when it is about to claim slices of a lost server, or (with
    ``has_claimed``) when it has.
    """

    def __init__(
        self,
        folder: Path,
        ranks: int,
        victims: Victims,
        *,
        step: Step = usual,
        claiming: int | None = None,
        has_claimed: bool = False,
        planes: Sequence[str] = (),
    ) -> None:
        self.ranks, self.victims, self.step = ranks, victims, step
        self.planes = planes  # by rank, if not all have the same
        self.claiming, self.has_claimed = claiming, has_claimed
        gone = {*victims, *([] if claiming is None else [claiming])}
        self.survivors = [rank for rank in range(ranks) if rank not in gone]
        self.found: list[Any] = []
        self.stats: list[dict[str, Any]] = [{} for _ in range(ranks)]
        self.pieces: list[Slice] = []
        self.by_rank = batches_of(ranks, count=STEPS)
        self.build: Build = with_sgd()
        self._folder = folder

    def run(self, build: Build, **settings: Any) -> Loss:
        self.build = build
        self.found = run_cluster(self.ranks, lambda world: self._work(world, settings))
        lived = [rank for rank, each in enumerate(self.found) if each is not None]
        assert lived == self.survivors
        for rank in self.survivors:
            check_same_bits(self.found[rank][0], self.found[lived[0]][0])
            check_same_optimizer_state(self.found[rank][1], self.found[lived[0]][1])
            assert self.stats[rank]["members"] == self.survivors
        return self

    def _work(self, world: World, settings: dict[str, Any]) -> Any:
        model, optimizer = build_seeded(self.build, seed=world.rank)
        at, layer = self.victims.get(world.rank, (0, None))
        about: Any = {**BESIDE, "counted_log": str(self._folder), **settings}
        if self.planes:
            about["plane"] = self.planes[world.rank]
        try:
            with foreprop.parallelize(model, optimizer, world=world, **about) as session:
                self.pieces[:] = pieces_of(session)
                if world.rank == self.claiming:
                    self._cut_off_when_claiming(session)
                for number, batch in enumerate(self.by_rank[world.rank], 1):
                    if number == at and layer is not None:
                        layers: Any = model
                        layers[layer].register_full_backward_hook(lambda *_: lose_node(session))
                    self.step(model, optimizer, batch, number)
                    if number == at and layer is None:
                        session.flush()
                        lose_node(session)
                found = snapshot(model.state_dict()), snapshot(optimizer.state_dict())
            self.stats[world.rank] = session.stats()
        except Died:
            return None
        except ForepropError:
            if world.rank == self.claiming:
                return None
            raise
        return found

    def _cut_off_when_claiming(self, session: Any) -> None:
        """Its worker at once; its server is in other threads, which must not wait for this one."""
        survival = session._training.backends.all[0].members.survival
        claim = survival._claim

        def claim_and_go(owners: dict[int, int]) -> None:
            if self.has_claimed:
                claim(owners)
            threading.Thread(target=cut_off, args=(session,), name="cut").start()

        survival._claim = claim_and_go

    def counted(self) -> list[CountedReplay]:
        """By server's number, whoever has taken over its slices."""
        found = []
        for index in range(self.ranks):
            own = [piece.number for piece in self.pieces if piece.server == index]
            found.append(counted_by(self._folder, index, self.ranks, own))
        return found

    def check(self, *, rtol: float = 0.0, **about: Any) -> Loss:
        """The survivors have the bits of plain arithmetic, and so has their optimizer's state.

        ``rtol``: a norm is added up in another order.
        """
        args = (self.build, self.by_rank, self.pieces, self.counted())
        model, optimizer = trained_by_arithmetic(*args, **about)
        for group in optimizer["param_groups"]:
            group["foreach"] = None
        for rank in self.survivors:
            check_alike(self.found[rank][0], model, rtol)
            check_alike(self.found[rank][1], optimizer, rtol)
        return self

    def takeovers(self, rank: int | None = None) -> list[dict[str, Any]]:
        """As a survivor tells of them."""
        told = self.stats[self.survivors[0] if rank is None else rank]["takeovers"]
        for each in told:
            assert each["lost_node"] == each["server"]
            assert each["seconds"] >= 0
            assert each["pushed_again"] in range(len(self.pieces) + 1)
        return list(told)


@pytest.mark.parametrize("build", [with_sgd(), with_adam], ids=["momentum", "adam"])
@pytest.mark.parametrize(
    ("victim", "layer"),
    [(0, 2), (1, None), *[pytest.param(*c, marks=LONG) for c in [(0, None), (1, 2), (2, 4)]]],
)
def test_nothing_of_a_lost_node_is_lost(
    tmp_path: Path, victim: int, layer: int | None, build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever node: the others' servers share its slices, and the counted sets say the bits."""
    with caplog.at_level(logging.WARNING, "foreprop"):
        loss = Loss(tmp_path, 3, {victim: (3, layer)}).run(build).check()
    for rank in loss.survivors:
        (takeover,) = loss.takeovers(rank)
        assert takeover["server"] == victim
        assert set(takeover["steps"]) <= {2, 3, 4}
    logs = [*tmp_path.glob(f"server-{victim}.*-{victim}-*.counted")]
    assert len(logs) == len(loss.survivors), "one of each that has taken over some"
    with pytest.raises(ConfigError, match=f"there are 3 logs of server {victim}; there must be"):
        read_replay(str(tmp_path), victim, 3, [])
    for rank in loss.survivors:
        assert f"server {rank} takes over " in caplog.text
        its = sum(piece.server == victim for piece in loss.pieces)
        gone = f"rank {rank}: server {victim} is gone; its {its} slices are to go on at servers"
        assert f"{gone} {loss.survivors}" in caplog.text


@pytest.mark.parametrize(
    ("step", "about"),
    [
        (clipped, {"before_step": clip, "rtol": 1e-5}),
        (accumulated, {"passes": 2}),
        (skipped, {}),
        (usual, {"wire": torch.bfloat16}),
    ],
    ids=["clipped", "accumulated", "skipped", "bfloat16"],
)
@pytest.mark.parametrize(
    "victims",
    [{0: (3, 2)}, pytest.param({1: (4, None)}, marks=LONG), pytest.param({2: (2, 4)}, marks=LONG)],
    ids=str,
)
def test_whatever_the_loop_does(
    tmp_path: Path, step: Step, about: dict[str, Any], victims: Victims
) -> None:
    settings = {"wire_dtype": "bfloat16"} if "wire" in about else {}
    Loss(tmp_path, 3, victims, step=step).run(with_adam, **settings).check(**about)


@pytest.mark.parametrize(
    "victims", [{0: (3, 2), 1: (3, 2)}, *long_cases({1: (3, None), 3: (3, None)})], ids=str
)
def test_two_nodes_lost_at_once(tmp_path: Path, victims: Victims) -> None:
    loss = Loss(tmp_path, 4, victims).run(with_adam).check()
    assert sorted(each["server"] for each in loss.takeovers()) == [*victims]


def test_one_node_after_another_until_one_is_left(tmp_path: Path) -> None:
    """Whose server then has all slices."""
    victims: Victims = {0: (2, 2), 1: (4, None), 2: (6, 2)}
    loss = Loss(tmp_path, 4, victims).run(with_sgd()).check()
    assert [each["server"] for each in loss.takeovers()] == [0, 1, 2]


@pytest.mark.parametrize("has_claimed", [False, *long_cases(True)])
@pytest.mark.parametrize("claiming", [1, *long_cases(2)])
def test_a_node_is_lost_while_others_claim(
    tmp_path: Path, claiming: int, has_claimed: bool
) -> None:
    """It owes claims, or has just made them, and may be the one to give an average."""
    loss = Loss(tmp_path, 4, {0: (3, 2)}, claiming=claiming, has_claimed=has_claimed)
    loss.run(with_adam).check()
    assert sorted(each["server"] for each in loss.takeovers()) == [0, claiming]


def draw_victims(seed: int) -> tuple[int, Victims]:
    """At about the same time, at any moment of a step."""
    chance = random.Random(seed)
    ranks = chance.choice([3, 4, 5])
    gone = chance.sample(range(ranks), chance.randint(1, ranks - 1))
    base = chance.randint(2, 5)
    victims: Victims = {
        rank: (base + chance.choice([0, 0, 1]), chance.choice([None, 1, 2, 4]))
        for rank in sorted(gone)
    }
    return ranks, victims


@pytest.mark.parametrize("seed", [1, 5, 8, *long_cases(*range(10, 70))])
def test_any_nodes_may_be_lost_at_any_moment(tmp_path: Path, seed: int) -> None:
    ranks, victims = draw_victims(seed)
    build = with_adam if seed % 2 else with_sgd()
    Loss(tmp_path, ranks, victims).run(build).check()


def test_a_server_without_slices_is_outlived(tmp_path: Path) -> None:
    build = with_sgd(lambda: nn.Sequential(nn.Linear(5, 3)))
    loss = Loss(tmp_path, 3, {2: (3, None)}).run(build, slice_elems=100).check()
    assert {piece.server for piece in loss.pieces} == {0, 1}
    (takeover,) = loss.takeovers()
    assert (takeover["steps"], takeover["pushed_again"]) == ([], 0)


@pytest.mark.parametrize("encryption", [None, *long_cases("tls")])
def test_with_a_secret(tmp_path: Path, encryption: str | None) -> None:
    settings = {"secret_file": secret_file(tmp_path), "encryption": encryption}
    Loss(tmp_path, 3, {0: (3, 2)}).run(with_sgd(), **settings).check()


@pytest.mark.parametrize("victim", [0, *long_cases(1, 2)])
@pytest.mark.parametrize("planes", ["auto python auto", *long_cases("python auto auto")])
def test_planes_may_differ(tmp_path: Path, victim: int, planes: str) -> None:
    """Slices of one plane's server go on at the other's, and averages that one lacks are given."""
    loss = Loss(tmp_path, 3, {victim: (3, 2)}, planes=planes.split()).run(with_adam).check()
    assert all(len(loss.takeovers(rank)) == 1 for rank in loss.survivors)


def test_without_a_loss_no_bit_is_another() -> None:
    by_rank = batches_of(3)
    plain = run_foreprop(with_adam, train_classifier, by_rank, architecture="p2p", update="workers")
    found = run_foreprop(with_adam, train_classifier, by_rank, **BESIDE)
    for each in found:
        check_same_bits(each.model, plain[0].model)
        check_same_optimizer_state(each.optimizer, plain[0].optimizer)
        assert each.stats["takeovers"] == []


def test_of_two_halves_that_do_not_reach_each_other_one_goes_on() -> None:
    """Ranks 1 and 2 hear nothing more of the others, which live: they say so, and end."""
    by_rank = batches_of(5, count=STEPS)
    halves = {0, 3, 4}, {1, 2}
    ready = threading.Barrier(5)
    ended = {rank: threading.Event() for rank in halves[1]}
    told: dict[int, str] = {}

    def cut(session: Any, rank: int) -> None:
        """From the servers of the other half, whose processes go on."""
        others = next(half for half in halves if rank not in half)
        for server in others:
            session._training.backends.all[0].engine.connections[server].stream.close()

    def work(world: World) -> Any:
        model, optimizer = build_seeded(with_sgd(), seed=world.rank)
        try:
            with foreprop.parallelize(model, optimizer, world=world, **BESIDE) as session:
                for number, batch in enumerate(by_rank[world.rank], 1):
                    if number == 3:
                        session.flush()
                        ready.wait(60)
                        cut(session, world.rank)
                    if number == STEPS:  # a server that has ended is no sign of life
                        for each in ended.values():
                            wait_for(each)
                    make_step(model, optimizer, batch)
                return snapshot(model.state_dict())
        except PeerLost as error:
            told[world.rank] = str(error)
            ended[world.rank].set()
            return None

    found = run_cluster(5, work)
    assert sorted(told) == [1, 2]
    assert all("and no majority: others may have gone on" in text for text in told.values()), told
    assert [rank for rank, each in enumerate(found) if each] == [0, 3, 4]
    check_same_bits(found[3], found[0])
    check_same_bits(found[4], found[0])


def test_servers_beside_elastic_workers_do_not_update() -> None:
    with pytest.raises(ConfigError, match="what servers beside the workers keep is lost with"):
        Config.resolve(elastic=True, update="servers")
    assert Config.resolve(elastic=True, dedicated_servers=1, update="servers").elastic


@pytest.mark.parametrize("build", [with_sgd(), with_adam])
def test_the_loss_of_a_dedicated_server_is_outlived(tmp_path: Path, build: Build) -> None:
    by_rank = batches_of(3, count=STEPS)
    pieces: list[Slice] = []

    def work(world: World) -> Any:
        with dedicated(world, counted_log=str(tmp_path)) as servers:
            model, optimizer = build_seeded(build, seed=world.rank)
            with foreprop.parallelize(model, optimizer, world=world, **ELASTIC) as session:
                pieces[:] = pieces_of(session)
                for number, batch in enumerate(by_rank[world.rank], 1):
                    make_step(model, optimizer, batch)
                    if number == 3 and servers:
                        servers[1]._server.end()
                found = snapshot(model.state_dict())
            return found, session.stats()

    found = run_cluster(3, work)
    own = [[piece.number for piece in pieces if piece.server == index] for index in range(2)]
    counted = [counted_by(tmp_path, index, 3, own[index]) for index in range(2)]
    wanted = by_arithmetic(build, by_rank, pieces, counted)
    for values, stats in found:
        check_same_bits(values, wanted)
        assert stats["members"] == [0, 1, 2]
        assert [each["server"] for each in stats["takeovers"]] == [1]


# The start.
def slow_start(monkeypatch: pytest.MonkeyPatch, rank: int, do: Callable[[], object]) -> None:
    """Let this rank do something before it looks for the values that all begin with."""
    usual = Averages.receive_initial_value
    seen = set[int]()

    def receive(arrival: Averages) -> None:
        if arrival._engine.rank == rank and rank not in seen:
            seen.add(rank)
            do()
        usual(arrival)

    monkeypatch.setattr(Averages, "receive_initial_value", receive)


def test_nobody_trains_before_all_have_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who dies in its first step may have a server that owed others the values of the start."""
    order: list[str] = []

    def be_late() -> None:
        time.sleep(0.5)
        order.append("has begun")

    slow_start(monkeypatch, 1, be_late)

    def work(world: World) -> None:
        model, optimizer = build_seeded(with_sgd(momentum=0.5))
        with foreprop.parallelize(model, optimizer, world=world, **BESIDE):
            order.append("trains")

    run_cluster(3, work)
    assert order == ["has begun", "trains", "trains", "trains"]


def test_who_has_not_begun_ends_with_the_server_that_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody else has the values that it has still to give. The others go on."""
    backends: dict[int, Any] = {}
    start, answer = ServedBackend.start, ServerMachine._answer

    def noted(backend: ServedBackend, parameters: Any) -> None:
        backends[backend.engine.rank] = backend
        start(backend, parameters)

    def withheld(machine: Any, told: AnswerSlice) -> Any:
        if machine._index == 2 and not told.step:
            told = told._replace(ranks=tuple(rank for rank in told.ranks if rank != 1))
        return answer(machine, told)

    def lose_another() -> None:
        while backends[1].connections.board.missing("begun") != [1]:
            time.sleep(0.01)
        two = SimpleNamespace(backends=SimpleNamespace(all=[backends[2]]))
        cut_off(SimpleNamespace(_training=two))

    monkeypatch.setattr(ServedBackend, "start", noted)
    monkeypatch.setattr(ServerMachine, "_answer", withheld)
    slow_start(monkeypatch, 1, lose_another)

    def work(world: World) -> str:
        model, optimizer = build_seeded(with_sgd(momentum=0.5))
        try:
            with foreprop.parallelize(model, optimizer, world=world, **BESIDE) as session:
                for batch in batches_of(3)[0]:
                    make_step(model, optimizer, batch)
                return str(sorted(session.stats()["left"]))
        except TransportError as error:
            return str(error)

    first, second, _ = run_cluster(3, work)
    assert first == "[1, 2]"
    assert second.startswith("server 2 (beside rank 2) is gone")

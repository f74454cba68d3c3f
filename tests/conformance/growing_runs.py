"""Sessions that others join while they train, and the same by arithmetic."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import foreprop
from foreprop.engine.world import World
from tests.cluster import run_cluster
from tests.conformance.counting_runs import (
    ELASTIC,
    Died,
    by_arithmetic,
    dedicated,
    die,
    make_step,
    newcomers_world,
    pieces_of,
    wait_for,
)
from tests.conformance.node_losses import BESIDE, lose_node
from tests.conformance.parity import (
    Build,
    batches_of,
    build_seeded,
    check_same_bits,
    snapshot,
    with_sgd,
)
from tests.countedlogs import counted_by

STEPS = 30


class Grown:
    """A session of ``started`` ranks to which others come.

    ``comes``: by rank, before which step of the others it is let come; these wait two steps later,
    until they have heard that it does. ``deaths``: by rank, after which step it dies.
    """

    def __init__(
        self,
        started: int,
        comes: Mapping[int, int],
        build: Build | None = None,
        *,
        deaths: Mapping[int, int] | None = None,
        beside: bool = False,
        steps: int = STEPS,
        **settings: Any,
    ) -> None:
        self.started, self.comes, self.deaths = started, comes, deaths or {}
        self.most = max([started - 1, *comes]) + 1
        self.build = build or with_sgd()
        usual = BESIDE if beside else ELASTIC
        self.settings = {**usual, "max_workers": self.most, **settings}
        self.steps, self.by_rank = steps, batches_of(self.most, count=steps)
        self.asked = {rank: threading.Event() for rank in comes}
        self.heard = {rank: threading.Event() for rank in comes}
        self.servers: list[str] = []
        self.began: dict[int, int] = {}
        self.found: dict[int, dict[str, torch.Tensor]] = {}
        self.stats: dict[int, dict[str, Any]] = {}
        self.pieces: list[Any] = []
        self.errors: list[BaseException] = []
        self.come: Callable[[int], Any] = self.join
        self.begin: Callable[[Any], Callable[[], object]] = lambda session: lambda: None
        """Told of each session, it gives what is to be done after each step."""

    def run(self, folder: Path) -> None:
        threads = [threading.Thread(target=self._come_when_let, args=(r,)) for r in self.comes]
        for thread in threads:
            thread.start()
        try:
            run_cluster(self.started, lambda world: self._work(world, folder))
        finally:
            for thread in threads:
                thread.join(30)
        assert not self.errors

    def _work(self, world: World, folder: Path) -> None:
        own: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.settings["architecture"] == "p2p":
            self.settings["counted_log"] = str(folder)
        else:
            world.in_process = False  # or one alone would find no `foreprop server`
            own = dedicated(world, counted_log=str(folder))
        with own, contextlib.suppress(Died):
            self.train(world)

    def _come_when_let(self, rank: int) -> None:
        try:
            wait_for(self.asked[rank])
            self.come(rank)
        except BaseException as error:
            self.errors.append(error)
        finally:
            self.heard[rank].set()

    def join(self, rank: int, **more: Any) -> None:
        self.train(newcomers_world(rank, self.started), join=",".join(self.servers), **more)

    def train(self, world: World, **more: Any) -> None:
        rank = world.rank
        model, optimizer = build_seeded(self.build, seed=rank)
        settings = {**self.settings, **more}
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            self.pieces[:] = pieces_of(session)
            self.servers[:] = session.stats()["servers"]
            self._listen(session)
            self.began[rank] = first = session.joined_at or 1
            end_step = self.begin(session)
            for step in range(first, self.steps + 1):
                if session.joined_at is None:
                    self._let_come(step)
                make_step(model, optimizer, self.by_rank[rank][step - 1])
                end_step()
                if self.deaths.get(rank) == step:
                    session.flush()
                    (lose_node if session.stats().get("takeovers") is not None else die)(session)
            self.found[rank] = snapshot(model.state_dict())
        self.stats[rank] = session.stats()

    def _listen(self, session: Any) -> None:
        def call(change: Any, members: Any) -> None:
            if change.joins:
                self.heard[change.rank].set()

        session._training.backends.all[0].members.notices.view.on_membership.append(call)

    def _let_come(self, step: int) -> None:
        for rank, at in self.comes.items():
            if step == at:
                self.asked[rank].set()
            if step == max(at + 2, 5):  # nobody is taken in before the third step is made
                wait_for(self.heard[rank])

    def check(self, folder: Path) -> None:
        """All end alike, and as plain arithmetic says by the log; each counts from its step on."""
        servers = max(piece.server for piece in self.pieces) + 1
        counted = []
        for index in range(servers):
            own = [piece.number for piece in self.pieces if piece.server == index]
            counted.append(counted_by(folder, index, self.most, own))
        wanted = by_arithmetic(self.build, self.by_rank, self.pieces, counted)
        here = [rank for rank in range(self.most) if rank in self.found]
        for rank in here:
            check_same_bits({name: self.found[rank][name] for name in wanted}, wanted)
            assert self.stats[rank]["members"] == here
            first = self.began[rank]
            for piece in self.pieces:
                at, steps = counted[piece.server].at, range(1, self.steps + 1)
                counts = [step for step in steps if rank in at(piece.number, step)]
                assert counts == [*range(first, self.steps + 1)]

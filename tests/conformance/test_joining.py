"""A worker that comes in the place of one that was lost: `join`."""

from __future__ import annotations

import contextlib
import copy
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import foreprop
from foreprop.backends.elastic import ask
from foreprop.config import Config
from foreprop.core.dealing import MemberChange
from foreprop.core.wire import Kind
from foreprop.engine.connection import Connection, greeting, unencrypted
from foreprop.engine.world import World, current_world
from foreprop.errors import ConfigError, Failure, ForepropError, HandshakeError, TransportError
from foreprop.features.members.counting import Counting
from foreprop.features.members.statetransfer import GivenBlobs, GivenModel
from tests.cluster import run_cluster
from tests.conformance.averaging_by_hand import check_alike
from tests.conformance.counting_runs import (
    ELASTIC,
    Died,
    by_arithmetic,
    counted_in,
    dedicated,
    die,
    make_step,
    newcomers_world,
    pieces_of,
    trained_by_arithmetic,
    wait_for,
)
from tests.conformance.node_losses import lose_node
from tests.conformance.parity import (
    Build,
    batches_of,
    build_seeded,
    check_same_bits,
    servers_only,
    small_model,
    snapshot,
    with_sgd,
)
from tests.countedlogs import counted_by
from tests.secretfile import secret_file
from tests.tiers import long_cases

pytestmark = servers_only  # each test names the architecture that it needs

STEPS = 26


class Joined:
    """A session of which ranks die after some steps, and come again.

    ``deaths``: by rank, after which step; ``dies_too`` when it has heard that all have come. Two
    steps after the last death the others wait until all newcomers have been promised a step, or
    have failed.
    """

    def __init__(
        self,
        ranks: int,
        deaths: dict[int, int],
        build: Build | None = None,
        dies_too: int | None = None,
        **settings: Any,
    ) -> None:
        self.dies_too = dies_too
        self.pause = 0.0
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.heard_of: Callable[[int], Any] = lambda step: None
        self.ranks, self.deaths = ranks, deaths
        self.build = build or with_sgd()
        self.settings = {**ELASTIC, **settings}
        self.by_rank = batches_of(ranks, count=STEPS)
        self.back = {rank: threading.Event() for rank in deaths}
        self.servers: list[str] = []
        self.began: dict[int, Any] = {}
        self.stats: list[dict[str, Any]] = [{} for _ in range(ranks)]
        self.heard: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        self.states: dict[int, Any] = {}
        """Of the optimizers, at the end."""
        self.pieces: list[Any] = []
        self.watch: Callable[[Any, Any], None] = lambda model, session: None
        self.again: Callable[[int], Any] = self.come

    def run(self, folder: Path) -> list[Any]:
        def work(world: World) -> Any:
            with self.servers_of(world, folder):
                try:
                    return self.train(world, world.rank)
                except Died:
                    if world.rank == self.dies_too:
                        return None
                try:
                    return self.again(world.rank)
                finally:
                    self.back[world.rank].set()

        return run_cluster(self.ranks, work)

    def servers_of(self, world: World, folder: Path) -> contextlib.AbstractContextManager[None]:
        if self.settings["dedicated_servers"]:
            return dedicated(world, counted_log=str(folder))
        return contextlib.nullcontext()

    def come(self, rank: int) -> Any:
        join = ",".join(self.servers)
        return self.train(newcomers_world(rank, self.ranks), rank, join=join)

    def train(self, world: World, rank: int, **more: Any) -> Any:
        model, optimizer = build_seeded(self.build, seed=rank)
        settings = {**self.settings, **more}
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            self.listen(session, self.heard.setdefault(rank, []))
            self.pieces[:] = pieces_of(session)
            first = session.joined_at or 1
            if more:
                self.began[rank] = first
            self.servers[:] = session.stats()["servers"]
            self.watch(model, session)
            for step in range(first, STEPS + 1):
                if step == max(self.deaths.values()) + 2 and not more:
                    for back in self.back.values():
                        wait_for(back)
                if step == STEPS - 10 and not more:
                    wait_for(self.goes_on)
                make_step(model, optimizer, self.by_rank[rank][step - 1])
                if rank == self.dies_too and self.is_time(step):
                    self.lose(session)
                if self.pause:
                    threading.Event().wait(self.pause)
                if not more and self.deaths.get(rank) == step:
                    [parameter.sum() for parameter in model.parameters()]  # it is all there
                    self.lose(session)
            if max(self.deaths.values()) + 2 > STEPS and not more:
                for back in self.back.values():
                    wait_for(back)
            session.flush()
            found = snapshot(model.state_dict())
            self.states[rank] = snapshot(optimizer.state_dict())
        self.stats[rank] = session.stats()
        return found

    def lose(self, session: Any) -> None:
        die(session)

    def is_time(self, step: int) -> bool:
        """To die, when all have come."""
        return all(each.is_set() for each in self.back.values())

    def listen(self, session: Any, heard: list[tuple[int, tuple[int, ...]]]) -> None:
        notices = session._training.backends.all[0].members.notices

        def call(change: MemberChange, ranks: Sequence[int]) -> None:
            heard.append((change.step, tuple(ranks)))
            for rank in notices.arrivals:
                self.back[rank].set()
            self.heard_of(change.step)

        notices.view.on_membership.append(call)


def check(joined: Joined, found: list[Any], folder: Path) -> None:
    """All end alike, and as plain arithmetic says by the log; nobody counts when it was not here.

    And all members knew of the newcomer before they ended the step before its first one.
    """
    here = [rank for rank in range(joined.ranks) if found[rank] is not None]
    counted = counted_in(folder, joined.ranks, joined.pieces)
    wanted = by_arithmetic(joined.build, joined.by_rank, joined.pieces, counted)
    for rank in here:
        check_same_bits(found[rank], wanted)
    for rank, death in joined.deaths.items():
        first = joined.began[rank]
        assert death < first
        for piece in joined.pieces:
            steps = [
                s for s in range(1, STEPS + 1) if rank in counted[piece.server].at(piece.number, s)
            ]
            gap = [*range(1, death + 1), *range(first, STEPS + 1)]
            assert steps in (gap, sorted({*gap, death + 1}))
        for member in here:
            assert joined.stats[member]["joined"][rank] == first
            assert joined.stats[member]["members"] == here


@pytest.mark.parametrize("victim", [0, *long_cases(1)])
def test_a_newcomer_counts_from_its_first_step_on(
    tmp_path: Path, victim: int, caplog: pytest.LogCaptureFixture
) -> None:
    joined = Joined(3, {victim: 3})
    with caplog.at_level(logging.WARNING, "foreprop"):
        found = joined.run(tmp_path)
    check(joined, found, tmp_path)
    first = joined.began[victim]
    others = [rank for rank in range(3) if rank != victim]
    for rank in others:
        assert joined.heard[rank][-1] == (first, (0, 1, 2))
        assert joined.stats[rank]["left"][victim]["step"] in (3, 4)
    assert f"rank {victim} has joined, and counts from step {first} on" in caplog.text
    assert f"server 1 counts rank {victim} from step {first} on" in caplog.text


def test_a_newcomer_where_the_last_worker_of_a_step_is_left_out(tmp_path: Path) -> None:
    """Its first step waits for it; servers clip, and it learns their norm as the others do."""
    norms: dict[int, list[float | None]] = {}

    def watch(model: Any, session: Any) -> None:
        """That of the last step, before each step."""
        norms[session.rank] = own = []
        model.register_forward_pre_hook(lambda *_: own.append(session.grad_norm))

    joined = Joined(4, {1: 3}, backup_workers=1, clip_grad_norm=0.2)
    joined.watch = watch
    found = joined.run(tmp_path)
    first = joined.began[1]
    counted = counted_in(tmp_path, 4, joined.pieces)
    at = [
        [counted[p.server].at(p.number, step) for p in joined.pieces]
        for step in range(1, STEPS + 1)
    ]
    assert all(1 in ranks for ranks in at[first - 1])
    assert not any(1 in ranks for sets in at[4 : first - 1] for ranks in sets)
    wanted, _ = trained_by_arithmetic(
        joined.build,
        joined.by_rank,
        joined.pieces,
        counted,
        before_step=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.2),
    )
    for rank in range(4):
        check_same_bits(found[rank], found[0])
        assert joined.stats[rank]["members"] == [0, 1, 2, 3]
    for name, value in wanted.items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-4, atol=1e-5)
    assert norms[0][0] is None
    assert norms[1] == norms[0][first - 1 :]
    assert norms[2] == norms[3] == norms[0]


def test_two_newcomers_and_one_that_dies_meanwhile(tmp_path: Path) -> None:
    """Adam, a bias that is frozen in the optimizer, and a layer that rank 0 alone has values of."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(small_model(), nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        model[0][2].bias.requires_grad_(False)  # type: ignore[index]
        model[1].requires_grad_(False)
        rest = [p for name, p in model.named_parameters() if not name.startswith("1.")]
        return model, torch.optim.Adam(rest, lr=0.01)

    joined = Joined(4, {1: 3, 2: 4}, build, dies_too=3)
    found = joined.run(tmp_path)
    assert found[3] is None
    for rank in (1, 2):
        weights = {name: value for name, value in found[rank].items() if not name.startswith("2.")}
        check_same_bits(weights, {name: found[0][name] for name in weights})
        assert joined.stats[0]["joined"][rank] == joined.began[rank]
    assert joined.stats[0]["members"] == joined.stats[1]["members"] == [0, 1, 2]


def with_averages() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Running averages, and a layer that no optimizer has: of each rank another one at first."""
    model = nn.Sequential(
        nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)
    )
    model[3].requires_grad_(False)
    rest = [p for name, p in model.named_parameters() if not name.startswith("3.")]
    return model, torch.optim.SGD(rest, lr=0.1, momentum=0.9)


class Shown:
    """What each rank's model shows in evaluation, before each of its steps."""

    def __init__(self, joined: Joined) -> None:
        self.by_step: dict[tuple[int, int], Any] = {}
        self.sessions: dict[int, Any] = {}
        self.x = torch.randn(4, 5, generator=torch.Generator().manual_seed(8))
        joined.watch = self.watch

    def watch(self, model: Any, session: Any) -> None:
        self.sessions[session.rank] = session
        training = session._training

        def show(module: Any, _: Any) -> None:
            if module.training and torch.is_grad_enabled():
                session.flush()
                copied = copy.deepcopy(module).eval()
                with torch.no_grad():
                    self.by_step[session.rank, training.completed + 1] = copied(self.x)

        if session.joined_at is not None:  # as it is at once, and not only when it trains
            with torch.no_grad():
                self.by_step[session.rank, 0] = model.eval()(self.x)
            model.train()
        model.register_forward_pre_hook(show)

    def check(self, newcomer: int, first: int, of_rank: int, other: int) -> None:
        wanted = self.by_step[of_rank, first]
        assert torch.equal(self.by_step[newcomer, first], wanted)
        assert torch.equal(self.by_step[newcomer, 0], wanted)
        assert not torch.equal(self.by_step[other, first], wanted), "each has averages of its own"


@pytest.mark.parametrize("victim", [0, *long_cases(1)])
def test_a_newcomer_shows_what_the_lowest_rank_shows(tmp_path: Path, victim: int) -> None:
    """Also its frozen layer, and where rank 0's node has gone with all that it had."""
    joined = JoinedBeside(3, {victim: 3}, build=with_averages)
    shown = Shown(joined)
    joined.run(tmp_path)
    lowest, other = (rank for rank in range(3) if rank != victim)
    shown.check(victim, joined.began[victim], lowest, other)


def test_the_next_rank_s_buffers_count_if_the_lowest_one_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has ended the step before the newcomer's first one, and says nothing any more."""
    joined = Joined(4, {2: 3}, with_averages, dies_too=0)
    joined.is_time = lambda step: False  # type: ignore[method-assign]
    shown = Shown(joined)
    original = GivenBlobs.end_step

    def end_step(self: GivenBlobs, done: int) -> None:
        if self._engine.rank == 0 and done + 1 in self._coming.values():
            die(shown.sessions[0])
        original(self, done)

    monkeypatch.setattr(GivenBlobs, "end_step", end_step)
    found = joined.run(tmp_path)
    assert found[0] is None
    first = joined.began[2]
    assert joined.stats[1]["left"][0]["step"] in (first - 2, first - 1), (
        "its last pushes may be lost"
    )
    shown.check(2, first, 1, 3)


def test_a_giver_s_share_is_given_where_its_loss_is_noticed_a_step_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have pushed the newcomer's first step by then, and made an `optimizer.step()`."""
    joined = Joined(4, {2: 3}, dies_too=0, ema=0.9)
    joined.is_time = lambda step: False  # type: ignore[method-assign]
    sessions: dict[int, Any] = {}
    joined.watch = lambda model, session: sessions.update({session.rank: session})
    original, lose = GivenModel.begin_step, Counting.lose

    def begin_step(self: GivenModel, step: int, settle: Callable[[], None]) -> None:
        if self._engine.rank == 0 and step in self._coming.values():
            die(sessions[0])
        original(self, step, settle)

    def lose_late(self: Counting, peer: Connection, failure: Failure) -> bool:
        if peer.number == 0:
            first = max(self.members.since.values())
            while any(sessions[rank]._training.completed < first for rank in (1, 3)):
                time.sleep(0.01)
        return lose(self, peer, failure)

    monkeypatch.setattr(GivenModel, "begin_step", begin_step)
    monkeypatch.setattr(Counting, "lose", lose_late)
    found = joined.run(tmp_path)
    assert found[0] is None
    for rank in (2, 3):
        check_same_bits(found[1], found[rank])
        for number, state in joined.states[1]["state"].items():
            check_same_bits(state, joined.states[rank]["state"][number])
    added = [sessions[rank]._training.added for rank in (1, 2, 3)]
    one, *others = [each.averages_of(each.parameters) for each in added]
    assert all(all(map(torch.equal, one, other)) for other in others)


def test_the_first_layer_is_used_before_a_tenth_of_the_bytes_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is, no server is let send more than a twelfth of its own."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(
            nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 60)
        )
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    total_bytes = sum(4 * parameter.numel() for parameter in build()[0].parameters())
    joined = Joined(2, {1: 3}, build, slice_elems=1000, update="servers")
    used, lock, sent_bytes, received_bytes = threading.Event(), threading.Lock(), [0, 0], [0]
    coming = threading.Event()
    original = Connection.send

    def send(self: Connection, kind: int, *rest: Any) -> None:
        if coming.is_set() and (kind, self._whose, self.rank) == (Kind.REPLY, "rank", 1):
            with lock:
                sent_bytes[self._sender] += len(rest[-1])
                own = [4 * piece.elems for piece in joined.pieces if piece.server == self._sender]
                is_more = sent_bytes[self._sender] > sum(own) / 12
            if is_more:
                wait_for(used)
        original(self, kind, *rest)

    def come(rank: int) -> Any:
        coming.set()
        return joined.come(rank)

    def watch(model: Any, session: Any) -> None:
        if session.joined_at is not None:
            connections = session._training.backends.engines[0].connections

            def first_layer_done(*_: Any) -> None:
                if not used.is_set():
                    received_bytes[0] = sum(each.received_bytes for each in connections)
                    used.set()

            model[0].register_forward_hook(first_layer_done)

    monkeypatch.setattr(Connection, "send", send)
    joined.again, joined.watch = come, watch
    found = joined.run(tmp_path)
    check_same_bits(found[1], found[0])
    assert 4 * (5 * 8 + 8) < received_bytes[0] < total_bytes / 10
    assert sum(sent_bytes) > total_bytes


def test_a_newcomer_that_comes_after_the_last_step(tmp_path: Path) -> None:
    """It has the values that the others end with, and makes no step."""
    joined = Joined(2, {1: STEPS - 1})
    found = joined.run(tmp_path)
    check(joined, found, tmp_path)
    assert joined.began[1] > STEPS
    assert joined.stats[1]["pushes"] == 0


def test_a_newcomer_that_dies_before_its_first_step_may_come_again(tmp_path: Path) -> None:
    joined = Joined(3, {1: 3})
    tries: list[Any] = []

    def come(rank: int) -> Any:
        model, optimizer = build_seeded(joined.build, seed=rank)
        about = {**joined.settings, "join": joined.servers[1]}
        world = newcomers_world(rank, 3)
        session = foreprop.parallelize(model, optimizer, world=world, **about)
        tries.append(session.joined_at)
        with pytest.raises(Died), session:
            die(session)
        return joined.come(rank)

    def heard_of(step: int) -> None:
        if tries and step > tries[0]:  # it has come again, however early
            joined.goes_on.set()

    joined.goes_on.clear()
    joined.again, joined.heard_of = come, heard_of
    found = joined.run(tmp_path)
    check(joined, found, tmp_path)
    assert tries[0] < joined.began[1]
    left = joined.stats[0]["left"][1]
    assert left["step"] == tries[0] - 1
    assert left["counted_slices"] == 0


# Servers beside the workers.
class JoinedBeside(Joined):
    """A node is lost with its server, its worker comes again, and then another node is lost."""

    def __init__(
        self,
        ranks: int,
        deaths: dict[int, int],
        then: int | None = None,
        build: Build | None = None,
    ) -> None:
        about = {"architecture": "p2p", "dedicated_servers": 0}
        super().__init__(ranks, deaths, build, **about)
        self.then = then
        if then is not None:
            self.dies_too = then

    def lose(self, session: Any) -> None:
        lose_node(session)

    def is_time(self, step: int) -> bool:
        return any(step > first + 5 for first in self.began.values())

    def run(self, folder: Path) -> list[Any]:
        self.settings["counted_log"] = str(folder)
        return super().run(folder)


def with_adamw() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small_model()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("victim", "then"),
    [
        (0, 2),
        pytest.param(1, None, marks=pytest.mark.long),
        pytest.param(2, 0, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("build", [with_adamw, *long_cases(with_sgd())])
def test_a_newcomer_beside_servers(
    tmp_path: Path, victim: int, then: int | None, build: Build
) -> None:
    """It starts no server; the slices of the lost one stay where they are, and outlive more."""
    joined = JoinedBeside(4, {victim: 3}, then, build)
    places: list[Any] = []

    def come(rank: int) -> Any:
        host, _, port = joined.servers[3].partition(":")
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s:
            told = ask(host, int(port), rank, Config())
            if rank in told.free and any(place.is_lost for place in told.places):
                break
            time.sleep(0.01)
        places.extend(told.places)
        return joined.come(rank)

    joined.again = come
    found = joined.run(tmp_path)
    assert [place.is_lost for place in places] == [rank == victim for rank in range(4)]
    assert len(joined.servers) == 3, "as the newcomer found them"
    here = [rank for rank in range(4) if found[rank] is not None]
    assert here == [rank for rank in range(4) if rank != then]
    counted = []
    for index in range(4):
        own = [piece.number for piece in joined.pieces if piece.server == index]
        counted.append(counted_by(tmp_path, index, 4, own))
    wanted, state = trained_by_arithmetic(build, joined.by_rank, joined.pieces, counted)
    for rank in here:
        check_same_bits(found[rank], wanted)
        check_alike(joined.states[rank]["state"], state["state"], 0.0)
        assert joined.stats[rank]["joined"] == {victim: joined.began[victim]}
        assert joined.stats[rank]["members"] == here
    takeovers = joined.stats[victim]["takeovers"]
    assert len(takeovers) == (0 if then is None else 1)


@pytest.mark.parametrize("encryption", [None, pytest.param("tls", marks=pytest.mark.long)])
def test_a_newcomer_shows_the_secret(tmp_path: Path, encryption: Any) -> None:
    """Who has another one, or none, is not even told where servers are."""
    own = secret_file(tmp_path)
    other = secret_file(tmp_path, "other.secret", "another one, of 24 bytes")
    joined = JoinedBeside(3, {1: 3})
    joined.settings |= {"secret_file": own, "encryption": encryption}

    def come(rank: int) -> Any:
        host, _, port = joined.servers[0].partition(":")
        for secret, message in ((other, "different secrets"), (None, "has no secret")):
            with pytest.raises((HandshakeError, TransportError), match=message):
                ask(host, int(port), rank, Config(secret_file=secret))
        return joined.come(rank)

    joined.again = come
    found = joined.run(tmp_path)
    check_same_bits(found[1], found[0])
    check_same_bits(found[2], found[0])
    assert joined.stats[0]["joined"] == joined.began


# Who is not taken in.
Refused = Callable[[Joined, int], Any]


def come_with(
    build: Build, rank: int | None = None, size: int | None = None, **more: Any
) -> Refused:
    def come(joined: Joined, lost: int) -> Any:
        model, optimizer = build_seeded(build, seed=lost)
        about = {**joined.settings, "join": joined.servers[0], "join_timeout_s": 5.0, **more}
        world = newcomers_world(lost if rank is None else rank, size or joined.ranks)
        foreprop.parallelize(model, optimizer, world=world, **about)

    return come


def other_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("come", "error", "message"),
    [
        (come_with(other_model), HandshakeError, "the session and rank 1 do not agree: number of"),
        (
            come_with(with_sgd(), slice_elems=20),
            HandshakeError,
            "do not agree: knobs.slice_elems: the session has 10, rank 1 has 20",
        ),
        (
            come_with(with_sgd(), rank=0, join_timeout_s=0.5),
            HandshakeError,
            "rank 0 wants to join, and is in the session, as server 0 sees it",
        ),
        (
            come_with(with_sgd(), dedicated_servers=3),
            HandshakeError,
            "the session has 2 servers, dedicated ones; this worker expects 3",
        ),
        (
            come_with(with_sgd(), join="127.0.0.1:9", join_timeout_s=0.5),
            TransportError,
            "rank 1 wants to join at 127.0.0.1:9 .join.: no connection to 127.0.0.1 port 9",
        ),
    ],
    ids=["model", "slices", "alive", "servers", "nobody"],
)
def test_who_is_refused_harms_nobody(
    tmp_path: Path, come: Refused, error: type[Exception], message: str
) -> None:
    joined = Joined(2, {1: 3})
    errors: list[BaseException] = []

    def again(rank: int) -> None:
        with pytest.raises(error, match=message) as caught:
            come(joined, rank)
        errors.append(caught.value)

    joined.again = again
    found = joined.run(tmp_path)
    assert len(errors) == 1
    assert found[1] is None
    counted = counted_in(tmp_path, 2, joined.pieces)
    check_same_bits(found[0], by_arithmetic(with_sgd(), joined.by_rank, joined.pieces, counted))
    assert joined.stats[0]["members"] == [0]


def test_one_that_fails_before_it_is_taken_in_harms_nobody(tmp_path: Path) -> None:
    joined = Joined(2, {1: 3})

    def again(rank: int) -> Any:
        host, _, port = joined.servers[0].partition(":")
        data = Failure(kind="ValueError", message="the data are odd").encode()
        failed = unencrypted(Kind.FAILURE, rank, data)
        for place in ask(host, int(port), rank, Config()).places:
            with socket.create_connection((place.host, place.port)) as sock:
                sock.sendall(greeting(place.session, rank) + failed)
                while sock.recv(4096):
                    pass
        return joined.come(rank)

    joined.again = again
    check(joined, joined.run(tmp_path), tmp_path)


def test_a_newcomer_s_other_learning_rate_ends_it_alone(tmp_path: Path) -> None:
    joined = Joined(2, {1: 3}, step_timeout_s=20.0, stall_report_s=0.4)

    def again(rank: int) -> None:
        usual, joined.build = joined.build, with_sgd(lr=0.2)
        try:
            with pytest.raises(
                ForepropError, match=r"lr=0.2 in group 0, and the others have lr=0.1"
            ):
                joined.come(rank)
        finally:
            joined.build = usual

    joined.again, joined.pause = again, 0.1
    found = joined.run(tmp_path)
    counted = counted_in(tmp_path, 2, joined.pieces)
    check_same_bits(found[0], by_arithmetic(with_sgd(), joined.by_rank, joined.pieces, counted))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"join": "here"}, "join is 'here'; it must be HOST:PORT of a server"),
        ({"join": "a:1,b"}, "join is 'a:1,b'; it must be HOST:PORT"),
        ({"join": "a:1", "link_rate_bits_per_s": 1e6}, "emulated link of a lost worker is gone"),
    ],
    ids=str,
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**{**ELASTIC, **settings})


def test_a_session_that_is_not_elastic_takes_in_nobody() -> None:
    model, optimizer = with_sgd()()
    with pytest.raises(ConfigError, match="join is 'a:1', and elastic is False"):
        foreprop.parallelize(model, optimizer, world=newcomers_world(1, 2), join="a:1")


def test_a_newcomer_must_know_which_rank_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    model, optimizer = with_sgd()()
    current_world()  # whatever the process was before
    with pytest.raises(ConfigError, match="join is 'a:1', and RANK or WORLD_SIZE is not set"):
        foreprop.parallelize(model, optimizer, **{**ELASTIC, "join": "a:1"})


# Connections that say nothing.
QUESTION = unencrypted(Kind.SERVERS, 1)
IDLE = {"nothing": b"", "half a question": QUESTION[:20], "a question": QUESTION}


def come_through(tmp_path: Path, said: str) -> float:
    """Seconds that it takes a newcomer, beside five hundred others at both servers.

    Whoever is closed to make room does not come again.
    """
    joined = Joined(3, {1: 3})
    took_s = 0.0

    def again(rank: int) -> Any:
        with contextlib.ExitStack() as crowd:
            for _ in range(250):
                for server in joined.servers:
                    host, port = server.rsplit(":", 1)
                    idle = crowd.enter_context(socket.create_connection((host, int(port))))
                    with contextlib.suppress(OSError):
                        idle.sendall(IDLE[said])
            nonlocal took_s
            started_s = time.monotonic()
            came = joined.come(rank)
            took_s = time.monotonic() - started_s
            return came

    joined.again = again
    check(joined, joined.run(tmp_path), tmp_path)
    return took_s


def test_a_newcomer_comes_through_five_hundred_idle_connections(tmp_path: Path) -> None:
    come_through(tmp_path, "half a question")


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("said", sorted(IDLE))
def test_it_comes_through_them_soon(tmp_path: Path, said: str) -> None:
    assert come_through(tmp_path, said) < 10

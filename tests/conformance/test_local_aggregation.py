"""Several workers on one node: what leaves the node is one gradient (Parallax, section 5.3.2)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import foreprop
from foreprop import PRESETS
from foreprop.engine.world import World
from foreprop.errors import ConfigError, ForepropError, HandshakeError, TrainingLoopError
from foreprop.features.nodes.relay import Relay
from tests.cluster import run_cluster
from tests.conformance.aggregation_runs import LIMIT, check_each_step, data_of, wait_for
from tests.conformance.matrices import PROTOCOLS, few
from tests.conformance.parity import (
    Batch,
    Build,
    Trained,
    batches_of,
    build_seeded,
    by_servers,
    check_close,
    check_same_bits,
    check_same_optimizer_state,
    merge,
    run_foreprop,
    run_plain,
    servers_only,
    train_classifier,
    with_sgd,
)
from tests.conformance.scaler_runs import BAD_STEP, alone, together
from tests.conformance.sparse_models import Bags, Pairs, Words, ranks, with_optimizer, words_of
from tests.tiers import long_cases

pytestmark = servers_only


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


BUILD = with_sgd(_model, weight_decay=0.01)


@cache
def _reference(workers: int, per_node: int) -> list[Trained]:
    by_rank = batches_of(workers, count=3)
    return run_foreprop(BUILD, train_classifier, by_rank, local_size=per_node)


def _check(workers: int = 4, per_node: int = 2, **settings: Any) -> None:
    """Every rank ends with the bits of p3's first run with these nodes."""
    wanted = _reference(workers, per_node)[0]
    by_rank = batches_of(workers, count=3)
    for got in run_foreprop(BUILD, train_classifier, by_rank, local_size=per_node, **settings):
        check_same_bits(got.model, wanted.model)
        check_same_optimizer_state(got.optimizer, wanted.optimizer)


@pytest.mark.parametrize(
    ("workers", "per_node"),
    [
        (3, 2),
        pytest.param(4, 2, marks=pytest.mark.long),
        pytest.param(5, 3, marks=pytest.mark.long),
    ],
)
def test_equals_one_process_with_the_whole_batch(workers: int, per_node: int) -> None:
    """The last node may have fewer workers."""
    plain = run_plain(BUILD, train_classifier, merge(batches_of(workers, count=3)))
    for trained in _reference(workers, per_node):
        check_close(trained.model, plain.model)
        check_same_bits(trained.model, _reference(workers, per_node)[0].model)


@pytest.mark.parametrize("preset", PROTOCOLS)
def test_every_preset_gives_the_same_bits(preset: str) -> None:
    _check(preset=preset)


@pytest.mark.parametrize("slice_elems", [7, *long_cases(1, 1000)])
def test_every_slice_size_gives_the_same_bits(slice_elems: int) -> None:
    _check(slice_elems=slice_elems)


@pytest.mark.parametrize("servers", [2, *long_cases(3)])
def test_any_number_of_servers_gives_the_same_bits(servers: int) -> None:
    _check(slice_elems=3, servers_per_node=servers)


@pytest.mark.long
def test_unequal_nodes_give_the_same_bits_with_every_preset() -> None:
    for preset in PRESETS:
        _check(3, 2, preset=preset, slice_elems=5)


# All that is not a sum passes through, too.
class Everything(nn.Module):
    """With buffers, a frozen parameter, one that only some ranks use, and one that nobody does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6, bias=False)  # the norm would take a bias away again
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.sometimes = nn.Parameter(torch.ones(6))
        self.never = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.norm(self.first(x)))
        if x[0, 0] > 0:
            hidden = hidden * self.sometimes
        return self.last(hidden)


def _everything() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Everything()
    used = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(used, lr=0.01)


SETTINGS: list[Any] = [
    {"reduction": "sum", "ema": 0.9},
    {"preset": "tensorflow", "clip_grad_norm": 0.05},
    {"wire_dtype": "bfloat16"},
    *long_cases({}, {"clip_grad_norm": 0.05}, {"clip_grad_value": 0.01}),
    *long_cases({"reduction": "sum"}, {"ema": 0.9}, {"preset": "kvstore", "big_array_elems": 10}),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(s) or "default")
def test_trains_as_without(settings: dict[str, Any]) -> None:
    """Close to the same ranks without local aggregation: only the sum has other brackets."""
    by_rank = batches_of(5, count=4)
    runs = {
        way: run_foreprop(
            _everything, train_classifier, by_rank, local_size=2, local_aggregation=way, **settings
        )
        for way in ("auto", "off")
    }
    rough = "wire_dtype" in settings
    for trained in runs["auto"]:
        check_same_bits(trained.model, runs["auto"][0].model, skip="running")
        for name, value in runs["off"][0].model.items():
            if not rough:
                torch.testing.assert_close(trained.model[name], value, rtol=2e-4, atol=2e-5)
            elif value.is_floating_point():
                torch.testing.assert_close(trained.model[name], value, rtol=0.05, atol=0.05)


def _change_by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]
) -> None:
    for number, batch in enumerate(batches):
        train_classifier(model, optimizer, [batch])
        if number in {0, 2}:
            str(model[0].weight)  # waits
            with torch.no_grad():
                model[0].weight.mul_(0.5)


@pytest.mark.parametrize("preset", PROTOCOLS)
def test_a_change_by_hand_on_every_rank_counts(preset: str) -> None:
    by_rank = batches_of(4, count=4)
    plain = run_plain(BUILD, _change_by_hand, merge(by_rank))
    for trained in run_foreprop(BUILD, _change_by_hand, by_rank, local_size=2, preset=preset):
        check_close(trained.model, plain.model)


def _change_first(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]
) -> None:
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    train_classifier(model, optimizer, batches)


def test_a_change_before_the_first_step_counts() -> None:
    """Its values may come to the relay before those of the start have left it."""
    by_rank = batches_of(4, count=3)
    plain = run_plain(BUILD, _change_first, merge(by_rank))
    for trained in run_foreprop(BUILD, _change_first, by_rank, local_size=2):
        check_close(trained.model, plain.model)


@pytest.mark.parametrize(
    ("culprits", "message"),
    [
        ([3], r"0.weight was changed by hand .* on ranks \[3\] but not on ranks \[2\]"),
        ([0, 1], r"0.weight was changed by hand .* on nodes \[0\] but not on nodes \[1\]"),
    ],
)
@by_servers
def test_a_change_on_some_ranks_is_an_error_that_names_them(
    culprits: list[int], message: str
) -> None:
    def work(world: World) -> None:
        model, optimizer = build_seeded(BUILD)
        with foreprop.parallelize(model, optimizer, world=world, step_timeout_s=10) as session:
            train_classifier(model, optimizer, batches_of(1)[0][:2])
            session.flush()
            if world.rank in culprits:
                with torch.no_grad():
                    model[0].weight.mul_(0.5)
            train_classifier(model, optimizer, batches_of(1)[0][:1])
            session.flush()

    with pytest.raises(TrainingLoopError, match=message):
        run_cluster(4, work, local_size=2)


@pytest.mark.parametrize(("culprit", "first"), [(3, 2), (2, 0)])
@by_servers
def test_ranks_that_set_another_learning_rate_are_named(culprit: int, first: int) -> None:
    """Within a node by its relay, between nodes by the servers, who know each node's first."""

    def work(world: World) -> None:
        model, optimizer = build_seeded(BUILD)
        with foreprop.parallelize(model, optimizer, world=world, step_timeout_s=10) as session:
            train_classifier(model, optimizer, batches_of(1)[0][:2])
            if world.rank == culprit or (culprit == 2 and world.rank == 3):
                optimizer.param_groups[0]["lr"] = 0.5
            train_classifier(model, optimizer, batches_of(1)[0][:1])
            session.flush()

    message = rf"lr of parameter group 0 is 0.1 on rank {first} and 0.5 on rank {culprit}"
    with pytest.raises(TrainingLoopError, match=message):
        run_cluster(4, work, local_size=2)


@pytest.mark.parametrize("culprit", [1, 2, 3])
def test_a_rank_with_another_model_is_named(culprit: int) -> None:
    def work(world: World) -> None:
        model = nn.Linear(5, 4 if world.rank == culprit else 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with foreprop.parallelize(model, optimizer, world=world, join_timeout_s=10):
            pass

    pair = {1: "0 and rank 1", 2: "(2 and rank 3|0 and rank 2)", 3: "2 and rank 3"}[culprit]
    with pytest.raises(HandshakeError, match=rf"rank {pair} do not agree: parameters"):
        run_cluster(4, work, local_size=2)


@pytest.mark.parametrize("clip", [LIMIT, *long_cases(None)])
def test_a_step_that_is_bad_on_one_rank_is_skipped_on_all(clip: float | None) -> None:
    build, by_rank = data_of("lstm", 4)
    values, scales, _ = alone(build, by_rank, bad_step=BAD_STEP, clip=clip)
    got = together(build, by_rank, bad_rank=3, workers_per_node=2, clip_grad_norm=clip)
    check_each_step(got[0], values)
    assert got[1] == scales


@pytest.mark.parametrize(("late", "settings"), few([1, 3], [{}, {"clip_grad_norm": 1.0}]), ids=str)
def test_who_holds_up_a_step_is_named(
    late: int, settings: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """By its own node's relay; on other nodes by the server, which knows nodes only.

    The first rank whose wait is over ends the session of all, and what it says is everybody's
    error. On standard error the late one's relay names it in any case.
    """
    told: list[str] = []

    def work(world: World) -> None:
        model, optimizer = build_seeded(BUILD)
        times = {"step_timeout_s": 4.0, "stall_report_s": 1.0, "update": "servers"}
        with foreprop.parallelize(model, optimizer, world=world, **times, **settings) as session:
            x, y = batches_of(1)[0][0]
            loss = nn.functional.cross_entropy(model(x), y)
            hook = model[0].weight.register_hook(
                lambda _: wait_for(told) if world.rank == late else None
            )
            loss.backward()
            hook.remove()
            optimizer.step()
            try:
                session.flush()
            except ForepropError as error:
                if world.rank == 0:
                    told.append(str(error))
                raise

    with pytest.raises(ForepropError):
        run_cluster(4, work, local_size=2)
    teller = re.match(r"rank (\d) waited", told[0])
    assert teller
    is_of_same_node = int(teller[1]) // 2 == late // 2
    node = rf"node {late // 2} \(ranks {late - 1}, {late}\)"
    named = f"rank {late}" if is_of_same_node else node
    assert re.search(rf"0.weight waits for the push of {named}", told[0])
    relay = rf"the relay of node {late // 2}, step 1: for .* waits for the push of rank {late}\b"
    assert re.search(relay, capfd.readouterr().err)


# Tables that are held row by row.
@pytest.mark.parametrize(
    ("make", "cls", "architecture", "settings"),
    few(
        [Words, *long_cases(Bags, Pairs)],
        [torch.optim.Adagrad, *long_cases(torch.optim.SGD)],
        ["hybrid", *long_cases("p2p")],
        [{"slice_elems": 13, "servers_per_node": 2}, *long_cases({})],
    ),
)
def test_tables_train_as_in_one_process_with_all_the_data(
    make: Callable[[], nn.Module],
    cls: type[torch.optim.Optimizer],
    architecture: str,
    settings: dict[str, Any],
) -> None:
    build, by_rank = with_optimizer(make, cls), ranks(5)
    plain = run_plain(build, train_classifier, merge(by_rank))
    together = run_foreprop(
        build, train_classifier, by_rank, local_size=2, architecture=architecture, **settings
    )
    for trained in together:
        check_same_bits(trained.model, together[0].model)
        check_close(trained.model, plain.model)


@pytest.mark.parametrize(
    "settings",
    [
        {"slice_elems": 7, "servers_per_node": 3},
        *long_cases({"slice_elems": 7}, {"servers_per_node": 3}, {"preset": "kvstore"}),
    ],
    ids=str,
)
def test_tables_have_the_same_bits_for_every_partition(settings: dict[str, Any]) -> None:
    build, by_rank = with_optimizer(Words, torch.optim.Adagrad), ranks(4)
    wanted, *_ = run_foreprop(build, train_classifier, by_rank, local_size=2)
    run, *_ = run_foreprop(build, train_classifier, by_rank, local_size=2, **settings)
    check_same_bits(run.model, wanted.model)


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_grad_norm": 0.05, "ema": 0.9},
        {"wire_dtype": "bfloat16"},
        *long_cases({"clip_grad_norm": 0.05}, {"ema": 0.9}, {"preset": "kvstore"}),
    ],
    ids="-".join,
)
def test_tables_train_as_without(settings: dict[str, Any]) -> None:
    build, by_rank = with_optimizer(Words, torch.optim.Adagrad), ranks(4)
    runs = {
        way: run_foreprop(
            build, train_classifier, by_rank, local_size=2, local_aggregation=way, **settings
        )
        for way in ("auto", "off")
    }
    tolerance = 0.05 if "wire_dtype" in settings else 2e-4
    for trained in runs["auto"]:
        check_same_bits(trained.model, runs["auto"][0].model)
        for name, value in runs["off"][0].model.items():
            torch.testing.assert_close(trained.model[name], value, rtol=tolerance, atol=tolerance)


# What leaves the node.
def _relays(session: foreprop.Session) -> list[Relay]:
    handles = session._training.backends.all[-1].connections.handles  # type: ignore[attr-defined]
    served = [handle._server for handle in handles]
    return [server for server in served if isinstance(server, Relay)]


def _count(build: Build, by_rank: Sequence[Sequence[Batch]], **settings: Any) -> tuple[int, ...]:
    """The bytes that a worker pushes and gets, and that its node with all workers does."""

    def work(world: World) -> tuple[int, ...]:
        model, optimizer = build_seeded(build, world.rank)
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            train_classifier(model, optimizer, by_rank[world.rank])
            session.flush()
            stats = session.stats()
            links = [relay.link for relay in _relays(session)]
        sent, received = sum(x.sent_bytes for x in links), sum(x.received_bytes for x in links)
        return stats["pushed_bytes"], stats["reply_bytes"], sent, received

    counts = run_cluster(len(by_rank), work, local_size=len(by_rank) // 2)
    assert [count[2] > 0 for count in counts] == [True] + [False] * (len(by_rank) // 2 - 1) + [
        True
    ] + [False] * (len(by_rank) // 2 - 1)
    return counts[len(by_rank) // 2]


@pytest.mark.parametrize("workers_per_node", [2, *long_cases(3)])
def test_a_node_sends_and_gets_what_one_worker_does(workers_per_node: int) -> None:
    """Beside headers and hellos: without relays it would be as often as there are workers."""
    build = with_sgd(lambda: nn.Sequential(nn.Linear(5, 2000), nn.Linear(2000, 3)))
    pushed, replied, sent, received = _count(build, batches_of(2 * workers_per_node, count=6))
    assert pushed <= sent < 1.1 * pushed
    assert replied <= received < 1.1 * replied


def test_rows_that_several_workers_look_up_are_pushed_and_fetched_once() -> None:
    """All ranks have the same words, so a node has no more rows than one worker."""
    build = with_optimizer(lambda: Bags(), torch.optim.Adagrad)
    same = [words_of(0, count=6)] * 4
    pushed, replied, sent, received = _count(build, same, whole_tables="none")
    headers = 28 * 40 + 4000  # and hellos, the optimizer's numbers, pulls
    assert pushed <= sent < pushed + headers
    assert replied <= received < replied + headers


def test_a_relay_s_trace_has_its_stages(tmp_path: Path) -> None:
    """For each slice and step one sum of the node's, and what came before and after it."""

    def work(world: World) -> int:
        model, optimizer = build_seeded(BUILD)
        with foreprop.parallelize(model, optimizer, world=world, trace=str(tmp_path)) as session:
            train_classifier(model, optimizer, batches_of(1)[0])
        return int(session.stats()["pushes"])  # an answer may come before its push is counted

    pushes = run_cluster(4, work, local_size=2)[0]
    files = sorted(tmp_path.glob("relay-*.json"))
    assert len(files) == 4  # of each node to each server
    stages = Counter(
        event["cat"]
        for file in files
        for event in json.loads(file.read_text())["traceEvents"]
        if event["ph"] == "X" and event["args"]["step"] > 0  # 0: the first values
    )
    assert stages["node_summed"] == stages["push_sent"] == stages["reply_received"] == 2 * pushes
    assert stages["push_received"] == stages["reply_sent"] == 4 * pushes


# When there is nothing to do.
@pytest.mark.parametrize(("size", "local_size"), [(2, 1), (2, 2)])
def test_it_cannot_be_forced_where_nothing_would_be_aggregated(size: int, local_size: int) -> None:
    def work(world: World) -> None:
        model, optimizer = build_seeded(BUILD)
        foreprop.parallelize(model, optimizer, world=world, local_aggregation="on")

    with pytest.raises(ConfigError, match="local_aggregation is 'on' with"):
        run_cluster(size, work, local_size=local_size)


def test_it_can_be_turned_off() -> None:
    def work(world: World) -> int:
        model, optimizer = build_seeded(BUILD)
        with foreprop.parallelize(
            model, optimizer, world=world, local_aggregation="off"
        ) as session:
            train_classifier(model, optimizer, batches_of(1)[0])
            return len(_relays(session))

    assert run_cluster(4, work, local_size=2) == [0, 0, 0, 0]

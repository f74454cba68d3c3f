"""Gradients and new values in half precision on the wire, against the same casts in one process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.config import Config
from foreprop.engine.tensors import DTYPES
from foreprop.engine.world import World
from foreprop.errors import HandshakeError
from tests.cluster import run_cluster, worlds
from tests.conformance.aggregation_runs import MODELS, Values, data_of, together, values_of
from tests.conformance.matrices import PROTOCOLS, few
from tests.conformance.parity import (
    Batch,
    Build,
    batches_of,
    build_seeded,
    by_servers,
    check_same_bits,
    make_batches,
    run_foreprop,
    servers_only,
    train_classifier,
    with_sgd,
)
from tests.conformance.scaler_runs import make_scaler
from tests.conformance.sparse_models import Words, with_optimizer, words_of
from tests.tiers import long_cases

pytestmark = by_servers  # which keep the values in full
HALVES = ("bfloat16", "float16")
RING = Config.resolve().architecture == "ring"
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""The largest relative error of a cast to the nearest, and a little more."""


def cast(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not gradient.is_sparse:
        return gradient.to(dtype)
    rows = gradient.coalesce()
    return torch.sparse_coo_tensor(rows.indices(), rows.values().to(dtype), rows.shape)


def emulate(build: Build, by_rank: Sequence[Sequence[Batch]], wire_dtype: str) -> Values:
    """What every rank sees after each step, computed in one process with the casts in its loop."""
    dtype = DTYPES[wire_dtype]
    master, optimizer = build_seeded(build)
    shown = copy.deepcopy(master)
    values = []
    for batches in zip(*by_rank, strict=True):
        sums: list[torch.Tensor] = []
        for x, y in batches:
            shown.zero_grad()
            F.cross_entropy(shown(x), y).backward()
            own = [cast(p.grad, dtype) for p in shown.parameters() if p.grad is not None]
            if not RING:  # servers add up in float32, collectives in the wire's type
                own = [gradient.to(torch.float32) for gradient in own]
            sums = [a + b for a, b in zip(sums, own, strict=True)] if sums else own
        for parameter, total in zip(master.parameters(), sums, strict=True):
            parameter.grad = total.to(torch.float32) / len(by_rank)
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(shown.parameters(), master.parameters(), strict=True):
                mine.copy_(theirs if RING else theirs.to(dtype))
        values.append(values_of(shown))
    return values


def check_bits(got: Values, wanted: Values) -> None:
    for ours, theirs in zip(got, wanted, strict=True):
        check_same_bits(ours, theirs)


@pytest.mark.parametrize(
    ("model", "wire_dtype", "ranks"), few(MODELS, HALVES, [1, 2] if RING else [1, 2, 3])
)
def test_every_step_has_the_bits_of_the_casts(model: str, wire_dtype: str, ranks: int) -> None:
    build, by_rank = data_of(model, ranks)
    got = together(build, by_rank, wire_dtype=wire_dtype)
    check_bits(got, emulate(build, by_rank, wire_dtype))
    exact = together(build, by_rank)
    assert any(not torch.equal(got[-1][name], exact[-1][name]) for name in exact[-1])


def test_another_layout_is_staged_and_cast() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = MODELS["cnn"][0]().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

    by_rank = data_of("cnn", 2)[1]
    got = together(build, by_rank, wire_dtype="bfloat16", slice_elems=11)
    check_bits(got, emulate(build, by_rank, "bfloat16"))
    for master, seen in masters_of(build, by_rank, wire_dtype="bfloat16", slice_elems=11):
        for name, value in seen.items():
            assert torch.equal(master[name] if RING else master[name].bfloat16().float(), value)


@servers_only
@pytest.mark.parametrize(("wire_dtype", "preset"), few(HALVES, PROTOCOLS))
def test_every_preset(wire_dtype: str, preset: str) -> None:
    build, by_rank = data_of("lstm", 2)
    got = together(build, by_rank, wire_dtype=wire_dtype, preset=preset, servers_per_node=2)
    check_bits(got, emulate(build, by_rank, wire_dtype))


@servers_only
@pytest.mark.parametrize(("servers", "slice_elems"), few([1, 3], [7, 1000, *long_cases(1)]))
def test_every_slice_size_and_number_of_servers(servers: int, slice_elems: int) -> None:
    build, by_rank = data_of("mlp", 2)
    settings: dict[str, Any] = {"servers_per_node": servers, "slice_elems": slice_elems}
    got = together(build, by_rank, wire_dtype="bfloat16", **settings)
    check_bits(got, emulate(build, by_rank, "bfloat16"))


@pytest.mark.parametrize("chunk_elems", [7, *long_cases(1, 1000)])
def test_every_chunk_size_of_a_ring(chunk_elems: int) -> None:
    build, by_rank = data_of("mlp", 3)
    settings: dict[str, Any] = {"architecture": "ring", "wire_dtype": "bfloat16"}
    got = together(build, by_rank, chunk_elems=chunk_elems, **settings)
    wanted = together(build, by_rank, architecture="ring")
    check_near(got, wanted, ROUNDING["bfloat16"])


def check_near(got: Values, wanted: Values, rounding: float, *, factor: float = 16) -> None:
    """Within a few roundings of the largest value, and not within a small part of one."""
    apart = 0.0
    for name, value in wanted[-1].items():
        limit = rounding * float(value.abs().max())
        apart = max(apart, float((got[-1][name] - value).abs().max()) / limit)
    assert 0.01 < apart < factor


@pytest.mark.parametrize(
    ("optimizer", "wire_dtype"),
    few([torch.optim.Adam, *long_cases(torch.optim.SGD)], ["float16", *long_cases("bfloat16")]),
)
def test_training_stays_close_to_that_in_float32(optimizer: Any, wire_dtype: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = MODELS["mlp"][0]()
        return model, optimizer(model.parameters(), lr=0.02)

    by_rank = batches_of(2, count=30)
    wanted = together(build, by_rank)
    check_near(together(build, by_rank, wire_dtype=wire_dtype), wanted, ROUNDING[wire_dtype])


@pytest.mark.parametrize("wire_dtype", ["bfloat16", *long_cases("float16")])
def test_half_the_bytes(wire_dtype: str) -> None:
    steps, by_rank = 4, batches_of(2)
    model_bytes = 4 * sum(p.numel() for p in build_seeded(with_sgd())[0].parameters())
    full = run_foreprop(with_sgd(), train_classifier, by_rank)
    half = run_foreprop(with_sgd(), train_classifier, by_rank, wire_dtype=wire_dtype)
    for rank in range(2):
        assert full[rank].stats["pushed_bytes"] == steps * model_bytes
        assert half[rank].stats["pushed_bytes"] == steps * model_bytes // 2
        if not RING:
            start_bytes = rank * model_bytes  # rank 0's values, in full
            assert full[rank].stats["reply_bytes"] == start_bytes + steps * model_bytes
            assert half[rank].stats["reply_bytes"] == start_bytes + steps * model_bytes // 2


# The servers' copy, and values from rank 0.
class One(nn.Module):
    """A parameter whose gradient is always one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(100))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.weight * torch.ones(100)).sum()


def look(_: torch.Tensor) -> None:
    """Nothing."""


def look_at_data(parameter: torch.Tensor) -> None:
    """Through which a change would leave no trace: while it is pending, that is noticed."""
    assert parameter.data is not None


def clamp(parameter: torch.Tensor) -> None:
    """Changes nothing, but might have."""
    parameter.sum()  # waits
    parameter.clamp_(-2, 2)


def run_ones(change: Callable[[torch.Tensor], object], *, steps: int, lr: float) -> torch.Tensor:
    """What all ranks see of the parameter after so many steps, with a change before each."""

    def loop(model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for x, y in batches:
            with torch.no_grad():
                change(model.weight)
            optimizer.zero_grad()
            model(x, y).backward()
            optimizer.step()

    build, by_rank = with_sgd(One, lr=lr, momentum=0), batches_of(2, count=steps)
    ones, others = run_foreprop(build, loop, by_rank, wire_dtype="bfloat16", slice_elems=30)
    check_same_bits(others.model, ones.model)
    return ones.model["weight"]


def as_seen(value: float) -> torch.Tensor:
    seen = torch.full((100,), value)
    return seen if RING else seen.bfloat16().float()


@pytest.mark.parametrize("change", [look_at_data, clamp, *long_cases(look)])
def test_updates_below_the_wires_precision_add_up(change: Callable[[torch.Tensor], object]) -> None:
    """In bfloat16 itself, 1 - 0.0001 is 1, how often so ever."""
    seen = run_ones(change, steps=100, lr=1e-4)
    assert torch.allclose(seen, as_seen(0.99), rtol=0, atol=1e-5)


def test_a_change_by_hand_of_some_elements_counts_for_those() -> None:
    calls = itertools.count(1)

    def change(parameter: torch.Tensor) -> None:
        parameter.sum()  # waits, so that no rank is ahead
        if next(calls) in (101, 102):  # before step 51, on both ranks
            parameter[:40] = 1 / 3

    seen = run_ones(change, steps=100, lr=1e-4)
    assert torch.allclose(seen[40:], as_seen(0.99)[40:], rtol=0, atol=1e-5)
    changed = torch.full((100,), 1 / 3) - 50e-4
    wanted = changed if RING else changed.bfloat16().float()
    assert torch.allclose(seen[:40], wanted[:40], rtol=0, atol=1e-5)


@servers_only
@pytest.mark.parametrize("preset", PROTOCOLS)
def test_what_has_never_been_updated_is_seen_in_full(preset: str) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.used = nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    by_rank = batches_of(2)
    settings: dict[str, Any] = {"preset": preset, "wire_dtype": "bfloat16"}
    wanted = build_seeded(with_sgd(Partly))[0].state_dict()
    for got in run_foreprop(with_sgd(Partly), train_classifier, by_rank, **settings):
        assert torch.equal(got.model["unused.weight"], wanted["unused.weight"])
        assert torch.equal(got.model["used.weight"], got.model["used.weight"].bfloat16().float())


@pytest.mark.parametrize(
    ("dtype", "wire_dtype"), few([torch.float64, torch.bfloat16, torch.float16], HALVES)
)
def test_parameters_of_other_types_go_as_they_are(dtype: torch.dtype, wire_dtype: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(5, 3).to(dtype)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    by_rank = [[(x.to(dtype), y) for x, y in batches] for batches in batches_of(2)]
    wanted = run_foreprop(build, train_classifier, by_rank)
    got = run_foreprop(build, train_classifier, by_rank, wire_dtype=wire_dtype)
    for ours, theirs in zip(got, wanted, strict=True):
        check_same_bits(ours.model, theirs.model)
        assert ours.stats["pushed_bytes"] == theirs.stats["pushed_bytes"]


def test_a_checkpoint_goes_on_within_rounding() -> None:
    batches = make_batches(12)
    settings: dict[str, Any] = {"world": worlds(1)[0], "wire_dtype": "bfloat16"}
    model, optimizer = build_seeded(with_sgd())
    with foreprop.parallelize(model, optimizer, **settings):
        train_classifier(model, optimizer, batches[:6])
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train_classifier(model, optimizer, batches[6:])
        wanted = values_of(model)
    again, optimizer = build_seeded(with_sgd(), seed=5)
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    with foreprop.parallelize(again, optimizer, **settings):
        train_classifier(again, optimizer, batches[6:])
        got = values_of(again)
    for name, value in wanted.items():
        limit = 4 * ROUNDING["bfloat16"] * float(value.abs().max())
        assert torch.allclose(got[name], value, rtol=0, atol=limit), name


def masters_of(build: Build, by_rank: Sequence[Sequence[Batch]], **settings: Any) -> Any:
    """By rank, the parameters in full after all batches, and as they are seen."""

    def work(world: World) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        model, optimizer = build_seeded(build, seed=world.rank)
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            wanted = values_of(model)
            check_same_bits(session.master_state_dict(), wanted)
            train_classifier(model, optimizer, by_rank[world.rank])
            return session.master_state_dict(), values_of(model)

    return run_cluster(len(by_rank), work)


@pytest.mark.parametrize(
    ("wire_dtype", "settings"),
    few([None, *HALVES], [{"slice_elems": 7, "servers_per_node": 2}, *long_cases({})]),
)
def test_the_parameters_can_be_had_in_full(wire_dtype: Any, settings: dict[str, Any]) -> None:
    settings = {} if RING else settings
    for master, seen in masters_of(with_sgd(), batches_of(2), wire_dtype=wire_dtype, **settings):
        if wire_dtype is None or RING:
            check_same_bits(master, seen)
            continue
        for name, value in master.items():
            assert torch.equal(value.to(DTYPES[wire_dtype]).float(), seen[name])
            assert not torch.equal(value, seen[name])


@servers_only
@pytest.mark.parametrize("architecture", ["p2p", "hybrid"])
def test_rows_can_be_had_in_full(architecture: str) -> None:
    by_rank = [words_of(seed) for seed in range(2)]
    settings = {"architecture": architecture, "servers_per_node": 2, "wire_dtype": "bfloat16"}
    for master, seen in masters_of(with_optimizer(Words), by_rank, **settings):
        table, rounded = master["table.weight"], seen["table.weight"]
        assert torch.equal(table.bfloat16().float(), rounded)
        assert not torch.equal(table, rounded)
        if architecture == "hybrid":
            assert torch.equal(master["out.weight"], seen["out.weight"])


def test_in_full_what_was_changed_by_hand_counts_before_the_next_step() -> None:
    model, optimizer = build_seeded(with_sgd(One, lr=1e-4, momentum=0))
    with foreprop.parallelize(
        model, optimizer, world=worlds(1)[0], wire_dtype="bfloat16"
    ) as session:
        for _ in range(3):
            model(*[torch.ones(1)] * 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        session.flush()
        with torch.no_grad():
            model.weight[0] = 1 / 3
        master = session.master_state_dict()["weight"]
        assert float(master[0]) == pytest.approx(1 / 3)
        assert torch.allclose(master[1:], torch.tensor(1 - 3e-4), rtol=0, atol=1e-6)


@servers_only
def test_moving_averages_are_of_the_full_values() -> None:
    def work(world: World) -> torch.Tensor:
        model, optimizer = build_seeded(with_sgd(One, lr=1e-4, momentum=0))
        with foreprop.parallelize(
            model, optimizer, world=world, wire_dtype="bfloat16", ema=0.5
        ) as session:
            for _ in range(20):
                model(*[torch.ones(1)] * 2).backward()
                optimizer.step()
                optimizer.zero_grad()
            return session.ema_state_dict()["weight"]

    for average in run_cluster(2, work):
        assert torch.allclose(average, torch.full((100,), 1 - 19e-4), rtol=0, atol=1e-6)


# float16's range.
def scaled_run(world: World, batches: Sequence[Batch], **settings: Any) -> tuple[Any, ...]:
    model, optimizer = build_seeded(with_sgd())
    scaler, scales = make_scaler(init_scale=2.0**24, growth_interval=100), []
    with foreprop.parallelize(model, optimizer, world=world, scaler=scaler, **settings):
        for x, y in batches:
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, values_of(model)


def test_gradients_beyond_float16_are_a_scalers_business() -> None:
    """The model computes in float32: that gradients overflow is the wire's doing alone."""
    by_rank = [batches * 10 for batches in batches_of(2)]
    run = run_cluster(2, lambda world: scaled_run(world, by_rank[world.rank], wire_dtype="float16"))
    (scales, ours), (others, theirs) = run
    assert scales == others
    check_same_bits(ours, theirs)
    before = [2.0**24, *scales]
    made = [step for step, scale in enumerate(scales) if scale == before[step]]
    assert 10 < len(made) < 35
    assert all(value.isfinite().all() for value in ours.values())
    kept = [[batches[step] for step in made] for batches in by_rank]
    exact = run_cluster(2, lambda world: scaled_run(world, kept[world.rank]))
    assert set(exact[0][0]) == {2.0**24}  # nothing overflows there
    check_near([ours], [exact[0][1]], ROUNDING["float16"])


def test_without_a_scaler_they_are_infinite() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        return with_sgd(One, lr=1.0, momentum=0)()

    def loop(model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        (model(*batches[0]) * 1e5).backward()
        optimizer.step()

    for wire_dtype, wanted in (("float16", torch.inf), ("bfloat16", 1e5)):
        for got in run_foreprop(build, loop, batches_of(2), wire_dtype=wire_dtype):
            assert torch.allclose(got.model["weight"], torch.tensor(-wanted), rtol=0.01)


# Agreement.
def test_ranks_that_disagree_are_told_both_values() -> None:
    def work(world: World) -> None:
        model, optimizer = build_seeded(with_sgd())
        wire_dtype = "bfloat16" if world.rank else None
        with foreprop.parallelize(
            model, optimizer, world=world, join_timeout_s=10, wire_dtype=wire_dtype
        ):
            pass

    with pytest.raises(HandshakeError, match="wire_dtype: rank 0 has None, rank 1 has 'bfloat16'"):
        run_cluster(2, work)


def test_it_is_said_at_the_start() -> None:
    for wire_dtype in (None, "float16"):
        model, optimizer = build_seeded(with_sgd())
        with foreprop.parallelize(
            model, optimizer, world=worlds(1)[0], wire_dtype=wire_dtype
        ) as session:
            assert ("wire_dtype=float16" in session.describe()) == (wire_dtype is not None)


# Rows.
@servers_only
@pytest.mark.parametrize(
    ("settings", "wire_dtype"), few([{}, {"slice_elems": 12, "servers_per_node": 3}], HALVES)
)
def test_rows_have_the_bits_of_the_casts(settings: dict[str, Any], wire_dtype: str) -> None:
    build = with_optimizer(Words)
    by_rank = [words_of(seed, once=True) for seed in range(2)]
    got = together(build, by_rank, wire_dtype=wire_dtype, **settings)
    check_bits(got, emulate(build, by_rank, wire_dtype))


@servers_only
@pytest.mark.parametrize("architecture", ["p2p", "hybrid"])
def test_rows_take_fewer_bytes(architecture: str) -> None:
    """Elements half as many, row numbers as many."""
    by_rank = [words_of(seed) for seed in range(2)]

    def loop(model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        train_classifier(model, optimizer, batches)
        model.table.weight.sum()

    def run(**settings: Any) -> Any:
        build = with_optimizer(Words)
        return run_foreprop(build, loop, by_rank, architecture=architecture, **settings)

    full, half = run(), run(wire_dtype="bfloat16")
    for rank in range(2):
        ours, theirs = half[rank].stats, full[rank].stats
        assert 0.5 < ours["pushed_bytes"] / theirs["pushed_bytes"] < 0.65
        assert ours["reply_bytes"] < 0.8 * theirs["reply_bytes"]
    check_same_bits(half[0].model, half[1].model)
    check_near([half[0].model], [full[0].model], ROUNDING["bfloat16"])


@servers_only
@pytest.mark.parametrize("change", [look_at_data, clamp, *long_cases(look)])
def test_updates_of_rows_add_up_too(change: Callable[[torch.Tensor], object]) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4, sparse=True)
            nn.init.ones_(self.table.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(torch.arange(5)).sum()

    def loop(model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for x, _ in batches:
            with torch.no_grad():
                change(model.table.weight)
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()

    build, by_rank = with_optimizer(Table, lr=1e-4), batches_of(2, count=50)
    for got in run_foreprop(build, loop, by_rank, wire_dtype="bfloat16"):
        seen, wanted = got.model["table.weight"], as_seen(0.995)[:4]
        assert torch.equal(seen[:5], wanted.expand(5, 4))
        assert torch.equal(seen[5:], torch.ones(5, 4))

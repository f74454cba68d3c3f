"""Codecs on the wire: with the exact one no bit changes, whatever the loop does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.core.frames import Stage
from foreprop.engine.trace import CodecStage
from foreprop.engine.world import World
from foreprop.errors import ConfigError, HandshakeError, TrainingLoopError
from foreprop.tools.report.tracefile import read_folder
from tests.cluster import run_cluster, worlds
from tests.conformance.aggregation_runs import (
    MODELS,
    Values,
    data_of,
    scaled_to,
    together,
    values_of,
)
from tests.conformance.matrices import PROTOCOLS, few
from tests.conformance.parity import (
    Batch,
    Build,
    batches_of,
    build_seeded,
    by_servers,
    check_same_bits,
    check_same_optimizer_state,
    make_batches,
    run_foreprop,
    servers_only,
    train_classifier,
    with_sgd,
)
from tests.conformance.scaler_runs import make_scaler
from tests.conformance.sparse_models import ManyWords, with_optimizer
from tests.tiers import long_cases

pytestmark = servers_only


def wide() -> nn.Module:
    """Large enough for every plane to be encoded in some slices, and sent as it is in others."""
    return nn.Sequential(nn.Linear(5, 400), nn.Tanh(), nn.Linear(400, 300), nn.Linear(300, 3))


def with_wide(optimizer: Any = torch.optim.SGD, **options: Any) -> Build:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = wide()
        return model, optimizer(model.parameters(), **{"lr": 0.05, **options})

    return build


def check_values(got: Values, wanted: Values) -> None:
    assert len(got) == len(wanted) > 0
    for ours, theirs in zip(got, wanted, strict=True):
        check_same_bits(ours, theirs)


ALONE: dict[str, Any] = {"check_finite": True}
"""Then no parameter shares a slice, whose marks cross, too."""


def check_no_bit_changes(build: Build, by_rank: Sequence[Sequence[Batch]], **settings: Any) -> None:
    wanted = together(build, by_rank, **settings)
    check_values(together(build, by_rank, compression="lossless", **settings), wanted)


# Exact.
@pytest.mark.parametrize(("model", "ranks"), few(MODELS, [1, 2, 3]))
def test_every_step_of_every_model(model: str, ranks: int) -> None:
    check_no_bit_changes(*data_of(model, ranks))


@pytest.mark.parametrize(
    ("optimizer", "ranks"),
    few([torch.optim.Adam, *long_cases(torch.optim.SGD)], [2, *long_cases(3)]),
)
def test_large_slices(optimizer: Any, ranks: int) -> None:
    build, by_rank = with_wide(optimizer, lr=0.01), batches_of(ranks)
    wanted = run_foreprop(build, train_classifier, by_rank, **ALONE)
    got = run_foreprop(build, train_classifier, by_rank, compression="lossless")
    for ours, theirs in zip(got, wanted, strict=True):
        check_same_bits(ours.model, theirs.model)
        check_same_optimizer_state(ours.optimizer, theirs.optimizer)
        check_bytes(ours.stats, theirs.stats)


def check_bytes(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Totals are of what crosses; what it would have been is told beside them."""
    assert ours["raw_pushed_bytes"] == theirs["pushed_bytes"]
    assert ours["raw_reply_bytes"] == theirs["reply_bytes"]
    assert 0.5 < ours["pushed_bytes"] / theirs["pushed_bytes"] < 0.95
    assert 0.5 < ours["reply_bytes"] / theirs["reply_bytes"] < 0.95
    assert "raw_pushed_bytes" not in theirs


@pytest.mark.parametrize("preset", PROTOCOLS)
def test_every_preset(preset: str) -> None:
    check_no_bit_changes(with_wide(), batches_of(2), preset=preset, servers_per_node=2)


@pytest.mark.parametrize(
    "settings",
    [
        {"slice_elems": 7, "servers_per_node": 3},
        {"wire_dtype": "bfloat16"},
        {"ema": 0.9, "clip_grad_norm": 0.1},
        {"update": "workers"},
        *long_cases({"slice_elems": 1}, {"wire_dtype": "float16"}, {"clip_grad_value": 0.01}),
        *long_cases({"reduction": "sum", "check_finite": True}),
    ],
    ids=str,
)
def test_every_setting(settings: dict[str, Any]) -> None:
    build = with_sgd(lr=0.05) if "slice_elems" in settings else with_wide()
    check_no_bit_changes(build, batches_of(2), **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        *long_cases({"preset": "kvstore"}, {"preset": "tensorflow"}, {"clip_grad_norm": 0.1}),
        *long_cases({"wire_dtype": "bfloat16"}, {"update": "workers"}),
    ],
    ids=str,
)
def test_relays_change_no_bit(settings: dict[str, Any]) -> None:
    by_rank = batches_of(3)
    settings = {"local_size": 2, **settings}
    wanted = run_foreprop(with_wide(), train_classifier, by_rank, **settings)
    got = run_foreprop(with_wide(), train_classifier, by_rank, compression="lossless", **settings)
    for ours, theirs in zip(got, wanted, strict=True):
        check_same_bits(ours.model, theirs.model)
        assert ours.stats["reply_bytes"] < 0.97 * theirs.stats["reply_bytes"]


def test_a_norm_that_the_loop_asks_for() -> None:
    def loop(model: Any, optimizer: Any, batches: Sequence[Batch]) -> list[float]:
        norms: list[float] = []
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            scaled_to(0.1, norms)(model)
            optimizer.step()
        return norms

    wanted = run_foreprop(with_wide(), loop, batches_of(2))
    for got in run_foreprop(with_wide(), loop, batches_of(2), compression="lossless"):
        assert got.result == wanted[0].result
        check_same_bits(got.model, wanted[0].model)


def test_accumulated_gradients() -> None:
    def loop(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        for number, (x, y) in enumerate(batches):
            F.cross_entropy(model(x), y).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()

    wanted = run_foreprop(with_wide(), loop, batches_of(2))
    for got in run_foreprop(with_wide(), loop, batches_of(2), compression="lossless"):
        check_same_bits(got.model, wanted[0].model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *long_cases(torch.float64)])
def test_other_types(dtype: torch.dtype) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = wide().to(dtype)
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    by_rank = [[(x.to(dtype), y) for x, y in batches] for batches in batches_of(2)]
    check_no_bit_changes(build, by_rank)


def test_another_layout_is_staged() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = MODELS["cnn"][0]().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

    check_no_bit_changes(build, data_of("cnn", 2)[1], slice_elems=40)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"local_size": 2},
        *long_cases({"local_size": 2, "ema": 0.9}, {"wire_dtype": "bfloat16"}),
        *long_cases({"slice_elems": 1000}, {"clip_grad_norm": 0.1}),
    ],
    ids=str,
)
def test_tables_row_by_row(settings: dict[str, Any]) -> None:
    ranks = 1 + settings.get("local_size", 1)  # of the last node one

    build = with_optimizer(ManyWords, torch.optim.Adagrad, lr=0.1)

    def loop(model: Any, optimizer: Any, batches: Sequence[Batch]) -> dict[str, torch.Tensor]:
        train_classifier(model, optimizer, batches)
        return values_of(model)

    generator = torch.Generator().manual_seed(3)
    by_rank = [
        [
            (
                torch.randint(300, (20, 30), generator=generator),
                torch.randint(3, (20,), generator=generator),
            )
            for _ in range(3)
        ]
        for _ in range(ranks)
    ]
    wanted = run_foreprop(build, loop, by_rank, **settings, **ALONE)
    for compression in ("lossless", {"table.*": "none", "*": "lossless"}):
        got = run_foreprop(build, loop, by_rank, compression=compression, **settings)
        for ours, theirs in zip(got, wanted, strict=True):
            check_same_bits(ours.result, theirs.result)
            check_same_bits(ours.model, theirs.model)
            if compression == "lossless" and "local_size" not in settings:
                for kind in ("pushed_bytes", "reply_bytes"):
                    assert ours.stats[kind] < 0.97 * theirs.stats[kind]
                    assert ours.stats[f"raw_{kind}"] == theirs.stats[kind]


def test_lossy_codecs_are_not_for_tables() -> None:
    model, optimizer = with_optimizer(ManyWords, torch.optim.Adagrad)()
    says = r"int8 is chosen for table.weight, which is held row by row.*'lossless' is for tables"
    with pytest.raises(ConfigError, match=says):
        foreprop.parallelize(model, optimizer, world=worlds(1)[0], compression="int8")


# What rank 0 says, and what is changed by hand.
def change_all(model: Any, _: torch.Generator) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def change_differently(model: Any, generator: torch.Generator) -> None:
    """Rank 0's count, but nobody's memory is what the servers take it for."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))


def change_through_data(model: Any, _: torch.Generator) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def replace_data(model: Any, _: torch.Generator) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


@pytest.mark.parametrize(
    ("change", "wire_dtype", "ranks"),
    few(
        [change_differently, change_through_data, *long_cases(change_all, replace_data)],
        [None, "bfloat16"],
        [2, *long_cases(3)],
    ),
)
def test_changes_by_hand(
    change: Callable[[Any, torch.Generator], None], wire_dtype: str | None, ranks: int
) -> None:
    """Values cross as they are then, and differences go on from there. Of three, by relays."""

    def loop(model: Any, optimizer: Any, batches: Sequence[Batch]) -> Values:
        values = []
        generator = torch.Generator().manual_seed(int(batches[0][0].abs().sum() * 1e3))
        for step, (x, y) in enumerate(batches):
            if step in (2, 3, 6):
                change(model, generator)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if step + 1 not in (2, 3, 6) or change is not change_through_data:
                values.append(values_of(model))  # waits; from then on p.data is not noticed
        return values

    build, by_rank = with_wide(), batches_of(ranks, count=8)
    settings: dict[str, Any] = {"wire_dtype": wire_dtype, "local_size": ranks - 1}
    wanted = run_foreprop(build, loop, by_rank, **settings)
    got = run_foreprop(build, loop, by_rank, compression="lossless", **settings)
    for ours, theirs in zip(got, wanted, strict=True):
        check_values(ours.result, theirs.result)


@pytest.mark.parametrize("wire_dtype", ["bfloat16", *long_cases(None)])
@by_servers
def test_what_only_another_rank_changes_through_data_is_lost_as_ever(
    wire_dtype: str | None,
) -> None:
    def work(world: World, compression: str | None) -> dict[str, torch.Tensor]:
        model, optimizer = build_seeded(with_wide(), seed=world.rank)
        settings: Any = {"wire_dtype": wire_dtype, "compression": compression}
        with foreprop.parallelize(model, optimizer, world=world, **settings):
            for step, (x, y) in enumerate(batches_of(2, count=6)[world.rank]):
                if step == 3 and world.rank == 1:
                    change_through_data(model, torch.Generator())
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            return values_of(model)

    wanted = run_cluster(2, lambda world: work(world, None))
    got = run_cluster(2, lambda world: work(world, "lossless"))
    for ours, theirs in zip(got, wanted, strict=True):
        check_same_bits(ours, theirs)
    check_same_bits(got[1], got[0])


@by_servers
def test_a_change_that_leaves_no_trace_is_an_error() -> None:
    model, optimizer = build_seeded(with_wide())
    with pytest.raises(TrainingLoopError, match=r"^0.weight was changed before its update of st"):  # noqa: PT012, SIM117
        with foreprop.parallelize(
            model, optimizer, world=worlds(1)[0], compression="lossless"
        ) as session:
            train_classifier(model, optimizer, make_batches(2))
            session.flush()
            model[0].weight.detach().numpy()[0] += 1
            train_classifier(model, optimizer, make_batches(2))


def test_a_parameter_that_is_not_used_in_every_step() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.other, self.step = nn.Linear(5, 300), nn.Linear(300, 3), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.step += 1
            hidden = self.used(x)
            return self.other(hidden) if self.step % 2 else hidden[:, :3]

    check_no_bit_changes(with_sgd(Sometimes), batches_of(2, count=6))


def test_a_scaler_skips_the_same_steps() -> None:
    def work(world: World, **settings: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        model, optimizer = build_seeded(with_wide())
        scaler, scales = make_scaler(), []
        with foreprop.parallelize(model, optimizer, world=world, scaler=scaler, **settings):
            for step, (x, y) in enumerate(batches_of(2, count=12)[world.rank]):
                optimizer.zero_grad()
                factor = torch.inf if step in (3, 4, 8) and world.rank == 1 else 1.0
                scaler.scale(F.cross_entropy(model(x), y) * factor).backward()
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
            return scales, values_of(model)

    wanted = run_cluster(2, work)
    assert len(set(wanted[0][0])) == 3
    for got in run_cluster(2, lambda world: work(world, compression="lossless")):
        assert got[0] == wanted[0][0]
        check_same_bits(got[1], wanted[0][1])


def test_a_checkpoint_goes_on_with_the_same_bits() -> None:
    def run(compression: str | None, saved: Any = None) -> Any:
        model, optimizer = build_seeded(with_wide(torch.optim.Adam, lr=0.01))
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        with foreprop.parallelize(
            model, optimizer, world=worlds(1)[0], compression=compression
        ) as session:
            train_classifier(model, optimizer, make_batches(5))
            assert session.state_dict() == {"residuals": {}}
            check_same_bits(session.master_state_dict(), values_of(model))
            return values_of(model), optimizer.state_dict()

    first = run("lossless")
    check_same_bits(run("lossless", first)[0], run(None, run(None))[0])


def test_a_trace_has_what_is_encoded_and_decoded(tmp_path: Path) -> None:
    """Pushes on the worker's side, answers on the server's, and each on the other one's."""
    settings: dict[str, Any] = {"compression": "lossless", "trace": str(tmp_path)}
    run_foreprop(with_wide(), train_classifier, batches_of(2), **settings)
    for trace in read_folder(tmp_path):
        spans = [(span["cat"], span["args"]["step"], span["args"]["slice"]) for span in trace.spans]
        for stage in CodecStage:
            own = {span[1:] for span in spans if span[0] == stage.value}
            assert {step for step, _ in own} >= {2, 3, 4}, (trace.process, stage)
        sent = Stage.PUSH_SENT if trace.rank is not None else Stage.REPLY_SENT
        assert {span[1:] for span in spans if span[0] == sent.value} >= {
            span[1:] for span in spans if span[0] == CodecStage.ENCODED.value
        }


# What is said and refused.
def test_it_is_said_at_the_start_and_ranks_must_agree() -> None:
    model, optimizer = build_seeded(with_sgd())
    with foreprop.parallelize(
        model, optimizer, world=worlds(1)[0], compression={"*.weight": "lossless"}
    ) as session:
        assert "compression=*.weight=lossless (exact);" in session.describe()

    def work(world: World) -> None:
        model, optimizer = build_seeded(with_sgd())
        compression = "lossless" if world.rank else None
        with foreprop.parallelize(
            model, optimizer, world=world, join_timeout_s=10, compression=compression
        ):
            pass

    says = r"knobs.compression: rank 0 has \(\), rank 1 has \(\('\*', 'lossless'\),\)"
    with pytest.raises(HandshakeError, match=says):
        run_cluster(2, work)


@pytest.mark.parametrize("compression", ["zip", {"nothing.*": "lossless"}])
def test_what_is_refused_changes_nothing(compression: Any) -> None:
    model, optimizer = build_seeded(with_sgd())
    with pytest.raises(ConfigError, match="compression: no "):
        foreprop.parallelize(model, optimizer, world=worlds(1)[0], compression=compression)
    train_classifier(model, optimizer, make_batches(1))
    with pytest.raises(ConfigError, match="compression: no codec is called 'zip'"):
        foreprop.parallelize(model, optimizer, compression="zip")

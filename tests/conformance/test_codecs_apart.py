"""Codecs where workers may be in different steps, or not all are counted: `compression.residuals`.

Pushes are encoded, with a residual that moves when a push counts. Answers are values by themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.engine.world import World
from tests import matrix as exact
from tests.cluster import run_cluster
from tests.conformance.counting_runs import (
    counted_in,
    late_run,
    lose_one,
    pieces_of,
    trained_by_arithmetic,
)
from tests.conformance.parity import (
    Batch,
    Build,
    batches_of,
    build_seeded,
    check_same_bits,
    run_foreprop,
    servers_only,
    snapshot,
    train_classifier,
    with_sgd,
)
from tests.tiers import long_cases

pytestmark = servers_only  # each test names the architecture that it needs

LOSSY = ["int8", "topk:0.3", *long_cases("int4", "randomk:0.3", "bf16")]
APART: dict[str, Any] = {"architecture": "p2p", "step_timeout_s": 30.0}


def wide_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
    )


def build_for(codec: str) -> tuple[Build, dict[str, Any]]:
    """A model, and settings: slices that are long enough for the codec."""
    lossless = codec == "lossless"
    build = with_sgd(wide_model) if lossless else with_sgd()
    return build, {"compression": codec, "slice_elems": 3000 if lossless else 13}


def check_by_hand(
    codec: str, found: dict[str, torch.Tensor], by_rank: Any, pieces: Any, counted: Any
) -> None:
    """A loop with the codec in it has the same bits; what is exact is compared with sessions."""
    if codec != "lossless":
        about = (build_for(codec)[0], by_rank, pieces, counted)
        check_same_bits(found, trained_by_arithmetic(*about, codec=codec)[0])


def replayed(folder: Path, ranks: int, steps: int, codec: str, **settings: Any) -> Any:
    """Rank 0's values of a session that counts what the log says."""
    build, usual = build_for(codec)
    about = {**usual, "architecture": "p2p", "update": "servers", "counted_replay": str(folder)}
    by_rank = batches_of(ranks, count=steps)
    return run_foreprop(build, train_classifier, by_rank, **{**about, **settings})[0].model


class Everybody:
    """As a log that has all of one rank's pushes."""

    def at(self, slice_: int, step: int) -> tuple[int, ...]:
        return (0,)


# Workers in different steps.
@pytest.mark.parametrize("codec", ["lossless", *LOSSY])
def test_one_worker_alone_has_the_bits_of_a_loop_with_the_codec_in_it(codec: str) -> None:
    """Each push is an update, and its answer is the server's values."""
    by_rank = batches_of(1)
    build, settings = build_for(codec)
    pieces: list[Any] = []

    def trained(**more: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        def work(world: World) -> Any:
            model, optimizer = build_seeded(build)
            about = {**APART, "staleness": "async", **settings, **more}
            with foreprop.parallelize(model, optimizer, world=world, **about) as session:
                pieces[:] = pieces_of(session)
                train_classifier(model, optimizer, by_rank[0])
                session.flush()
                check_same_bits(session.master_state_dict(), model.state_dict())
                return snapshot(model.state_dict()), session.stats()

        (found,) = run_cluster(1, work)
        return found  # type: ignore[no-any-return]

    found, stats = trained()
    everybody: Any = [Everybody()] * (1 + max(piece.server for piece in pieces))
    check_by_hand(codec, found, by_rank, pieces, everybody)
    if codec == "lossless":
        check_same_bits(found, trained(compression=None)[0])
    assert stats["pushed_bytes"] < stats["raw_pushed_bytes"]
    assert (stats["reply_bytes"] < stats["raw_reply_bytes"]) == (codec == "lossless")


def linear(settings: dict[str, Any], steps: int = exact.STEPS) -> list[Any]:
    """By rank: values, servers' values and residuals, of gradients that no value changes."""

    def work(world: World) -> Any:
        model, optimizer = exact.make()
        with foreprop.parallelize(model, optimizer, world=world, **APART, **settings) as session:
            for batch in exact.batches_of(world.rank)[:steps]:
                optimizer.zero_grad()
                model(*batch).backward()
                optimizer.step()
            session.flush()
            found = snapshot(model.state_dict())
            return found, session.master_state_dict(), session.state_dict()["residuals"]

    return run_cluster(2, work)


@pytest.mark.parametrize("staleness", [2, *long_cases("async")])
@pytest.mark.parametrize("codec", ["topk:0.3", "randomk:0.3", "dgc:0.3"])
def test_in_any_order_updates_are_those_of_pushes_in_step(codec: str, staleness: Any) -> None:
    """What is sent depends on a rank's own gradients, and all sums are exact."""
    (one, masters, kept), (other, _, _) = linear({"compression": codec, "staleness": staleness})
    (_, in_step, as_kept), _ = linear({"compression": codec, "update": "servers"})
    check_same_bits(one, other)
    check_same_bits(one, masters)
    check_same_bits(one, in_step)
    for name, arrays in as_kept.items():
        check_same_bits(kept[name], arrays)


def test_with_staleness_values_and_residuals_have_all_gradients() -> None:
    whole = linear({"staleness": 2})[0][0]
    (found, _, first), (_, _, second) = linear({"staleness": 2, "compression": "int4"})
    for name, value in found.items():
        left_out = sum(kept[name]["error"] for kept in (first, second) if name in kept)
        full = value - exact.LR / 2 * left_out
        torch.testing.assert_close(full, whole[name], rtol=0, atol=1e-5)
    assert any(not torch.equal(found[name], whole[name]) for name in whole)


# Not all counted.
@pytest.mark.parametrize("codec", ["lossless", *LOSSY])
def test_a_late_workers_residual_is_as_if_its_push_had_not_been(tmp_path: Path, codec: str) -> None:
    """The log and a loop with the codec in it give the same bits, and so does a replay."""
    build, settings = build_for(codec)
    found, stats, pieces = late_run(tmp_path, build, **settings)
    for other in found[1:]:
        check_same_bits(other, found[0])
    assert stats[2]["late_slices"] > 0
    counted, by_rank = counted_in(tmp_path, 3, pieces), batches_of(3, count=8)
    check_by_hand(codec, found[0], by_rank, pieces, counted)
    check_same_bits(found[0], replayed(tmp_path, 3, 8, codec))
    if codec == "lossless":
        check_same_bits(found[0], replayed(tmp_path, 3, 8, codec, compression=None))


@pytest.mark.parametrize("codec", ["lossless", *LOSSY])
def test_survivors_have_the_bits_of_who_was_counted(tmp_path: Path, codec: str) -> None:
    build, settings = build_for(codec)
    found, stats, pieces = lose_one(tmp_path, 1, 3, 2, build, update="servers", **settings)
    check_same_bits(found[0], found[2])
    counted, by_rank = counted_in(tmp_path, 3, pieces), batches_of(3, count=6)
    check_by_hand(codec, found[0], by_rank, pieces, counted)
    if codec == "lossless":
        about: dict[str, Any] = {"compression": None, "local_size": 3, "servers_per_node": 2}
        check_same_bits(found[0], replayed(tmp_path, 3, 6, codec, **about))
    assert (stats[0]["reply_bytes"] < stats[0]["raw_reply_bytes"]) == (codec == "lossless")


# What comes of it.
@pytest.mark.parametrize(
    "settings", [{"staleness": 2}, {"backup_workers": 1}], ids=["staleness", "backup"]
)
def test_int8_beside_them_trains_as_well(settings: dict[str, Any]) -> None:
    """A classifier's loss falls to about what it falls to without a codec."""
    means = torch.randn(3, 5, generator=torch.Generator().manual_seed(7)) * 2

    def batches(rank: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(rank)
        targets = torch.randint(0, 3, (60, 32), generator=generator)
        return [(means[y] + torch.randn(32, 5, generator=generator), y) for y in targets]

    def last_losses(**more: Any) -> list[float]:
        def work(world: World) -> tuple[float, float]:
            model, optimizer = build_seeded(with_sgd(momentum=0.5))
            about = {**APART, **settings, **more}
            x, y = (torch.cat(parts) for parts in zip(*batches(9), strict=True))
            with torch.no_grad():  # Before there are others, whose updates a rank apart takes.
                before = float(F.cross_entropy(model(x), y))
            with foreprop.parallelize(model, optimizer, world=world, **about) as session:
                train_classifier(model, optimizer, batches(world.rank))
                session.flush()
                with torch.no_grad():
                    return before, float(F.cross_entropy(model(x), y))

        first, *others = run_cluster(3, work)
        assert all(other == first for other in others)
        return list(first)

    before, plain = last_losses()
    _, coded = last_losses(compression="int8")
    assert plain < before / 4
    assert coded == pytest.approx(plain, rel=0.2)

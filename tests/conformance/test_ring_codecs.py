"""Codecs in a ring: sums of codes, what each rank keeps, and which codecs cannot be added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import foreprop
from foreprop.config import Config
from foreprop.core.codec import Place
from foreprop.engine.world import World
from foreprop.errors import ConfigError, HandshakeError
from foreprop.features.compression.sparse import RandomK, SentShare
from tests.cluster import run_cluster, worlds
from tests.conformance.aggregation_runs import Values, values_of
from tests.conformance.parity import (
    Batch,
    batches_of,
    build_seeded,
    check_same_bits,
    run_foreprop,
    servers_only,
    train_classifier,
    with_sgd,
)
from tests.conformance.scaler_runs import make_scaler
from tests.conformance.sparse_models import ManyWords, with_optimizer
from tests.tiers import long_cases

pytestmark = servers_only  # each test names the architecture that it needs

SHARE = 0.3
CODEC = f"randomk:{SHARE}"
Found = tuple[Values, dict[str, Any], dict[str, Any], dict[tuple[str, int], int]]
"""Values by step, totals, state; and the numbers of pieces, by parameter and first element."""


def run(ranks: int, scaler: Any = None, states: Any = None, **settings: Any) -> list[Found]:
    def work(world: World) -> Found:
        model, optimizer = build_seeded(with_sgd(), seed=world.rank)
        scale = scaler()
        settings.setdefault("compression", CODEC)
        with foreprop.parallelize(
            model, optimizer, world=world, architecture="ring", scaler=scale, **settings
        ) as session:
            if states is not None:
                session.load_state_dict(states)
                return [], {}, session.state_dict(), {}
            values = train(model, optimizer, batches_of(ranks, count=6)[world.rank], scale)
            (backend,) = session._training.backends.all
            names = [info.name for info in backend.engine.parameters]
            numbers = {
                (names[piece.parameter], piece.start_elems): slice_.number
                for piece, slice_ in getattr(backend.engine.sums, "slices", {}).items()
            }
            return values, session.stats(), session.state_dict(), numbers

    scaler = scaler or (lambda: None)
    return run_cluster(ranks, work)


def train(model: Any, optimizer: Any, batches: Sequence[Batch], scaler: Any = None) -> Values:
    values = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        values.append(values_of(model))
    return values


def emulate(ranks: int, numbers: dict[tuple[str, int], int], elems: int) -> tuple[Values, Any]:
    """Algorithm 1 of Stich 2018 in one process, in pieces of at most ``elems`` elements."""
    codec = RandomK(CODEC, SentShare(SHARE))
    model, optimizer = build_seeded(with_sgd())
    errors = [{n: torch.zeros_like(p) for n, p in model.named_parameters()} for _ in range(ranks)]
    values: Values = []
    for step, batches in enumerate(zip(*batches_of(ranks, count=6), strict=True), start=1):
        sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for rank, (x, y) in enumerate(batches):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                wanted = (parameter.grad + errors[rank][name]).view(-1)
                for start in range(0, parameter.numel(), elems):
                    part = wanted[start : start + elems]
                    place = Place(step, numbers[name, start], rank)
                    chosen = start + codec.indices(len(part), place)
                    sums[name].view(-1)[chosen] += wanted[chosen]
                    wanted[chosen] = 0.0
                errors[rank][name] = wanted.view(parameter.shape)
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name] / ranks
        optimizer.step()
        values.append(values_of(model))
    return values, errors


@pytest.mark.parametrize("chunk_elems", [1_000_000, *long_cases(10)])
def test_every_step_is_that_of_the_paper(chunk_elems: int) -> None:
    runs = run(2, chunk_elems=chunk_elems)
    wanted, errors = emulate(2, runs[0][3], chunk_elems)
    for rank, (values, stats, state, _) in enumerate(runs):
        for ours, theirs in zip(values, wanted, strict=True):
            check_same_bits(ours, theirs)
        for name, error in errors[rank].items():
            assert torch.equal(state["residuals"][name]["error"], error), name
            assert error.any()
        assert stats["pushed_bytes"] < 0.5 * stats["raw_pushed_bytes"]


def test_all_ranks_have_the_same_bits() -> None:
    first, *others = run(3, clip_grad_norm=0.1, ema=0.9)
    for other in others:
        for ours, theirs in zip(other[0], first[0], strict=True):
            check_same_bits(ours, theirs)


def test_what_a_pattern_leaves_out_is_summed_as_it_is() -> None:
    """What is behind a codec in the same chunk, too: of the first step all is the same."""
    ours = run(2, compression={"0.*": CODEC})[0][0][0]
    theirs = run(2, compression=None)[0][0][0]
    differ = {name for name, value in theirs.items() if not torch.equal(ours[name], value)}
    assert differ == {"0.weight", "0.bias"}


def test_a_scale_that_changes_changes_no_bit() -> None:
    scaled, plain = run(2, lambda: make_scaler(growth_interval=2)), run(2)
    for ours, theirs in zip(scaled, plain, strict=True):
        check_same_bits(ours[0][-1], theirs[0][-1])
        for name, arrays in theirs[2]["residuals"].items():
            assert torch.equal(ours[2]["residuals"][name]["error"], arrays["error"])


def test_residuals_go_on_with_other_chunks_and_fewer_ranks() -> None:
    saved = [state for _, _, state, _ in run(3)]
    found = [state for _, _, state, _ in run(2, states=saved, chunk_elems=10)]
    for name in saved[0]["residuals"]:
        had = [state["residuals"][name]["error"] * (2 / 3) for state in saved]
        assert torch.equal(found[0]["residuals"][name]["error"], had[0] + had[2])
        assert torch.equal(found[1]["residuals"][name]["error"], had[1])


# A cast of everything.
@pytest.mark.parametrize(("codec", "wire_dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_a_cast_of_everything_is_the_wires_type(codec: str, wire_dtype: Any) -> None:
    names: tuple[Any, ...] = ("ring", "hybrid", "auto")
    for name in names:
        config = Config(architecture=name, compression=codec)
        assert config == Config(architecture=name, wire_dtype=wire_dtype)
        assert config == Config(architecture=name, wire_dtype=wire_dtype, compression=codec)
    settings: dict[str, Any] = {"architecture": "ring"}
    wanted = run_foreprop(
        with_sgd(), train_classifier, batches_of(2), wire_dtype=wire_dtype, **settings
    )
    for got in run_foreprop(
        with_sgd(), train_classifier, batches_of(2), compression=codec, **settings
    ):
        check_same_bits(got.model, wanted[0].model)


# Hybrid: collectives sum what is dense, servers have the rows.
def run_words(**settings: Any) -> list[tuple[Values, dict[str, Any], dict[str, Any]]]:
    generator = torch.Generator().manual_seed(3)
    by_rank = [
        [
            (
                torch.randint(300, (20, 30), generator=generator),
                torch.randint(3, (20,), generator=generator),
            )
            for _ in range(3)
        ]
        for _ in range(2)
    ]

    def work(world: World) -> tuple[Values, dict[str, Any], dict[str, Any]]:
        build = with_optimizer(ManyWords, torch.optim.Adagrad, lr=0.1)
        model, optimizer = build_seeded(build, seed=world.rank)
        with foreprop.parallelize(
            model, optimizer, world=world, architecture="hybrid", **settings
        ) as session:
            values = train(model, optimizer, by_rank[world.rank])
            state = session.state_dict()
        return values, session.stats(), state

    return run_cluster(2, work)


def test_rows_beside_a_ring_go_losslessly() -> None:
    exact, coded = run_words(), run_words(compression={"table.*": "lossless"})
    for ours, theirs in zip(coded, exact, strict=True):
        for got, wanted in zip(ours[0], theirs[0], strict=True):
            check_same_bits(got, wanted)
        assert ours[1]["pushed_bytes"] < 0.97 * theirs[1]["pushed_bytes"]


def test_dense_parameters_beside_rows_have_codes_that_can_be_added_up() -> None:
    exact = run_words()[0][0]
    first, second = run_words(compression={"table.*": "lossless", "out.weight": CODEC})
    for ours, theirs in zip(first[0], second[0], strict=True):
        check_same_bits(ours, theirs)
    changed = {
        name for name, value in exact[0].items() if not torch.equal(first[0][0][name], value)
    }
    assert changed == {"out.weight"}  # of the first step
    for _, _, state in (first, second):
        assert set(state["residuals"]) == {"out.weight"}
        assert state["residuals"]["out.weight"]["error"].any()


def test_who_has_the_rows_and_who_has_not_take_different_codecs() -> None:
    says = r"lossless is chosen for out.weight, whose gradients collectives add up.*takes randomk"
    with pytest.raises(ConfigError, match=says):
        run_words(compression="lossless")
    with pytest.raises(ConfigError, match=r"randomk:0.3 is chosen for table.weight.*row by row"):
        run_words(compression=CODEC)
    with pytest.raises(ConfigError, match="no parameter's name matches 'nothing"):
        run_words(compression={"nothing.*": CODEC})
    with pytest.raises(ConfigError, match=r"of a table's rows lossless"):
        Config(architecture="hybrid", compression="int8")


# Beside a type of the wire.
def test_what_is_coded_is_not_cast_and_the_rest_is() -> None:
    """Of the first step all have the same gradients."""
    by_name = {"*.weight": CODEC}
    both, coded, cast = (
        run(2, **settings)[0]
        for settings in (
            {"compression": by_name, "wire_dtype": "bfloat16"},
            {"compression": by_name},
            {"compression": None, "wire_dtype": "bfloat16"},
        )
    )
    assert coded[0][0].keys() == both[0][0].keys()
    for name, value in both[0][0].items():
        torch.testing.assert_close(
            value, (coded if name.endswith("weight") else cast)[0][0][name], rtol=0, atol=0
        )
    assert any(not torch.equal(coded[0][0][name], cast[0][0][name]) for name in cast[0][0])
    check_same_bits(run(2, wire_dtype="bfloat16")[1][0][-1], run(2)[1][0][-1])  # all are coded
    assert both[1]["pushed_bytes"] < coded[1]["pushed_bytes"]


# What is said and refused.
def test_it_is_said_at_the_start_and_ranks_must_agree() -> None:
    def work(world: World, compression: str | None) -> str:
        model, optimizer = build_seeded(with_sgd())
        settings: Any = {"architecture": "ring", "compression": compression, "join_timeout_s": 10}
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            return session.describe()

    assert f"compression={CODEC} (lossy);" in run_cluster(2, lambda world: work(world, CODEC))[0]
    with pytest.raises(HandshakeError, match=r"knobs.compression: rank 0 has \(\), rank 1 has"):
        run_cluster(2, lambda world: work(world, CODEC if world.rank else None))


@pytest.mark.parametrize(
    "compression",
    ["int8", "lossless", "topk:0.1", "dgc", "auto", {"0.*": "bf16"}, {"0.*": CODEC, "*": "int2"}],
    ids=str,
)
def test_codes_that_cannot_be_added_up_are_refused(compression: Any) -> None:
    with pytest.raises(ConfigError, match=r"takes bf16 or fp16 for all.*'p2p' or 'ps'"):
        Config(architecture="ring", compression=compression)


def test_two_types_of_the_wire_are_refused() -> None:
    with pytest.raises(ConfigError, match="compression is 'bf16': collectives add up"):
        Config(architecture="ring", compression="bf16", wire_dtype="float16")


def test_a_pattern_without_a_name_is_refused() -> None:
    model, optimizer = build_seeded(with_sgd())
    settings: Any = {"architecture": "ring", "compression": {"nothing.*": CODEC}}
    with pytest.raises(ConfigError, match="no parameter's name matches 'nothing"):
        foreprop.parallelize(model, optimizer, world=worlds(1)[0], **settings)

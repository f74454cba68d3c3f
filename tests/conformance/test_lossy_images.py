"""Lossy codecs where servers update: all have the same bits after every step, and lose nothing."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop import PRESETS
from foreprop.core.codec import Place
from foreprop.core.wire import Flag
from foreprop.engine.tensors import IMAGE, MASTER, decode_state
from foreprop.engine.world import World
from foreprop.errors import ConfigError
from foreprop.features.compression.codecs import make, make_for_replies, traits_of
from tests.cluster import run_cluster, worlds
from tests.conformance.aggregation_runs import MODELS, Values, data_of, together, values_of
from tests.conformance.matrices import few
from tests.conformance.parity import (
    Batch,
    Build,
    Trained,
    batches_of,
    build_seeded,
    check_same_bits,
    run_foreprop,
    servers_only,
    train_classifier,
    with_sgd,
)
from tests.conformance.scaler_runs import make_scaler
from tests.tiers import long_cases

pytestmark = [servers_only, pytest.mark.usefixtures("servers_update")]

LOSSY = (
    *("int8", "int4", "int2", "topk:0.1", "topk:0.3", "randomk:0.3"),
    *("dgc:0.1", "dgc:0.1:2", "bf16", "fp16"),
)
KINDS = ["int4", "int2", "topk:0.3", "randomk:0.3", "dgc:0.1:2", "fp16"]
KINDS += long_cases(*sorted({*LOSSY} - {*KINDS}))
SHOWN = ("int8", "topk:0.1")
"""Where one of each kind is enough: all elements, and a share of them."""


def train_by(session: Any, model: Any, optimizer: Any, batches: Sequence[Batch]) -> Values:
    """And look at the servers' images after each step."""
    values = []
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        values.append(values_of(model))
        check_images(session, values[-1])
    return values


def check_images(session: Any, shown: dict[str, torch.Tensor]) -> None:
    training = session._training
    (backend,) = training.backends.all
    engine, step = backend.engine, training.completed
    numbers = [piece.number for piece in engine.slices]
    answers = engine.requests.fetch_states(numbers, step, flags=Flag.MASTER)
    images = 0
    for piece in engine.slices:
        state = decode_state(memoryview(answers[piece.number]), elems=piece.elems)
        name = engine.parameters[piece.parameter].name
        ours = shown[name].view(-1)[piece.start_elems : piece.stop_elems]
        image = state.get(IMAGE, state[MASTER])
        images += IMAGE in state
        assert torch.equal(image.view(torch.int32), ours.view(torch.int32)), (name, step)
    assert images


def run(
    build: Build, by_rank: Sequence[Sequence[Batch]], *, local_size: int = 1, **settings: Any
) -> list[tuple[Values, dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]]:
    """By rank: values by step, totals, state, masters."""

    def work(world: World) -> Any:
        model, optimizer = build_seeded(build, seed=world.rank)
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            values = train_by(session, model, optimizer, by_rank[world.rank])
            return values, session.stats(), session.state_dict(), session.master_state_dict()

    return run_cluster(len(by_rank), work, local_size=local_size)


def check_alike(runs: Sequence[Any]) -> None:
    for values, *_ in runs[1:]:
        for ours, theirs in zip(values, runs[0][0], strict=True):
            check_same_bits(ours, theirs)


@pytest.mark.parametrize("ranks", [2, *long_cases(3)])
@pytest.mark.parametrize("codec", KINDS)
def test_images_of_every_codec_are_the_same_bits_everywhere(codec: str, ranks: int) -> None:
    check_alike(run(with_sgd(), batches_of(ranks), compression=codec))


@pytest.mark.parametrize(("model", "ranks", "codec"), few(MODELS, [2, *long_cases(3)], SHOWN))
def test_images_are_the_same_bits_everywhere(model: str, ranks: int, codec: str) -> None:
    build, by_rank = data_of(model, ranks)
    check_alike(run(build, by_rank, compression=codec))


@pytest.mark.parametrize("local_size", [1, *long_cases(2)])
@pytest.mark.parametrize("codec", SHOWN)
def test_what_is_encoded_is_not_cast_and_the_rest_is(codec: str, local_size: int) -> None:
    by_rank = batches_of(2 * local_size)

    def trained(**settings: Any) -> Trained:
        about = {"local_size": local_size, "slice_elems": 20, "update": "servers", **settings}
        first, *others = run_foreprop(with_sgd(), train_classifier, by_rank, **about)
        for other in others:
            check_same_bits(other.model, first.model)
        return first

    cast = trained(wire_dtype="bfloat16")
    some = trained(wire_dtype="bfloat16", compression={"0.weight": codec})
    everything = trained(wire_dtype="bfloat16", compression=codec)
    if local_size == 1:  # else relays encode
        assert some.stats["pushed_bytes"] < cast.stats["pushed_bytes"]
    check_same_bits(everything.model, trained(compression=codec).model)


@pytest.mark.parametrize(
    ("settings", "codec"),
    few(
        [
            {"preset": "kvstore"},
            {"preset": "tensorflow"},
            {"slice_elems": 7, "servers_per_node": 3},
            {"clip_grad_norm": 0.1},
            {"ema": 0.9, "clip_grad_value": 0.01},
            *long_cases(*({"preset": preset} for preset in ("p3", "slicing", "wfbp", "p3-2019"))),
        ],
        SHOWN,
    ),
    ids=str,
)
def test_with_every_setting(settings: dict[str, Any], codec: str) -> None:
    runs = run(with_sgd(), batches_of(2), compression=codec, **settings)
    check_alike(runs)
    for values, stats, _, masters in runs:
        assert stats["pushed_bytes"] < stats["raw_pushed_bytes"]
        assert any(not torch.equal(masters[name], values[-1][name]) for name in masters)


def emulate(
    name: str, build: Build, by_rank: Sequence[Sequence[Batch]], *, local_size: int = 1
) -> tuple[Values, Any, Any]:
    """One process with the codecs in its loop: values by step, masters, states by node."""
    nodes = range(0, len(by_rank), local_size)
    codec, replies, nowhere = make(name), make_for_replies(name, len(nodes)), Place(0, 0, 0)
    master, optimizer = build_seeded(build)
    image = copy.deepcopy(master)
    states = [[codec.new_state(p.numel()) for p in master.parameters()] for _ in nodes]
    values: Values = []

    def pushed(gradient: torch.Tensor, state: Any) -> torch.Tensor:
        out = torch.empty(gradient.numel())
        codec.decode(codec.encode(gradient.reshape(-1), state, nowhere), out, nowhere)
        return out.view(gradient.shape)

    def answer(shown: torch.Tensor, full: torch.Tensor) -> None:
        change = (full - shown).reshape(-1)
        data = replies.encode(change, {}, nowhere)
        if len(data) >= 4 * len(change):  # no shorter than the values, which are sent instead
            shown.copy_(full)
            return
        replies.decode(data, change, nowhere)
        shown.add_(change.view(shown.shape))

    for step, batches in enumerate(zip(*by_rank, strict=True)):
        sums: list[torch.Tensor] = []
        for node, first in enumerate(nodes):
            image.zero_grad()
            for x, y in batches[first : first + local_size]:  # .grad adds up in their order
                F.cross_entropy(image(x), y).backward()
            grads = [p.grad for p in image.parameters() if p.grad is not None]
            own = [pushed(*of) for of in zip(grads, states[node], strict=True)]
            sums = [a + b for a, b in zip(sums, own, strict=True)] if sums else own
        for parameter, total in zip(master.parameters(), sums, strict=True):
            parameter.grad = total.sign() if traits_of(name).votes else total / len(by_rank)
        optimizer.step()
        with torch.no_grad():
            for shown, full in zip(image.parameters(), master.parameters(), strict=True):
                answer(shown, full) if step else shown.copy_(full)
        values.append(values_of(image))
    return values, values_of(master), states


@pytest.mark.parametrize("codec", ["int8", "int2", "topk:0.3", *long_cases("int4", "bf16")])
@pytest.mark.parametrize("ranks", [*long_cases(1, 2), 3])
def test_every_step_has_the_bits_of_the_codec_in_the_loop(ranks: int, codec: str) -> None:
    """Of codecs that vote, which foreprop-lab's tests have, servers apply the majority's signs."""
    build, by_rank = with_sgd(lambda: nn.Linear(5, 3)), batches_of(ranks, count=8)
    wanted, masters, states = emulate(codec, build, by_rank)
    for rank, (values, _, state, master) in enumerate(run(build, by_rank, compression=codec)):
        for ours, theirs in zip(values, wanted, strict=True):
            check_same_bits(ours, theirs)
        check_same_bits(master, masters)
        for name, arrays in zip(masters, states[rank], strict=True):
            for key, array in arrays.items():
                assert torch.equal(state["residuals"][name][key].view(-1), array)


# Relays: a node's sum is encoded, and nothing on the node.
@pytest.mark.parametrize(
    "codec", [*SHOWN, "dgc:0.1:2", *long_cases(*sorted({*LOSSY} - {*SHOWN, "dgc:0.1:2"}))]
)
def test_images_behind_relays_are_the_same_bits_everywhere(codec: str) -> None:
    """The last node has one worker. Relays clip what DGC accumulates."""
    settings: dict[str, Any] = {"clip_grad_norm": 0.5} if codec.startswith("dgc") else {}
    settings |= {"local_size": 2, "compression": codec}
    runs = run(with_sgd(weight_decay=0.1), batches_of(3), **settings)
    check_alike(runs)
    assert runs[1][2] == {"residuals": {}}
    for *_, state, _ in (runs[0], runs[2]):
        kept = [array.any() for own in state["residuals"].values() for array in own.values()]
        assert any(kept) == bool(make(codec).new_state(1))


@pytest.mark.parametrize("codec", ["int8", "topk:0.3", *long_cases("int2", "bf16")])
def test_relays_have_the_bits_of_the_codec_on_the_sum_of_a_node(codec: str) -> None:
    build, by_rank = with_sgd(lambda: nn.Linear(5, 3)), batches_of(3, count=8)
    wanted, masters, states = emulate(codec, build, by_rank, local_size=2)
    runs = run(build, by_rank, local_size=2, compression=codec)
    for rank, (values, _, state, master) in enumerate(runs):
        for ours, theirs in zip(values, wanted, strict=True):
            check_same_bits(ours, theirs)
        check_same_bits(master, masters)
        if rank % 2:  # not its node's first
            assert state == {"residuals": {}}
            continue
        for name, arrays in zip(masters, states[rank // 2], strict=True):
            for key, array in arrays.items():
                assert torch.equal(state["residuals"][name][key].view(-1), array)


@pytest.mark.parametrize("preset", ["kvstore", *long_cases(*sorted({*PRESETS} - {"kvstore"}))])
def test_relays_with_every_preset(preset: str) -> None:
    settings: dict[str, Any] = {"preset": preset, "ema": 0.9, "clip_grad_norm": 0.1}
    runs = run(with_sgd(), batches_of(4), local_size=2, compression="int8", **settings)
    check_alike(runs)


def test_what_a_pattern_leaves_out_has_the_bits_of_off() -> None:
    """Of a model's last layer alone: what is before it does not differ in the first step."""
    settings = {"compression": {"4.*": "int8", "*": "lossless"}}
    got = together(with_sgd(), batches_of(2), **settings)
    wanted = together(with_sgd(), batches_of(2))
    check_same_bits(
        {name: value for name, value in got[0].items() if not name.startswith("4")},
        {name: value for name, value in wanted[0].items() if not name.startswith("4")},
    )
    assert not torch.equal(got[0]["4.weight"], wanted[0]["4.weight"])


# Values, scales, infinities.
def test_a_change_by_hand_keeps_what_was_not_changed_in_full() -> None:
    def work(world: World) -> dict[str, torch.Tensor]:
        model, optimizer = build_seeded(with_sgd(lr=0.3), seed=world.rank)
        with foreprop.parallelize(model, optimizer, world=world, compression="int8") as session:
            values = train_by(session, model, optimizer, batches_of(2)[world.rank])
            before = session.master_state_dict()
            with torch.no_grad():
                model[0].weight[0] = 0.5
            after = session.master_state_dict()
            assert torch.equal(after["0.weight"][0], torch.full((5,), 0.5))
            assert torch.equal(after["0.weight"][1:], before["0.weight"][1:])
            assert not torch.equal(before["0.weight"], values[-1]["0.weight"])
            optimizer.param_groups[0]["lr"] = 0.0
            shown = train_by(session, model, optimizer, batches_of(2)[world.rank][:1])[-1]
            check_same_bits(session.master_state_dict(), after)
            # in full, as nobody knew what workers had
            assert torch.equal(shown["0.weight"], after["0.weight"])
            return shown

    first, second = run_cluster(2, work)
    check_same_bits(first, second)


@pytest.mark.parametrize(
    ("codec", "local_size"),
    [
        ("int2", 1),
        ("dgc:0.1", 2),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [("int8", 1), ("topk:0.1", 1), ("dgc:0.1", 1), ("int8", 2), ("int2", 2)]
        ),
    ],
)
def test_a_scale_that_changes_changes_no_bit(codec: str, local_size: int) -> None:
    """Powers of two: residuals are multiplied with them, exactly. With relays by them."""
    ranks = 1 + local_size  # of the last node one

    def work(world: World, scaler: Any) -> tuple[dict[str, torch.Tensor], Any]:
        decayed = with_sgd(weight_decay=0.25)
        model, optimizer = build_seeded(decayed, seed=world.rank)
        settings: Any = {"compression": codec, "update": "servers"}
        with foreprop.parallelize(
            model, optimizer, world=world, scaler=scaler, **settings
        ) as session:
            for x, y in batches_of(ranks, count=9)[world.rank]:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                if scaler is None:
                    loss.backward()
                    optimizer.step()
                    continue
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            return values_of(model), session.state_dict()["residuals"]

    scaled = run_cluster(
        ranks, lambda world: work(world, make_scaler(growth_interval=2)), local_size=local_size
    )
    plain = run_cluster(ranks, lambda world: work(world, None), local_size=local_size)
    for (ours, residuals), (theirs, others) in zip(scaled, plain, strict=True):
        check_same_bits(ours, theirs)
        for name, arrays in others.items():
            for key, array in arrays.items():
                assert torch.equal(residuals[name][key], array), (name, key)


def test_an_infinity_reaches_everybody() -> None:
    def loop(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) * (torch.inf if step == 2 else 1.0)).backward()
            optimizer.step()

    first, second = run_foreprop(with_sgd(), loop, batches_of(2), compression="int8")
    assert not first.model["0.weight"].isfinite().any()
    assert list(first.model) == list(second.model)
    for name, value in first.model.items():
        assert torch.equal(value.view(torch.int32), second.model[name].view(torch.int32))


# Checkpoints.
@pytest.mark.parametrize("codec", ["int8", *long_cases("dgc:0.1")])
def test_a_node_that_goes_on_has_what_its_ranks_had(codec: str) -> None:
    """From workers' residuals to relays', and on to those of other relays."""
    by_rank = batches_of(4)
    saved = [state for _, _, state, _ in run(with_sgd(), by_rank, compression=codec)]

    def work(world: World, states: Any, slice_elems: int) -> Any:
        model, optimizer = build_seeded(with_sgd())
        settings: Any = {"compression": codec, "slice_elems": slice_elems}
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            session.load_state_dict(states)
            found = session.state_dict()
            train_by(session, model, optimizer, by_rank[world.rank])
            return found

    nodes = run_cluster(4, lambda world: work(world, saved, 12), local_size=2)
    assert nodes[1] == nodes[3] == {"residuals": {}}
    again = run_cluster(3, lambda world: work(world, nodes, 7), local_size=2)
    for name, arrays in saved[0]["residuals"].items():
        for key in arrays:
            had = [state["residuals"][name][key] for state in saved]
            assert had[0].any()
            of_nodes = [nodes[rank]["residuals"][name][key] for rank in (0, 2)]
            assert torch.equal(of_nodes[0], had[0] + had[1])
            assert torch.equal(of_nodes[1], had[2] + had[3])
            assert torch.equal(again[0]["residuals"][name][key], of_nodes[0] * 0.75)
            assert torch.equal(again[2]["residuals"][name][key], of_nodes[1] * 0.75)


@pytest.mark.parametrize("codec", ["dgc:0.1", *long_cases("int8")])
def test_residuals_of_all_ranks_go_on_with_other_slices_and_fewer_ranks(codec: str) -> None:
    by_rank = batches_of(3)
    saved = run(with_sgd(), by_rank, compression=codec)
    states = [state for _, _, state, _ in saved]

    def work(world: World) -> Any:
        model, optimizer = build_seeded(with_sgd())
        with foreprop.parallelize(
            model, optimizer, world=world, compression=codec, slice_elems=12
        ) as session:
            session.load_state_dict(states)
            found = session.state_dict()["residuals"]
            train_by(session, model, optimizer, by_rank[world.rank])
            return found

    found = run_cluster(2, work)
    for name, arrays in states[0]["residuals"].items():
        for key, array in arrays.items():
            parts = [state["residuals"][name][key] * (2 / 3) for state in states]
            assert torch.equal(found[0][name][key], parts[0] + parts[2])
            assert torch.equal(found[1][name][key], parts[1])
            assert array.any()


def test_what_does_not_fit_is_refused() -> None:
    model, optimizer = build_seeded(with_sgd())
    world = worlds(1)[0]
    with foreprop.parallelize(model, optimizer, world=world, compression="int8") as session:
        with pytest.raises(ConfigError, match="as a list in their order"):
            session.load_state_dict({"residuals": {}})  # type: ignore[arg-type]
        wrong = {"residuals": {"0.weight": {"error": torch.zeros(3)}}}
        with pytest.raises(ConfigError, match=r"3 elements of 0.weight's error, which has 35"):
            session.load_state_dict([wrong])


def test_a_loop_that_needs_its_gradients_is_told_so() -> None:
    def loop(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    with pytest.raises(foreprop.ForepropError, match="clip_grad_norm"):
        run_foreprop(with_sgd(), loop, batches_of(2), compression="int8")


def test_half_precision_is_refused_by_name() -> None:
    model = nn.Linear(5, 3).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    says = r"int8 is chosen for weight, which is bfloat16.*\{'weight': 'none', ...\}"
    with pytest.raises(ConfigError, match=says):
        foreprop.parallelize(model, optimizer, world=worlds(1)[0], compression="int8")

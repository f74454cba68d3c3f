"""The lab's codecs in sessions, as a user's: what foreprop's tests hold of its own codecs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import foreprop
from foreprop.core.codec import Place
from foreprop.engine.world import World
from foreprop.errors import TrainingLoopError
from foreprop.features.compression.codecs import make
from tests import matrix as exact
from tests.cluster import run_cluster
from tests.conformance import test_codecs_apart as apart
from tests.conformance import test_lossy_averages as averages
from tests.conformance import test_lossy_images as images
from tests.conformance.parity import (
    batches_of,
    build_seeded,
    check_same_bits,
    servers_only,
    small_model,
    with_sgd,
)
from tests.conformance.scaler_runs import make_scaler
from tests.conformance.test_plugins import session_with_a_server_process
from tests.tiers import long_cases

pytestmark = [servers_only, pytest.mark.timeout(600)]
ALL = ["1bit", "sign", "terngrad", *long_cases("efsign", "qsgd", "qsgd:7")]


@pytest.fixture
def servers_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREPROP_UPDATE", "servers")


@pytest.mark.process
@pytest.mark.parametrize("codec", ["1bit", *long_cases("sign", "qsgd:7")])
def test_servers_processes_find_them_by_entry_points(codec: str) -> None:
    """No setting says where they are."""
    session_with_a_server_process(with_sgd(), compression=codec)


# Where workers update.
@pytest.mark.parametrize("codec", ALL)
def test_every_rank_has_the_same_bits(codec: str) -> None:
    averages.test_every_rank_has_the_same_bits(codec, {})


@pytest.mark.parametrize("codec", ["1bit", *long_cases("efsign")])
@pytest.mark.parametrize("loop", averages.LOOPS)
def test_nothing_is_lost(codec: str, loop: Any) -> None:
    averages.check_nothing_is_lost(codec, loop)


@pytest.mark.long
@pytest.mark.parametrize("codec", ["1bit", "efsign", "qsgd", "qsgd:7", "terngrad"])
def test_a_scaler_of_the_loop_leaves_out_the_same_steps(codec: str) -> None:
    averages.test_a_scaler_of_the_loop_leaves_out_the_same_steps(codec, 1)


@pytest.mark.long
@pytest.mark.parametrize("local_size", [1, 2])
def test_a_checkpoint_goes_on_with_the_same_bits(local_size: int) -> None:
    averages.test_a_checkpoint_goes_on_with_the_same_bits("1bit", local_size)


def test_signs_have_no_scale() -> None:
    def work(world: World) -> None:
        model, optimizer = build_seeded(with_sgd())
        scaler = make_scaler()
        with foreprop.parallelize(model, optimizer, world=world, compression="sign"):
            x, y = batches_of(2)[world.rank][0]
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)

    with pytest.raises(TrainingLoopError, match=r"votes of signs have no scale.* than sign"):
        run_cluster(2, work)


@pytest.mark.parametrize("codec", ["1bit", "sign"])
def test_who_updates(codec: str) -> None:
    """One that loses much of averages has servers update, if the setting does not say who."""

    def work(world: World, **about: Any) -> bool:
        model, optimizer = build_seeded(with_sgd(small_model, momentum=0.0))
        with foreprop.parallelize(
            model, optimizer, world=world, compression=codec, **about
        ) as session:
            return bool(session._training.by_workers)

    assert run_cluster(1, work)[0] == (codec == "sign")
    assert run_cluster(1, lambda world: work(world, update="workers"))[0]


# Where servers update.
@pytest.mark.usefixtures("servers_update")
@pytest.mark.parametrize("codec", ALL)
def test_images_of_every_codec_are_the_same_bits_everywhere(codec: str) -> None:
    images.test_images_of_every_codec_are_the_same_bits_everywhere(codec, 2)


@pytest.mark.usefixtures("servers_update")
@pytest.mark.parametrize("codec", ["1bit", "sign", *long_cases("efsign")])
def test_every_step_has_the_bits_of_the_codec_in_the_loop(codec: str) -> None:
    images.test_every_step_has_the_bits_of_the_codec_in_the_loop(3, codec)


@pytest.mark.usefixtures("servers_update")
@pytest.mark.parametrize("codec", ["1bit", "sign"])
def test_relays_have_the_bits_of_the_codec_on_the_sum_of_a_node(codec: str) -> None:
    images.test_relays_have_the_bits_of_the_codec_on_the_sum_of_a_node(codec)


@pytest.mark.long
@pytest.mark.usefixtures("servers_update")
@pytest.mark.parametrize("codec", ["1bit", "efsign", "sign", "qsgd", "qsgd:7", "terngrad"])
def test_images_behind_relays_are_the_same_bits_everywhere(codec: str) -> None:
    images.test_images_behind_relays_are_the_same_bits_everywhere(codec)


# Where workers are apart.
def test_a_vote_of_one_is_a_share_of_the_mean() -> None:
    (found, *_), (other, *_) = apart.linear({"staleness": 2, "compression": "sign"})
    check_same_bits(found, other)
    model, optimizer = exact.make()
    codec, place = make("sign"), Place(0, 0, 0)
    for batches in zip(exact.batches_of(0), exact.batches_of(1), strict=True):
        for batch in batches:
            optimizer.zero_grad()
            model(*batch).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                vote = torch.empty(parameter.numel())
                codec.decode(codec.encode(parameter.grad.reshape(-1), {}, place), vote, place)
                parameter.grad = vote.view_as(parameter) / 2
            optimizer.step()
    check_same_bits(found, model.state_dict())


@pytest.mark.long
@pytest.mark.parametrize("codec", ["1bit", "qsgd:7"])
def test_a_late_workers_residual_is_as_if_its_push_had_not_been(tmp_path: Any, codec: str) -> None:
    apart.test_a_late_workers_residual_is_as_if_its_push_had_not_been(tmp_path, codec)

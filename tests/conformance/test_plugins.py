"""A user's codec and optimizer, those that docs/extending.md shows, in sessions of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import foreprop
from foreprop.errors import ConfigError, HandshakeError
from tests.cluster import worlds
from tests.conformance.parity import (
    Build,
    batches_of,
    check_same_bits,
    merge,
    run_foreprop,
    run_plain,
    servers_only,
    small_model,
    train_classifier,
    with_sgd,
)
from tests.plugins import NAME, forgotten, page_module

pytestmark = servers_only


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with forgotten():
        yield page_module(tmp_path, monkeypatch)


def with_own(page: Any) -> Build:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small_model()
        return model, page.SignSGD(model.parameters(), lr=0.01)

    return build


def test_servers_apply_it_to_the_bit(page: Any) -> None:
    by_rank = batches_of(2)
    own = with_own(page)
    settings: dict[str, Any] = {"update": "servers", "slice_elems": 7}
    by_workers = run_foreprop(own, train_classifier, by_rank, update="workers")
    for got, wanted in zip(
        run_foreprop(own, train_classifier, by_rank, **settings), by_workers, strict=True
    ):
        check_same_bits(got.model, wanted.model)


@pytest.mark.parametrize(
    "settings",
    [{}, {"compression": {"0.*": "halves", "*": "int8"}}, {"servers_per_node": 3}],
    ids=["all", "some", "many servers"],
)
def test_its_codes_are_decoded_alike(page: ModuleType, settings: dict[str, Any]) -> None:
    by_rank = batches_of(2)
    about = {"compression": "halves", "slice_elems": 20, **settings}
    first, second = run_foreprop(with_sgd(), train_classifier, by_rank, **about)
    check_same_bits(first.model, second.model)
    plain = run_plain(with_sgd(), train_classifier, merge(by_rank))
    for name, value in plain.model.items():
        torch.testing.assert_close(first.model[name], value, rtol=0, atol=0.02)
    assert first.stats["pushed_bytes"] < 0.7 * first.stats["raw_pushed_bytes"]


def test_relays_encode_and_servers_do_what_is_not_torch_s(page: Any) -> None:
    settings: dict[str, Any] = {"compression": "halves", "ema": 0.9, "clip_grad_value": 0.5}
    first, *others = run_foreprop(
        with_own(page), train_classifier, batches_of(4), local_size=2, **settings
    )
    for other in others:
        check_same_bits(other.model, first.model)
        assert other.optimizer["state"]


def session_with_a_server_process(build: Build, **settings: Any) -> None:
    world = worlds(1)[0]
    world.in_process = False
    model, optimizer = build()
    with foreprop.parallelize(model, optimizer, world=world, **settings):
        train_classifier(model, optimizer, batches_of(1)[0])


@pytest.mark.process
def test_a_server_s_process_knows_what_plugins_register(page: ModuleType) -> None:
    """Its module is beside the script, which is no folder of the server's own."""
    about: dict[str, Any] = {"update": "servers", "compression": "halves"}
    session_with_a_server_process(with_own(page), plugins=NAME, **about)
    with pytest.raises(HandshakeError, match=r"no codec is called 'halves'.* name its module in"):
        session_with_a_server_process(with_own(page), **about)


@pytest.mark.process
@pytest.mark.long
def test_a_server_s_process_that_knows_no_such_optimizer(page: ModuleType) -> None:
    told = r"optimizer 'SignSGD' is not one that servers apply.* name its module in plugins"
    with pytest.raises(HandshakeError, match=told):
        session_with_a_server_process(with_own(page), update="servers")


def test_a_plugin_that_cannot_be_imported_is_told_before_anything() -> None:
    model, optimizer = with_sgd()()
    with pytest.raises(ConfigError, match="plugins is 'no_such'"):
        foreprop.parallelize(model, optimizer, world=worlds(1)[0], plugins="no_such")

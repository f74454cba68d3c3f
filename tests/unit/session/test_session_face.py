"""What users see of a session is what they call."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import foreprop
from foreprop.session.alone import LoneSession
from foreprop.session.session import ConnectedSession
from tests.cluster import worlds

CALLED = {
    "call_every",
    "close",
    "config",
    "describe",
    "ema_state_dict",
    "flush",
    "grad_norm",
    "joined_at",
    "load_ema_state_dict",
    "load_state_dict",
    "load_tables",
    "master_state_dict",
    "metrics",
    "planning",
    "rank",
    "rows",
    "save_tables",
    "set_rows",
    "state_dict",
    "stats",
    "world_size",
}


@pytest.mark.parametrize("kind", [foreprop.Session, ConnectedSession, LoneSession])
def test_a_session_has_nothing_but_what_users_call(kind: type) -> None:
    assert {name for name in dir(kind) if not name.startswith("_")} == CALLED


@pytest.mark.parametrize("alone", [True, False])
def test_neither_has_the_object(alone: bool) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world = None if alone else worlds(1)[0]
    with foreprop.parallelize(model, optimizer, world=world) as session:
        assert {name for name in dir(session) if not name.startswith("_")} == CALLED
        assert session.config == foreprop.Config()


def test_help_says_what_each_is_for() -> None:
    assert [name for name in CALLED if not inspect.getdoc(getattr(foreprop.Session, name))] == []


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "preset p3, slice_elems=50000"),
        ({"preset": "kvstore"}, "preset kvstore,"),
        ({"order": "fifo"}, "preset slicing,"),
        (
            {"preset": "kvstore", "order": "priority"},
            "granularity=array order=priority reply=notify placement=kvstore lanes=peers,",
        ),
    ],
)
def test_the_line_at_the_start_names_the_preset(settings: dict[str, Any], told: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0], **settings) as session:
        assert told in session.describe()
        assert session.describe().startswith("1 worker on 1 node, 1 server beside")

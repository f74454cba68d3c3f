"""Servers that own what suits their nodes' links: other slices, other owners, the same bits."""

from __future__ import annotations

import copy

import torch

import foreprop
from foreprop.engine.world import World
from tests.cluster import run_cluster


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.ReLU(), torch.nn.Linear(300, 8))


def train(world: World, begun: torch.nn.Module, settings: dict[str, str]) -> list[torch.Tensor]:
    model = copy.deepcopy(begun)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.randn(3, 4, 40, generator=torch.Generator().manual_seed(world.rank))
    session = foreprop.parallelize(model, optimizer, world=world, slice_elems=1000, **settings)
    with session:
        for batch in data:
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
        session.flush()
        return [parameter.detach().clone() for parameter in model.parameters()]


def test_placement_by_links_and_compute_changes_no_bits() -> None:
    begun = make_model()  # once: ranks are threads, which share the random numbers
    even, *others = (
        run_cluster(3, lambda world, settings=settings: train(world, begun, settings))
        for settings in (
            {},
            {"node_rates": "2:0.7"},
            {"node_rates": "1:0.3"},  # it owns nothing
            {"late_nodes": "0"},
            {"late_nodes": "0", "node_rates": "2:0.7"},
        )
    )
    for uneven in others:
        for of_rank in uneven:
            assert all(map(torch.equal, of_rank, even[0]))

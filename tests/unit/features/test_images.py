"""The vote that servers take of signs, as `compression.images` has it."""

from __future__ import annotations

import torch

from foreprop.features.compression.images import vote


def test_the_vote_is_the_majority_and_nobodys_if_as_many_are_for_it() -> None:
    signs = torch.randn((4, 40_001), generator=torch.Generator().manual_seed(1)).sign()
    ayes = (signs > 0).sum(0)
    assert torch.equal(vote(signs.sum(0)), ((ayes > 2).int() - (ayes < 2).int()).float())


def test_what_is_not_finite_has_no_vote_but_shows() -> None:
    total = torch.tensor([torch.inf, -torch.inf, torch.nan, -3.0, 0.0])
    got = vote(total)
    assert bool(got[:3].isnan().all())
    assert got[3:].tolist() == [-1.0, 0.0]

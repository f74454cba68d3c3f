"""Top-k and random-k: which elements, how many, and indices that cannot be."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from codec_runs import PLACE, noise, there_and_back
from hypothesis import given
from hypothesis import strategies as st

from foreprop.core.codec import Place
from foreprop.errors import RemoteProtocolError
from foreprop.features.compression.codecs import make
from foreprop.features.compression.sparse import RandomK, SentShare, TopK, largest
from tests.tiers import long_cases

FEW = st.sampled_from([0.0, 1.0, -1.0, 2.0, -2.5, 1e-30])
"""So that many magnitudes are equal."""


@given(
    values=st.lists(FEW | st.floats(width=32, allow_nan=False), min_size=1, max_size=400),
    data=st.data(),
)
def test_the_largest_are_those_that_sorting_finds(values: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(values)))
    given_ = torch.tensor(values)
    indices = largest(given_, count).tolist()
    assert indices == sorted(set(indices))
    found = sorted(abs(x) for x in given_[indices].tolist())
    assert found == sorted(abs(x) for x in given_.tolist())[len(values) - count :]


@pytest.mark.parametrize("elems", [50_003, *long_cases(10_000, 200_000)])
@pytest.mark.parametrize("share", [0.001, 0.25, 1.0, *long_cases(0.0005, 0.01, 0.1)])
def test_the_largest_of_many(elems: int, share: float) -> None:
    values, count = noise(elems), max(1, round(share * elems))
    expected = np.sort(np.argsort(-np.abs(values.numpy()), kind="stable")[:count])
    assert largest(values, count).tolist() == expected.tolist()


def test_nan_is_larger_than_infinity() -> None:
    values = noise(10_000)
    values[[17, 9_000]] = torch.nan
    values[[3, 5_000]] = torch.inf
    assert largest(values, 2).tolist() == [17, 9_000]
    assert largest(values, 4).tolist() == [3, 17, 5_000, 9_000]


@given(
    values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=300),
    share=st.floats(0.001, 1),
)
def test_top_k_contracts(values: list[float], share: float) -> None:
    """Stich et al., definition 2.1: what is left is at most (1 - k / n) of the squared norm."""
    given_ = torch.tensor(values)
    codec = TopK("topk", SentShare(share))
    out = there_and_back(codec, given_)
    count = codec.share.count(len(values), 0)
    left = math.fsum(x * x for x in (given_.double() - out.double()).tolist())
    whole = math.fsum(x * x for x in given_.double().tolist())
    assert left <= (1 - count / len(values)) * whole * (1 + 1e-12)
    sent = out != 0
    assert torch.equal(out[sent], given_[sent])


@pytest.mark.parametrize(
    ("share", "elems", "count"),
    [(0.07, 100, 7), (0.01, 100, 1), (0.01, 101, 2), (0.001, 5, 1), (1.0, 5, 5), (0.3, 10, 3)],
)
def test_how_many_are_sent(share: float, elems: int, count: int) -> None:
    assert SentShare(share).count(elems, 0) == count
    assert SentShare(share, times=3).count(elems, 0) == min(elems, 3 * count)


def test_the_warm_up_is_that_of_the_paper() -> None:
    share = SentShare(0.001, warmup_steps=10)
    percents = [share.count(1_000_000, step) / 1e4 for step in (0, 9, 10, 20, 30, 39, 40, 10**9)]
    assert percents == [25, 25, 6.25, 1.5625, 0.3907, 0.3907, 0.1, 0.1]
    codec = TopK("topk", share)
    assert (
        codec.most_bytes(1_000_000) == len(codec.encode(noise(1_000_000), {}, PLACE)) == 2_000_000
    )


def test_from_half_of_the_elements_on_all_are_sent_without_indices() -> None:
    values = noise(1000)
    for count in (499, 500, 501, 1000):
        codec = TopK("topk", SentShare(count / 1000))
        sent = codec.encode(values, {}, PLACE)
        assert len(sent) == codec.most_bytes(1000) == (8 * 499 if count == 499 else 4000)
        out = there_and_back(codec, values)
        assert torch.equal(out, values) == (count > 499)


@pytest.mark.parametrize("elems", [1, 2, 1000, *long_cases(10, 50_003)])
@pytest.mark.parametrize("share", [0.001, 0.2, 0.5, *long_cases(0.01, 1.0)])
def test_random_elements_are_the_same_on_all_ranks_and_no_indices_are_sent(
    elems: int, share: float
) -> None:
    codec = RandomK("randomk", SentShare(share))
    count = codec.share.count(elems, 4)
    chosen = [codec.indices(elems, Place(4, 7, rank)) for rank in range(-1, 3)]
    assert all(torch.equal(chosen[0], other) for other in chosen[1:])
    indices = chosen[0].tolist()
    assert indices == sorted(set(indices))
    assert len(indices) == count
    assert indices[0] >= 0
    assert indices[-1] < elems
    values = noise(elems)
    sent = codec.encode(values, {}, Place(4, 7, 2))
    assert bytes(sent) == values[indices].numpy().tobytes()
    out = torch.empty(elems)
    codec.decode(sent, out, Place(4, 7, 0))
    expected = torch.zeros(elems)
    expected[indices] = values[indices]
    assert torch.equal(out, expected)


@pytest.mark.parametrize("case", [(41, 0.2), *long_cases((40, 0.1), (40, 0.5))])
def test_any_element_and_any_pair_is_as_likely_as_another(case: tuple[int, float]) -> None:
    elems, share = case
    codec, draws = RandomK("randomk", SentShare(share)), 3000
    taken = torch.zeros(draws, elems)
    for step in range(draws):
        taken[step, codec.indices(elems, Place(step, 0, 0))] = 1.0
    count = codec.share.count(elems, 0)
    together = taken.T @ taken
    pair = count * (count - 1) / (elems * (elems - 1))
    for found, chance in (
        (together.diagonal(), count / elems),
        (together[~torch.eye(elems, dtype=torch.bool)], pair),
    ):
        deviation = math.sqrt(draws * chance * (1 - chance))
        assert float((found - draws * chance).abs().max()) < 5.5 * deviation


def test_random_k_contracts_on_average() -> None:
    values, codec = noise(400), RandomK("randomk", SentShare(0.1))
    left = [
        float((values - there_and_back(codec, values, {}, Place(step, 0, 0))).norm()) ** 2
        for step in range(2000)
    ]
    whole = float(values.norm()) ** 2
    assert sum(left) / len(left) / whole == pytest.approx(0.9, abs=0.005)


@pytest.mark.parametrize(
    ("indices", "says"),
    [
        ([0, 1, 2, 1000], "not one of 1000 elements"),
        ([-1, 1, 2, 3], "not one of 1000 elements"),
        ([2**31 - 1, 1, 2, 3], "do not rise"),
        ([5, 5, 6, 7], "do not rise"),
        ([7, 6, 8, 9], "do not rise"),
        ([0, -5, 8, 9], "do not rise"),
    ],
)
@pytest.mark.parametrize("name", ["topk:0.004", "dgc:0.004"])
def test_indices_that_cannot_be_are_refused(name: str, indices: list[int], says: str) -> None:
    data = np.array(indices, np.int32).tobytes() + bytes(16)
    out = torch.full((1000,), 7.0)
    with pytest.raises(RemoteProtocolError, match=f"^{name}: .*{says}"):
        make(name).decode(memoryview(data), out, PLACE)
    assert torch.equal(out, torch.full((1000,), 7.0))

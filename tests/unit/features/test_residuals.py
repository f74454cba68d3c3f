"""What codecs keep of a slice counts when its round does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foreprop.core.codec import Place
from foreprop.core.frames import NO_TOKEN, SendFrame
from foreprop.core.manifest import ParameterInfo
from foreprop.core.slicing import Slice
from foreprop.core.wire import Kind
from foreprop.engine.memory import bytes_of
from foreprop.features.compression.choosing import SliceCodec
from foreprop.features.compression.codecs import make
from foreprop.features.compression.residuals import OF_AVERAGES, Residuals, SliceResidual, divided


def kept_of(value: float = 0.0, scale: float = 1.0) -> SliceResidual:
    return SliceResidual({"error": torch.full((2,), value)}, scale)


def try_round(
    kept: SliceResidual, round_: tuple[int, int], adds: float, *, scale: float = 1.0
) -> None:
    """An encoding that leaves out so much more than it begins with."""
    kept.follow(round_, scale)
    kept.begin(round_)["error"].add_(adds)


def error_before(kept: SliceResidual, step: int, scale: float = 1.0) -> float:
    (value,) = set(kept.before(step, scale)["error"].tolist())
    return float(value)


def test_a_round_counts_when_a_later_step_begins() -> None:
    kept = kept_of()
    try_round(kept, (1, 0), 3.0)
    assert (error_before(kept, 1), error_before(kept, 2)) == (0.0, 3.0)
    try_round(kept, (2, 0), 4.0)
    assert (error_before(kept, 2), error_before(kept, 3)) == (3.0, 7.0)


def test_another_round_of_the_step_begins_where_the_last_one_did() -> None:
    kept = kept_of()
    try_round(kept, (1, 0), 3.0)
    try_round(kept, (1, 1), 4.0)
    kept.follow((1, 2), 1.0)  # without a gradient
    assert error_before(kept, 2) == 0.0
    try_round(kept, (2, 0), 5.0)
    assert error_before(kept, 3) == 5.0


def test_encoded_once_more_it_begins_where_it_did() -> None:
    kept = kept_of(2.0)
    try_round(kept, (1, 0), 3.0)
    try_round(kept, (1, 0), 3.0)
    assert error_before(kept, 2) == 5.0


def test_what_another_round_builds_on_has_counted() -> None:
    kept = kept_of()
    try_round(kept, (1, 0), 3.0)
    kept.follow((1, 1), 1.0, builds_on=True)
    kept.begin((1, 1))["error"].add_(4.0)
    assert (error_before(kept, 1), error_before(kept, 2)) == (3.0, 7.0)


def test_what_is_not_sent_leaves_no_trace() -> None:
    kept = kept_of(2.0)
    try_round(kept, (1, 0), 3.0)
    kept.give_up()
    kept.follow((2, 0), 1.0)
    assert error_before(kept, 2) == 2.0


@pytest.mark.parametrize("scale", [2.0, 0.5])
def test_a_scale_that_is_told_after_the_push_is_made_good(scale: float) -> None:
    """The code has 6 of 10, scaled, with 1 of the last step that should have been ``scale``."""
    kept = kept_of(1.0)
    try_round(kept, (1, 0), 10.0 - 6.0 - 0.0)
    assert kept.before(2, scale)["error"].tolist() == [(10.0 - 6.0 + scale) / scale] * 2
    kept.follow((2, 0), scale)
    assert kept.arrays["error"].tolist() == [10.0 - 6.0 + scale] * 2
    kept.give_up()
    kept.follow((3, 0), 4 * scale)
    assert kept.arrays["error"].tolist() == [4 * (10.0 - 6.0 + scale)] * 2


def test_of_averages_there_is_one_whatever_the_number_of_ranks() -> None:
    own: dict[str, Any] = {"w": {"error": torch.ones(1), OF_AVERAGES + "error": torch.ones(1)}}
    states: list[dict[str, Any]] = [
        {"residuals": own},
        {"residuals": {"w": {"error": torch.ones(1)}}},
    ]
    found = divided(states, ranks=range(1), world_size=1, averages=True)
    assert found["w"]["error"].item() == 1.0
    assert found["w"][OF_AVERAGES + "error"].item() == 1.0


# Where servers may leave pushes out.
def residuals_of(codec: str, elems: int = 300) -> Residuals:
    piece = Slice(0, 0, 0, elems, 0)
    coded = SliceCodec(piece, make(codec), None, None, torch.float32)
    info = ParameterInfo(name="w", shape=(elems,), dtype="float32", group=0)
    return Residuals([info], {0: coded}, rank=0, some_count=True)


def push_one(residuals: Residuals, step: int, values: torch.Tensor) -> memoryview:
    frame = SendFrame(0, Kind.PUSH, step, 0, 0, 0, NO_TOKEN)
    residuals.follow(0, (step, 0))
    return residuals.encoded(frame, bytes_of(values))


def decoded(codec: str, data: memoryview, step: int, elems: int = 300) -> torch.Tensor:
    out = torch.empty(elems)
    make(codec).decode(data, out, Place(step, 0, 0))
    return out


@pytest.mark.parametrize("codec", ["int8", "int4", "int2", "topk:0.1", "randomk:0.1"])
def test_what_counts_and_the_residual_are_the_sum_of_gradients_that_count(codec: str) -> None:
    residuals, generator = residuals_of(codec), torch.Generator().manual_seed(1)
    pushed, whole = torch.zeros(300), torch.zeros(300)
    for step in range(1, 21):
        before = residuals.get(0, step)
        values = torch.randn(300, generator=generator)
        data = push_one(residuals, step, values)
        if step % 3:
            pushed, whole = pushed + decoded(codec, data, step), whole + values
            continue
        residuals.give_up(0)
        after = residuals.get(0, step + 1)
        assert all(torch.equal(before[key], after[key]) for key in after)
    (kept,) = residuals.get(0, 21).values()
    torch.testing.assert_close(pushed + kept, whole, rtol=0, atol=1e-4)


def test_a_push_that_does_not_count_leaves_momentum_as_it_was() -> None:
    """The state of dgc is the same bits as if the push had never been encoded."""
    lossy, usual = residuals_of("dgc:0.1"), residuals_of("dgc:0.1")
    values = torch.linspace(-1, 1, 300)
    for step in range(1, 9):
        data = push_one(lossy, step, values * step)
        if step in (3, 4, 7):
            lossy.give_up(0)
        else:
            assert data == push_one(usual, step, values * step)
    for key, array in usual.get(0, 9).items():
        assert torch.equal(lossy.get(0, 9)[key], array)


def test_what_is_not_finite_goes_as_it_is_and_leaves_no_trace() -> None:
    residuals = residuals_of("int4")
    push_one(residuals, 1, torch.linspace(-1, 1, 300))
    before = residuals.get(0, 2)
    odd = torch.linspace(-1, 1, 300)
    odd[7] = torch.inf
    assert push_one(residuals, 2, odd) == bytes_of(odd)
    for key, array in residuals.get(0, 3).items():
        assert torch.equal(array, before[key])
        assert array.any()

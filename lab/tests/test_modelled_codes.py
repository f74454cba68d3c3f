"""What simulator and model say of codes, beside the frames that a session has sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from foreprop.core.codecfacts import codec_named
from foreprop.core.frames import NO_TOKEN, SendFrame
from foreprop.core.parallax import ROW_NUMBER_BYTES
from foreprop.core.wire import HEADER_BYTES, Kind
from foreprop.engine.connection import Connection
from foreprop.plan.deployment import Deployment, Table
from foreprop.plan.parameterserver import rows_of
from foreprop.plan.profile import Layer, Profile, ProfiledArray
from foreprop_lab.simulate.coder import at_relays, between_workers_and_relays
from foreprop_lab.simulate.compressed import coded_slices
from foreprop_lab.simulate.presets import agree, simulated_config
from foreprop_lab.simulate.served import Agreement
from foreprop_lab.simulate.setting import SimulatedSetting
from tests.conformance.parity import (
    batches_of,
    run_foreprop,
    servers_only,
    train_classifier,
    with_sgd,
)
from tests.conformance.sparse_models import ManyWords, with_optimizer
from tests.tiers import long_cases

pytestmark = servers_only

STEPS, SLICE_ELEMS = 4, 500
Sent = Counter[tuple[Kind, int, int]]
"""How many frames of a kind, of a slice, with so many bytes of payload."""


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 300), nn.ReLU(), nn.Linear(300, 3))


def frames_of_a_session(monkeypatch: pytest.MonkeyPatch, local_size: int, **settings: Any) -> Sent:
    """Of all its processes, from the second step on: the first answers are values.

    On the Python plane, for the native one's frames pass nothing of Python's.
    """
    sent: Sent = Counter()
    send = Connection.send

    def record(
        self: Connection, kind: int, flags: int, step: int, slice_: int, priority: int, data: Any
    ) -> None:
        if kind in (Kind.PUSH, Kind.REPLY) and step > 1:
            sent[Kind(kind), slice_, len(data)] += 1
        send(self, kind, flags, step, slice_, priority, data)

    monkeypatch.setattr(Connection, "send", record)
    by_rank = batches_of(2 * local_size, count=STEPS)
    settings |= {"local_size": local_size, "plane": "python"}
    run_foreprop(with_sgd(two_layers), train_classifier, by_rank, **settings)
    return sent


def frames_of(agreement: Agreement, kind: Kind, copies: int) -> Sent:
    """Of a step of the simulator's, times the steps and the peers."""
    sent: Sent = Counter()
    for piece in agreement.slices:
        frame = SendFrame(0, kind, 1, piece.number, 0, 0, NO_TOKEN)
        size_bytes = agreement.frame_bytes(frame) - HEADER_BYTES
        sent[kind, piece.number, size_bytes] += copies * (STEPS - 1)
    return sent


def simulated(compression: str, workers_per_node: int) -> Agreement:
    arrays = [
        ProfiledArray(name=name, shape=tuple(parameter.shape), forward_flops=1.0)
        for name, parameter in two_layers().named_parameters()
    ]
    setting = SimulatedSetting(
        profile=Profile(name="two", arrays=tuple(arrays)),
        systems=("p3",),
        nodes=2,
        workers_per_node=workers_per_node,
        scale=1,
        slice_elems=SLICE_ELEMS,
        compression=compression,
    )
    config = simulated_config("p3", setting)
    agreement = agree(config, setting)
    return replace(agreement, coded=coded_slices(config, setting, agreement.slices))


def total(parts: Iterable[Sent]) -> Sent:
    return sum(parts, Counter())


@pytest.mark.parametrize(
    "compression",
    [*("int8", "topk:0.1", "1bit"), *long_cases("bf16", "int2", "int4", "terngrad", "randomk:0.1")],
)
@pytest.mark.parametrize("local_size", [1, 2])
def test_simulated_frames_are_a_sessions(
    local_size: int, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frame by frame. With relays pushes inside a node are as they are, and answers coded."""
    found = frames_of_a_session(
        monkeypatch, local_size, compression=compression, slice_elems=SLICE_ELEMS
    )
    agreement, workers = simulated(compression, local_size), 2 * local_size
    expected = [frames_of(agreement, Kind.PUSH, 2), frames_of(agreement, Kind.REPLY, 2)]
    if local_size > 1:
        expected.append(frames_of(between_workers_and_relays(agreement), Kind.PUSH, workers))
        expected.append(frames_of(at_relays(agreement), Kind.REPLY, workers))
    assert found == total(expected)


def test_modelled_rows_are_a_sessions() -> None:
    """With what the exact codec leaves of values in this session; row numbers go as they are."""
    rows, width, drawn = 300, 64, 120
    generator = torch.Generator().manual_seed(3)
    words = [torch.randperm(rows, generator=generator)[:drawn].view(1, -1) for _ in range(STEPS)]
    by_rank = [[(each, torch.ones(1, dtype=torch.int64)) for each in words] for _ in range(2)]
    build = with_optimizer(ManyWords, torch.optim.Adagrad, lr=0.1)
    only_rows = {"table.*": "lossless"}
    plain, coded = (
        run_foreprop(build, train_classifier, by_rank, compression=compression)[0].stats
        for compression in (None, only_rows)
    )
    dense_bytes = STEPS * 4 * (width * 3 + 3)
    raw_bytes, code_bytes = (each["pushed_bytes"] - dense_bytes for each in (plain, coded))
    sent = [each - STEPS * drawn * 4 for each in (raw_bytes, code_bytes)]  # without row numbers
    share = sent[1] / sent[0]
    assert 0.5 < share < 0.97
    deployment = Deployment(
        layers=[Layer(name="x", sizes_elems=(), forward_s=1.0, backward_s=1.0)],
        nodes=2,
        rate_bits_per_s=1e9,
        tables=[Table(0, rows * width, width, drawn / rows)],
    )
    numbers_bytes = STEPS * drawn * ROW_NUMBER_BYTES
    for codec, size_bytes in zip((None, f"lossless:{share:.4f}"), sent, strict=True):
        row_codec = None if codec is None else codec_named(codec)
        pieces = rows_of(replace(deployment, row_codec=row_codec), first=0, servers=2)
        found_bytes = STEPS * sum(piece.size_bytes for piece in pieces) - numbers_bytes
        assert found_bytes == pytest.approx(size_bytes, rel=0.01)

"""A relay's tensors: sums in rank order, memory that is used again."""

from __future__ import annotations

import msgspec
import pytest
import torch

from foreprop.errors import RemoteProtocolError
from foreprop.features.nodes.nodesums import RelayStore
from tests.faults.wire_peers import manifest_of


def store(wire_dtype: str | None = None) -> RelayStore:
    """Two slices of six float32."""
    manifest = manifest_of()
    if wire_dtype is not None:
        knobs = msgspec.structs.replace(manifest.knobs, wire_dtype=wire_dtype)
        manifest = msgspec.structs.replace(manifest, knobs=knobs)
    return RelayStore(manifest, manifest.slices(), 0)


def put(relay: RelayStore, worker: int, values: torch.Tensor) -> None:
    buffer = relay.take_buffer(0)
    buffer.tensor.copy_(values)
    relay.put_gradient(0, worker, buffer)


def total_of(relay: RelayStore, workers: tuple[int, ...]) -> torch.Tensor:
    relay.add_up(0, workers)
    relay.keep_sum_only(0)
    buffer = relay.take_sum(0)
    assert buffer is not None
    values = buffer.tensor.clone()
    relay.give(buffer)
    return values


def test_the_sum_is_in_rank_order_whatever_came_first() -> None:
    relay = store()
    gradients = [torch.full((6,), value) for value in (1e8, 1.0, -1e8)]
    for worker in (2, 0, 1):
        put(relay, worker, gradients[worker])
    in_order = (gradients[0] + gradients[1]) + gradients[2]
    assert torch.equal(total_of(relay, (0, 1, 2)), in_order)


def test_memory_is_used_again() -> None:
    relay = store()
    pointers = set()
    for _ in range(5):
        for worker in (0, 1):
            buffer = relay.take_buffer(0)
            pointers.add(buffer.tensor.data_ptr())
            relay.put_gradient(0, worker, buffer)
        total_of(relay, (0, 1))
    assert len(pointers) == 2


def test_a_node_without_gradients_has_no_sum() -> None:
    relay = store()
    relay.add_up(0, ())
    relay.keep_sum_only(0)
    assert relay.take_sum(0) is None


def test_half_precision_is_summed_in_float32_and_rounded_once() -> None:
    relay = store("bfloat16")
    values = [1.0, 2**-9, 2**-9, 2**-9, 2**-9]  # each too small to change a bfloat16 of 1
    for worker, value in enumerate(values):
        put(relay, worker, torch.full((6,), value))
    total = total_of(relay, (0, 1, 2, 3, 4))
    assert total.dtype == torch.bfloat16
    assert total[0] == torch.tensor(sum(values)).bfloat16() != 1


def test_values_of_the_start_and_of_the_first_step_do_not_mix() -> None:
    """The first may still wait in the queue when the second come."""
    relay = store()
    for step in (0, 1):
        buffer = relay.take_buffer(0, value=True)
        buffer.tensor.fill_(step + 5)
        relay.put_value(0, buffer, step=step)
    relay.install_value(0)
    passed_on = [relay.take_value(0, step) for step in (0, 1)]
    assert [float(torch.frombuffer(each, dtype=torch.float32)[0]) for each in passed_on] == [5, 6]
    assert float(torch.frombuffer(relay.values(0), dtype=torch.float32)[0]) == 5


def test_an_answer_comes_in_full_or_in_the_wire_s_type() -> None:
    relay = store("float16")
    for size_bytes in (24, 12):
        room = relay.room(0, size_bytes)
        relay.land(0, room)
        assert len(relay.values(0)) == size_bytes
    relay.land(0, memoryview(b""))  # unchanged
    assert len(relay.values(0)) == 12
    with pytest.raises(RemoteProtocolError, match="slice 0 carries 13 bytes, not 24"):
        relay.room(0, 13)

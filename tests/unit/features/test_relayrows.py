"""A relay's rows: one push for all workers of the node, and no row fetched twice."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from foreprop.core.frames import SERVER
from foreprop.core.manifest import Manifest, ParameterInfo
from foreprop.core.relay_machine import workers_of_node
from foreprop.core.slicing import Shard
from foreprop.core.wire import Flag, Header, Kind
from foreprop.engine.connection import EMPTY
from foreprop.errors import RemoteProtocolError
from foreprop.features.nodes.rows import RelayRows
from foreprop.features.tables.parts import (
    RowPart,
    decode_part,
    decode_pull,
    encode_part,
    encode_pull,
)
from tests.faults.wire_peers import manifest_of

WIDTH = 2


class FakeExecutor:
    """Writes down what would be sent."""

    def __init__(self) -> None:
        self.host = SimpleNamespace(index=0)
        self.lock = threading.RLock()
        self.peers = workers_of_node(1, 4, 2)
        self.to_server: list[tuple[Any, ...]] = []
        self.to_workers: list[tuple[Any, ...]] = []

    def send(self, peer: int, *frame: Any) -> None:
        if peer == SERVER:
            self.to_server.append(frame if len(frame) == 6 else (*frame, 0))
        else:
            self.to_workers.append((peer, *frame))

    def execute(self, instructions: Any) -> None:
        raise AssertionError(instructions)


def peer_of(number: int) -> Any:
    """A connection."""
    return SimpleNamespace(number=number)


class Setup:
    """A table of ten rows on one server; node 1 with ranks 2 and 3."""

    def __init__(self, **knobs: Any) -> None:
        table = ParameterInfo(name="t", shape=(10, WIDTH), dtype="float32", group=0, rows=True)
        manifest: Manifest = manifest_of(world_size=4, parameters=(table,), workers_per_push=2)
        changed = msgspec.structs.replace(manifest.knobs, **knobs)
        manifest = msgspec.structs.replace(manifest, knobs=changed)
        self.executor: Any = FakeExecutor()
        self.shard: Shard = manifest.shards(0)[0]
        self.rows = RelayRows(manifest, [self.shard], self.executor, lambda *_: ())

    def push(self, worker: int, numbers: list[int], value: float = 1.0, **about: Any) -> None:
        rows = torch.full((len(numbers), WIDTH), value)
        data = encode_part(RowPart(torch.tensor(numbers, dtype=torch.int64), rows))
        self._frame(worker, Kind.ROWS_PUSH, data, **about)

    def _frame(
        self,
        worker: int,
        kind: Kind,
        data: bytes,
        *,
        step: int = 1,
        slice_: int = 0,
        flags: int = 0,
    ) -> None:
        header = Header(kind, flags, worker + 2, step, slice_, 4, len(data))
        self.rows.on_frame(peer_of(worker), header, memoryview(bytearray(data)))

    def pull(self, worker: int, request: int, numbers: list[int], step: int = 1) -> None:
        data = encode_pull(self.shard.number, torch.tensor(numbers, dtype=torch.int64))
        self._frame(worker, Kind.ROWS_PULL, data, step=step, slice_=request)

    def pushed_on(self) -> list[tuple[list[int], list[float], int]]:
        """The parts that went to the server: row numbers, the rows' first elements, flags."""
        found = []
        for kind, _, _, _, data, flags in self.executor.to_server:
            assert kind == Kind.ROWS_PUSH
            part = decode_part(memoryview(bytearray(data)), self.shard, torch.float32)
            found.append((part.numbers.tolist(), part.rows[:, 0].tolist(), flags))
        return found

    def asked(self) -> list[tuple[int, list[int]]]:
        """The pulls that went to the server: number and rows."""
        pulls = [frame for frame in self.executor.to_server if frame[0] == Kind.ROWS_PULL]
        return [
            (request, decode_pull(memoryview(bytearray(data)), self.shard).tolist())
            for _, _, _, request, data, _ in pulls
        ]

    def arrive(self, request: int, numbers: list[int], step: int = 1) -> None:
        """Have the server answer: row n has the value n."""
        header = Header(Kind.ROWS_REPLY, 0, 0, step, request, 4, 0)
        rows = torch.tensor(numbers, dtype=torch.float32)[:, None].expand(-1, WIDTH).contiguous()
        self.rows.room(peer_of(SERVER), header)[:] = memoryview(
            rows.view(torch.uint8).reshape(-1).numpy()
        )
        self.rows.on_frame(peer_of(SERVER), header, EMPTY)

    def answers(self) -> list[tuple[int, int, list[float]]]:
        """The answers: worker, its own number of the pull, the rows' first elements."""
        return [
            (
                worker,
                request,
                torch.frombuffer(bytearray(data), dtype=torch.float32)[::WIDTH].tolist(),
            )
            for worker, kind, _, _, request, data in self.executor.to_workers
            if kind == Kind.ROWS_REPLY
        ]


def test_each_touched_row_is_pushed_once_when_every_worker_has_pushed() -> None:
    setup = Setup()
    setup.push(1, [1, 4], 10.0)
    assert setup.executor.to_server == []
    assert (
        setup.rows.describe_wait(0, 1) == "the update of the rows of t waits for the push of rank 2"
    )
    setup.push(0, [4, 7], 1.0)
    assert setup.pushed_on() == [([1, 4, 7], [10.0, 11.0, 1.0], 0)]
    assert setup.rows.has_pushed(0, 1)


def test_a_long_push_goes_in_parts() -> None:
    setup = Setup(slice_elems=2 * WIDTH)
    setup.push(0, [0, 1], flags=Flag.MORE)
    setup.push(0, [5])
    setup.push(1, [1, 2])
    assert [(numbers, flags) for numbers, _, flags in setup.pushed_on()] == [
        ([0, 1], Flag.MORE),
        ([2, 5], 0),
    ]


def test_a_node_without_gradients_says_so() -> None:
    setup = Setup()
    for worker in (0, 1):
        setup._frame(worker, Kind.ROWS_PUSH, b"", flags=Flag.NO_GRADIENT)
    assert setup.executor.to_server == [(Kind.ROWS_PUSH, 1, 4, 0, b"", Flag.NO_GRADIENT)]


def test_a_gradient_without_rows_is_another_matter() -> None:
    setup = Setup()
    setup.push(0, [])
    setup._frame(1, Kind.ROWS_PUSH, b"", flags=Flag.NO_GRADIENT)
    assert setup.pushed_on() == [([], [], 0)]


def test_rows_on_their_way_are_not_asked_for_again() -> None:
    setup = Setup()
    setup.pull(0, 70, [1, 3])
    setup.pull(1, 80, [3, 5])
    assert setup.asked() == [(0, [1, 3]), (1, [5])]
    setup.arrive(1, [5])
    assert setup.answers() == []
    setup.arrive(0, [1, 3])
    assert sorted(setup.answers()) == [(0, 70, [1.0, 3.0]), (1, 80, [3.0, 5.0])]


def test_rows_that_are_here_are_answered_at_once() -> None:
    setup = Setup()
    setup.pull(0, 70, [1, 3])
    setup.arrive(0, [1, 3])
    setup.pull(1, 80, [3])
    assert setup.asked() == [(0, [1, 3])]
    assert setup.answers() == [(0, 70, [1.0, 3.0]), (1, 80, [3.0])]


def test_rows_of_another_step_are_other_rows() -> None:
    setup = Setup()
    setup.pull(0, 70, [1], step=1)
    setup.pull(1, 80, [1], step=2)
    setup.pull(1, 81, [1], step=3)
    assert setup.asked() == [(0, [1]), (1, [1]), (2, [1])]
    setup.arrive(2, [1], step=3)
    setup.arrive(0, [1], step=1)  # who waits is answered, though nobody else will ask
    assert [(worker, request) for worker, request, _ in setup.answers()] == [(1, 81), (0, 70)]


def test_rows_that_nobody_asked_for_are_refused() -> None:
    setup = Setup()
    setup.pull(0, 70, [1])
    with pytest.raises(RemoteProtocolError, match="request 0, step 2, which is not awaited"):
        setup.arrive(0, [1], step=2)


def test_values_are_rank_zero_s_to_send() -> None:
    with pytest.raises(RemoteProtocolError, match="rank 2 sent parameter values"):
        Setup()._frame(0, Kind.ROWS_VALUE, b"")


def test_rows_that_come_before_a_pull_is_done_with_are_handed_out_once() -> None:
    """The thread of the server's link may be faster than the one that has asked."""
    setup = Setup()
    send = setup.executor.send

    def answered_at_once(peer: int, *frame: Any) -> None:
        send(peer, *frame)
        if peer == SERVER:
            setup.arrive(frame[3], [3, 5])

    setup.executor.send = answered_at_once
    setup.pull(0, 70, [3, 5])
    assert setup.answers() == [(0, 70, [3.0, 5.0])]


def test_rows_that_are_asked_for_anew_are_fetched_again() -> None:
    setup = Setup()
    setup.pull(0, 70, [3])
    setup.arrive(0, [3])
    data = encode_pull(setup.shard.number, torch.tensor([3]))
    setup._frame(1, Kind.ROWS_PULL, data, slice_=80, flags=Flag.ANEW)
    assert setup.asked() == [(0, [3]), (1, [3])]
    setup.pull(0, 71, [3])  # waits for the new ones
    assert setup.answers() == [(0, 70, [3.0])]
    setup.arrive(1, [4])
    assert setup.answers()[1:] == [(1, 80, [4.0]), (0, 71, [4.0])]

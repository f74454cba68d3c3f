"""Which pushes a window lets go."""

from __future__ import annotations

from typing import Any

import pytest

from foreprop.config import Config
from foreprop.core.frames import FrameSent, GradientReady, ReplyArrived, SendFrame
from foreprop.core.manifest import Manifest, OptimizerInfo, ParameterInfo
from foreprop.core.pushwindow import PushWindow, pushed_bytes
from foreprop.core.sendqueue import AT_ONCE, Order, window_share_bytes
from foreprop.core.slicing import Slice
from foreprop.core.wire import Flag, Kind
from foreprop.core.worker_machine import WorkerMachine
from foreprop.errors import InternalError

SIZES_BYTES = [10, 10, 10, 10, 100]


def leave(window: PushWindow, *slices: int) -> None:
    """A push leaves for server 0 in step 1; the slice's number is its priority."""
    for slice_ in slices:
        assert window.admits(0, 1, slice_, slice_)
        window.left(0, 1, slice_, slice_)


def manifest_of(compression: str | None, **facts: Any) -> Manifest:
    """A matrix of 512 by 250 elements, in slices of 10,000, and a bias."""
    config = Config(compression=compression, slice_elems=10_000)
    return Manifest(
        foreprop="1",
        torch="2",
        byteorder="little",
        session="s",
        world_size=8,
        knobs=config.knobs(8),
        optimizer=OptimizerInfo(name="SGD"),
        parameters=(
            ParameterInfo(name="a.weight", shape=(512, 250), dtype="float32", group=0),
            ParameterInfo(name="a.bias", shape=(512,), dtype="float32", group=0),
        ),
        blob_bytes=(0,),
        **facts,
    )


@pytest.mark.parametrize(
    ("compression", "per_elem", "of_bias"),
    [
        (None, 4, 4),
        ("int8", 1 + 4 / 128, 1 + 4 / 128),
        ("*.weight=int4", 0.5 + 4 / 128, 4),
        ("dgc:0.01:500", 0.08, 4),
        ("topk:0.9", 4, 4),  # 7.2 would be more than as they are
    ],
)
def test_codecs_count_with_what_they_send(
    compression: str | None, per_elem: float, of_bias: float
) -> None:
    manifest = manifest_of(compression)
    slices = manifest.slices()
    sizes = pushed_bytes(manifest, slices)
    for piece, size_bytes in zip(slices, sizes, strict=True):
        expected = (of_bias if piece.parameter else per_elem) * piece.elems
        assert size_bytes == pytest.approx(expected, abs=4)  # a scale for the last block
    assert len(sizes) == 14


def test_to_a_relay_pushes_go_as_they_are() -> None:
    manifest = manifest_of("int8", workers_per_push=2)
    slices = manifest.slices()
    assert pushed_bytes(manifest, slices) == [4 * piece.elems for piece in slices]


def test_a_window_of_codes_holds_more_pushes() -> None:
    """Each server has 80 kB: two float32 slices, but no fewer than four, or eight in int8."""
    lets_go = {}
    for compression in (None, "int8"):
        manifest = manifest_of(compression)
        window_bytes = 8 * 80_000
        window = PushWindow(pushed_bytes(manifest, manifest.slices()), window_bytes, servers=8)
        own = [piece.number for piece in manifest.slices() if piece.parameter == 0]
        ahead = 0
        while ahead < len(own) and window.admits(0, 1, 0, own[ahead]):
            window.left(0, 1, 0, own[ahead])
            ahead += 1
        lets_go[compression] = ahead
    assert lets_go[None] == 4  # half as many as there are servers
    assert lets_go["int8"] == 8


def test_connections_share_what_may_be_unacknowledged() -> None:
    """A node's worker and its server send to so many at once, if peers take turns."""
    for order in ("priority", "fifo"):
        assert window_share_bytes(120_000, AT_ONCE, order) == 120_000 // AT_ONCE
    for peers in (AT_ONCE + 1, 100):
        assert window_share_bytes(120_000, peers, "priority") == 120_000 // (2 * AT_ONCE)
        assert window_share_bytes(1_200_000, peers, "fifo") == 1_200_000 // peers
    assert window_share_bytes(1, 100, "priority") == 4096


def test_pushes_leave_until_the_window_is_full_and_again_after_an_answer() -> None:
    window = PushWindow(SIZES_BYTES, 30)
    leave(window, 0, 1, 2)
    assert not window.admits(0, 1, 3, 3)
    window.answered(1)
    leave(window, 3)
    assert not window.admits(0, 1, 4, 4)


def test_every_server_has_a_window_of_its_own() -> None:
    window = PushWindow(SIZES_BYTES, 20)
    leave(window, 0, 1)
    assert not window.admits(0, 1, 2, 2)
    assert window.admits(1, 1, 2, 2)


def test_what_is_less_urgent_does_not_count() -> None:
    """It may be what the other workers have not pushed yet, and will push later."""
    window = PushWindow(SIZES_BYTES, 20)
    leave(window, 2, 3)
    assert not window.admits(0, 1, 4, 4)
    leave(window, 0, 1)


def test_an_earlier_step_is_more_urgent_whatever_the_priority() -> None:
    window = PushWindow(SIZES_BYTES, 20)
    window.left(0, 2, 0, 0)
    window.left(0, 2, 1, 1)
    assert window.admits(0, 1, 4, 4)
    assert not window.admits(0, 2, 4, 4)


@pytest.mark.parametrize("window_bytes", [0, 1, 10, 99])
def test_two_slices_may_always_leave(window_bytes: int) -> None:
    """However large they are: one on its way there, one on its way back."""
    window = PushWindow(SIZES_BYTES, window_bytes)
    leave(window, 0, 4)
    window.answered(0)
    leave(window, 3)
    assert not window.admits(0, 1, 4, 4)


@pytest.mark.parametrize(("servers", "slices"), [(1, 8), (4, 2), (5, 2), (8, 4), (16, 4), (64, 4)])
def test_servers_share_the_window_and_many_servers_have_up_to_four_slices(
    servers: int, slices: int
) -> None:
    window = PushWindow([10] * 10, 80, servers=servers)
    leave(window, *range(slices))
    assert not window.admits(0, 1, 9, 9)


def test_while_the_link_is_short_of_pushes_only_the_most_urgent_parameter_waits() -> None:
    window = PushWindow(SIZES_BYTES, 20)
    window.left(0, 1, 0, 0)
    window.left(0, 1, 0, 1)
    assert not window.admits(0, 1, 0, 2, is_short=True)
    assert not window.admits(0, 1, 1, 3)
    assert window.admits(0, 1, 1, 3, is_short=True)
    window.answered(0)
    window.answered(1)
    window.left(0, 1, 1, 3)
    window.left(0, 1, 1, 2)
    assert not window.admits(0, 1, 1, 4, is_short=True)
    assert window.admits(0, 2, 0, 0, is_short=True)


def test_answers_to_pushes_that_carried_nothing_are_no_matter() -> None:
    window = PushWindow(SIZES_BYTES, 20)
    window.answered(3)
    leave(window, 0, 1)
    assert not window.admits(0, 1, 2, 2)


# The machine with a window.
SLICES = tuple(Slice(i, p, 0, 1, 0) for i, p in enumerate([0, 1, 1, 1]))


def sent(instructions: list[object]) -> list[int]:
    return [f.slice for f in instructions if isinstance(f, SendFrame) and f.kind == Kind.PUSH]


def machine(window_bytes: int = 2, order: Order = "priority") -> WorkerMachine:
    window = PushWindow([1] * len(SLICES), window_bytes)
    return WorkerMachine(SLICES, parameters=2, order=order, reply="broadcast", window=window)


def test_a_worker_sends_on_when_an_answer_comes() -> None:
    worker = machine()
    assert sent(list(worker.handle(GradientReady(1, 1)))) == [1]
    assert sent(list(worker.handle(FrameSent(0)))) == [2]
    assert worker.handle(FrameSent(0)) == []
    assert worker.queue_depth == 1
    assert sent(list(worker.handle(ReplyArrived(2, 1, 0)))) == [3]
    assert worker.handle(FrameSent(0)) == []


def test_an_answer_while_a_frame_is_under_way_sends_nothing_more() -> None:
    worker = machine()
    worker.handle(GradientReady(1, 1))
    worker.handle(FrameSent(0))
    assert sent(list(worker.handle(ReplyArrived(1, 1, 0)))) == []
    assert sent(list(worker.handle(FrameSent(0)))) == [3]


def test_what_is_urgent_passes_a_full_window() -> None:
    worker = machine()
    worker.handle(GradientReady(1, 1))
    worker.handle(FrameSent(0))
    assert worker.handle(FrameSent(0)) == []
    assert sent(list(worker.handle(GradientReady(0, 1)))) == [0]


def test_pushes_without_a_gradient_do_not_fill_the_window() -> None:
    """A model of which little is used would otherwise wait for one empty answer after the other."""
    worker = machine()
    frames = list(worker.handle(GradientReady(1, 1, Flag.NO_GRADIENT)))
    while following := list(worker.handle(FrameSent(0))):
        frames += following
    assert sent(frames) == [1, 2, 3]


def test_a_window_needs_workers_that_agree_on_the_order() -> None:
    with pytest.raises(InternalError, match="push window with order='fifo'"):
        machine(order="fifo")


def test_a_push_that_leaves_once_more_is_owed_by_its_new_server_alone() -> None:
    """Its slice has moved: the server before it owes nothing, and may be lost."""
    window = PushWindow([10, 10, 10], 10)
    for slice_ in range(3):
        window.left(0, 1, 0, slice_)
    window.left(1, 1, 0, 0)
    window.forget(0)
    window.answered(0)
    assert window.admits(0, 1, 9, 2)
    assert window.admits(1, 1, 9, 2)

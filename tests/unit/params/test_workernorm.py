"""A worker that waits for the norm of gradients."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from foreprop.config import Config
from foreprop.core.norm import ZERO, encode_square_sums
from foreprop.core.slicing import Slice
from foreprop.core.wire import Kind
from foreprop.engine.progress import Progress
from foreprop.params.workernorm import WorkerNorm

PIECE = Slice(number=0, parameter=0, start_elems=0, stop_elems=2, server=0)


def engine(progress: Progress) -> Any:
    """The engine of a worker with one server, which has the only slice."""
    return SimpleNamespace(
        manifest=SimpleNamespace(
            knobs=SimpleNamespace(
                aggregation=Config().aggregation, packs=(), counts_some=False, staleness=0
            ),
            is_served=lambda _: True,
        ),
        progress=progress,
        config=Config(stall_report_s=0.2),
        slices=[PIECE],
        shards=[],
        parameters=["weight"],
        rank=0,
        measures=True,
        requests=SimpleNamespace(describe_incomplete=str, ask_about_incomplete=lambda: None),
    )


def test_a_wait_for_the_norm_counts_as_waited() -> None:
    progress = Progress(["weight"], rank=0, config=Config(stall_report_s=0.2))
    norm = WorkerNorm(engine(progress))
    peer: Any = SimpleNamespace(number=0)
    header: Any = SimpleNamespace(kind=Kind.NORM_PART, step=1)
    begun = threading.Event()

    def tell() -> None:
        begun.wait(60)
        norm.on_frame(peer, header, memoryview(encode_square_sums([ZERO])))

    def describe() -> None:
        begun.set()

    norm._engine.requests.ask_about_incomplete = describe
    telling = threading.Thread(target=tell)
    telling.start()
    assert norm.square_sums(1, 1) == [ZERO]
    telling.join()
    assert progress.counters.waits == 1
    assert progress.counters.waited_s > 0
    norm.square_sums(1, 1)
    assert progress.counters.waits == 1, "there was nothing to wait for"

"""By the device's clock: gradients leave while it computes, and values land while it computes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foreprop.engine.worker import WorkerEngine
from tests.devices.training import Scenario
from tests.lagging import overlap
from tests.lagging.device import DEVICE, Event, lagging
from tests.lagging.streams import LINES, current_stream
from tests.lagging.training import train

LAYERS = 6
TRAINING = 1
"""The number of the stream on which the one rank trains."""


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), *(nn.Linear(16, 16) for _ in range(LAYERS)))


def test_pushes_start_in_the_backward_pass_and_replies_land_in_the_forward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    push = WorkerEngine.push
    pushed = threading.Semaphore(0)
    seen: dict[str, Any] = {}

    def note(engine: WorkerEngine, parameter: int, step: int, **given: Any) -> None:
        push(engine, parameter, step, **given)
        pushed.release()

    monkeypatch.setattr(WorkerEngine, "push", note)

    def hold() -> None:
        seen["early"] = sum(pushed.acquire(timeout=60) for _ in range(2 * LAYERS))

    def hold_the_device(module: nn.Module, given: Any, found: torch.Tensor) -> None:
        """Before the first layer's gradients, until all other layers' have left."""
        found.register_hook(lambda _: current_stream().line.put(hold))

    def loop(model: Any, optimizer: Any, batches: Any, session: Any) -> None:
        for x, _ in batches:
            session.flush()
            current_stream().synchronize()
            LINES[TRAINING].busy.clear()
            while pushed.acquire(blocking=False):  # the first layer's
                pass
            LINES.host_waits.clear()
            if x is batches[-1][0]:  # the first gradients of all wait for the whole backward pass
                model[0].register_forward_hook(hold_the_device)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            seen["computed"] = event = Event()
            event.record()
            optimizer.step()
            model(x)  # uses every parameter once more
            seen["waited"] = list(LINES.host_waits)
            current_stream().synchronize()
            seen["jobs"] = list(LINES[TRAINING].busy)

    settings = {"architecture": "p2p", "update": "servers"}
    LINES.takes_s = {TRAINING: 0.0}  # it records when it does what
    try:
        with lagging(manner="eager"):
            train(Scenario(deep, loop, settings=settings, ranks=1, steps=3), DEVICE)
    finally:
        LINES.takes_s = {}
    assert {thread for thread, _ in seen["waited"]} == {"foreprop-stage"}

    assert seen["early"] == 2 * LAYERS, "gradients leave while the backward pass runs"
    computed_s = seen["computed"]._marker.reached_s
    after = [name for began_s, _, name in seen["jobs"] if began_s >= computed_s]
    landed = [number for number, name in enumerate(after) if name == "copy to device"]
    used = [number for number, name in enumerate(after) if name.startswith("aten.addmm")]
    assert len(landed) == 2 * (LAYERS + 1)
    assert len(used) == LAYERS + 1
    assert all(first < last for first, last in zip(used, landed[2::2], strict=False)), (
        "each layer's values land when the layers before it have been computed"
    )


@pytest.mark.long
@pytest.mark.leaks_ok(reason="matplotlib keeps its fonts open")
def test_the_command_measures_both_and_draws_each_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: list[overlap.Span] = []
    draw = overlap.draw_timeline

    def note(found: Sequence[overlap.Span], path: Path) -> None:
        spans.extend(found)
        draw(found, path)

    monkeypatch.setattr(overlap, "draw_timeline", note)
    picture = tmp_path / "timeline.svg"
    assert overlap.main(["--rounds", "1", "--steps", "2", "--timeline", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "host memory" in printed
    assert "device over host memory: " in printed
    drawn = picture.read_text()
    assert [told for told in overlap.TOLD.values() if f">{told}<" not in drawn] == []
    names = Counter(span.lane for span in spans)
    assert names["compute"] == 5 * overlap.LAYERS, "three forward passes, two backward ones"
    assert names["copy to host"] == 2 * overlap.LAYERS
    assert names["copy to device"] == 2 * overlap.LAYERS
    assert names["push"] >= 2 * overlap.LAYERS
    assert names["reply"] >= 2 * overlap.LAYERS
    began_s = min(span.began_s for span in spans)
    assert all(span.ended_s - began_s < 60 for span in spans), "all lanes have one clock"

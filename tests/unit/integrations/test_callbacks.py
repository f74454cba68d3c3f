"""Metrics for TensorBoard and Weights & Biases, as these keep them; nothing is sent anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foreprop.engine.metrics import Metrics
from foreprop.errors import ConfigError
from foreprop.integrations.tensorboard import TensorBoard
from foreprop.integrations.wandb import WeightsAndBiases


def metrics(step: int) -> Metrics:
    return Metrics(
        step=step,
        steps=10,
        seconds=2.0,
        waits=1,
        waited_s=0.5,
        pushed_bytes=1000,
        reply_bytes=2000,
        queue_depth=4,
        max_queue_depth=9,
    )


NAMES = {
    "step_s",
    "steps_per_s",
    "waiting_share",
    "sent_bits_per_s",
    "received_bits_per_s",
    "queue_depth",
}


class Writer:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.flushed = self.closed = 0

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def flush(self) -> None:
        self.flushed += 1

    def close(self) -> None:
        self.closed += 1


def test_tensorboard_gets_every_scalar_at_its_step() -> None:
    writer: Any = Writer()
    board = TensorBoard(writer=writer, prefix="net/")
    board(metrics(10))
    board(metrics(20))
    board.close()
    assert {name for name, _, _ in writer.scalars} == {f"net/{name}" for name in NAMES}
    assert ("net/waiting_share", 0.25, 20) in writer.scalars
    assert (writer.flushed, writer.closed) == (1, 0)  # it is the user's own
    with pytest.raises(ConfigError, match="give one of them"):
        TensorBoard("runs", writer=writer)


class Run:
    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.defined: list[tuple[str, str]] = []

    def log(self, data: dict[str, Any]) -> None:
        self.logged.append(data)

    def define_metric(self, name: str, step_metric: str) -> None:
        self.defined.append((name, step_metric))


def test_a_run_gets_metrics_over_the_sessions_own_steps() -> None:
    run = Run()
    WeightsAndBiases(run)(metrics(30))
    assert run.defined == [("foreprop/*", "foreprop/step")]
    (logged,) = run.logged
    assert set(logged) == {f"foreprop/{name}" for name in (*NAMES, "step")}
    assert (logged["foreprop/step"], logged["foreprop/step_s"]) == (30, 0.2)


@pytest.mark.parametrize(
    ("module", "make", "extra"),
    [
        ("torch.utils.tensorboard", TensorBoard, r"'\.\[tensorboard\]'"),
        ("wandb", WeightsAndBiases, r"'\.\[wandb\]'"),
    ],
)
def test_what_is_not_installed_is_told(
    monkeypatch: pytest.MonkeyPatch, module: str, make: Any, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=extra):
        make()


@pytest.mark.long
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board(metrics(10))
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Scalars("foreprop/step_s")
    assert (event.step, event.value) == (10, pytest.approx(0.2))


OFFLINE = """
import sys
import wandb
from foreprop.integrations.wandb import WeightsAndBiases
from foreprop.errors import ConfigError
from foreprop.engine.metrics import Metrics

try:
    WeightsAndBiases()
except ConfigError as error:
    assert "call wandb.init()" in str(error)
else:
    sys.exit("no run was active")
run = wandb.init(dir=sys.argv[1], settings=wandb.Settings(silent=True))
numbers = dict(waits=1, waited_s=0.5, pushed_bytes=1, reply_bytes=1, queue_depth=4)
WeightsAndBiases()(Metrics(step=10, steps=10, seconds=2.0, max_queue_depth=9, **numbers))
assert abs(run.summary["foreprop/step_s"] - 0.2) < 1e-9
run.finish()
wandb.teardown()
"""


@pytest.mark.long
def test_weights_and_biases_keep_it_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
    subprocess.run(
        [sys.executable, "-c", OFFLINE, str(tmp_path)], check=True, env=environment, timeout=100
    )
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))

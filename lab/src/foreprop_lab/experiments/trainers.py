"""What a step costs in Lightning and in Hugging Face's Trainer, beside the same plain loop.

    python -m foreprop_lab.experiments.trainers 2 20 0.5

The arguments are nodes, measured steps of each loop, and the device's time per step in seconds.
Each loop trains the lab's transformer of real layers, with the preset p3 and with DDP, on the lab's
links at balance 1.0. All loops live in the same processes and take turns, a few steps at a time.
What delays the host delays the device, too: nothing of a trainer's own work is hidden. A step is
from the end of a forward pass to the end of the next.

Each trainer does what it does by default, and is compared with the plain loop that does the same:
Trainer clips by the norm in every step, and Lightning does not.
"""

from __future__ import annotations

import itertools
import os
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import foreprop
from foreprop_lab.experiments.layers.models import DEVICE, MODELS
from foreprop_lab.experiments.layers.training import WAITS, LayersSetting, real_profile
from foreprop_lab.lab.run import run_lab
from foreprop_lab.lab.systems import Steps, System
from foreprop_lab.setting.records import Record

PLAIN, CLIPPED, LIGHTNING, TRAINER = OURS = ("plain", "plain-clipped", "lightning", "trainer")
DDP = "ddp-"
LOOPS = (*OURS, *(DDP + name for name in OURS))
SAME_STEP = {PLAIN: PLAIN, CLIPPED: CLIPPED, LIGHTNING: PLAIN, TRAINER: CLIPPED}
"""The plain loop that does the same as each loop."""

CLIP_NORM = 1.0
"""The norm to which Trainer clips by default."""

_START_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainersSetting(LayersSetting):
    """The setting of all `LOOPS`, which make the same steps."""

    known_systems: ClassVar[tuple[str, ...]] = LOOPS
    paced_systems: ClassVar[tuple[str, ...]] = OURS


class Turns:
    """Runs a training loop in a thread of its own, a number of steps at a time."""

    def __init__(self) -> None:
        self.marks: list[float] = []
        """When each forward pass of this turn's steps ended."""
        self._left = 0
        self._requests: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    # The loop's thread calls these.
    def may_step(self) -> bool:
        """Wait for this loop's turn before a step; False when the loop is to end."""
        if self._left == 0:
            self._answers.put(self.marks)
            self._left = self._requests.get()
            self.marks = [time.monotonic()]
        self._left -= 1
        return self._left >= 0

    def run(self, loop: Callable[[], None]) -> None:
        """The thread's work; what it raises, `ask` raises."""
        try:
            loop()
            self._answers.put([])
        except BaseException as error:
            self._answers.put(error)

    # The lab's thread calls these.
    def answer(self, timeout_s: float | None = None) -> list[float]:
        answer = self._answers.get(timeout=timeout_s)
        if isinstance(answer, BaseException):
            raise answer
        marks: list[float] = answer
        return marks

    def ask(self, steps: int) -> list[float]:
        """Have the loop make so many steps, or end if they are 0; return the marks."""
        self._requests.put(steps)
        return self.answer()


class Task(nn.Module):
    """The transformer and its loss; marks the ends of forward passes."""

    def __init__(self, setting: TrainersSetting, turns: Turns) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = MODELS[setting.profile.name]()
        self.model.take_times(setting.layers)
        self.turns = [turns]  # no module

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = F.cross_entropy(self.model(x).flatten(0, -2), labels.flatten())
        self.turns[0].marks.append(time.monotonic())
        return {"loss": loss}

    def sgd(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Batches(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """The same batch again and again, without end."""

    def __init__(self, task: Task) -> None:
        x, labels = task.model.batch(torch.Generator().manual_seed(0))
        self._batch = {"x": x, "labels": labels}

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield self._batch


def train_plainly(name: str, task: Task, turns: Turns, settings: dict[str, Any]) -> None:
    optimizer, call = task.sgd(), task
    session = None
    if name in OURS:
        session = foreprop.parallelize(task, optimizer, **settings)
    else:
        call = DistributedDataParallel(task)  # type: ignore[assignment]
    batch = next(iter(Batches(task)))
    while turns.may_step():
        optimizer.zero_grad()
        loss: Any = call(**batch)["loss"]
        loss.backward()
        if name.endswith(CLIPPED):
            nn.utils.clip_grad_norm_(task.parameters(), CLIP_NORM)
        optimizer.step()
    if session is not None:
        session.close()


def train_with_lightning(name: str, task: Task, turns: Turns, settings: dict[str, Any]) -> None:
    import lightning.pytorch as pl

    from foreprop.integrations.lightning import ForepropStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.task = task

        def on_train_batch_start(self, batch: Any, number: int) -> int | None:
            if turns.may_step():
                return None
            self.trainer.should_stop = True
            return -1  # ends the epoch

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss: torch.Tensor = self.task(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.sgd()

    trainer = pl.Trainer(
        strategy=ForepropStrategy(**settings) if name == LIGHTNING else "ddp",
        accelerator="cpu",
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Batches(task), batch_size=None))


def train_with_trainer(name: str, task: Task, turns: Turns, settings: dict[str, Any]) -> None:
    import transformers

    from foreprop.integrations.trainer import ForepropTrainer

    class InTurn(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not turns.may_step():
                raise _Ended

    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(prefix="trainer-"),
        max_steps=1_000_000,
        per_device_train_batch_size=1,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,  # as torch's default, and Lightning's
        accelerator_config={"dispatch_batches": False},
    )
    optimizer = task.sgd()
    own: dict[str, Any] = {"foreprop": settings} if name == TRAINER else {}
    trainer = (ForepropTrainer if name == TRAINER else transformers.Trainer)(
        task,
        arguments,
        train_dataset=Batches(task),
        data_collator=lambda batches: batches[0],
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
        callbacks=[InTurn()],
        **own,
    )
    try:
        trainer.train()
    except _Ended:
        if isinstance(trainer, ForepropTrainer) and trainer.session is not None:
            trainer.session.close()


class _Ended(Exception):
    """The last turn is over."""


_TRAIN = {
    PLAIN: train_plainly,
    CLIPPED: train_plainly,
    LIGHTNING: train_with_lightning,
    TRAINER: train_with_trainer,
}


class LoopSystem:
    """One of `LOOPS` on one node."""

    def __init__(self, name: str, setting: TrainersSetting, rank: int, *, paced: bool) -> None:
        os.environ |= {"TORCHELASTIC_RUN_ID": "lab", "GROUP_RANK": str(rank)}  # as of torchrun
        DEVICE.waits_for_host = True
        settings: dict[str, Any] = {"slice_elems": setting.slice_elems_of("p3")}
        if paced:
            settings["link_rate_bits_per_s"] = setting.network.rate_of(rank)
        self._release = WAITS.hold()
        self._turns = Turns()
        task = Task(setting, self._turns)
        loop = lambda: _TRAIN[name.removeprefix(DDP)](name, task, self._turns, settings)  # noqa: E731
        self._thread = threading.Thread(
            target=self._turns.run, args=(loop,), name=name, daemon=True
        )
        self._thread.start()
        self._turns.answer(_START_S)  # it is before its first step

    def steps(self, count: int, first: int = 1) -> Steps:
        idle_before = DEVICE.idle_s
        marks = self._turns.ask(count)
        step_s = [after - before for before, after in itertools.pairwise(marks)]
        idle_s = (DEVICE.idle_s - idle_before) / count
        return Steps(step_s=step_s, waited_s=[idle_s] * count)

    def close(self) -> None:
        self._turns.ask(0)
        self._thread.join()
        self._release()


def build_system(
    name: str, rank: int, setting: Any, *, paced: bool, bucket_bytes: int | None
) -> System:
    """Build a loop for `foreprop_lab.lab.run.run_lab`; DDP's buckets are its own."""
    return LoopSystem(name, setting, rank, paced=paced)


def table(records: list[Record]) -> list[str]:
    """Each loop's median step, over that of the plain loop that does the same, and over DDP's."""
    step_s = {record.system: record.iteration_s.median for record in records}
    lines = [f"{'loop':18} {'ms/step':>8} {'of plain':>9} {'of its DDP':>11}"]
    for name, seconds in step_s.items():
        own = name.removeprefix(DDP)
        plain = step_s[name.removesuffix(own) + SAME_STEP[own]]
        ddp = step_s.get(DDP + own)
        of_ddp = f"{seconds / ddp:11.3f}" if ddp is not None else ""
        lines.append(f"{name:18} {1e3 * seconds:8.1f} {seconds / plain:9.3f} {of_ddp}")
    busy = statistics.fmean(record.cpu_share for record in records)
    return [*lines, f"CPUs busy: {100 * busy:.0f} % (by all of the machine's programs)"]


def main(nodes: int, steps: int, compute_s: float) -> list[Record]:
    setting = TrainersSetting(
        profile=real_profile("transformer"),
        systems=LOOPS,
        nodes=nodes,
        iterations=steps,
        compute_s=compute_s,
        scale=1,
    )
    result = run_lab(setting, build=build_system, progress=lambda _: None)
    for line in (*result.notices, *table(result.records)):
        print(line, flush=True)
    return result.records


if __name__ == "__main__":
    from foreprop_lab.experiments import trainers  # by the name under which the nodes find it

    trainers.main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))

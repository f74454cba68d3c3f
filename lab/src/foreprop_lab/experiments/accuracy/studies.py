"""The trainings that each study has, and what is kept of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from foreprop.core.staleness import Staleness
from foreprop.errors import ConfigError
from foreprop_lab.benchmarks import codecs
from foreprop_lab.experiments.accuracy.stale import train_stale
from foreprop_lab.experiments.accuracy.steptimes import (
    SYSTEM,
    Clock,
    stale_step_s,
    synchronous_step_s,
)
from foreprop_lab.experiments.accuracy.tasks import TASKS, Task, load_part
from foreprop_lab.experiments.accuracy.training import EXACT, Outcome, train

CODECS, DGC, ASGD = "codecs", "dgc", "asgd"
"""The studies: each codec; DGC, as P3's Fig. 11; asynchronous workers, as its Fig. 15."""
STUDIES = (CODECS, DGC, ASGD)
NAMES = tuple(name for name in codecs.NAMES if name not in ("lossless", "fp16"))
_USUAL_SEEDS = {CODECS: 3, DGC: 1, ASGD: 1}
DGC_CODEC = "dgc:0.001"
"""The paper's threshold of 99.9 %."""
_SCORES, _CODEC_SCORES = 6, 4
_CODEC_RANKS = 2
_CHANGES: Sequence[dict[str, float]] = (
    {},
    {"lr": 0.5},
    {"lr": 2.0},
    {"momentum": 0.8},
    {"batch": 0.5},
)
"""The five settings of Fig. 11, as factors for the task's own; the momentum is given itself.

The paper has five and does not say which.
"""
_STALENESS: Sequence[tuple[Staleness, float]] = (
    (0, 0.0),
    (3, 0.0),
    ("async", 0.0),
    ("async", 0.04),
)
"""Staleness and lambda of P3, SSP, ASGD and DC-ASGD. 0.04 is the default of MXNet's DCASGD."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The setting of one training, from which its result follows."""

    task: str
    codec: str = EXACT
    staleness: Staleness = 0
    strength: float = 0.0
    ranks: int
    batch: int
    epochs: int
    lr: float
    momentum: float
    seed: int
    clock: Clock | None = None
    part: float = 1.0
    """The share of the task's examples to train with: the first ones."""

    @property
    def label(self) -> str:
        """The name of what its study compares."""
        if self.strength:
            return "DC-ASGD"
        if self.staleness == "async":
            return "ASGD"
        if self.staleness:
            return f"SSP, s = {self.staleness}"
        return self.codec if self.codec != EXACT or self.clock is None else SYSTEM


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    run: Run
    outcome: Outcome


def runs_of(
    study: str,
    task: str,
    *,
    epochs: int | None,
    names: Sequence[str],
    clock: Clock,
    part: float = 1.0,
    seeds: int | None = None,
    momentum: float | None = None,
) -> list[Run]:
    """A study's runs, in an order in which an interrupted study has some of everything.

    ``seeds`` is how many there are, from 0 on. ``momentum`` replaces the task's own. Raises
    `ConfigError`.
    """
    own = TASKS[task]
    if momentum is not None:
        if not 0 <= momentum < 1:
            raise ConfigError(f"momentum is {momentum}; it must be at least 0 and less than 1")
        own = replace(own, momentum=momentum)
    numbers = range(_USUAL_SEEDS[study] if seeds is None else seeds)

    def run(ranks: int, **given: object) -> Run:
        usual = {
            "batch": own.batch * _CODEC_RANKS // ranks,
            "epochs": epochs or own.epochs,
            "lr": own.lr,
            "momentum": own.momentum,
            "seed": 0,
            "part": part,
        }
        return msgspec.convert({"task": task, "ranks": ranks, **usual, **given}, Run)

    if study == CODECS:
        return [
            run(_CODEC_RANKS, codec=name, seed=seed) for seed in numbers for name in (EXACT, *names)
        ]
    shared = {"clock": msgspec.to_builtins(clock)}
    if study == ASGD:
        return [
            run(clock.nodes, staleness=staleness, strength=strength, seed=seed, **shared)
            for seed in numbers
            for staleness, strength in _STALENESS
        ]
    batch = own.batch * _CODEC_RANKS // clock.nodes
    return [
        run(
            clock.nodes,
            codec=codec,
            lr=own.lr * change.get("lr", 1.0),
            momentum=change.get("momentum", own.momentum),
            batch=int(batch * change.get("batch", 1.0)),
            seed=seed,
            **shared,
        )
        for seed in numbers
        for change in _CHANGES
        for codec in (EXACT, DGC_CODEC)
    ]


def task_of(run: Run) -> Task:
    """The task with the run's changes; `Task.load` raises `ConfigError` for too little data."""
    whole = TASKS[run.task]
    return replace(
        whole,
        load=lambda: load_part(whole, run.part, least=run.ranks * run.batch),
        batch=run.batch,
        epochs=run.epochs,
        lr=run.lr,
        momentum=run.momentum,
    )


def outcome_of(run: Run) -> Outcome:
    """Train. The result is deterministic, except that sums are ordered otherwise on other machines.

    Raises `ConfigError` for a part of the data without a whole step.
    """
    task = task_of(run)
    if run.clock is None:
        # one seed shows how quickly each codec learns; scoring takes time
        scores = 1 if run.seed else _CODEC_SCORES
        return train(task, run.codec, run.seed, ranks=run.ranks, scores=scores)
    if run.staleness:
        return train_stale(
            task,
            run.seed,
            staleness=run.staleness,
            strength=run.strength,
            step_s=stale_step_s(run.clock, SYSTEM),
            scores=_SCORES,
        )
    codec = None if run.codec == EXACT else run.codec
    step_s = synchronous_step_s(run.clock, SYSTEM, codec)
    return train(task, run.codec, run.seed, ranks=run.ranks, scores=_SCORES, step_s=step_s)


def train_all(
    runs: Iterable[Run], out: Path, *, say: Callable[[str], None] = lambda _: None
) -> list[Trained]:
    """Train all runs but those that ``out`` has already, and add the new ones to it."""
    done = {trained.run: trained for trained in kept(out)}
    for number, run in enumerate(wanted := [*runs], 1):
        say(f"{number}/{len(wanted)} {run.task}, {run.label}, seed {run.seed}")
        if run in done:
            continue
        outcome = outcome_of(run)
        done = {trained.run: trained for trained in kept(out)}  # another study's, meanwhile
        done[run] = Trained(run=run, outcome=outcome)
        keep(out, done.values())
    return [done[run] for run in wanted]


def kept(out: Path) -> list[Trained]:
    """The trainings that the file has; none if there is no file."""
    if not out.exists():
        return []
    try:
        return msgspec.json.decode(out.read_bytes(), type=list[Trained])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{out} is no file of trainings: {error}") from error


def keep(out: Path, trained: Iterable[Trained]) -> None:
    """Write all trainings, one per line; the file is replaced completely or not at all."""
    lines = b",\n".join(msgspec.json.encode(each) for each in trained)
    new = out.with_suffix(".new")
    new.write_bytes(b"[\n" + lines + b"\n]\n")
    new.replace(out)

"""Running a script on each system in turn, a few rounds of them, and collecting what comes of it.

Whole runs take turns, not blocks of steps within one: each begins with the script's own first step,
so the losses can be laid beside each other, and what one system leaves in memory, caches or sockets
does not touch the next. The order turns by one place from round to round.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import psutil

from foreprop.errors import ConfigError, ForepropError
from foreprop.quantities import counted, option
from foreprop.tools.compare import records
from foreprop.tools.compare.records import Task
from foreprop.tools.compare.result import (
    CPU_BOUND_SHARE,
    LEAST_STEPS,
    Comparison,
    RankRun,
    Run,
    draws_differ,
    reference_of,
    rows_of,
)
from foreprop.tools.compare.systems import ALONE, CONTENDERS, DDP, DDP_BF16, USUAL
from foreprop.tools.run.run import Outcome
from foreprop.version import __version__

_WORKERS_LINE = re.compile(rb"\[(\d+)\] ?(.*)", re.DOTALL)
_BY_SIGNAL = "ended by "
"""How the launcher's failure begins if a signal to this command has ended the run."""
_FOLLOWS = ("PeerLost", "StepTimeout", "DistBackendError", "RuntimeError: [")
"""The errors of ranks that have lost another one."""


class Stopped(Exception):
    """A signal has ended the command, with this exit code."""

    def __init__(self, code: int, failure: str) -> None:
        super().__init__(failure)
        self.code = code


class Lines:
    """Takes what a run prints: records are kept, the rest goes to its log, and ``echo``."""

    def __init__(self, log: Path, echo: BinaryIO | None = None) -> None:
        self.records: list[records.Record] = []
        self._log = log.open("wb")
        self._echo = echo
        self._rest = b""

    def write(self, text: bytes) -> int:
        *whole, self._rest = (self._rest + text).split(b"\n")
        for line in whole:
            self._take(line)
        return len(text)

    def _take(self, line: bytes) -> None:
        found = _WORKERS_LINE.fullmatch(line)
        text = line if found is None else found[2]
        record = records.maybe_decode(text)
        if record is not None:
            self.records.append(record)
        elif text.strip():
            for stream in (self._log, self._echo):
                if stream is not None:
                    stream.write(line + b"\n")

    def flush(self) -> None:
        self._log.flush()

    def close(self) -> None:
        if self._rest:
            self._take(self._rest)
            self._rest = b""
        self._log.close()


Start = Callable[[Task, Lines], Outcome]
"""Runs the script once, on all ranks, and returns when all have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be compared, and how often."""

    script: str
    """The script's name, for messages."""
    systems: tuple[str, ...] = option("Separated by commas.", USUAL)
    workers: int
    machines: int
    rounds: int = option("Runs of the script on each system.", 3, least=1)
    steps: int = option("Steps that count in a run.", 20, least=LEAST_STEPS)
    warm_up: int = option("Steps before those, which do not count.", 5, least=1)
    batch: int | None = option(
        "Samples in one worker's step: shows samples/s in the place of steps/s.", None, least=1
    )
    seed: int | None = option(
        "Seeds every run's generators alike, before the script does; -1 leaves them.", 0
    )
    backend: Literal["gloo", "nccl"] | None = option(
        "DDP's, if the script makes no process group; by default as the model's device suggests.",
        None,
    )
    find_unused_parameters: bool = option("Have DDP look for parameters without gradient.", False)
    module: bool = option("SCRIPT is a module, as after python -m.", False)
    command: str = ""

    def task(self, system: str) -> Task:
        return Task(
            system=system,
            steps=self.steps,
            warm_up=self.warm_up,
            seed=self.seed,
            module=self.module,
            backend=self.backend,
            find_unused=self.find_unused_parameters,
        )


def compare(
    request: Request,
    start: Start,
    folder: Path,
    *,
    progress: Callable[[str], None] = lambda _: None,
    echo: BinaryIO | None = None,
) -> Comparison:
    """Run everything, with logs in ``folder``; a system that fails once is not tried again.

    Raises `ConfigError` for a script that cannot be compared at all, and `Stopped`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    runs: list[Run] = []
    for number in range(request.rounds):
        turn = number % len(request.systems)
        for system in (*request.systems[turn:], *request.systems[:turn]):
            if any(run.error for run in runs if run.system == system):
                continue
            progress(f"round {number + 1} of {request.rounds}: {CONTENDERS[system].title}")
            run = _run_once(request, start, system, number + 1, folder, echo)
            if not runs:
                _check_script(request, run)
            runs.append(run)
    samples = None if request.batch is None else request.batch * request.workers
    return Comparison(
        command=request.command,
        workers=request.workers,
        machines=request.machines,
        steps=request.steps,
        warm_up=request.warm_up,
        batch=request.batch,
        reference=reference_of(request.systems),
        versions={
            "foreprop": __version__,
            "torch": importlib.metadata.version("torch"),
            "python": platform.python_version(),
        },
        notices=_notices(request, runs),
        rows=rows_of(runs, request.systems, samples=samples),
        runs=runs,
    )


def _run_once(
    request: Request,
    start: Start,
    system: str,
    number: int,
    folder: Path,
    echo: BinaryIO | None,
) -> Run:
    log = folder / f"{number}-{system}.log"
    lines = Lines(log, echo)
    try:
        outcome = start(request.task(system), lines)
    finally:
        lines.close()
    if outcome.failure is not None and outcome.failure.startswith(_BY_SIGNAL):
        raise Stopped(outcome.code, outcome.failure)
    run = Run(system=system, round=number, warm_up=request.warm_up, log=str(log))
    run.ranks = _ranks(request.workers, lines.records)
    run.about = next((r.about for r in lines.records if isinstance(r, records.Began)), "")
    run.error = _why_failed(run, lines.records, outcome)
    return run


def _ranks(workers: int, reported: Sequence[records.Record]) -> list[RankRun]:
    ranks = [RankRun(losses=[], seconds=[]) for _ in range(workers)]
    for record in reported:
        rank = ranks[record.rank]
        if isinstance(record, records.Began):
            rank.is_ready = True
        elif isinstance(record, records.Chunk):
            rank.losses += record.losses
            rank.seconds += record.seconds
        else:
            was_ready = rank.is_ready
            for name in records.RankEnd.__struct_fields__:
                setattr(rank, name, getattr(record, name))
            rank.is_ready |= was_ready
    return ranks


def _errors(reported: Sequence[records.Record]) -> list[str]:
    """The ranks' errors, the cause first: that of a rank that did not merely lose the others."""
    found = [
        f"rank {record.rank}: {record.error}"
        for record in reported
        if isinstance(record, records.Ended) and record.error
    ]
    return sorted(found, key=lambda text: text.partition(": ")[2].startswith(_FOLLOWS))


def _why_failed(run: Run, reported: Sequence[records.Record], outcome: Outcome) -> str:
    """Why a run does not count; empty if it does."""
    is_ddp = run.system in (DDP, DDP_BF16)
    if errors := _errors(reported):
        if is_ddp and "find_unused_parameters" in errors[0]:
            return errors[0] + " (here: --find-unused-parameters)"
        return errors[0]
    if not all(rank.digest for rank in run.ranks):
        if outcome.code:
            return outcome.failure or f"it was ended with exit code {outcome.code}"
        if any(rank.is_ready for rank in run.ranks):
            return "some ranks called parallelize(), and others ended without"
        return _NOT_PARALLEL
    if len(run.step_s) < LEAST_STEPS:
        return (
            f"the script made {counted(run.ranks[0].steps, 'step')}, and {run.warm_up} of them"
            f" are not counted; that leaves less than {LEAST_STEPS}. Give it more data or epochs,"
            " or --warm-up 1"
        )
    if run.system != ALONE and len({rank.digest for rank in run.ranks}) > 1:
        why = ": DDP averages only what goes through model(...), and the loop does something else"
        return "the ranks' parameters were not the same in the end" + why * is_ddp
    return ""


_NOT_PARALLEL = (
    "the script ended without calling foreprop.parallelize(model, optimizer); compare needs"
    " foreprop's two lines in it, and puts the systems in their place"
)


def _check_script(request: Request, run: Run) -> None:
    if run.error and not any(rank.is_ready for rank in run.ranks):
        if run.error == _NOT_PARALLEL:
            raise ConfigError(f"{request.script}: {run.error}")
        raise ScriptFailed(
            f"{request.script} failed before parallelize() returned: {run.error}; what it printed"
            f" is in {run.log}"
        )


class ScriptFailed(ForepropError):
    """The user's script cannot be run."""


def _notices(request: Request, runs: Sequence[Run]) -> list[str]:
    notices = []
    good = [run for run in runs if not run.error]
    made = {len(run.step_s) for run in good}
    if made and min(made) < request.steps:
        notices.append(
            f"The script ends by itself: of a run {counted(min(made), 'step')} count, not"
            f" {request.steps}."
        )
    if draws_differ(runs):
        notices.append(
            "The script draws other random numbers each time it is run: its first loss, before any"
            " update, is another one. So the losses say nothing; have it seed its generators."
        )
    busy = {run.system for run in good if run.cpu_share > CPU_BOUND_SHARE}
    if names := [name for name in request.systems if name in busy and name != ALONE]:
        notices.append(
            f"{', '.join(names)}: a machine's processors were busy for over {CPU_BOUND_SHARE:.0%}"
            " of the time, so these steps say little about the network."
        )
    processors = psutil.cpu_count() or 1
    if request.machines == 1 and request.workers > 1:
        notices.append(
            "All workers are on this machine: nothing crosses a network, and the"
            f" {processors} processors are shared by workers and servers. Run it on your hosts,"
            " with --resources, to see what their network does."
        )
    return notices

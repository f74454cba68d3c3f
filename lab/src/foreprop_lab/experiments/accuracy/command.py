"""``foreprop lab accuracy``: real models on real data, time from the simulator's clock."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import torch
import typer

from foreprop.errors import ConfigError
from foreprop.features.compression.codecs import make
from foreprop.quantities import parse_rate, parse_time
from foreprop.tools.cli.options import writable
from foreprop.tools.cli.output import console, print_line
from foreprop_lab.experiments.accuracy.comparison import lines_of, time_lines
from foreprop_lab.experiments.accuracy.scorecharts import chart_of
from foreprop_lab.experiments.accuracy.steptimes import Clock
from foreprop_lab.experiments.accuracy.studies import CODECS, NAMES, STUDIES, runs_of, train_all
from foreprop_lab.experiments.accuracy.tasks import TASKS
from foreprop_lab.experiments.accuracy.timed import timed
from foreprop_lab.experiments.chart import write_chart

_CLOCK = Clock()


def accuracy(
    study: Annotated[str, typer.Argument(help="codecs, dgc (Fig. 11) or asgd (Fig. 15).")],
    *,
    task: Annotated[str, typer.Option(help=f"One of {', '.join(TASKS)}.")] = "cifar",
    names: Annotated[
        str, typer.Option("--codecs", help="Of the study codecs, separated by commas.")
    ] = ",".join(NAMES),
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Of each training; by default the task's own.")
    ] = None,
    part: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Of the examples to train with: the first ones."),
    ] = 1.0,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, max=100, help="How many, from 0 on; by default 3 of codecs and 1 of others."
        ),
    ] = None,
    momentum: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Of SGD; by default the task's own."),
    ] = None,
    nodes: Annotated[
        int, typer.Option(min=2, max=16, help="Workers of dgc and asgd; codecs have 2.")
    ] = _CLOCK.nodes,
    rate: Annotated[str, typer.Option(help="Their links' rate, as 1Gbit.")] = "1Gbit",
    compute: Annotated[str, typer.Option(help="Their device's time per step.")] = "100ms",
    step_jitter: Annotated[
        float, typer.Option(min=0.0, help="Their steps vary by exp(this x a normal draw).")
    ] = _CLOCK.step_jitter,
    out: Annotated[Path, typer.Option(help="Folder for trainings and figures.")] = Path(
        "runs/accuracy"
    ),
) -> None:
    """Train a small model with real gradients on real data, many times, and compare scores.

    codecs: with each codec, three seeds each. dgc: five settings, exact and DGC at 99.9 %, as the
    P3 paper's Fig. 11. asgd: synchronous, stale synchronous and asynchronous workers, as its
    Fig. 15. All workers are in this process; their steps' times are simulated: of ResNet-110, but
    for codecs with other tasks than cifar of the model itself. The same options give the same
    results. A training is kept when it is done, so a run goes on where it was interrupted.

    Examples:
      foreprop lab accuracy codecs --task fashion --codecs int8,dgc:0.001
      foreprop lab accuracy codecs --task wikitext --part 0.25 --codecs int8,int4
      foreprop lab accuracy dgc --epochs 3
      foreprop lab accuracy codecs --task wikitext --part 0.25 --rate 100Mbit
      foreprop lab accuracy asgd --nodes 4 --rate 1Gbit --step-jitter 0.3 --seeds 3
    """
    for what, value, known in (("STUDY", study, STUDIES), ("--task", task, tuple(TASKS))):
        if value not in known:
            raise ConfigError(f"{what} is {value!r}; there are {', '.join(known)}")
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        make(name)  # an unknown one is told now
    clock = Clock(
        nodes=nodes,
        rate_bits_per_s=parse_rate("--rate", rate),
        compute_s=parse_time("--compute", compute),
        step_jitter=step_jitter,
    )
    trainings = writable(out) / "trainings.json"
    torch.set_num_threads(1)
    shown = console()
    runs = runs_of(
        study,
        task,
        epochs=epochs,
        names=chosen,
        clock=clock,
        part=part,
        seeds=seeds,
        momentum=momentum,
    )
    with shown.status("") as status:
        trained = train_all(runs, trainings, say=status.update)
    for line in lines_of(study, trained):
        print_line(shown, line)
    if study == CODECS:
        trained = timed(trained, clock)
        for line in ("", *time_lines(trained)):
            print_line(shown, line)
    data = msgspec.json.format(msgspec.json.encode(trained), indent=1)
    write_chart(out, f"{task}-{study}", chart_of(study, trained), data)

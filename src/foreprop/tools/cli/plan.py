"""``foreprop plan``: which architecture to use on a cluster, before there is one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from foreprop.errors import ConfigError
from foreprop.plan.planner import Forecast, PlanSetting, enough_servers, forecasts
from foreprop.plan.profile import Profile, load_profile, profile_names, read_profile
from foreprop.plan.recommendation import Recommendation, recommend
from foreprop.plan.whatif import WhatIf, parse_what_if, value_text, what_if
from foreprop.quantities import (
    parse_counts,
    parse_rate,
    parse_time,
    rate_text,
    three_digits,
    time_text,
)
from foreprop.tools.cli import output
from foreprop.tools.cli.options import Shown, filling
from foreprop.tools.cli.registry import missing_library

_PICTURES = (".png", ".svg")
_LONG_S = 10.0
"""Compute from which on the table is in seconds."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    model: str
    nodes: int
    workers_per_node: int
    rate_bits_per_s: float
    server_rate_bits_per_s: float | None
    latency_s: float
    compute_s: float
    batch: int | None
    throughput_unit: str
    tables: list[str]
    """Arrays that are held, or gathered, row by row."""
    limit_s: float
    """What no schedule can beat without dedicated servers."""
    forecasts: list[Forecast]
    recommendation: Recommendation
    what_if: WhatIf | None


@filling(
    PlanSetting,
    rate_bits_per_s=Shown(name="rate", kind=str, read=partial(parse_rate, "rate")),
    latency_s=Shown(name="latency", kind=str, default="100us", read=partial(parse_time, "latency")),
    servers=Shown(kind=str, default="0", read=partial(parse_counts, "servers")),
    server_rate_bits_per_s=Shown(
        name="server_rate", kind=str | None, read=partial(parse_rate, "server_rate")
    ),
)
def plan(
    model: Annotated[str | None, typer.Option(help=f"One of {', '.join(profile_names())}.")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="A JSON file of arrays and FLOPs (docs/plan.md), instead of --model."),
    ] = None,
    compute: Annotated[
        str | None,
        typer.Option(
            help="Forward and backward pass of one batch on one worker, as 180ms; by default as"
            " measured, if the profile says."
        ),
    ] = None,
    *,
    what_if_range: Annotated[
        str | None,
        typer.Option(
            "--what-if",
            metavar="NAME=FROM..TO",
            help="Curves over rate, latency, compute, nodes or servers, as rate=1Gbit..100Gbit.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Draw the curves of --what-if: a .png or .svg file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
    **given: Any,
) -> None:
    """Predict each architecture and preset on a cluster, and say which to use and why.

    All by arithmetic, in seconds, with nothing started; docs/plan.md says how to read it. Plain DDP
    is recommended wherever it is as good.

    Examples:
      foreprop plan --model resnet50 --nodes 4 --rate 10Gbit --compute 180ms
      foreprop plan --model vgg19 --nodes 8 --rate 1Gbps --compute 0.5s --servers 0..8
      foreprop plan --model resnet50 --nodes 4 --rate 10Gbit --compute 180ms \\
        --what-if rate=1Gbit..100Gbit --out rates.png
    """
    chosen = _profile(model, profile)
    setting = PlanSetting(profile=chosen, compute_s=_compute_s(chosen, compute), **given)
    varied = None if what_if_range is None else parse_what_if(what_if_range)
    draw = None if out is None else _drawing(out, what_if_range)
    with Console(stderr=True).status("") as status:
        curves = None if varied is None else what_if(setting, *varied, progress=status.update)
        made = forecasts(setting, progress=status.update)
        recommendation = recommend(setting, made)
    if as_json:
        output.print_json(_whole(setting, made, recommendation, curves))
    else:
        _print(output.console(), setting, made, recommendation, curves)
    if draw is not None and curves is not None:
        draw(title(setting, but=curves.variable), curves)
        Console(stderr=as_json).print(f"Picture: {out}", soft_wrap=True, markup=False)


def _profile(model: str | None, path: Path | None) -> Profile:
    if (model is None) == (path is None):
        given = "neither --model nor --profile is" if model is None else "both are"
        raise ConfigError(
            f"{given} given: give either --model or --profile; models are"
            f" {', '.join(profile_names())}"
        )
    return load_profile(model) if model is not None else read_profile(path or Path())


def _compute_s(profile: Profile, compute: str | None) -> float:
    if compute is not None:
        return parse_time("compute", compute)
    if profile.measured_s is None:
        raise ConfigError(
            f"--compute is not given, and the profile of {profile.name} has no measured times; say"
            " how long one worker takes for the forward and backward pass of a batch, as"
            " --compute 180ms"
        )
    return profile.measured_s


def _drawing(out: Path, what_if_range: str | None) -> Callable[[str, WhatIf], None]:
    """A function that draws the curves; raises, before any work, if they cannot be drawn."""
    if what_if_range is None:
        raise ConfigError(f"out is {out}, but there is nothing to draw without --what-if")
    if out.suffix not in _PICTURES:
        raise ConfigError(f"out is {out}; its name must end in .png or .svg")
    if not out.parent.is_dir() or out.is_dir():
        raise ConfigError(f"out is {out}, which cannot be written: no such folder, or itself one")
    try:  # matplotlib is an extra
        from foreprop.tools.report.charts import draw_what_if
    except ModuleNotFoundError as error:
        raise missing_library("--out", error) from error
    return partial(draw_what_if, out)


def _whole(
    setting: PlanSetting,
    made: list[Forecast],
    recommendation: Recommendation,
    curves: WhatIf | None,
) -> Plan:
    return Plan(
        model=setting.profile.name,
        nodes=setting.nodes,
        workers_per_node=setting.workers_per_node,
        rate_bits_per_s=setting.rate_bits_per_s,
        server_rate_bits_per_s=setting.server_rate_bits_per_s,
        latency_s=setting.latency_s,
        compute_s=setting.compute_s,
        batch=setting.batch,
        throughput_unit=setting.throughput_unit,
        tables=[array.name for array in filter(setting.is_table, setting.profile.arrays)],
        limit_s=setting.limit_s,
        forecasts=made,
        recommendation=recommendation,
        what_if=curves,
    )


def title(setting: PlanSetting, *, but: str = "") -> str:
    """The cluster and model that are asked about; ``but`` is a part to leave out."""
    many, server_rate = setting.workers_per_node, setting.server_rate_bits_per_s
    parts = {
        "model": setting.profile.name,
        "nodes": f"{setting.nodes} nodes",
        "workers": f"{many} workers on each" if many > 1 else "",
        "rate": rate_text(setting.rate_bits_per_s),
        "server_rate": f"dedicated servers {rate_text(server_rate)}" if server_rate else "",
        "latency": f"latency {time_text(setting.latency_s)}",
        "compute": f"compute {time_text(setting.compute_s)}",
    }
    return ", ".join(text for name, text in parts.items() if text and name != but)


def _print(
    console: Console,
    setting: PlanSetting,
    made: list[Forecast],
    recommendation: Recommendation,
    curves: WhatIf | None,
) -> None:
    say = partial(output.print_line, console)
    say(title(setting), "bold")
    enough = enough_servers(made)
    shown = [f for f in made if f.candidate.servers <= enough]
    output.print_table(console, _forecasts_table(setting, shown, recommendation))
    say("efficiency: compute / step. link: how long the busiest link, or server, is busy.")
    if len(shown) < len(made):
        say(f"More dedicated servers than {enough} are no faster.")
    say(f"Without dedicated servers no schedule beats {time_text(setting.limit_s)} per step.")
    if names := setting.table_names:
        say(f"By rows: {names}. ddp gathers the rows; ring, ddp dense reduce all of the table.")
    say("")
    say(f"* Use {recommendation.candidate.name}: {recommendation.code}", "bold")
    for reason in recommendation.reasons:
        say(f"  {reason}")
    if curves is not None:
        say("")
        heading = f"{title(setting, but=curves.variable)}: {curves.throughput_unit} of all workers"
        say(heading, "bold")
        output.print_table(console, _what_if_table(curves))
        say("ideal: no device ever waits. use: what would be recommended of these.")


def _forecasts_table(
    setting: PlanSetting, made: list[Forecast], recommendation: Recommendation
) -> Table:
    seconds = setting.compute_s >= _LONG_S
    unit, factor, digits = ("s", 1.0, 2) if seconds else ("ms", 1e3, 1)
    headings = ("servers", f"step\n{unit}", setting.throughput_unit, "efficiency", "over\nDDP")
    shown = _table("system", *headings, f"link\n{unit}")
    shown.add_column("limited\nby", no_wrap=True)
    ddp_s = recommendation.over_ddp * recommendation.step_s
    for row in made:
        candidate, best = row.candidate, row.candidate == recommendation.candidate
        shown.add_row(
            f"{'*' if best else ' '} {candidate.kind}",
            str(candidate.servers or ""),
            f"{factor * row.step_s:.{digits}f}",
            three_digits(row.throughput),
            f"{row.efficiency:.0%}",
            f"{ddp_s / row.step_s:.2f}x",
            f"{factor * max(row.wire_s, row.server_s):.{digits}f}",
            row.limited_by,
            style="bold" if best else None,
        )
    return shown


def _table(first: str, *others: str) -> Table:
    shown = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    shown.add_column(first, no_wrap=True)
    for heading in others:
        shown.add_column(heading, justify="right", no_wrap=True)
    return shown


def _what_if_table(curves: WhatIf) -> Table:
    systems = [name.replace(", ", "\n") for name in curves.candidates]
    shown = _table(curves.variable, *systems, "ideal")
    shown.add_column("use")
    for point in curves.points:
        shown.add_row(
            value_text(curves.variable, point.value),
            *(three_digits(throughput) for throughput in point.throughputs),
            three_digits(point.ideal),
            point.recommended,
        )
    return shown

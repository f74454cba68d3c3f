"""Which candidate to use, why, and what more would help, by the model's predictions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import msgspec

from foreprop.plan.compressing import Compressed, compressed_steps
from foreprop.plan.planner import (
    P3,
    Candidate,
    Forecast,
    PlanSetting,
    candidate_step_s,
    choose,
    plain_ddp,
)
from foreprop.quantities import rate_text, short, time_text

Verdict = Literal["plain_ddp", "schedule", "servers"]
"""What is worth using: nothing of ours, an order of sending, or dedicated servers."""
_VERDICTS: Mapping[str, Verdict] = {"ddp": "plain_ddp", "ps": "servers"}
Obstacle = Literal[
    "none", "wire_too_slow", "servers_too_slow", "wire", "server", "relays", "latency"
]
"""What makes the recommended candidate's step longer than the compute."""

_Left = Literal["wire", "server", "relays", "latency"]
_BUSY_ENOUGH = 0.9  # the share of computing above which nothing is worth doing about the rest
_TOO_SLOW = 2.0
"""So many times as long as the compute: devices wait half of the time, whatever the schedule."""
_WORTHWHILE = 1.1  # the speed-up below which a change of the cluster is not worth a line
_BUSY_RELAYS = 0.5
"""The share of the compute above which the time of a node's relays is worth a line."""


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """A change that would make steps shorter than the recommended candidate's are now."""

    kind: Literal["servers", "rate", "half_precision", "compression"]
    servers: int | None = None
    """How many dedicated servers, in all."""
    rate_bits_per_s: float | None = None
    compressed: Compressed | None = None
    step_s: float
    speed_up: float


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """The candidate to use, the figures that it rests on, and sentences about it (``reasons``)."""

    candidate: Candidate
    verdict: Verdict
    obstacle: Obstacle
    step_s: float
    efficiency: float
    over_ddp: float
    """How many of these steps a step of plain DDP takes, the faster one with tables."""
    fastest: Candidate
    fastest_step_s: float
    too_slow: float | None
    """How many times as long as the compute the busiest link takes, if that is the obstacle."""
    remedies: list[Remedy]
    """The cheapest first; none if the devices are busy enough."""
    reasons: list[str]
    code: str


def recommend(setting: PlanSetting, forecasts: Sequence[Forecast]) -> Recommendation:
    """Choose among forecasts, one of them plain DDP's, and predict other clusters that may help."""
    by_candidate = {f.candidate: f for f in forecasts}
    steps_s = {f.candidate: f.step_s for f in forecasts}
    chosen = by_candidate[choose(steps_s)]
    fastest = min(forecasts, key=lambda f: f.step_s)
    obstacle = obstacle_of(chosen)
    remedies = [] if obstacle == "none" else list(_remedies(setting, chosen))
    return Recommendation(
        candidate=chosen.candidate,
        verdict=_VERDICTS.get(chosen.candidate.architecture, "schedule"),
        obstacle=obstacle,
        step_s=chosen.step_s,
        efficiency=chosen.efficiency,
        over_ddp=steps_s[plain_ddp(steps_s)] / chosen.step_s,
        fastest=fastest.candidate,
        fastest_step_s=fastest.step_s,
        too_slow=_link_s(chosen) / chosen.compute_s if obstacle in _SLOW else None,
        remedies=remedies,
        reasons=[
            _why(chosen, fastest, forecasts),
            *_tables(setting, chosen.candidate),
            *_relays(setting, chosen, forecasts),
            *_what_is_left(chosen, obstacle),
            *(remedy_text(remedy, chosen.candidate) for remedy in remedies),
        ],
        code=chosen.candidate.code,
    )


_SLOW = ("wire_too_slow", "servers_too_slow")


def obstacle_of(forecast: Forecast) -> Obstacle:
    if forecast.efficiency >= _BUSY_ENOUGH:
        return "none"
    if forecast.limited_by == "latency":
        return "latency"
    if forecast.relays_s > max(_link_s(forecast), forecast.compute_s):
        return "relays"
    server_is_slower = forecast.server_s > forecast.wire_s
    if _link_s(forecast) >= _TOO_SLOW * forecast.compute_s:
        return "servers_too_slow" if server_is_slower else "wire_too_slow"
    # devices may limit a step that links make longer, too: only about links can something be done
    links: tuple[_Left, ...] = get_args(_Left)
    return max(links, key=lambda resource: forecast.saved_s[resource])


def _link_s(forecast: Forecast) -> float:
    return max(forecast.wire_s, forecast.server_s)


def _remedies(setting: PlanSetting, chosen: Forecast) -> Iterator[Remedy]:
    yield from _more_servers(setting, chosen)
    if not _gathers(setting, chosen.candidate):
        half = replace(setting, bytes_per_elem=setting.bytes_per_elem // 2)
        yield from _on(half, chosen, kind="half_precision")
    rate = 2 * setting.rate_bits_per_s
    server_rate = setting.server_rate_bits_per_s
    twice = replace(
        setting,
        rate_bits_per_s=rate,
        server_rate_bits_per_s=None if server_rate is None else 2 * server_rate,
    )
    yield from _on(twice, chosen, kind="rate", rate_bits_per_s=rate)
    yield from _compressed(setting, chosen)


def _compressed(setting: PlanSetting, chosen: Forecast) -> Iterator[Remedy]:
    """The codecs that are worth so much more than none, and than all that lose less."""
    least_s = chosen.step_s
    for made in compressed_steps(setting, chosen.candidate):
        if least_s / made.step_s >= _WORTHWHILE:
            gain = chosen.step_s / made.step_s
            yield Remedy(kind="compression", compressed=made, step_s=made.step_s, speed_up=gain)
        least_s = min(least_s, made.step_s)


def _on(changed: PlanSetting, chosen: Forecast, **what: Any) -> Iterator[Remedy]:
    """The changed cluster, if it makes the chosen candidate so much faster."""
    seconds = candidate_step_s(changed, chosen.candidate)
    if (gain := chosen.step_s / seconds) >= _WORTHWHILE:
        yield Remedy(step_s=seconds, speed_up=gain, **what)


def _gathers(setting: PlanSetting, candidate: Candidate) -> bool:
    """Whether ranks gather sparse gradients, which DDP's hooks do not compress."""
    return candidate.architecture == "ddp" and not candidate.dense and bool(setting.tables)


def _more_servers(setting: PlanSetting, chosen: Forecast) -> Iterator[Remedy]:
    considered, before_s, found = max(setting.servers), chosen.step_s, False
    more = [2**n for n in range(setting.nodes.bit_length())]
    counts = [considered + each for each in more if considered + each < setting.nodes]
    for count in (*counts, *[setting.nodes] * (considered < setting.nodes)):
        if found and count < setting.nodes:
            continue
        seconds = candidate_step_s(setting, Candidate("ps", P3, count))
        if before_s / seconds >= _WORTHWHILE:
            gain = chosen.step_s / seconds
            yield Remedy(kind="servers", servers=count, step_s=seconds, speed_up=gain)
            before_s, found = seconds, True


def _why(chosen: Forecast, fastest: Forecast, forecasts: Sequence[Forecast]) -> str:
    steps_s = {f.candidate: f.step_s for f in forecasts}
    ddp_s, ours_s = steps_s[plain_ddp(steps_s)], chosen.step_s
    rest = "nothing is faster."
    if fastest is not chosen:
        saved = 1 - fastest.step_s / ours_s
        rest = f"the fastest, {fastest.candidate.name}, saves only {saved:.1%} and is less simple."
    if chosen is fastest and chosen.candidate.architecture == "ddp":
        return f"Plain DDP is the fastest here: {time_text(ours_s)} per step."
    if chosen.candidate.architecture == "ddp":
        return f"Plain DDP is as good here: {time_text(ours_s)} per step; {rest}"
    text = (
        f"{_times(ddp_s / ours_s)} as fast as plain DDP: {time_text(ours_s)} per step instead of"
        f" {time_text(ddp_s)}; {rest}"
    )
    if chosen.candidate.servers:
        best = min((f for f in forecasts if not f.candidate.servers), key=lambda f: f.step_s)
        text += (
            f" {_times(best.step_s / ours_s)} as fast as the best without dedicated servers,"
            f" {best.candidate.name}."
        )
    return text


def _tables(setting: PlanSetting, candidate: Candidate) -> Iterator[str]:
    names = setting.table_names
    if not names:
        return
    if candidate.holds_rows:
        yield (
            f"Only touched rows of {names} are sent: their embeddings need sparse=True, and the"
            " optimizer must be SGD without momentum, Adagrad or SparseAdam."
        )
    elif _gathers(setting, candidate):
        yield (
            f"The embeddings of {names} need sparse=True: all ranks gather their gradients'"
            " rows (gloo; NCCL cannot)."
        )
    elif candidate.architecture == "ddp":
        yield f"The embeddings of {names} need sparse=False: all of their gradients is reduced."


def _relays(setting: PlanSetting, chosen: Forecast, forecasts: Sequence[Forecast]) -> Iterator[str]:
    """How busy a node's relays are with the chosen candidate, or what they cost the next best."""
    relayed = chosen
    if not chosen.relays_s:
        relayed = min(forecasts, key=lambda f: f.step_s - f.saved_s["relays"])
    if relayed.relays_s < _BUSY_RELAYS * relayed.compute_s:
        return
    text = (
        f"Summing the gradients of a node's {setting.workers_per_node} workers takes one process"
        f" {time_text(relayed.relays_s)} per step, counted as if it had one core"
    )
    if relayed is chosen:
        yield f"{text}."
    else:
        free_s = relayed.step_s - relayed.saved_s["relays"]
        yield (
            f"{text}: with {relayed.candidate.name} a step takes {time_text(relayed.step_s)} for"
            f" that, and without {time_text(free_s)}."
        )


def _what_is_left(chosen: Forecast, obstacle: Obstacle) -> Iterator[str]:
    if obstacle == "none":
        yield (
            f"The devices compute for {chosen.efficiency:.0%} of the step, so there is little left"
            " to gain."
        )
    elif obstacle == "latency":
        yield (
            f"Latency limits it: {time_text(chosen.saved_s['latency'])} of the step would be saved"
            " if messages took no time. Larger batches, so fewer steps, help; faster links do not."
        )
    elif obstacle == "wire" or obstacle == "server" or obstacle == "relays":
        what = {"wire": "links", "server": "servers", "relays": "relays"}[obstacle]
        yield (
            f"The devices compute for {chosen.efficiency:.0%} of the step. Endlessly fast {what}"
            f" would save {time_text(chosen.saved_s[obstacle])} of it."
        )
    else:
        link_s = _link_s(chosen)
        times = link_s / chosen.compute_s
        slow = "wire is" if obstacle == "wire_too_slow" else "servers are"
        enough = "" if chosen.candidate.architecture == "ddp" else " enough"
        compute = time_text(chosen.compute_s)
        yield (
            f"No schedule helps{enough}: the {slow} {times:.1f}x too slow, busy for"
            f" {time_text(link_s)} of a step in which the devices compute for {compute}. Send about"
            f" {math.ceil(times)} times less: by compression, or by accumulating gradients over as"
            " many batches."
        )


def remedy_text(remedy: Remedy, chosen: Candidate) -> str:
    gain = f"would give {_times(remedy.speed_up)}."
    if remedy.kind == "servers" and remedy.servers is not None:
        more = remedy.servers - chosen.servers
        many = "s" * (more > 1)
        if chosen.servers:
            return f"{more} more server{many}, {remedy.servers} in all, {gain}"
        return f"{more} dedicated server{many} on machines of their own {gain}"
    if remedy.kind == "rate" and remedy.rate_bits_per_s is not None:
        return f"Links of {rate_text(remedy.rate_bits_per_s)} {gain}"
    if (found := remedy.compressed) is not None:
        exact = f"Not exact: {found.not_exact}." if found.not_exact else "The same bits as without."
        kept_mb = found.kept_bytes / 1e6
        kept = f" Each node keeps {kept_mb:.3g} MB from step to step." if kept_mb else ""
        return (
            f"{found.code} {gain} {found.shares[0].upper()}{found.shares[1:]}; a step takes"
            f" {time_text(found.step_s)}, with so many bytes no less than"
            f" {time_text(found.limit_s)}. {exact} {found.accuracy}{kept}"
        )
    how = "bf16_compress_hook" if chosen.architecture == "ddp" else 'wire_dtype="bfloat16"'
    return f"Half the bytes ({how}, which rounds) {gain}"


def _times(factor: float) -> str:
    return f"{short(round(factor, 2))}x"

"""The comparison paper's experiment: measured in the lab, predicted by both models."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from foreprop.errors import ConfigError
from foreprop.plan import limit
from foreprop.plan.refined import Prediction, predict
from foreprop.quantities import counted
from foreprop.tools.compare.result import CPU_BOUND_SHARE, Spread
from foreprop_lab.datasets import ensure_files
from foreprop_lab.experiments.mlp import published
from foreprop_lab.experiments.mlp.published import Symbols
from foreprop_lab.experiments.mlp.training import (
    IMAGES,
    P2P,
    SERVERS,
    MlpSetting,
    MlpSteps,
    serve_mlp_node,
)
from foreprop_lab.lab.cluster import Cluster, busy_s
from foreprop_lab.lab.network import NetworkUnavailable
from foreprop_lab.lab.systems import means
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.setting.labsetting import DISCARDED_STEPS, RING_STEPS

_BLOCK_STEPS = 10


class Epochs(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of one pass through 60,000 images, by each model."""

    published: float | None
    """The time by formulas 13, 18 and 21 to the letter; None where one divides by zero."""
    published_in_batches: float | None
    """The time by them, with n counted in batches, and b those of all workers together."""
    refined: float


class MlpRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one system with one number of workers."""

    system: str
    preset: str
    workers: int
    servers: int
    """The number of servers on machines of their own."""
    batch: int
    hidden: int
    model_bytes: int
    rate_bits_per_s: float
    compute_s: float
    step_s: Spread
    """The time of a step on the device's clock, as a mean over the workers."""
    waiting_s: float
    """How long the devices were idle in a step, on average."""
    epoch_s: float
    """The time of 60,000 images at the median step."""
    images_per_s: float
    predicted_epoch_s: Epochs
    limited_by: str
    """The cost that would save most if it were nothing, by the refined model."""
    steps: int
    loss_first: float
    """The mean loss of the warm-up, over workers and steps: it shows that the training is real."""
    loss_last: float
    """The mean loss of the last block."""
    cpu_share: float
    cpu_bound: bool


@dataclass(slots=True)
class _Tally:
    step_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """The loss of each block, the warm-up's first."""
    busy_s: float = 0.0
    wall_s: float = 0.0


def run_mlp(
    setting: MlpSetting, *, progress: Callable[[str], None] = lambda _: None
) -> list[MlpRecord]:
    """Measure all systems in one cluster, blocks of their steps in turn; predict the same.

    Raises `ConfigError` where this machine does not let us make links, `DatasetUnavailable`.
    """
    ensure_files()  # before the clocks run
    tallies = {name: _Tally() for name in setting.systems}
    try:
        cluster = Cluster(serve_mlp_node, setting, nodes=setting.nodes, network=setting.network)
    except NetworkUnavailable as error:
        raise ConfigError(f"links have to be made by the kernel, and cannot be: {error}") from error
    workers = counted(setting.workers, "worker")
    with cluster:
        for name in setting.systems:
            progress(f"{name}, {workers}: starting")
            cluster.ask_all(("build", name))
            warm_up = _Tally()
            _block(cluster, setting, name, RING_STEPS, warm_up)
            tallies[name].losses += warm_up.losses
        for done in range(0, setting.steps, _BLOCK_STEPS):
            count = min(_BLOCK_STEPS, setting.steps - done)
            for name, tally in tallies.items():
                progress(f"{name}, {workers}: {done} of {setting.steps} steps")
                _block(cluster, setting, name, count, tally)
        for name in setting.systems:
            cluster.ask_all(("drop", name))
    return [_record(setting, name, tally) for name, tally in tallies.items()]


def _block(cluster: Cluster, setting: MlpSetting, name: str, count: int, tally: _Tally) -> None:
    busy_before_s, used_before_s, before_s = busy_s(), cluster.cpu_s(), time.monotonic()
    answers: list[MlpSteps] = cluster.ask_all(("steps", name, count + DISCARDED_STEPS))
    tally.wall_s += time.monotonic() - before_s
    tally.busy_s += max(busy_s() - busy_before_s, cluster.cpu_s() - used_before_s)
    workers = answers[: setting.workers]
    tally.step_s += means([worker.steps.step_s for worker in workers])
    tally.waited_s += means([worker.steps.waited_s for worker in workers])
    tally.losses.append(statistics.fmean(means([worker.losses for worker in workers])))


def _record(setting: MlpSetting, name: str, tally: _Tally) -> MlpRecord:
    spread = Spread.of(tally.step_s)
    share = tally.busy_s / (tally.wall_s * (os.cpu_count() or 1))
    epochs, prediction = predict_epochs(setting, name)
    return MlpRecord(
        system=name,
        preset=setting.preset,
        workers=setting.workers,
        servers=SERVERS.get(name, 0),
        batch=setting.batch,
        hidden=setting.hidden,
        model_bytes=limit.model_bytes(setting.layers),
        rate_bits_per_s=setting.rate_bits_per_s,
        compute_s=setting.compute_s,
        step_s=spread,
        waiting_s=statistics.fmean(tally.waited_s),
        epoch_s=setting.epoch_steps * spread.median,
        images_per_s=setting.batch * setting.workers / spread.median,
        predicted_epoch_s=epochs,
        limited_by=prediction.limited_by,
        steps=len(tally.step_s),
        loss_first=tally.losses[0],
        loss_last=tally.losses[-1],
        cpu_share=share,
        cpu_bound=share > CPU_BOUND_SHARE,
    )


def predict_epochs(setting: MlpSetting, name: str) -> tuple[Epochs, Prediction]:
    """One epoch of a system by both models."""
    prediction = predict(setting.deployment(name))
    epochs = Epochs(
        published=_published_s(symbols(setting, name), name),
        published_in_batches=_published_s(symbols(setting, name, in_batches=True), name),
        refined=setting.epoch_steps * prediction.step_s,
    )
    return epochs, prediction


def symbols(setting: MlpSetting, name: str, *, in_batches: bool = False) -> Symbols:
    """The paper's quantities, with T_processing for a batch as formula 11 has it.

    ``in_batches`` reads the formulas kindly. Formulas 9 to 11 divide n by b, which is then the
    images of all workers' batches; 15, 17 and 19 divide n by w, which then are batches, not images.
    """
    served = name in SERVERS
    images, batch = float(IMAGES), float(setting.batch)
    size_bytes = limit.model_bytes(setting.layers)
    elems = size_bytes // limit.BYTES_PER_ELEM
    return Symbols(
        n=images / batch if in_batches and not served else images,
        b=batch * setting.workers if in_batches else batch,
        w=setting.workers,
        ps=SERVERS.get(name, 1),
        W=8 * size_bytes,
        B=setting.rate_bits_per_s,
        processing_s=setting.compute_s,
        update_s=Hosts().updating_s(elems, 1),
    )


def _published_s(given: Symbols, name: str) -> float | None:
    if name in SERVERS:
        return published.total_ps_s(given)
    if name != P2P:
        return published.total_ring_s(given)
    return published.total_p2p_s(given) if given.w > 1 else None


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    """The errors of a model's epoch times as shares of those measured, without CPU-bound runs."""

    system: str
    model: str
    points: int
    median: float
    """The median of the absolute errors."""
    at_most: float
    mean: float
    """The mean error with its sign: above 0 if the predicted epochs are too long."""


def errors_of(records: Sequence[MlpRecord]) -> list[Errors]:
    """The errors of each system and model, and of all systems together."""
    systems = list(dict.fromkeys(record.system for record in records))
    found = []
    for system in [*systems, "all"]:
        of_system = [r for r in records if system in (r.system, "all") and not r.cpu_bound]
        for model in msgspec.structs.fields(Epochs):
            ratios = [
                predicted / record.epoch_s - 1
                for record in of_system
                if (predicted := getattr(record.predicted_epoch_s, model.name)) is not None
            ]
            if ratios:
                found.append(_errors(system, model.name, ratios))
    return found


def _errors(system: str, model: str, ratios: Sequence[float]) -> Errors:
    absolute = [abs(ratio) for ratio in ratios]
    return Errors(
        system=system,
        model=model,
        points=len(ratios),
        median=statistics.median(absolute),
        at_most=max(absolute),
        mean=statistics.fmean(ratios),
    )

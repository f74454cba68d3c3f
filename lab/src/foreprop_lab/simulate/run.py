"""What `lab.run` measures, simulated: the same settings in, the same records out."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from msgspec import UNSET

from foreprop.plan.deployment import BUCKET_BYTES
from foreprop.version import __version__
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.setting.labsetting import (
    DDP,
    DDP_SPARSE,
    DDP_TUNED,
    DISCARDED_STEPS,
    HYBRID,
    RING,
    RING_STEPS,
    best_bucket,
)
from foreprop_lab.setting.records import Record, record_of
from foreprop_lab.simulate.cluster import Cluster, Sample, SimulatedSteps, lab_link, own_links
from foreprop_lab.simulate.collective import simulate_ddp
from foreprop_lab.simulate.presets import simulate_preset
from foreprop_lab.simulate.ring import simulate_hybrid, simulate_ring
from foreprop_lab.simulate.rowtables import tables_of
from foreprop_lab.simulate.setting import SimulatedSetting

SIMULATED = "simulated"
"""The value of `Record.network` for what was not measured."""
_TUNING_STEPS = 2


def simulate_lab(
    setting: SimulatedSetting,
    *,
    hosts: Hosts | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Record]:
    """A record for each system, in the setting's order; deterministic.

    ``warm_up`` steps are simulated and not counted, as in the lab, but at least one. CPU times of
    the records are 0.
    """
    return [record for record, _ in simulate_each(setting, hosts=hosts, progress=progress)]


def simulate_each(
    setting: SimulatedSetting,
    *,
    hosts: Hosts | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[Record, list[Sample]]]:
    for name in setting.systems:
        asked = setting.codec_of(name)
        coded = _with_codecs(replace(setting, compression=asked), hosts or Hosts(), progress)
        progress(f"{name}: simulating")
        yield _simulate(name, coded, hosts or Hosts(), asked)


def _with_codecs(
    setting: SimulatedSetting, hosts: Hosts, progress: Callable[[str], None]
) -> SimulatedSetting:
    if setting.compression is None:
        return setting
    from foreprop_lab.simulate.compressed import with_chosen_codecs

    progress(f"{setting.compression}: codecs")
    return with_chosen_codecs(setting, hosts)


def _simulate(
    name: str, setting: SimulatedSetting, hosts: Hosts, asked: str | None
) -> tuple[Record, list[Sample]]:
    uncounted = max(DISCARDED_STEPS, setting.warm_up, RING_STEPS if name in (RING, HYBRID) else 0)
    bucket_bytes = setting.scaled(BUCKET_BYTES) if name in (DDP, DDP_SPARSE) else None
    if name == DDP_TUNED:
        bucket_bytes = best_bucket(setting, partial(_tuning_step_s, setting, hosts))
    about: dict[str, Any] = {"bucket_bytes": bucket_bytes, "first_step": 1 - uncounted}
    steps = uncounted + setting.iterations
    simulated = simulate_system(name, setting, hosts, steps=steps, **about)
    record = _record(name, setting, simulated, uncounted, bucket_bytes, asked)
    return record, simulated.samples


def _tuning_step_s(setting: SimulatedSetting, hosts: Hosts, candidate: int, size: int) -> float:
    """The time of a step of ddp-tuned with buckets of a size, from which the best is found."""
    del candidate
    about = {"bucket_bytes": size, "first_step": 1 - DISCARDED_STEPS}
    steps = DISCARDED_STEPS + _TUNING_STEPS
    simulated = simulate_system(DDP_TUNED, setting, hosts, steps=steps, **about)
    return statistics.fmean(simulated.step_s[0][DISCARDED_STEPS:])


def simulate_system(
    name: str,
    setting: SimulatedSetting,
    hosts: Hosts,
    *,
    steps: int,
    bucket_bytes: int | None = None,
    first_step: int = 1,
    **changes: Any,
) -> SimulatedSteps:
    """Train one system on a cluster of its own; ``bucket_bytes``, already scaled, makes it DDP.

    ``changes`` are fields of `Config`, for systems other than DDP. ``first_step`` is the number of
    the first step among those that are drawn (`setting.unevenness`).
    """
    network = setting.network
    if setting.server_s_per_gb:  # of the undivided model
        hosts = replace(hosts, server_byte_s=setting.server_s_per_gb * 1e-9 * setting.scale)
    cluster = Cluster(
        lab_link(network, latency_s=setting.latency_s),
        hosts,
        crowds=setting.crowds,
        workers_per_node=setting.workers_per_node,
        open_ports=not setting.shape_ingress,
        own_links=own_links(network, latency_s=setting.latency_s),
        first_step=first_step,
        dedicated_servers=setting.dedicated_servers,
    )
    if bucket_bytes is not None:
        tables = tables_of(setting) if name == DDP_SPARSE else ()
        return simulate_ddp(setting, cluster, steps=steps, bucket_bytes=bucket_bytes, tables=tables)
    if name == RING or (name == HYBRID and not setting.rows):
        return simulate_ring(setting, cluster, steps=steps, **changes)
    if name == HYBRID:
        return simulate_hybrid(setting, cluster, steps=steps, **changes)
    return simulate_preset(name, setting, cluster, steps=steps, **changes)


def counted_step_s(simulated: SimulatedSteps) -> list[float]:
    """The steps of a session with b backup workers: each ends when N - b workers have ended it."""
    ends_s = zip(*map(accumulate, simulated.step_s), strict=True)
    at_s = [0.0, *(sorted(each)[-1 - simulated.backup_workers] for each in ends_s)]
    return [after_s - before_s for before_s, after_s in pairwise(at_s)]


def _record(
    name: str,
    setting: SimulatedSetting,
    simulated: SimulatedSteps,
    uncounted: int,
    bucket_bytes: int | None,
    asked: str | None,
) -> Record:
    crowds = setting.crowds
    members = [crowd.members for crowd in crowds for _ in range(setting.workers_per_node)]
    # of workers apart, what a step of all takes at the rate of all together
    mean = statistics.harmonic_mean if setting.staleness else statistics.fmean
    step_s = [mean(each, weights=members) for each in zip(*simulated.step_s, strict=True)]
    if simulated.backup_workers:
        step_s = counted_step_s(simulated)
    waited_s = [
        statistics.fmean(each, weights=members) for each in zip(*simulated.waited_s, strict=True)
    ]
    coded: dict[str, Any] = {"limit_s": setting.limit_by(name)}
    if asked is not None:
        from foreprop.core.justenough import shares_text
        from foreprop_lab.simulate.compressed import array_codecs, coded_limit_s

        sizes = [size for layer in setting.layers for size in layer.sizes_elems]
        shares = shares_text(array_codecs(setting), sizes)
        coded = {"compression": asked, "coded": shares, "limit_s": coded_limit_s(setting)}
    return record_of(
        name,
        setting,
        step_s[uncounted:],
        waited_s[uncounted:],
        cpu_s_per_gb=0.0,
        cpu_share=0.0,
        cpu_bound=False,
        bucket_bytes=bucket_bytes,
        network=SIMULATED,
        staleness=setting.staleness or UNSET,
        simulated=setting.beyond or UNSET,
        representatives=len(crowds) if len(crowds) < setting.nodes else None,
        versions={"foreprop": __version__, "python": platform.python_version()},
        **coded,
    )

"""One measurement: a cluster, several systems whose blocks of steps take turns, records.

The coordinator (`_Run`) sends every worker the same request; `serve_worker` answers it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import operator
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from msgspec import UNSET

from foreprop.core.codec import is_automatic
from foreprop.core.codecfacts import LOSSLESS, codec_named
from foreprop.core.justenough import shares_text
from foreprop.errors import ConfigError
from foreprop.plan import limit
from foreprop.plan.deployment import BUCKET_BYTES
from foreprop.tools.compare.result import CPU_BOUND_SHARE
from foreprop.version import __version__
from foreprop_lab.lab.cluster import Cluster, busy_s
from foreprop_lab.lab.network import NetworkUnavailable, interface_bytes
from foreprop_lab.lab.systems import (
    DdpSystem,
    ForepropSystem,
    Steps,
    System,
    join_process_group,
    means,
)
from foreprop_lab.setting.codecs import powersgd_rank
from foreprop_lab.setting.labsetting import (
    AUTO,
    DDP,
    DDP_TUNED,
    DISCARDED_STEPS,
    MXNET,
    LabSetting,
    base_of,
    best_bucket,
)
from foreprop_lab.setting.links import Network
from foreprop_lab.setting.records import Record, record_of

Progress = Callable[[str], None]
Sample = tuple[float, int, int]
"""Seconds since the first sample, and bytes sent and received since then."""

_BLOCK_STEPS = 5
_TUNING_STEPS = 2
_PLANNING_STEPS = 4 + 5
"""The steps that `plan.planning` measures, and those in which new connections settle."""
_SAMPLE_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class LabResult:
    """The records in the order of the setting's systems, and what came with them."""

    records: list[Record]
    samples: dict[str, list[Sample]]
    """Node 0's interface by system, if it was asked for and the node has one of its own."""
    notices: list[str]


Build = Callable[..., System]
"""A module's function like `build_system`, which makes one of a setting's systems on a worker."""


def run_lab(
    setting: LabSetting, *, build: Build | None = None, progress: Progress = lambda _: None
) -> LabResult:
    """Measure all systems of the setting in one cluster, their steps interleaved.

    For systems that the lab does not know, ``build`` makes them.
    """
    build = build or build_system
    network = setting.network
    notices: list[str] = []
    each = f" of {setting.workers_per_node} workers" * (setting.workers_per_node > 1)
    progress(f"{setting.nodes} nodes{each} at {setting.rate / 1e6:.0f} Mbit/s")
    try:
        cluster = _cluster(setting, build, network)
    except NetworkUnavailable as error:
        if setting.cross_traffic:
            raise ConfigError(
                f"cross_traffic needs links made by the kernel, which there are not: {error}"
            ) from error
        notices.append(f"no links made by the kernel ({error}): foreprop paces its own sockets")
        paced = setting.paced_systems
        ours = tuple(n for n in setting.systems if base_of(n) in paced)
        others = [name for name in setting.systems if name not in ours]
        if not ours:
            raise ConfigError(f"{notices[0]}, which {', '.join(others)} cannot") from error
        if others:
            notices.append(f"left out, because they need such links: {', '.join(others)}")
        setting = replace(setting, systems=ours)
        cluster = _cluster(setting, build, None)
    with cluster:
        run = _Run(setting, cluster, paced=bool(notices), progress=progress)
        run.build()
        run.measure()
        run.end()
    return LabResult(records=run.records(), samples=run.samples, notices=notices)


def _cluster(setting: LabSetting, build: Build, network: Network | None) -> Cluster:
    return Cluster(
        serve_worker,
        (setting, build, network is None),
        nodes=setting.nodes,
        network=network,
        workers_per_node=setting.workers_per_node,
    )


def sampled_steps(setting: LabSetting) -> int:
    """The steps during which `LabResult.samples` were taken."""
    return block_steps(setting) + DISCARDED_STEPS


def block_steps(setting: LabSetting) -> int:
    return setting.iterations if setting.staleness else min(_BLOCK_STEPS, setting.iterations)


@dataclass(slots=True)
class _Tally:
    """What has been measured of one system."""

    step_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    held_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    wall_s: float = 0.0
    busy_s: float = 0.0
    steps: int = 0
    bucket_bytes: int | None = None
    slice_elems: int | None = None
    """The slices' size if it was found automatically."""
    version: str = ""
    codecs: list[str] = field(default_factory=list)
    """Each array's codec, if the system has any."""
    counts: Sequence[float] = (0.0, 0.0, 0.0)
    """`_Block.counts` of a step of the last block."""


class _Run:
    def __init__(
        self, setting: LabSetting, cluster: Cluster, *, paced: bool, progress: Progress
    ) -> None:
        self._setting = setting
        self._cluster = cluster
        self._paced = paced
        self._progress = progress
        self._tallies = {name: _Tally() for name in setting.systems}
        self.samples: dict[str, list[Sample]] = {}

    def build(self) -> None:
        for name, tally in self._tallies.items():
            self._progress(f"{name}: starting")
            if base_of(name) == DDP:
                tally.bucket_bytes = self._setting.scaled(BUCKET_BYTES)
                # PowerSGD's hook all-reduces again when it has an answer, in gloo's threads: of
                # several buckets in another order on each rank, which gloo cannot. So it has one.
                if powersgd_rank(self._setting.codec_of(name)) is not None:
                    tally.bucket_bytes = 2 * limit.model_bytes(self._setting.layers)
            elif name == DDP_TUNED:
                tally.bucket_bytes = best_bucket(self._setting, self._tuning_step_s)
            tally.version = self._build(name, tally.bucket_bytes)

    def _build(self, name: str, bucket_bytes: int | None) -> str:
        versions: list[str] = self._cluster.ask_all(("build", name, bucket_bytes))
        return versions[0]

    def _tuning_step_s(self, candidate: int, size: int) -> float:
        self._progress(f"{DDP_TUNED}: trying buckets of {candidate >> 20} MB")
        self._build(DDP_TUNED, size)
        steps = self._block(DDP_TUNED, _TUNING_STEPS)
        self._cluster.ask_all(("drop", DDP_TUNED))
        return statistics.median(steps.step_s)

    def measure(self) -> None:
        setting = self._setting
        for name in setting.systems:
            self._progress(f"{name}: warming up")
            plans = name in AUTO or is_automatic(setting.codec_of(name))
            planning = _PLANNING_STEPS if plans else 0
            steps = max(1, setting.warm_up - DISCARDED_STEPS) + planning
            self._block(name, steps, last=0)
        size = block_steps(setting)
        blocks = -(-setting.iterations // size)
        sampled = setting.sample_network and not self._paced  # without links, nothing counts
        for block in range(blocks):
            last = min((block + 1) * size, setting.iterations)
            turn = block % len(setting.systems)
            for name in (*setting.systems[turn:], *setting.systems[:turn]):
                self._progress(f"{name}: block {block + 1} of {blocks}")
                numbers = range(block * size + 1, last + 1)
                self._measure_block(name, numbers, sample=sampled and block == 0)

    def _measure_block(self, name: str, numbers: range, *, sample: bool) -> None:
        tally, count = self._tallies[name], len(numbers)
        cpu_before, busy_before, before = self._cluster.cpu_s(), busy_s(), time.monotonic()
        steps = self._block(name, count, last=numbers[-1], sample=sample)
        tally.wall_s += time.monotonic() - before
        tally.cpu_s += self._cluster.cpu_s() - cpu_before
        tally.busy_s += busy_s() - busy_before
        tally.steps += count + DISCARDED_STEPS
        tally.step_s += steps.step_s
        tally.waited_s += steps.waited_s
        tally.held_s += steps.held_s

    def _block(
        self, name: str, count: int, *, last: int | None = None, sample: bool = False
    ) -> Steps:
        """Make a block of steps; of each step the mean over the workers, the first left out.

        ``last`` is the last step's number among those that are drawn; by default the first step
        that counts has number 1. Steps that are left out have the numbers before.
        """
        steps = count + DISCARDED_STEPS
        first = (count if last is None else last) - steps + 1
        answers: list[_Block] = self._cluster.ask_all(("steps", name, steps, first, sample))
        if sample:
            self.samples[name] = answers[0].samples
        tally = self._tallies[name]
        # what is left of the blocks before, as of warming up, does not count
        counts = zip(*(answer.counts for answer in answers), strict=True)
        tally.counts = [statistics.fmean(each) / steps for each in counts]
        workers = [answer.steps for answer in answers]
        return Steps(
            step_s=means([w.step_s for w in workers], harmonic=bool(self._setting.staleness)),
            waited_s=means([w.waited_s for w in workers]),
            held_s=means([w.held_s for w in workers]),
        )

    def end(self) -> None:
        for name, tally in self._tallies.items():
            if name in AUTO:
                tally.slice_elems = self._cluster.ask_all(("slice_elems", name))[0]
            if base_of(name) != DDP and self._setting.codec_of(name) is not None:
                tally.codecs = self._cluster.ask_all(("codecs", name))[0]
            self._cluster.ask_all(("drop", name))

    def records(self) -> list[Record]:
        return [self._record(name, tally) for name, tally in self._tallies.items()]

    def _record(self, name: str, tally: _Tally) -> Record:
        setting = self._setting
        sent_gb = setting.wire_s * setting.rate / 8 * setting.nodes * tally.steps / 1e9
        cpu_share = max(tally.busy_s, tally.cpu_s) / (tally.wall_s * (os.cpu_count() or 1))
        return record_of(
            name,
            setting,
            tally.step_s,
            tally.waited_s,
            cpu_s_per_gb=tally.cpu_s / sent_gb,
            cpu_share=cpu_share,
            cpu_bound=cpu_share > CPU_BOUND_SHARE,
            slice_elems=tally.slice_elems or setting.slice_elems_of(name),
            bucket_bytes=tally.bucket_bytes,
            network="pacing" if self._paced else "namespaces",
            sent_bytes=round(tally.counts[0]) or UNSET,
            counted_bytes=round(tally.counts[1]) or UNSET,
            counted_frames=round(tally.counts[2]) or UNSET,
            **self._coded(name, tally),
            staleness=setting.staleness or UNSET,
            **self._launched(tally),
            versions={
                "foreprop": __version__,
                "torch": importlib.metadata.version("torch"),
                "python": platform.python_version(),
                "linux": platform.release(),
                **({"mxnet": tally.version} if name in MXNET else {}),
            },
        )

    def _launched(self, tally: _Tally) -> dict[str, float]:
        launch_s = self._setting.launch_s
        if launch_s is None:
            return {}
        held_s = statistics.fmean(tally.held_s)
        return {"launch_s": launch_s, "launching_s": self._setting.launching_s, "held_s": held_s}

    def _coded(self, name: str, tally: _Tally) -> dict[str, Any]:
        asked = self._setting.codec_of(name)
        if not tally.codecs:
            return {} if asked is None else {"compression": asked}
        layers = self._setting.layers
        sizes = [size for layer in layers for size in layer.sizes_elems]
        codecs = [codec_named(codec) for codec in tally.codecs]
        if set(tally.codecs) == {LOSSLESS}:
            share = tally.counts[1] / (2 * limit.model_bytes(layers))
            codecs = [codec_named(f"{LOSSLESS}:{min(1.0, share):.4f}")] * len(codecs)
        left = limit.encoded_layers(layers, codecs, ranks=self._setting.nodes)
        shares = shares_text(codecs, sizes)
        return {"compression": asked, "coded": shares, "limit_s": self._setting.limit_of(left)}


class _Block(NamedTuple):
    """One worker's block of steps, and the bytes of all of them."""

    steps: Steps
    samples: list[Sample]
    counts: tuple[int, int, int]
    """The bytes that left the node's link, by its interface, headers included, 0 if it has none;
    bytes and number of frames that foreprop counts: what was pushed, and what came as answers."""


def serve_worker(
    rank: int, connection: Connection, argument: tuple[LabSetting, Build, bool]
) -> None:
    """Answer the coordinator's requests until it closes the connection."""
    torch.set_num_threads(1)
    setting, build, paced = argument
    systems: dict[str, System] = {}
    while True:
        kind, name, *details = connection.recv()
        answer: Any = None
        if kind == "build":
            if any(system.startswith(DDP) for system in setting.systems):
                join_process_group()
            systems[name] = build(name, rank, setting, paced=paced, bucket_bytes=details[0])
            answer = getattr(systems[name], "version", "")
        elif kind == "steps":
            count, first, sample = details
            answer = _steps(systems[name], count, first, sample=sample and rank == 0)
        elif kind in ("slice_elems", "codecs"):
            answer = getattr(systems[name], kind)
        elif kind == "drop":
            systems.pop(name).close()
        connection.send(answer)


def build_system(
    name: str, rank: int, setting: LabSetting, *, paced: bool, bucket_bytes: int | None
) -> System:
    """Build foreprop or DDP; `foreprop_lab.lab.mxnet` builds the peers on MXNet."""
    if bucket_bytes is not None:
        # ddp-tuned is built for every size that it tries
        trace = setting.trace / name if setting.trace is not None and name == DDP else None
        hook = setting.codec_of(name)
        return DdpSystem(setting, rank, bucket_bytes=bucket_bytes, trace=trace, hook=hook)
    return ForepropSystem(name, setting, rank, paced=paced)


def _steps(system: System, count: int, first: int, *, sample: bool) -> _Block:
    before = _counts_so_far(system)
    samples: list[Sample] = []
    with _sampled(samples) if sample else contextlib.nullcontext():
        steps = system.steps(count, first)
    sent, size, frames = map(operator.sub, _counts_so_far(system), before)
    return _Block(steps, samples, (sent, size, frames))


def _counts_so_far(system: System) -> tuple[int, int, int]:
    try:
        sent = interface_bytes()[0]
    except NetworkUnavailable:
        sent = 0
    return sent, *getattr(system, "counted_frames", (0, 0))


@contextlib.contextmanager
def _sampled(samples: list[Sample]) -> Iterator[None]:
    """Read the node's interface counters at fixed times, in a thread."""
    stopped = threading.Event()

    def run() -> None:
        started = time.monotonic()
        sent_before, received_before = interface_bytes()
        due = 0.0
        while not stopped.wait(max(0.0, started + due - time.monotonic())):
            sent, received = interface_bytes()
            elapsed = time.monotonic() - started
            samples.append((elapsed, sent - sent_before, received - received_before))
            due = elapsed + _SAMPLE_S

    thread = threading.Thread(target=run, name="lab-sampler", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()

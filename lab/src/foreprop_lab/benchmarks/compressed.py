"""What compression takes and gives: codecs by themselves, and real training on slow links.

The links are emulated as those of the demo are: every rank is a node whose link is paced.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from foreprop.config import Config
from foreprop.core.codec import NONE
from foreprop.session.composition import parallelize
from foreprop_lab.benchmarks.codecs import Trip
from foreprop_lab.benchmarks.loopback import MODELS, Cpu
from foreprop_lab.benchmarks.workers import run_workers

_WARM_UP_STEPS = 3
_CODEC_REPEATS = 20
_SLICE_ELEMS = 50_000
_SEED = 1


class TrainedCost(NamedTuple):
    """A codec's cost on arrays of a training, on one thread.

    ``share`` is the size of what is sent over that of the array.
    """

    codec: str
    what: str
    encode_s_per_gb: float
    decode_s_per_gb: float
    share: float


def measure_on_gradients(
    names: Iterable[str], *, model: str, steps: int, repeats: int = _CODEC_REPEATS
) -> list[TrainedCost]:
    """Measure codecs on the gradients and the changes of a model's values after some training."""
    torch.set_num_threads(1)
    gradients, changes = _arrays(model, steps)
    given = (("gradients", gradients), ("new values", changes))
    return [_cost(name, what, arrays, repeats) for name in names for what, arrays in given]


def _arrays(model: str, steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Slices of a training's gradients, and of the exclusive or of values before and after."""
    torch.manual_seed(_SEED)
    network, make_optimizer, (inputs, targets), _ = MODELS[model]()
    optimizer = make_optimizer(network)
    before: list[torch.Tensor] = []
    for _ in range(steps):
        before = [p.detach().clone() for p in network.parameters()]
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    pairs = list(zip(network.parameters(), before, strict=True))
    gradients = [part for p, _ in pairs if p.grad is not None for part in _slices(p.grad)]
    changes = [
        (new.view(torch.int32) ^ old.view(torch.int32)).view(torch.float32)
        for p, was in pairs
        for new, old in zip(_slices(p.detach()), _slices(was), strict=True)
    ]
    return gradients, changes


def _slices(tensor: torch.Tensor) -> list[torch.Tensor]:
    flat = tensor.reshape(-1)
    starts = range(0, len(flat), _SLICE_ELEMS)
    return [flat[start : start + _SLICE_ELEMS].contiguous() for start in starts]


def _cost(name: str, what: str, arrays: Sequence[torch.Tensor], repeats: int) -> TrainedCost:
    trip = Trip(name, arrays)
    for step in range(1, repeats + 1):
        trip.go(step)
    cost = trip.cost
    share = cost.bytes_per_elem / 4
    return TrainedCost(name, what, cost.encode_s_per_gb, cost.decode_s_per_gb, share)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedStep:
    """Medians over rounds; CPU time is that of all ranks and servers together, per step."""

    model: str
    rate_bits_per_s: float
    codec: str
    step_s: float
    ratio: float
    """The step's time over that without compression in the same round."""
    share: float
    """The bytes that crossed over those that would have without compression."""
    cpu_s: float


class _Measured(NamedTuple):
    step_s: float
    cpu_s: float
    share: float


def measure_compression(
    *,
    model: str,
    rates_bits_per_s: Sequence[float],
    codecs: Sequence[str],
    ranks: int,
    rounds: int,
    steps: int,
) -> list[CompressedStep]:
    """Rounds in which training with every codec, and with none, makes some steps, in random order.

    ``model`` is one of `foreprop_lab.benchmarks.loopback.MODELS`. Torch has one thread per rank.
    """
    kinds = (NONE, *codecs)
    found = []
    for rate in rates_bits_per_s:
        by_rank = run_workers(ranks, _work, model, rate, kinds, rounds, steps)
        found += [
            _summary(model, rate, kind, [by_rank[rank] for rank in range(ranks)]) for kind in kinds
        ]
    return found


def _summary(
    model: str, rate: float, kind: str, of_ranks: Sequence[Mapping[str, list[_Measured]]]
) -> CompressedStep:
    own, plain = of_ranks[0][kind], of_ranks[0][NONE]
    ratios = [ours.step_s / theirs.step_s for ours, theirs in zip(own, plain, strict=True)]
    cpus = zip(*([each.cpu_s for each in rank[kind]] for rank in of_ranks), strict=True)
    return CompressedStep(
        model=model,
        rate_bits_per_s=rate,
        codec=kind,
        step_s=statistics.median(each.step_s for each in own),
        ratio=statistics.median(ratios),
        share=own[-1].share,
        cpu_s=statistics.median(map(sum, cpus)),
    )


def _work(
    model: str, rate: float, kinds: Sequence[str], rounds: int, steps: int
) -> dict[str, list[_Measured]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        loops = {kind: _Loop(model, rate, kind) for kind in kinds}
        for loop in loops.values():
            loop.measure(_WARM_UP_STEPS)
        found: dict[str, list[_Measured]] = {kind: [] for kind in kinds}
        for turn in range(rounds):  # all ranks in the same order
            for kind in random.Random(turn).sample(sorted(loops), len(loops)):
                found[kind].append(loops[kind].measure(steps))
        for loop in loops.values():
            loop.session.close()
        return found
    finally:
        dist.destroy_process_group()


class _Loop:
    def __init__(self, model: str, rate: float, kind: str) -> None:
        torch.manual_seed(_SEED)
        self._model, make_optimizer, self._batch, _ = MODELS[model]()
        self._optimizer = make_optimizer(self._model)
        config = Config.resolve(
            compression=kind, link_rate_bits_per_s=rate, workers_per_node=1, update="servers"
        )
        self.session = parallelize(self._model, self._optimizer, config=config)

    def measure(self, steps: int) -> _Measured:
        before, started_s = Cpu.used(), time.perf_counter()
        for _ in range(steps):
            self._step()
        self.session.flush()
        took_s = (time.perf_counter() - started_s) / steps
        used_s = (sum(Cpu.used()) - sum(before)) / steps
        dist.barrier()
        stats = self.session.stats()
        sent = stats["pushed_bytes"] + stats["reply_bytes"]
        raw = stats.get("raw_pushed_bytes", sent) + stats.get("raw_reply_bytes", 0)
        return _Measured(took_s, used_s, sent / raw)

    def _step(self) -> None:
        inputs, targets = self._batch
        self._optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self._model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

"""A language model in the lab: real words look up rows, and the device's time is emulated.

The model is of Parallax's kind (section 2): an embedding, an LSTM with a projection, and a softmax
over sampled words. Both tables have a row for each type of WikiText-2's full vocabulary. A step
looks up the rows of its words, of their next words and of the sampled ones. Autograd computes the
rows' gradients; the LSTM is emulated as the lab's other layers are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch.nn.parallel import DistributedDataParallel

from foreprop.backends.processes import die_with_parent
from foreprop.config import Config
from foreprop.errors import ConfigError
from foreprop.features.tables.lookahead import lookahead
from foreprop.plan.profile import Layer, Profile, ProfiledArray
from foreprop.quantities import option
from foreprop.session.composition import connect
from foreprop_lab.experiments.language.ablation import ABLATION, Ablated
from foreprop_lab.experiments.wikitext import number_words, wikitext2
from foreprop_lab.lab.accelerator import DeviceClock, EmulatedLayer
from foreprop_lab.lab.systems import Steps
from foreprop_lab.setting.labsetting import LabSetting, local_aggregation

HYBRID, SERVERS, FEW_SERVERS, RING = "hybrid", "p2p", "ps", "ring"
DDP_SPARSE, DDP_DENSE = "ddp-sparse", "ddp-dense"
LANGUAGE_SYSTEMS = (HYBRID, SERVERS, FEW_SERVERS, RING, DDP_SPARSE, DDP_DENSE)
"""foreprop's architectures ("ps" has servers on two nodes), and DDP, sparse and dense."""

_SPARSE_OTHERS = frozenset({HYBRID, SERVERS, FEW_SERVERS, DDP_SPARSE})
_FEW = 2  # servers of "ps"
_NEVER_REACHED = 1e6
"""A norm so large that gradients are measured and not changed."""
_DEFAULT = Config()


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageSetting(LabSetting):
    """The setting, with that of the words. ``scale`` only divides widths."""

    width: int = option("Elements of a word's row, unscaled.", 512)
    """The LSTM's projection has this width, too."""
    hidden: int = option("Units of the LSTM, unscaled.", 1024)
    sequences: int = 128
    length: int = 20
    """The words in each sequence of a batch."""
    samples: int = option("Words that the softmax draws.", 8192)
    """They are drawn from a log-uniform distribution."""
    text: Path | None = option("A file of words, instead of WikiText-2.", None)

    known_systems: ClassVar[tuple[str, ...]] = (*LANGUAGE_SYSTEMS, *ABLATION)

    def __post_init__(self) -> None:
        super(LanguageSetting, self).__post_init__()
        for name in ("width", "hidden", "sequences", "length", "samples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; at least 1")

    @property
    def row_elems(self) -> int:
        return max(1, self.width // self.scale)


def lstm_profile(width: int, hidden: int) -> Profile:
    """The profile of the arrays between the tables: four gates, a projection to a row's width."""
    gates = 4 * hidden
    sizes = {
        "lstm.input": (gates, width),
        "lstm.recurrent": (gates, width),
        "lstm.bias": (gates,),
        "projection.weight": (width, hidden),
    }
    return Profile(
        name="lstm-lm",
        arrays=tuple(
            ProfiledArray(name=name, shape=shape, forward_flops=float(math.prod(shape)))
            for name, shape in sizes.items()
        ),
    )


class LanguageModel(torch.nn.Module):
    """Looks up words, occupies the device as the LSTM would, looks up the softmax's rows."""

    def __init__(
        self, types: int, row_elems: int, layers: list[Layer], clock: DeviceClock, *, sparse: bool
    ) -> None:
        super().__init__()
        self.clock = clock
        self.words = torch.nn.Embedding(types, row_elems, sparse=sparse)
        self.lstm = torch.nn.Sequential(*(EmulatedLayer(layer, self.clock) for layer in layers))
        self.softmax = torch.nn.Embedding(types, row_elems, sparse=sparse)

    def forward(self, words: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        x = self.lstm(self.look_up(self.words, words).mean().reshape(1))
        result: torch.Tensor = x * self.look_up(self.softmax, classes).mean()
        return result

    def look_up(self, table: torch.nn.Embedding, rows: torch.Tensor) -> torch.Tensor:
        started_at = time.monotonic()
        found: torch.Tensor = table(rows)
        self.clock.waited(started_at)
        return found

    def end_backward(self) -> None:
        """Wait as the device does; call it after ``loss.backward()``, where DDP waits."""
        self.clock.waited(self.clock.backward_ended_at)


class Text:
    """One worker's share of the text, batch by batch, without end."""

    def __init__(self, setting: LanguageSetting, rank: int) -> None:
        words, types = _read_words(setting)
        share = len(words) // setting.workers
        self.types = len(types)
        self._words = words[rank * share : (rank + 1) * share]
        self._setting = setting
        self._generator = torch.Generator().manual_seed(rank)

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The words (sequences, length), and the rows of the softmax: next words and samples."""
        shape = (self._setting.sequences, self._setting.length)
        count = math.prod(shape)
        while True:
            for start in range(0, len(self._words) - count, count):
                text = self._words[start : start + count + 1]
                yield text[:-1].view(shape), torch.cat([text[1:], self._sample()])

    def _sample(self) -> torch.Tensor:
        """Draw types log-uniformly; their numbers go by frequency (as in TensorFlow's sampler)."""
        uniform = torch.rand(self._setting.samples, generator=self._generator, dtype=torch.float64)
        drawn = torch.exp(uniform * math.log(self.types + 1)).to(torch.int64) - 1
        return drawn.clamp_(0, self.types - 1)


def _read_words(setting: LanguageSetting) -> tuple[torch.Tensor, list[str]]:
    """The words' numbers and the types.

    Raises `ConfigError` for a text without a batch for each worker, and `DatasetUnavailable`.
    """
    words, types = _number_all(setting.text)
    needed = setting.workers * (setting.sequences * setting.length + 1)
    if len(words) < needed:
        raise ConfigError(
            f"text is {setting.text}, which has {len(words)} words; a batch for each of"
            f" {setting.workers} workers takes {needed}"
        )
    return words, types


@functools.cache
def _number_all(text: Path | None) -> tuple[torch.Tensor, list[str]]:
    """Number a text's words; cached, as a worker that clips reads all others' shares, too."""
    if text is None:
        return wikitext2()
    try:
        return number_words(text.read_text(encoding="utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"text is {text}, which cannot be read: {error}") from error


class AggregatedRows:
    """Reads the rows that any worker looks up in a step, which a worker that clips needs.

    It fetches the rows' new values: as many bytes as their aggregated gradients, at the same time.
    Nothing is clipped.
    """

    def __init__(self, setting: LanguageSetting) -> None:
        self._batches = [Text(setting, rank).batches() for rank in range(setting.workers)]

    def advance(self) -> None:
        """Go to the workers' next batches."""
        words, classes = zip(*(next(batches) for batches in self._batches), strict=True)
        self._words = torch.unique(torch.cat([each.flatten() for each in words]))
        self._classes = torch.unique(torch.cat(classes))

    @torch.no_grad()
    def fetch(self, model: LanguageModel) -> None:
        model.look_up(model.words, self._words)
        model.look_up(model.softmax, self._classes)


class LanguageSystem:
    """One way of training the language model, on one worker."""

    def __init__(self, name: str, setting: LanguageSetting, rank: int) -> None:
        text = Text(setting, rank)
        torch.manual_seed(0)
        sparse = name in _SPARSE_OTHERS or name in ABLATION
        clock = DeviceClock()
        self._model = LanguageModel(
            text.types, setting.row_elems, setting.layers, clock, sparse=sparse
        )
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)
        self._batches = lookahead.follow(text.batches())  # as a loader from `shard` does
        self._forward: Callable[..., torch.Tensor] = self._model
        self._close: Callable[[], None] = lambda: None
        ablated = ABLATION.get(name)
        on_workers = ablated is not None and not ablated.clips_on_servers
        self._aggregated = AggregatedRows(setting) if on_workers else None
        if name in (DDP_SPARSE, DDP_DENSE):
            self._forward = DistributedDataParallel(
                self._model, bucket_cap_mb=25 / setting.scale, gradient_as_bucket_view=not sparse
            )
            return
        node, local = divmod(rank, setting.workers_per_node)
        if name == FEW_SERVERS and node < _FEW and not local:
            subprocess.Popen(
                [sys.executable, "-m", "foreprop.tools.cli.main", "server"],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                preexec_fn=die_with_parent,  # it would wait for other sessions
            )
        session = connect(self._model, self._optimizer, _config(name, setting))
        self._close = session.close

    def steps(self, count: int, first: int = 1) -> Steps:
        """Make steps; one counts from the end of a forward pass to the end of the next one."""
        del first  # nothing is drawn
        clock = self._model.clock
        clock.restart()
        loss = self._next_loss()
        steps = Steps()
        for _ in range(count):
            started, idle_before = clock.free_at, clock.idle_s
            self._optimizer.zero_grad()
            loss.sum().backward()  # type: ignore[no-untyped-call]
            self._model.end_backward()
            self._optimizer.step()
            if self._aggregated is not None:
                self._aggregated.fetch(self._model)
            loss = self._next_loss()
            steps.step_s.append(clock.free_at - started)
            steps.waited_s.append(clock.idle_s - idle_before)
        return steps

    def _next_loss(self) -> torch.Tensor:
        if self._aggregated is not None:
            self._aggregated.advance()
        return self._forward(*next(self._batches))

    def close(self) -> None:
        self._close()


def _config(name: str, setting: LanguageSetting) -> Config:
    ablated = ABLATION.get(name) or Ablated(
        architecture=name,  # type: ignore[arg-type]
        local_aggregation=local_aggregation(),
    )
    return dataclasses.replace(
        _DEFAULT,
        architecture=ablated.architecture,
        dedicated_servers=min(_FEW, setting.nodes) if name == FEW_SERVERS else 0,
        workers_per_node=setting.workers_per_node,
        local_aggregation=ablated.local_aggregation,
        clip_grad_norm=_NEVER_REACHED if ablated.clips_on_servers else None,
        wire_dtype=ablated.wire_dtype,
        whole_tables="none",
        chunk_elems=setting.scaled(_DEFAULT.chunk_elems),
        slice_elems=setting.slice_elems_of(name),
        unsent_bytes=setting.scaled(_DEFAULT.unsent_bytes),
        push_window_bytes=setting.scaled(_DEFAULT.push_window_bytes),
    )


def build_system(
    name: str, rank: int, setting: LanguageSetting, *, paced: bool, bucket_bytes: int | None
) -> LanguageSystem:
    """Build a system for `lab.run.run_lab`; links are the kernel's, and DDP has its own buckets."""
    del paced, bucket_bytes
    return LanguageSystem(name, setting, rank)

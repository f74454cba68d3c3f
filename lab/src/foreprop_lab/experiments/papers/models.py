"""Parallax's four models (Kim et al., section 7.1), as the simulator takes them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch

from foreprop.plan.profile import Profile, ProfiledArray, load_profile
from foreprop_lab.experiments.language.training import LanguageSetting, Text, lstm_profile
from foreprop_lab.experiments.wikitext import wikitext2

WORKERS_PER_MACHINE = 6
"""The TITAN Xp in each of the paper's 8 machines."""
_BATCHES = 3
"""How many batches of each worker have their rows counted."""
_WIDTH, _HIDDEN = 512, 2048
_UNITS = 1024
_TYPES = 36_548
"""The byte pairs of each language of the translation model (Wu et al. 2016: 32,000 and more)."""
_SENTENCES, _SENTENCE = 128, 25


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallaxModel:
    profile: Profile
    compute_s: float
    """The time of a batch on one worker."""
    batch: int
    """The batch of one worker, in ``unit``."""
    unit: str
    together: tuple[tuple[str, float], ...] = ()
    """The share of each table's rows that a machine's workers touch together."""
    listed: tuple[tuple[str, float], ...] = ()
    """The rows of a worker's gradient over all rows of each table, repeated ones counted each time.

    A word that occurs twice has two rows in TensorFlow's lists, which Horovod gathers as they are
    (horovod/horovod#341, #3328).
    """

    @property
    def dense_elems(self) -> int:
        return _elems(array for array in self.profile.arrays if array.alpha is None)

    @property
    def sparse_elems(self) -> int:
        return _elems(array for array in self.profile.arrays if array.alpha is not None)

    @property
    def as_lists(self) -> Profile:
        """The profile with as many rows as the lists have, repeated ones included."""
        listed = dict(self.listed)
        arrays = (
            msgspec.structs.replace(array, alpha=listed.get(array.name, array.alpha))
            for array in self.profile.arrays
        )
        return replace(self.profile, arrays=tuple(arrays))

    @property
    def alpha(self) -> float:
        """The share of all elements that a step uses: Parallax's mean over its parameters."""
        used = sum(_elems([a]) * (1.0 if a.alpha is None else a.alpha) for a in self.profile.arrays)
        return used / (self.dense_elems + self.sparse_elems)


def _elems(arrays: Iterator[ProfiledArray] | Sequence[ProfiledArray]) -> int:
    return sum(array.rows * array.row_elems for array in arrays)


def language_model(setting: LanguageSetting | None = None) -> ParallaxModel:
    """The lab's model, undivided: two tables of WikiText-2's types, an LSTM of 2,048 units.

    ``setting`` says whose text and batches. Its step's compute follows from the paper: 276,000
    words/s on 48 workers (Table 4) are 9.4 times one worker's (section 7.3).
    """
    setting = setting or LanguageSetting(
        profile=lstm_profile(_WIDTH, _HIDDEN),
        systems=("hybrid",),
        nodes=WORKERS_PER_MACHINE,
        width=_WIDTH,
        hidden=_HIDDEN,
    )
    texts = [Text(setting, rank) for rank in range(setting.workers)]
    batches = [_rows_of(text) for text in texts]
    shares = [_shares(rows, texts[0].types) for rows in zip(*batches, strict=True)]
    tables, together, listed = [], [], []
    for name, numbers, rows in zip(
        ("words.weight", "softmax.weight"), zip(*shares, strict=True), batches[0][0], strict=True
    ):
        alpha, union = (statistics.fmean(each) for each in zip(*numbers, strict=True))
        shape = (texts[0].types, setting.width)
        tables.append(ProfiledArray(name=name, shape=shape, forward_flops=0.0, alpha=alpha))
        together.append((name, union))
        listed.append((name, rows.numel() / texts[0].types))
    lstm = lstm_profile(setting.width, setting.hidden)
    return ParallaxModel(
        profile=replace(lstm, arrays=(tables[0], *lstm.arrays, tables[1])),
        compute_s=9.4 * setting.sequences * setting.length / 276_000,
        batch=setting.sequences * setting.length,
        unit="words",
        together=tuple(together),
        listed=tuple(listed),
    )


_Rows = tuple[torch.Tensor, ...]
"""The rows of each table in one batch."""


def _rows_of(text: Text) -> list[_Rows]:
    return [rows for _, rows in zip(range(_BATCHES), text.batches(), strict=False)]


def _shares(rows: Sequence[_Rows], types: int) -> list[tuple[float, float]]:
    """The shares of each table's rows that each worker touches, and all together, in a step."""
    shares = []
    for numbers in zip(*rows, strict=True):
        each = statistics.fmean(len(torch.unique(own)) for own in numbers)
        union = len(torch.unique(torch.cat([own.flatten() for own in numbers])))
        shares.append((each / types, union / types))
    return shares


def translation_model(words: torch.Tensor | None = None) -> ParallaxModel:
    """LSTMs of 1,024 units: four layers each way, the first of the encoder bidirectional.

    The tables are the two embeddings; the softmax is over all types, and dense. Which rows 128
    sentences of 25 words touch is counted in ``words``, by default WikiText-2's: no translated text
    is available here. Its compute follows from 191,000 words/s and 17.1 (Table 4, section 7.3).
    """
    words = (wikitext2()[0] if words is None else words).clamp(max=_TYPES - 1)
    size = _SENTENCES * _SENTENCE
    counted = []
    for step in range(_BATCHES):
        first = step * WORKERS_PER_MACHINE * size
        each = torch.split(words[first : first + WORKERS_PER_MACHINE * size], size)
        counted += _shares([(own,) for own in each], _TYPES)
    alpha, union = (statistics.fmean(each) for each in zip(*counted, strict=True))
    gates = 4 * _UNITS
    inputs = {
        "encoder.forward": _UNITS,
        "encoder.backward": _UNITS,
        "encoder.1": 2 * _UNITS,
        "encoder.2": _UNITS,
        "encoder.3": _UNITS,
    }
    decoder = {"decoder.0": 2 * _UNITS, **{f"decoder.{n}": _UNITS for n in (1, 2, 3)}}
    encoder_table, decoder_table = (
        ProfiledArray(name=f"{way}.words", shape=(_TYPES, _UNITS), forward_flops=0.0, alpha=alpha)
        for way in ("source", "target")
    )
    arrays = (
        encoder_table,
        *_lstms(inputs, gates),
        decoder_table,
        *_lstms(decoder, gates),
        _dense("attention", (2 * _UNITS, _UNITS)),
        _dense("softmax", (_TYPES, _UNITS)),
    )
    return ParallaxModel(
        profile=Profile(name="lstm-nmt", arrays=arrays),
        compute_s=17.1 * size / 191_000,
        batch=size,
        unit="words",
        together=tuple((table.name, union) for table in (encoder_table, decoder_table)),
        listed=tuple((table.name, size / _TYPES) for table in (encoder_table, decoder_table)),
    )


def _lstms(inputs: dict[str, int], gates: int) -> list[ProfiledArray]:
    return [
        _dense(f"{name}.{part}", (gates, width))
        for name, own in inputs.items()
        for part, width in (("input", own), ("recurrent", _UNITS))
    ]


def _dense(name: str, shape: tuple[int, int]) -> ProfiledArray:
    return ProfiledArray(name=name, shape=shape, forward_flops=float(shape[0] * shape[1]))


def convolutional(name: str, images_per_s: float) -> ParallaxModel:
    """A model with batches of 64; its rate is a TITAN Xp's with TensorFlow 1.6, not the paper's."""
    return ParallaxModel(
        profile=load_profile(name), compute_s=64 / images_per_s, batch=64, unit="images"
    )


def four_models() -> dict[str, ParallaxModel]:
    return {
        "ResNet-50": convolutional("resnet50", 200.0),
        "InceptionV3": convolutional("inceptionv3", 130.0),
        "LM": language_model(),
        "NMT": translation_model(),
    }

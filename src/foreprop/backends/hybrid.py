"""The two backends of ``hybrid``: all-reduce for dense parameters, servers for row-wise ones.

That is Parallax's division of labour (Kim et al., EuroSys 2019). Each gets its own parameters only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from foreprop.backends.composedworker import ServedBackend
from foreprop.backends.ring import RingBackend
from foreprop.core.codec import NONE, choices_text, codec_of, pattern_of
from foreprop.core.norm import SquareSum
from foreprop.features.compression.choosing import check_choices
from foreprop.params.modelhooks import ModelBuffers
from foreprop.params.parameter import ParameterArrival
from foreprop.params.setup import Setup


def connect_both(setup: Setup) -> list[tuple[RingBackend | ServedBackend, Sequence[int]]]:
    """Connect both backends; returns each with the session's numbers of its parameters.

    Buffers and frozen parameters are the first's. Whoever waits for one of them learns of the
    other's failure. The first one's part of the global norm is added to the servers'.
    """
    dense = [number for number, info in enumerate(setup.infos) if not info.rows]
    rows = [number for number, info in enumerate(setup.infos) if info.rows]
    if setup.config.codecs:
        check_choices(setup.config.codecs, setup.infos)

    def send_sum(step: int, part: SquareSum) -> None:
        served.norm.add_part(step, part)

    ring = RingBackend(dataclasses.replace(_part(setup, dense), send_sum=send_sum))
    try:
        nothing = ModelBuffers(torch.nn.Module())
        of_rows = dataclasses.replace(_part(setup, rows), frozen=[], buffers=nothing, part="rows")
        served = ServedBackend(of_rows)
    except BaseException as error:
        ring.engine.close(failure=error)
        raise
    if ring.engine.chunks:
        served.norm.share(ring.engine.use_norm)
        served.engine.requests.add_outside(ring.engine.describe, ring.engine.look_around)
    ring.engine.progress.beside.append(served.engine.progress)
    served.engine.progress.beside.append(ring.engine.progress)
    return [(ring, dense), (served, rows)]


def _part(setup: Setup, chosen: Sequence[int]) -> Setup:
    infos = [setup.infos[number] for number in chosen]
    config = setup.config
    if config.codecs:  # patterns are of all names
        codecs = [(info.name, codec_of(info.name, config.codecs)) for info in infos]
        own = [(pattern_of(name), codec) for name, codec in codecs if codec != NONE]
        config = config.replace(compression=choices_text(own))
    return dataclasses.replace(
        setup,
        config=config,
        parameters=[setup.parameters[number] for number in chosen],
        infos=infos,
        memory=_Chosen(setup.memory, chosen),
    )


class _Chosen(Sequence[ParameterArrival]):
    """Some of a sequence's items, which may not all be there yet."""

    def __init__(self, whole: Sequence[ParameterArrival], chosen: Sequence[int]) -> None:
        self._whole = whole
        self._chosen = chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: Any) -> Any:
        return self._whole[self._chosen[index]]

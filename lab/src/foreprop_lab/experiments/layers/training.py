"""The systems that ``lab layers`` compares: real layers in one cluster, eager and compiled."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from foreprop.engine.worker import WorkerEngine
from foreprop.errors import ConfigError
from foreprop.params.interception import Interception
from foreprop.plan.compressing import arrays_in_order
from foreprop.plan.profile import Layer, Profile
from foreprop.session.composition import connect
from foreprop_lab.experiments.layers.models import (
    DEVICE,
    MODELS,
    NOT_COMPILED,
    RealModel,
    profile_of,
)
from foreprop_lab.lab.systems import Steps, System, codecs_in, counted_frames, train
from foreprop_lab.setting.codecs import session_compression
from foreprop_lab.setting.labsetting import LabSetting, base_of, foreprop_config

EAGER, BLOCKS, WHOLE = "eager", "blocks", "whole"
LAYERS_SYSTEMS = (EAGER, BLOCKS, WHOLE)
"""The same loop with the preset p3: eager, with each block compiled, and compiled whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersSetting(LabSetting):
    """The setting. ``scale`` divides slices, windows and buffers, as if the model were larger."""

    known_systems: ClassVar[tuple[str, ...]] = LAYERS_SYSTEMS
    paced_systems: ClassVar[tuple[str, ...]] = LAYERS_SYSTEMS
    coded_systems: ClassVar[tuple[str, ...]] = LAYERS_SYSTEMS
    hooked_systems: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        super(LayersSetting, self).__post_init__()
        compiled = [name for name in self.systems if base_of(name) != EAGER]
        if self.profile.name in NOT_COMPILED and compiled:
            raise ConfigError(
                f"systems has {compiled[0]!r}, but torch's compiler leaves {self.profile.name!r} to"
                f" eager code: ask for {EAGER} (--systems)"
            )

    @property
    def layers(self) -> list[Layer]:
        return self.profile.layers(scale=1, compute_s=self.compute_s)


def real_profile(model: str) -> Profile:
    """The profile of a model of real layers; `ConfigError` names those that there are."""
    if model not in MODELS:
        raise ConfigError(f"model is {model!r}; there are {', '.join(MODELS)}")
    return profile_of(model)


def _idling(wait: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wait)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        asked_at = time.monotonic()
        try:
            return wait(*args, **kwargs)
        finally:
            DEVICE.waited(asked_at)

    return wrapper


WAITS = Interception(WorkerEngine, "wait", _idling)
"""The device is idle while any code waits for a parameter."""


class LayersSystem:
    """foreprop with the preset p3 and a model of real layers."""

    def __init__(self, name: str, setting: LabSetting, rank: int, *, paced: bool) -> None:
        torch.manual_seed(0)
        self._model = MODELS[setting.profile.name]()
        self._model.take_times(setting.layers)
        self._generator = torch.Generator().manual_seed(rank)
        self._call = _compiled(self._model, base_of(name))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        own: dict[str, Any] = {}
        if setting.trace is not None:
            own["trace"] = str(setting.trace / name)
        if paced:
            own["link_rate_bits_per_s"] = setting.network.rate_of(rank)
        arrays = [array.name for array in arrays_in_order(setting.profile)]
        if (codec := setting.codec_of(name)) is not None:
            own["compression"] = session_compression(codec, setting.profile, arrays)
        config = foreprop_config("p3", setting, **own)
        self._arrays = [(array, self._model.get_parameter(array)) for array in arrays]
        self._session = connect(self._model, self._optimizer, config)
        self._release = WAITS.hold()

    @property
    def codecs(self) -> list[str]:
        """The codec that each array of the profile has now."""
        return codecs_in(self._session, self._arrays)

    @property
    def counted_frames(self) -> tuple[int, int]:
        return counted_frames(self._session)

    def steps(self, count: int, first: int = 1) -> Steps:
        self._session.flush()
        numbers = range(first, first + count)
        return train(self._model, self._loss, self._optimizer, numbers)

    def _loss(self, _: torch.Tensor) -> torch.Tensor:
        inputs, classes = self._model.batch(self._generator)
        return F.cross_entropy(self._call(inputs).flatten(0, -2), classes.flatten())

    def close(self) -> None:
        self._release()
        self._session.close()


def _compiled(model: RealModel, name: str) -> Callable[..., torch.Tensor]:
    """The model compiled by inductor, in this process and not in processes of its own."""
    if name == EAGER:
        return model
    import torch._inductor.config as inductor

    inductor.compile_threads = 1
    if name == WHOLE:
        whole: Callable[..., torch.Tensor] = torch.compile(model, fullgraph=True)
        return whole
    for block in model.blocks:
        block.compile(fullgraph=True)
    return model


def build_system(
    name: str, rank: int, setting: LabSetting, *, paced: bool, bucket_bytes: int | None
) -> System:
    """Build a system for `foreprop_lab.lab.run.run_lab`; there are no buckets."""
    return LayersSystem(name, setting, rank, paced=paced)

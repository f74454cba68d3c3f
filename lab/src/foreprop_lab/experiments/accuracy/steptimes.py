"""How long a step of the trained model takes on a network, from `foreprop_lab.simulate`.

A profile is one of foreprop's, or that of a model trained here.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping

import msgspec

from foreprop.plan.profile import Profile, ProfiledArray, load_profile
from foreprop.quantities import rate_text
from foreprop_lab.experiments.accuracy.tasks import TYPES, LanguageNet, perceptron
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.simulate.compressed import with_chosen_codecs
from foreprop_lab.simulate.run import simulate_system
from foreprop_lab.simulate.setting import SimulatedSetting

SYSTEM = "p3"
_STEPS, _UNCOUNTED = 24, 2


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """Devices and links: those of the P3 paper's Figs. 11 and 15, as far as it gives them."""

    profile: str = "resnet110_cifar"
    nodes: int = 4
    rate_bits_per_s: float = 1e9
    compute_s: float = 0.1
    """A step's compute. The paper has no figure; a batch of 32 takes a P4000 about as long."""
    step_jitter: float = 0.1
    """See `setting.unevenness`."""
    slow_nodes: int = 0
    slowdown: float = 0.0

    def __str__(self) -> str:
        slow = f", {self.slow_nodes} of them {self.slowdown:g} slower" if self.slow_nodes else ""
        return (
            f"{self.profile} on {self.nodes} nodes{slow}, {rate_text(self.rate_bits_per_s)},"
            f" {self.compute_s:g} s per step, jitter {self.step_jitter:g}"
        )


@functools.cache
def synchronous_step_s(clock: Clock, system: str, codec: str | None) -> float:
    """The mean time of a preset's step, with a codec or with none."""
    times = _simulated(clock, system, compression=codec)
    return statistics.fmean(step for steps in times for step in steps)


@functools.cache
def stale_step_s(clock: Clock, system: str) -> list[list[float]]:
    """The times of each worker's steps, where it waits for nobody else's updates."""
    return _simulated(clock, system, staleness="async")


def _simulated(clock: Clock, system: str, **changes: object) -> list[list[float]]:
    setting = SimulatedSetting(
        profile=_profile_named(clock.profile),
        nodes=clock.nodes,
        rate_bits_per_s=clock.rate_bits_per_s,
        compute_s=clock.compute_s,
        step_jitter=clock.step_jitter,
        slow_nodes=clock.slow_nodes,
        slowdown=clock.slowdown,
        scale=1,
        systems=(system,),
        symmetric=False,
        **changes,  # type: ignore[arg-type]
    )
    if setting.compression is not None:
        setting = with_chosen_codecs(setting, Hosts())
    simulated = simulate_system(system, setting, Hosts(), steps=_STEPS, first_step=1 - _UNCOUNTED)
    return [steps[_UNCOUNTED:] for steps in simulated.step_s]


def _profile_named(name: str) -> Profile:
    return _OWN[name]() if name in _OWN else load_profile(name)


def _perceptron() -> Profile:
    """The perceptron's profile; FLOPs follow elements, as an image passes each matrix once."""
    arrays = [
        ProfiledArray(
            name=name,
            shape=tuple(parameter.shape),
            forward_flops=2.0 * parameter.numel() if parameter.dim() > 1 else 0.0,
        )
        for name, parameter in perceptron().named_parameters()
    ]
    return Profile(name="perceptron", arrays=tuple(arrays))


def _language_net() -> Profile:
    """The language model's profile, for one word.

    The shared matrix is used first, so its gradient is ready last; the time of its second use, for
    the classes, is counted for their biases.
    """
    shapes = {name: tuple(p.shape) for name, p in LanguageNet().named_parameters()}
    words = ProfiledArray(name="words.weight", shape=shapes["words.weight"], forward_flops=0.0)
    lstm = [
        ProfiledArray(
            name=name,
            shape=shape,
            forward_flops=2.0 * shape[0] * shape[1] if len(shape) > 1 else 0.0,
        )
        for name, shape in shapes.items()
        if name.startswith("lstm.")
    ]
    flops = 2.0 * TYPES * shapes["words.weight"][1]
    bias = ProfiledArray(name="classes.bias", shape=shapes["bias"], forward_flops=flops)
    return Profile(name="language_net", arrays=(words, *lstm, bias))


_OWN: Mapping[str, Callable[[], Profile]] = {
    "perceptron": _perceptron,
    "language_net": _language_net,
}
PROFILES: Mapping[str, str] = {
    "fashion": "perceptron",
    "cifar": Clock().profile,
    "wikitext": "language_net",
}
"""The profile of each task's model."""

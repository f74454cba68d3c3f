"""What random numbers come next: of Python, numpy, torch and the device, and of a loader's own."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

States = dict[str, Any]
"""Plain data, as safe loading takes it."""


def random_states() -> States:
    """The process's, as they are now; of a device only if it is in use."""
    version, numbers, gauss = random.getstate()
    states: States = {
        "python": [version, list(numbers), gauss],
        "torch": torch.get_rng_state(),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, place, has_gauss, cached = numpy.random.get_state(legacy=True)
        states["numpy"] = [str(name), keys.tolist(), int(place), int(has_gauss), float(cached)]
    if (device := _device_module()) is not None:
        states["device"] = device.get_rng_state()
    return states


def restore_random_states(states: States) -> None:
    """They go on from there. What this process does not use is left out; so is all, if empty."""
    if not states:
        return
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(states["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    device = _device_module()
    if device is not None and "device" in states:
        device.set_rng_state(states["device"])


def check_random_states(states: States) -> None:
    """Raise whatever it is that `restore_random_states` would, and change nothing."""
    if not states:
        return
    version, numbers, gauss = states["python"]
    random.Random().setstate((version, tuple(numbers), gauss))
    check_generators([states["torch"]])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        name, keys, *rest = states["numpy"]
        tried = (name, numpy.array(keys, dtype=numpy.uint32), *rest)
        numpy.random.RandomState().set_state(tried)
    if not isinstance(states.get("device", states["torch"]), torch.Tensor):
        raise TypeError("the device's are no tensor")


def check_generators(states: Sequence[Any]) -> None:
    for state in states:
        torch.Generator().set_state(state)


def _device_module() -> Any:
    """Of this process's accelerator: the current device's random numbers; None if there is none."""
    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    started = getattr(module, "is_initialized", lambda: True)
    return module if started() and hasattr(module, "get_rng_state") else None


# A loader's own generators.
def generators_of(loader: Any) -> list[torch.Generator]:
    """Each once, in an order that is alike for loaders that are made alike."""
    found: dict[int, torch.Generator] = {}
    for part in _parts(loader):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            found.setdefault(id(generator), generator)
    return list(found.values())


def _parts(loader: Any) -> Iterator[Any]:
    batches = getattr(loader, "batch_sampler", None)
    yield from (loader, getattr(loader, "sampler", None), batches)
    yield getattr(batches, "sampler", None)
    yield getattr(loader, "dataset", None)


def states_of(generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
    return [generator.get_state() for generator in generators]


def restore_generators(generators: Sequence[torch.Generator], states: Sequence[Any]) -> None:
    """A loader that has others by now keeps those that are new."""
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)

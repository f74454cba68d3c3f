"""What a slice, and what a parameter, costs a worker's threads: in host memory and on a device.

    python -m tests.lagging.slicecost

A session of one worker, whose server is a process of its own, exchanges parameters that are cut
into few slices, and into many. The bytes are the same, so the difference is the slices'. Processor
time is read from each thread's own clock. The device's streams are left out, as a GPU's work is
not the host's; what the device for tests takes longer to queue than a GPU's driver is not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from foreprop.config import Config
from foreprop.engine.world import World
from foreprop.session.composition import connect
from foreprop_lab.benchmarks.wire import lonely_world
from tests.lagging.device import DEVICE, lagging
from tests.lagging.streams import Event

PARAMETERS, ELEMS = 40, 64_000
FEW, MANY = 4, 40
"""Slices of each parameter."""
PLACES = ("cpu", DEVICE)
_WARM_UP_STEPS = 5


class Cost(NamedTuple):
    """Of one step."""

    cpu_s: dict[str, float]
    """By thread: medians over steps."""
    calls: Counter[str]
    """Of the device's module and events, by name."""


def measure(place: str, slices: int, steps: int, world: World) -> Cost:
    """``place``: of the parameters, each of which has so many ``slices``."""
    with lagging(manner="eager"):
        model = torch.nn.ParameterList(torch.zeros(ELEMS, device=place) for _ in range(PARAMETERS))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        config = Config.resolve(
            "p3", architecture="p2p", update="servers", slice_elems=ELEMS // slices
        )
        with connect(model, optimizer, config, world=world) as session:
            for parameter in model:
                parameter.grad = torch.ones_like(parameter)

            def step() -> None:
                optimizer.step()
                session.flush()

            for _ in range(_WARM_UP_STEPS):
                step()
            with _counted() as calls:
                step()
            used = [_used_s(step) for _ in range(steps)]
    lasting = set.intersection(*(set(one) for one in used))
    return Cost({name: statistics.median(one[name] for one in used) for name in lasting}, calls)


def _used_s(step: Callable[[], None]) -> dict[str, float]:
    before = _clocks()
    step()
    return {name: now_s - before.get(name, 0.0) for name, now_s in _clocks().items()}


def _clocks() -> dict[str, float]:
    """Processor time of this process's threads, seconds, but for the device's own."""
    return {
        thread.name: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None and not thread.name.startswith(DEVICE)
    }


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Calls from now on, of all threads."""
    calls: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return count

    module = type(torch.get_device_module(DEVICE))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("current_stream", "stream"):
            counted = staticmethod(counting(name, getattr(module, name)))
            patch.setattr(module, name, counted)
        for name in ("__init__", "record", "wait", "synchronize"):
            told = f"Event.{name}".removesuffix(".__init__")
            patch.setattr(Event, name, counting(told, getattr(Event, name)))
        yield calls


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="sessions of each kind")
    parser.add_argument("--steps", type=int, default=40, help="in each")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    slices_us: dict[tuple[str, str], list[float]] = {}
    rests_us: dict[tuple[str, str], list[float]] = {}
    for _ in range(asked.rounds):
        for place in PLACES:
            few, many = (measure(place, n, asked.steps, lonely_world()) for n in (FEW, MANY))
            if place == DEVICE:
                calls = few.calls, many.calls
            for name in few.cpu_s.keys() & many.cpu_s.keys():
                few_us, many_us = (
                    s / PARAMETERS * 1e6 for s in (few.cpu_s[name], many.cpu_s[name])
                )
                slice_us = (many_us - few_us) / (MANY - FEW)
                slices_us.setdefault((place, name), []).append(slice_us)
                rests_us.setdefault((place, name), []).append(few_us - FEW * slice_us)
    print("processor time, us: medians (least to most) of rounds")
    for (place, name), us in sorted(slices_us.items()):
        rest = _told(rests_us[place, name])
        print(f"{place:8}{name:20}{_told(us)} per slice,{rest} per parameter besides")
    for slices, one in zip((FEW, MANY), calls, strict=True):
        each = {name: count / PARAMETERS for name, count in sorted(one.items())}
        print(f"calls of the device per parameter of {slices} slices: {each}")
    return 0


def _told(values: list[float]) -> str:
    return f"{statistics.median(values):7.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    sys.exit(main())

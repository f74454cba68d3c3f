"""Findings about accelerators: what torch does not see, what is shared, what sits far away."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from foreprop.doctor.records import (
    Device,
    Examination,
    Facts,
    Finding,
    differing,
    hint,
    known_facts,
    warning,
)
from foreprop.quantities import counted

_CHECK = "devices"


def find_devices(examination: Examination) -> Iterator[Finding]:
    for host in examination.hosts:
        if host.facts is not None:
            yield from _find_unseen(host.name, host.facts)
            yield from _find_shared(host.name, host.workers, host.facts)
            yield from _find_far(host.name, host.facts)
    known = known_facts(examination)
    models: dict[str, Hashable] = {
        name: ", ".join(sorted({device.model for device in facts.devices})) or "none"
        for name, facts in known
    }
    same = "every step waits for the slowest host"
    yield from differing("hint", _CHECK, "the devices differ", models, same)
    drivers: dict[str, Hashable] = {
        name: ", ".join(sorted({d.driver for d in facts.devices if d.driver})) or None
        for name, facts in known
    }
    yield from differing(
        "hint", _CHECK, "drivers differ", drivers, "install the same driver on all hosts"
    )
    nccl: dict[str, Hashable] = {name: facts.nccl for name, facts in known if facts.devices}
    advice = "ring between GPUs needs the same NCCL: install the same torch everywhere"
    yield from differing("warning", _CHECK, "NCCL differs", nccl, advice)


def _find_unseen(name: str, facts: Facts) -> Iterator[Finding]:
    if facts.devices or not (facts.devices_error or facts.unseen_devices):
        return
    there = ", ".join(facts.unseen_devices)
    on_the_bus = f"; on the PCI bus there is {there}" if there else ""
    why = f": {facts.devices_error}" if facts.devices_error else ""
    advice = (
        "if they are to train: see that their driver is loaded, and install a torch that is"
        " built for them; else set CUDA_VISIBLE_DEVICES to nothing"
    )
    text = f"{name}: torch {facts.torch} sees no device{why}{on_the_bus}"
    yield hint(_CHECK, [name], text, advice)


def _find_shared(name: str, workers: int, facts: Facts) -> Iterator[Finding]:
    count = len(facts.devices)
    if not 0 < count < workers:
        return
    seen = facts.visible_devices
    setting = "" if seen is None else f" (CUDA_VISIBLE_DEVICES is {seen!r})"
    advice = (
        f"start {counted(count, 'worker')} there, or make more devices visible; each worker"
        " takes the one"
        " at its LOCAL_RANK"
    )
    text = (
        f"{name}: {counted(workers, 'worker')}, but torch sees {counted(count, 'device')}{setting}"
    )
    yield warning(_CHECK, [name], text, advice)


def _find_far(name: str, facts: Facts) -> Iterator[Finding]:
    here = facts.interface_numa_node
    far = [device for device in facts.devices if _is_elsewhere(device, here)]
    if here is None or not far:
        return
    where = ", ".join(f"{device.name} at node {device.numa_node}" for device in far)
    yield hint(
        _CHECK,
        [name],
        f"{name}: {facts.interface} is at NUMA node {here}, {where}: gradients cross between them",
        "start the workers of each device on its own node (numactl --cpunodebind), or set"
        " FOREPROP_INTERFACE to a card that is nearer, if there is one",
    )


def _is_elsewhere(device: Device, node: int | None) -> bool:
    return device.numa_node is not None and device.numa_node != node

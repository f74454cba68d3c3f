"""A host's accelerators: what torch says of them, and where Linux says they sit (sysfs, procfs).

Gradients cross from the device through host memory to the network's card. Where a machine has
several NUMA nodes (sockets), the kernel tells on which of them each of the two is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foreprop.config.otherhosts import foreign_setting
from foreprop.doctor.records import Device

ROOT = Path("/")
_NVIDIA = 0x10DE
_DISPLAY, _PROCESSING = 0x03, 0x12
"""PCI classes; an accelerator that draws nothing is one of the second, or a display of no VGA."""
_VGA = 0x0300


class HostDevices(NamedTuple):
    """As `Facts` has it."""

    devices: list[Device]
    devices_error: str | None = None
    unseen_devices: Sequence[str] = ()
    nccl: str | None = None
    interface_numa_node: int | None = None


def gather_devices(interface: str | None, root: Path = ROOT) -> HostDevices:
    """Loads torch, and has it look for devices; it makes no context on one.

    ``root``: where ``sys`` and ``proc`` are. Raises what the import of torch raises.
    """
    devices, error = _devices(root)
    hidden = foreign_setting("CUDA_VISIBLE_DEVICES") is not None
    return HostDevices(
        devices=devices,
        devices_error=error,
        unseen_devices=[] if devices or hidden else list(_accelerators_on_the_bus(root)),
        nccl=_nccl(),
        interface_numa_node=None if interface is None else _interface_node(interface, root),
    )


def _devices(root: Path) -> tuple[list[Device], str | None]:
    """Or none, and what torch says why."""
    import torch

    if not hasattr(torch, "accelerator"):  # an older torch, which other findings are about
        return [], None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            kind = torch.accelerator.current_accelerator(check_available=True)
            if kind is not None:
                module: Any = torch.get_device_module(kind)
                return [_device(module, kind.type, n, root) for n in range(_count(module))], None
        except Exception as error:  # every backend has its own
            return [], f"{type(error).__name__}: {_first_line(error)}"
    return [], _first_line(told[0].message) if told else None


def _first_line(told: object) -> str:
    return str(told).partition("\n")[0]


def _count(module: Any) -> int:
    return int(module.device_count())


def _device(module: Any, kind: str, index: int, root: Path) -> Device:
    properties: Any = None
    if hasattr(module, "get_device_properties"):
        properties = module.get_device_properties(index)
    pci = _pci_address(properties, root)
    driver = None if pci is None else _driver(root / "sys/bus/pci/devices" / pci)
    return Device(
        name=f"{kind}:{index}",
        model=str(getattr(properties, "name", "")) or kind,
        memory_bytes=getattr(properties, "total_memory", None),
        driver=driver or getattr(properties, "driver_version", None),
        pci=pci,
        numa_node=None if pci is None else _numa_node(root / "sys/bus/pci/devices" / pci),
    )


def _pci_address(properties: Any, root: Path) -> str | None:
    """As torch tells it; else NVIDIA's driver does, by the device's UUID."""
    if hasattr(properties, "pci_bus_id"):
        domain, bus = int(properties.pci_domain_id), int(properties.pci_bus_id)
        return f"{domain:04x}:{bus:02x}:{int(properties.pci_device_id):02x}.0"
    uuid = str(getattr(properties, "uuid", "")).removeprefix("GPU-")
    for told in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        if uuid and f"GPU-{uuid}" in (_text(told) or ""):
            return told.parent.name
    return None


def _driver(device: Path) -> str | None:
    """The kernel's module, and its version if it has one of its own."""
    module = device / "driver" / "module"
    if not module.exists():
        return None
    version = _text(module / "version")
    return module.resolve().name + (f" {version}" if version else "")


def _numa_node(device: Path) -> int | None:
    text = _text(device / "numa_node")
    return None if text is None or int(text) < 0 else int(text)


def _interface_node(interface: str, root: Path) -> int | None:
    """Of its card; of a bond, bridge or VLAN that of the first card below."""
    folder = root / "sys/class/net" / interface
    if (folder / "device").exists():
        return _numa_node(folder / "device")
    for lower in sorted(folder.glob("lower_*")):
        node = _interface_node(lower.name.removeprefix("lower_"), root)
        if node is not None:
            return node
    return None


def _accelerators_on_the_bus(root: Path) -> Iterator[str]:
    """Devices that look like one, as ``0000:17:00.0 (10de:2330)``."""
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        found = [_text(folder / name) for name in ("class", "vendor", "device")]
        if None in found:
            continue
        class_, vendor, device = (int(text or "", 16) for text in found)
        kind = class_ >> 16
        is_display = kind == _DISPLAY and (vendor == _NVIDIA or class_ >> 8 != _VGA)
        if is_display or kind == _PROCESSING:
            yield f"{folder.name} ({vendor:04x}:{device:04x})"


def _nccl() -> str | None:
    """Of ROCm's torch, RCCL's."""
    import torch

    distributed = getattr(torch, "distributed", None)  # a build may have none
    if distributed is None or not distributed.is_nccl_available():
        return None
    import torch.cuda.nccl

    version: Any = torch.cuda.nccl.version
    return ".".join(map(str, version()))


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # a container may not have it
        return None

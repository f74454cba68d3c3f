"""What a host says of itself: names, address, link, kernel, versions, accelerators.

Gradients cross from the device through host memory to the network's card. Where a machine has
several NUMA nodes (sockets), the kernel tells on which of them each of the two is.
"""

from __future__ import annotations

import ipaddress
import os
import platform
import resource
import socket
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from foreprop.config import Config
from foreprop.config.launchers import foreign_setting
from foreprop.engine.native import maybe_library
from foreprop.engine.stream import check_reachable, local_address
from foreprop.errors import ForepropError
from foreprop.tools.doctor.records import Device, Facts, Introduce, Resolved
from foreprop.tools.run.plan import own_addresses
from foreprop.version import __version__

_TCP = Path("/proc/sys/net/ipv4")
_CORE = Path("/proc/sys/net/core")


class Place(NamedTuple):
    """Where the host can be reached, or why it cannot: fields of `Facts`."""

    address: str | None
    address_error: str | None
    port: int | None
    rendezvous_port: int | None
    rendezvous_error: str | None


def find_address(rendezvous: str, config: Config) -> tuple[str | None, str | None]:
    """The address that a session would announce, and what is wrong with it or why there is none."""
    address = None
    try:
        address = local_address(rendezvous, config.interface)
        check_reachable(address, rendezvous, config.interface)
    except ForepropError as error:
        return address, str(error)
    return address, None


def gather_facts(asked: Introduce, config: Config, place: Place) -> Facts:
    """Gather all facts; this imports torch, to see whether that works."""
    missing = None if os.path.isdir(asked.directory or ".") else asked.directory
    torch, torch_error = _load_torch()
    interface: str | None = None
    if place.address is not None:
        wanted = ipaddress.ip_address(place.address.partition("%")[0])
        # 127.0.0.2 and similar addresses belong to the loopback device without being listed
        interface = own_addresses().get(wanted, "lo" if wanted.is_loopback else None)
    devices = None if torch is None else gather_devices(torch, interface)
    stats = psutil.net_if_stats().get(interface or "")
    first_port, last_port = (*_numbers(_TCP / "ip_local_port_range"), None, None)[:2]
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Facts(
        foreprop=__version__,
        python=platform.python_version(),
        plane=maybe_library() is not None,
        torch=None if torch is None else str(torch.__version__),
        torch_error=torch_error,
        byteorder=sys.byteorder,
        names=[resolve(name) for name in asked.names],
        own_name=resolve(socket.gethostname()),
        gloo_interface=foreign_setting("GLOO_SOCKET_IFNAME"),
        **place._asdict(),
        directory_error=missing and f"there is no directory {missing}",
        interface=interface,
        mtu_bytes=stats.mtu if stats else None,
        speed_bits_per_s=stats.speed * 1e6 if stats and 0 < stats.speed < 65_535 else None,
        full_duplex=stats.duplex != psutil.NIC_DUPLEX_HALF if stats else None,
        congestion_control=text_of(_TCP / "tcp_congestion_control"),
        send_buffer_bytes=_last(_numbers(_TCP / "tcp_wmem")),
        receive_buffer_bytes=_last(_numbers(_TCP / "tcp_rmem")),
        asked_buffer_bytes=_last(_numbers(_CORE / "wmem_max")),
        first_port=first_port,
        last_port=last_port,
        push_window_bytes=config.push_window_bytes,
        cpus=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        threads=foreign_setting("OMP_NUM_THREADS"),
        open_files=sys.maxsize if soft == resource.RLIM_INFINITY else soft,
        visible_devices=foreign_setting("CUDA_VISIBLE_DEVICES"),
        **({} if devices is None else devices._asdict()),
    )


def resolve(name: str) -> Resolved:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return Resolved(name=name, addresses=[], error=getattr(error, "strerror", "") or str(error))
    return Resolved(name=name, addresses=list(dict.fromkeys(str(entry[4][0]) for entry in found)))


def _load_torch() -> tuple[Any, str | None]:
    try:
        import torch
    except Exception as error:  # a broken installation may raise anything
        return None, f"{type(error).__name__}: {error}"
    return torch, None


def _numbers(path: Path) -> list[int | None]:
    return [int(word) for word in (text_of(path) or "").split()]


def _last(numbers: list[int | None]) -> int | None:
    return numbers[-1] if numbers else None


# Accelerators: torch's facts, and their place by Linux's sysfs and procfs.
ROOT = Path("/")
_NVIDIA = 0x10DE
_DISPLAY, _PROCESSING = 0x03, 0x12
"""PCI classes; an accelerator without a screen is of the second, or a display that is no VGA."""
_VGA = 0x0300


class HostDevices(NamedTuple):
    """What torch and Linux say of a host's accelerators: fields of `Facts`."""

    devices: list[Device]
    devices_error: str | None = None
    unseen_devices: Sequence[str] = ()
    nccl: str | None = None
    interface_numa_node: int | None = None


def gather_devices(torch: Any, interface: str | None, root: Path = ROOT) -> HostDevices:
    """Have torch look for devices, without making a context on one.

    Linux's ``sys`` and ``proc`` are read below ``root``.
    """
    devices, error = _devices(torch, root)
    hidden = foreign_setting("CUDA_VISIBLE_DEVICES") is not None
    return HostDevices(
        devices=devices,
        devices_error=error,
        unseen_devices=[] if devices or hidden else list(_accelerators_on_the_bus(root)),
        nccl=_nccl_version(torch),
        interface_numa_node=None if interface is None else _interface_node(interface, root),
    )


def _devices(torch: Any, root: Path) -> tuple[list[Device], str | None]:
    if not hasattr(torch, "accelerator"):  # an older torch, which other findings are about
        return [], None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            kind = torch.accelerator.current_accelerator(check_available=True)
            if kind is not None:
                module: Any = torch.get_device_module(kind)
                count = int(module.device_count())
                return [_device(module, kind.type, n, root) for n in range(count)], None
        except Exception as error:  # every backend has its own
            return [], f"{type(error).__name__}: {_first_line(error)}"
    return [], _first_line(caught[0].message) if caught else None


def _first_line(message: object) -> str:
    return str(message).partition("\n")[0]


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
    """The device's address on the bus, from torch, or from NVIDIA's driver by the device's UUID."""
    if hasattr(properties, "pci_bus_id"):
        domain, bus = int(properties.pci_domain_id), int(properties.pci_bus_id)
        return f"{domain:04x}:{bus:02x}:{int(properties.pci_device_id):02x}.0"
    uuid = str(getattr(properties, "uuid", "")).removeprefix("GPU-")
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        if uuid and f"GPU-{uuid}" in (text_of(file) or ""):
            return file.parent.name
    return None


def _driver(device: Path) -> str | None:
    """The kernel's module, and its version if it has one of its own."""
    module = device / "driver" / "module"
    if not module.exists():
        return None
    version = text_of(module / "version")
    return module.resolve().name + (f" {version}" if version else "")


def _numa_node(device: Path) -> int | None:
    text = text_of(device / "numa_node")
    return None if text is None or int(text) < 0 else int(text)


def _interface_node(interface: str, root: Path) -> int | None:
    """The NUMA node of an interface's card; a bond, bridge or VLAN has its first card's."""
    folder = root / "sys/class/net" / interface
    if (folder / "device").exists():
        return _numa_node(folder / "device")
    for lower in sorted(folder.glob("lower_*")):
        node = _interface_node(lower.name.removeprefix("lower_"), root)
        if node is not None:
            return node
    return None


def _accelerators_on_the_bus(root: Path) -> Iterator[str]:
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        found = [text_of(folder / name) for name in ("class", "vendor", "device")]
        if None in found:
            continue
        class_, vendor, device = (int(text or "", 16) for text in found)
        kind = class_ >> 16
        is_display = kind == _DISPLAY and (vendor == _NVIDIA or class_ >> 8 != _VGA)
        if is_display or kind == _PROCESSING:
            yield f"{folder.name} ({vendor:04x}:{device:04x})"


def _nccl_version(torch: Any) -> str | None:
    # with ROCm's torch this is the version of RCCL
    distributed = getattr(torch, "distributed", None)  # a build may have none
    if distributed is None or not distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def text_of(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # a container may not have it
        return None

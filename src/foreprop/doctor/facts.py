"""What a host says of itself: names, address, link, kernel, versions."""

from __future__ import annotations

import ipaddress
import os
import platform
import resource
import socket
import sys
from pathlib import Path
from typing import NamedTuple

import psutil

from foreprop.config import Config
from foreprop.config.otherhosts import foreign_setting
from foreprop.doctor.devices import gather_devices
from foreprop.doctor.records import Facts, Introduce, Resolved
from foreprop.errors import ForepropError
from foreprop.link.announced import check_reachable
from foreprop.link.stream import local_address
from foreprop.run.plan import own_addresses
from foreprop.version import __version__

_TCP = Path("/proc/sys/net/ipv4")
_CORE = Path("/proc/sys/net/core")


class Place(NamedTuple):
    """Where the host can be reached, or why it cannot; as `Facts` has it."""

    address: str | None
    address_error: str | None
    port: int | None
    rendezvous_port: int | None
    rendezvous_error: str | None


def find_address(rendezvous: str, config: Config) -> tuple[str | None, str | None]:
    """The one that a session would announce, and what is wrong with it, or why there is none."""
    address = None
    try:
        address = local_address(rendezvous, config.interface)
        check_reachable(address, rendezvous, config.interface)
    except ForepropError as error:
        return address, str(error)
    return address, None


def gather_facts(asked: Introduce, config: Config, place: Place) -> Facts:
    """Loads torch, to see whether that works."""
    missing = None if os.path.isdir(asked.directory or ".") else asked.directory
    torch, torch_error = _torch_version()
    interface = None if place.address is None else _interface_of(place.address)
    devices = None if torch is None else gather_devices(interface)
    stats = psutil.net_if_stats().get(interface or "")
    first_port, last_port = (*_numbers(_TCP / "ip_local_port_range"), None, None)[:2]
    return Facts(
        foreprop=__version__,
        python=platform.python_version(),
        torch=torch,
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
        congestion_control=_text(_TCP / "tcp_congestion_control"),
        send_buffer_bytes=_last(_numbers(_TCP / "tcp_wmem")),
        receive_buffer_bytes=_last(_numbers(_TCP / "tcp_rmem")),
        asked_buffer_bytes=_last(_numbers(_CORE / "wmem_max")),
        first_port=first_port,
        last_port=last_port,
        push_window_bytes=config.push_window_bytes,
        cpus=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        threads=foreign_setting("OMP_NUM_THREADS"),
        open_files=_open_files(),
        visible_devices=foreign_setting("CUDA_VISIBLE_DEVICES"),
        **({} if devices is None else devices._asdict()),
    )


def resolve(name: str) -> Resolved:
    """What the host's resolver says, best first."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return Resolved(name=name, addresses=[], error=getattr(error, "strerror", "") or str(error))
    return Resolved(name=name, addresses=list(dict.fromkeys(str(entry[4][0]) for entry in found)))


def _torch_version() -> tuple[str | None, str | None]:
    """Or why it cannot be loaded, which may be anything."""
    try:
        import torch
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    return str(torch.__version__), None


def _interface_of(address: str) -> str | None:
    wanted = ipaddress.ip_address(address.partition("%")[0])
    # 127.0.0.2 and its like are loopback's without being listed
    return own_addresses().get(wanted, "lo" if wanted.is_loopback else None)


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # some of these are not there in a container's network
        return None


def _numbers(path: Path) -> list[int | None]:
    return [int(word) for word in (_text(path) or "").split()]


def _last(numbers: list[int | None]) -> int | None:
    return numbers[-1] if numbers else None


def _open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft

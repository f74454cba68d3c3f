"""What probes are asked, what they answer, and what comes of it: plain data, JSON on the way.

Hosts are numbers here: places in the list of hosts. A fact that is None is one that neither torch
nor the kernel tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import Literal

import msgspec

from foreprop.engine.traffic import Attempt, Endpoint, Flow, Trip

PROTOCOL = 1
"""Changes when a doctor and a probe of different versions would not understand each other."""

Severity = Literal["error", "warning", "hint"]
"""error: keeps training from working; warning: slows it down or confuses; hint: worth a look."""


# Requests to probes.
class Introduce(msgspec.Struct, frozen=True, kw_only=True, tag="introduce"):
    """Gather the host's facts, and listen from now on."""

    host: int
    token: str
    """32 hexadecimal digits that whoever connects must know."""
    names: list[str]
    """Names to look up."""
    rendezvous: str
    serve_rendezvous: bool
    """Whether to listen where torchrun would on the first host, too."""
    port: int | None
    """The rendezvous' port; None for a free one."""
    directory: str | None
    environment: dict[str, str]


class Reach(msgspec.Struct, frozen=True, kw_only=True, tag="reach"):
    """Connect to all peers at once, each for at most ``timeout_s``."""

    peers: list[Endpoint]
    timeout_s: float


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """Send small messages there and back, to one peer after the other, ``seconds`` at most each."""

    peers: list[Endpoint]
    seconds: float


class Send(msgspec.Struct, frozen=True, kw_only=True, tag="send"):
    """Send as much as goes to all peers at once; counted for ``seconds`` after ``settle_s``."""

    peers: list[Endpoint]
    settle_s: float
    seconds: float


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """The examination is over."""


Command = Introduce | Reach | Ping | Send | End


# Their answers.
class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A probe's first words, before anything can go wrong."""

    protocol: int
    foreprop: str


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """What a name means on a host: addresses, the first of which is used, or why it has none."""

    name: str
    addresses: list[str]
    error: str | None = None


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """An accelerator that torch sees."""

    name: str
    """Its name in torch: ``cuda:0``."""
    model: str
    memory_bytes: int | None = None
    driver: str | None = None
    """The kernel's module, with its version."""
    pci: str | None = None
    """Its address on the bus: ``0000:17:00.0``."""
    numa_node: int | None = None


class Facts(msgspec.Struct, frozen=True, kw_only=True, tag="facts"):
    """What a host says of itself."""

    foreprop: str
    python: str
    plane: bool = True
    """Whether the native plane was built there."""
    torch: str | None
    torch_error: str | None = None
    byteorder: str
    names: list[Resolved]
    own_name: Resolved
    """Its host name, which gloo looks up."""
    gloo_interface: str | None
    address: str | None
    """The address that a session would announce to others; ``port`` is a free one there."""
    address_error: str | None = None
    port: int | None = None
    rendezvous_port: int | None = None
    rendezvous_error: str | None = None
    directory_error: str | None = None
    interface: str | None = None
    mtu_bytes: int | None = None
    speed_bits_per_s: float | None = None
    full_duplex: bool | None = None
    congestion_control: str | None = None
    send_buffer_bytes: int | None = None
    """The largest send buffer that the kernel gives by itself (tcp_wmem)."""
    receive_buffer_bytes: int | None = None
    """The largest receive buffer that the kernel gives by itself (tcp_rmem)."""
    asked_buffer_bytes: int | None = None
    """The largest send buffer that a program may ask for (net.core.wmem_max)."""
    first_port: int | None = None
    last_port: int | None = None
    """The range that the kernel takes free ports from."""
    push_window_bytes: int
    cpus: int
    load: float
    """How many threads wanted to run, on average of the minute before anything was measured."""
    threads: str | None
    """OMP_NUM_THREADS, if it is set."""
    open_files: int
    devices: list[Device] = []
    devices_error: str | None = None
    """What torch says where it sees no device."""
    unseen_devices: list[str] = []
    """Accelerators on the PCI bus, where torch sees none."""
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES, if it is set."""
    nccl: str | None = None
    interface_numa_node: int | None = None


class Reached(msgspec.Struct, frozen=True, kw_only=True, tag="reached"):
    attempts: list[Attempt]


class Pinged(msgspec.Struct, frozen=True, kw_only=True, tag="pinged"):
    trips: list[Trip]


class Sent(msgspec.Struct, frozen=True, kw_only=True, tag="sent"):
    flows: list[Flow]


class Defect(msgspec.Struct, frozen=True, kw_only=True, tag="defect"):
    """The probe could not do what it was asked."""

    text: str


Answer = Hello | Facts | Reached | Pinged | Sent | Defect


# The results of an examination.
class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a host has no results, or no more of them."""

    kind: Literal[
        "unreachable", "no_python", "no_foreprop", "other_version", "silent", "ended", "defect"
    ]
    text: str
    command: str = ""
    """What started its probe, for trying by hand."""


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """A host: its facts, if it came so far, and what went wrong, if anything did."""

    name: str
    workers: int = 1
    facts: Facts | None = None
    failure: Failure | None = None


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """All that was measured: flows ``alone`` (few at a time) and ``together`` (all at once)."""

    rendezvous: str
    hosts: list[Examined]
    attempts: list[Attempt] = []
    trips: list[Trip] = []
    alone: list[Flow] = []
    together: list[Flow] = []


class Finding(msgspec.Struct, frozen=True):
    """Something found, about these hosts, and what to do about it."""

    severity: Severity
    check: str
    hosts: list[str]
    found: str
    advice: str


# These decoders raise ``msgspec.MsgspecError``.
decode_command: Callable[[bytes], Command] = msgspec.json.Decoder(Command).decode
decode_answer: Callable[[bytes], Answer] = msgspec.json.Decoder(Answer).decode


# Helpers for findings, which say which hosts have which value.
Known = list[tuple[str, Facts]]
error, warning = partial(Finding, "error"), partial(Finding, "warning")
hint = partial(Finding, "hint")
"""Findings, of a check, about hosts: what is found, and what to do about it."""


def known_facts(examination: Examination) -> Known:
    return [(host.name, host.facts) for host in examination.hosts if host.facts is not None]


def both_stayed(examination: Examination, source: int, to: int) -> bool:
    return all(examination.hosts[host].failure is None for host in (source, to))


def groups(values: Mapping[str, Hashable]) -> str:
    """``node0, node1: 2.6; node2: 2.7``, the most common first."""
    names: dict[Hashable, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    most_first = sorted(names.items(), key=lambda item: -len(item[1]))
    return "; ".join(f"{', '.join(who)}: {value}" for value, who in most_first)


def differing(
    severity: Severity, check: str, text: str, values: Mapping[str, Hashable], advice: str
) -> Iterator[Finding]:
    """One finding if hosts do not all have the same value: ``text``, and who has which.

    It is about the hosts without the most common value. A host whose value is None is left out.
    """
    known = {name: value for name, value in values.items() if value is not None}
    if len(set(known.values())) > 1:
        ((common, _),) = Counter(known.values()).most_common(1)
        odd = [name for name, value in known.items() if value != common]
        yield Finding(severity, check, odd, f"{text}: {groups(known)}", advice)

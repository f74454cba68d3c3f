"""The resource file: which hosts there are, and how many workers or which GPUs on each.

One host per line: P3's hosts file, with Parallax's GPU ids. `docs/run.md` describes the format.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from foreprop.core.manifest import MOST_PROCESSES
from foreprop.errors import ConfigError

FORMAT = "HOST, HOST workers=4 or HOST:0,1,2,3 (GPU ids)"
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")  # never an option of ssh
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_ZONE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,14}")  # the name or number of an interface
_WORKERS = ("workers", "slots")
MOST_WORKERS = 1024
"""The most workers on one host: more are a slip of the pen, and would take for ever to start."""
_MOST_DIGITS = len(str(MOST_WORKERS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine, and how many workers or which GPUs it has (its CUDA_VISIBLE_DEVICES)."""

    name: str
    user: str | None = None
    workers: int = 1
    gpus: tuple[int, ...] | None = None

    @property
    def login(self) -> str:
        return self.name if self.user is None else f"{self.user}@{self.name}"


class _BadLine(Exception):
    """What is wrong with a line; who catches it adds the file and the line's number."""


def read_resources(path: Path, *, workers_per_node: int) -> tuple[Host, ...]:
    """The hosts of a file, in its order; raises `ConfigError`."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"resources is {str(path)!r}, which cannot be read: {reason}") from error
    return parse_resources(text, source=str(path), workers_per_node=workers_per_node)


def parse_resources(text: str, *, source: str, workers_per_node: int) -> tuple[Host, ...]:
    """The hosts of a file's text; ``workers_per_node`` is for those whose line does not say."""
    found: dict[str, int] = {}
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.partition("#")[0].strip()
        if not stripped:
            continue
        try:
            host = _parse_line(stripped, workers_per_node)
            first = found.setdefault(host.name.lower(), number)
            if first != number:
                raise _BadLine(f"line {first} has this host already; name each host once")
        except _BadLine as error:
            raise ConfigError(f"{source}, line {number}: {stripped!r}: {error}") from error
        hosts.append(host)
    if not hosts:
        raise ConfigError(f"{source} names no host; write one per line: {FORMAT}")
    if workers_per_node > MOST_WORKERS:
        raise ConfigError(f"workers_per_node is {workers_per_node}; at most {MOST_WORKERS}")
    total = sum(host.workers for host in hosts)
    if total > MOST_PROCESSES:
        raise ConfigError(f"{source} has {total} workers in all; at most {MOST_PROCESSES}")
    return tuple(hosts)


def _parse_line(line: str, workers_per_node: int) -> Host:
    where, *settings = line.split()
    user, at, rest = where.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise _BadLine(f"the user is {user!r}; write USER@HOST")
    name, ids = _split_ids(rest)
    gpus = None if ids is None else _parse_gpus(ids)
    workers = _parse_workers(settings)
    if gpus is not None and workers is not None:
        raise _BadLine("GPU ids mean one worker each; leave out workers=")
    if gpus is not None:
        workers = len(gpus)
    return Host(
        name=name,
        user=user or None,
        workers=workers_per_node if workers is None else workers,
        gpus=gpus,
    )


def _split_ids(text: str) -> tuple[str, str | None]:
    """The parts of HOST:IDS, where the host may be an IPv6 address in brackets."""
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        if not bracket or not _is_ipv6(name) or (rest and not rest.startswith(":")):
            raise _BadLine("an IPv6 address is written in brackets: [fe80::1] or [fe80::1]:0,1")
        return name, rest[1:] if rest else None
    if text.count(":") > 1:
        raise _BadLine("write an IPv6 address in brackets: [fe80::1] or [fe80::1]:0,1")
    name, colon, ids = text.partition(":")
    if not _NAME.fullmatch(name):
        raise _BadLine(f"the host is {name!r}; write its name or address: {FORMAT}")
    return name, ids if colon else None


def _is_ipv6(text: str) -> bool:
    address, percent, zone = text.partition("%")
    if percent and not _ZONE.fullmatch(zone):
        raise _BadLine(f"the zone of {address} is {zone!r}; it is an interface's name: %eth0")
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _parse_gpus(ids: str) -> tuple[int, ...]:
    found = [_maybe_number(part) for part in ids.split(",")]
    numbers = [number for number in found if number is not None]
    if len(numbers) != len(found):
        raise _BadLine(f"the GPU ids are {ids!r}; write whole numbers and commas: HOST:0,1,2,3")
    if max(numbers) >= MOST_WORKERS:
        raise _BadLine(f"the GPU ids are {ids!r}; they must be under {MOST_WORKERS}")
    if len(set(numbers)) != len(numbers):
        raise _BadLine(f"the GPU ids are {ids!r}; name each GPU once")
    return tuple(numbers)


def _parse_workers(settings: list[str]) -> int | None:
    workers: int | None = None
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in _WORKERS:
            raise _BadLine(f"{setting!r} is not known; a line is {FORMAT}")
        if workers is not None:
            raise _BadLine(f"{setting!r}: the number of workers is there already")
        workers = _maybe_number(value)
        if workers is None or not 1 <= workers <= MOST_WORKERS:
            raise _BadLine(f"{setting!r}: the number of workers must be 1 to {MOST_WORKERS}")
    return workers


def _maybe_number(text: str) -> int | None:
    if not (text.isascii() and text.isdigit()):
        return None
    # a few digits more than all limits have: a million of them would take long to read
    return int(text.lstrip("0")[: _MOST_DIGITS + 1] or "0")

"""What of this process's environment other machines get, and what the doctor shows of it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Sequence
from typing import Literal

from foreprop.errors import ConfigError

Foreign = Literal["OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES"]


def foreign_setting(name: Foreign) -> str | None:
    """A variable of torch's, for ``foreprop doctor`` to show; None if it is not set."""
    return os.environ.get(name)


ELASTIC = "FOREPROP_ELASTIC"
"""The setting, which ``foreprop run --elastic`` sets for its workers."""
MAX_WORKERS = "FOREPROP_MAX_WORKERS"
"""The setting, which ``foreprop run --nodes`` sets where more hosts may come."""
JOIN = "FOREPROP_JOIN"
"""Where a worker asks a session that runs to take it in: servers' HOST:PORT, with commas."""
STEPS_FILE = "FOREPROP_STEPS_FILE"
"""Set by ``foreprop run`` for its workers: where they say how far they have come, and whom they
have lost. It is in the memory of the host's agent; anywhere else there is nobody to be told."""


def tell_agent(line: bytes) -> None:
    """Up to 100 bytes without a line end, which are written whole."""
    path = os.environ.get(STEPS_FILE)
    if path is None:
        return
    with contextlib.suppress(OSError):  # the agent has gone, and so will this process
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, line + b"\n")
        finally:
            os.close(descriptor)


def report_lost(rank: int, peer: str) -> None:
    """That this worker's session has ended for another process's sake, which others may name."""
    name = " ".join(peer.split())[:60]
    if name and name != f"rank {rank}":
        tell_agent(b"%d lost %s" % (rank, name.encode("ascii", "backslashreplace")[:80]))


SERVERS_FILE = "FOREPROP_SERVERS_FILE"
"""Set by whoever starts a worker of an elastic session: where it says where servers listen."""


def servers_file() -> str | None:
    return os.environ.get(SERVERS_FILE)


def environment_for_hosts(names: Sequence[str] = ()) -> dict[str, str]:
    """What workers on other machines get of this environment: the settings, and ``NAME[=VALUE]``.

    An ``interface`` that is an address is this machine's alone, and stays here. Raises
    `ConfigError`.
    """
    found = {name: value for name, value in os.environ.items() if name.startswith("FOREPROP_")}
    if _is_address(found.get("FOREPROP_INTERFACE", "")):
        del found["FOREPROP_INTERFACE"]
    for text in names:
        name, equals, value = text.partition("=")
        if not name.isidentifier() or not name.isascii():
            raise ConfigError(f"env is {text!r}; it must be NAME or NAME=VALUE")
        if not equals and name not in os.environ:
            raise ConfigError(f"env is {text!r}, which is not set here; set it or say {name}=VALUE")
        found[name] = value if equals else os.environ[name]
    return found


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True

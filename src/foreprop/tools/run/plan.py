"""What each host is to run: torchrun's arguments, the environment, and how the host is reached."""

from __future__ import annotations

import getpass
import ipaddress
import math
import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath

import psutil
from msgspec.structs import replace as replace_struct

from foreprop.config.launchers import ELASTIC, JOIN, MAX_WORKERS
from foreprop.engine.stream import is_loopback
from foreprop.errors import ConfigError
from foreprop.tools.run.records import Place, Task
from foreprop.tools.run.resources import Host

DEFAULT_PORT = 29500
"""The rendezvous' port that torchrun takes by itself."""
HOST_PROGRAM = ("-P", "-m", "foreprop.tools.run.host")
_SSH_OPTIONS = (
    *("-o", "BatchMode=yes"),  # a question for a password would wait for ever, unseen
    *("-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=15"),
)
"""Options after the user's own: ssh takes the first of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run on several hosts: what to start on each, and how to get there.

    torchrun counts ranks through the hosts in their order. In an elastic run ``hosts`` grows by
    those that join later; the first ``hosts_at_start`` of them began it.
    """

    hosts: tuple[Host, ...]
    here: frozenset[str]
    """The names of those hosts that are this machine."""
    script: tuple[str, ...]
    """The training script and its arguments."""
    directory: str
    python: str
    module: bool = False
    """Whether the script is a module's name, as after ``python -m``."""
    ssh: tuple[str, ...] = ("ssh",)
    environment: Mapping[str, str]
    master_address: str
    port: int | None = None
    """The rendezvous' port; None for a free one of the first host."""
    grace_s: float = 10.0
    elastic: bool = False
    """Whether the other hosts go on when one fails."""
    hosts_at_start: int | None = None
    """How many hosts began the run; None for all."""
    most_workers: int | None = None
    """How many workers there may be, if hosts may join; else None."""

    def is_here(self, index: int) -> bool:
        return self.hosts[index].name in self.here

    def ranks(self, index: int) -> range:
        first = sum(host.workers for host in self.hosts[:index])
        return range(first, first + self.hosts[index].workers)

    @property
    def first_hosts(self) -> tuple[Host, ...]:
        return self.hosts[: self.hosts_at_start]

    def with_host(self, index: int, host: Host) -> Plan:
        """The plan with another host, of as many workers, in a place; or in the next, new one."""
        return replace(self, hosts=(*self.hosts[:index], host, *self.hosts[index + 1 :]))

    def environment_of(self, index: int) -> dict[str, str]:
        """The variables that a host's workers have beside their machine's own environment."""
        found = {}
        counts = {host.workers for host in self.first_hosts}
        if len(counts) > 1:  # workers count as nodes in equal groups: let none reach over two hosts
            found["FOREPROP_WORKERS_PER_NODE"] = str(math.gcd(*counts))
        if self.most_workers is not None:
            found[MAX_WORKERS] = str(self.most_workers)
        found |= self.environment
        if self.elastic:
            found[ELASTIC] = str(True)
        gpus = self.hosts[index].gpus
        if gpus is not None:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        return found

    def task(self, index: int) -> Task:
        return Task(
            host=self.hosts[index].name,
            directory=self.directory,
            environment=self.environment_of(index),
            arguments=self._torchrun_arguments(index),
            port=self.port,
            grace_s=self.grace_s,
        )

    def joining_task(self, index: int, address: str) -> Task:
        """The task of a host that joins a run: its rendezvous is its own, on a free port.

        At ``address`` its workers ask the running session to take them in.
        """
        ranks = self.ranks(index)
        return replace_struct(
            self.task(index),
            environment=self.environment_of(index) | {JOIN: address},
            arguments=self._arguments_for(ranks, nodes=1, node_rank=0, address="127.0.0.1"),
            port=None,
            place=Place(
                node_rank=index,
                nodes=len(self.first_hosts),
                first_rank=ranks[0],
                world_size=sum(host.workers for host in self.first_hosts),
            ),
        )

    def _torchrun_arguments(self, index: int) -> list[str]:
        address, nodes = self.master_address, len(self.hosts)
        return self._arguments_for(self.ranks(index), nodes, node_rank=index, address=address)

    def _arguments_for(self, ranks: range, nodes: int, node_rank: int, address: str) -> list[str]:
        return [
            *("--nnodes", str(nodes)),
            *("--node-rank", str(node_rank)),
            *("--nproc-per-node", str(len(ranks))),
            *("--master-addr", f"[{address}]" if ":" in address else address),
            *(("--module",) if self.module else ()),
            *self.script,
        ]

    def command(self, index: int, arguments: tuple[str, ...] = HOST_PROGRAM) -> list[str]:
        """The command that starts a program of foreprop's on a host, from here."""
        program = [self.python, *arguments]
        if self.is_here(index):
            return program
        path = self.environment.get("PYTHONPATH")  # the host program may need it too
        words = program if path is None else ["env", f"PYTHONPATH={path}", *program]
        return self._over_ssh(index, "exec " + shlex.join(words))

    def by_hand(self, index: int) -> str:
        """A shell command that does the same with plain torchrun, to be typed here."""
        words = [
            *("--master-port", str(self.port or DEFAULT_PORT)),
            *self._torchrun_arguments(index),
        ]
        variables = [f"{name}={value}" for name, value in self.environment_of(index).items()]
        start = [*(("env", *variables) if variables else ()), self.python]
        torchrun = shlex.join([*start, "-m", "torch.distributed.run", *words])
        command = f"cd {shlex.quote(self.directory)} && {torchrun}"
        return command if self.is_here(index) else shlex.join(self._over_ssh(index, command))

    def _over_ssh(self, index: int, command: str) -> list[str]:
        options = _SSH_OPTIONS if PurePath(self.ssh[0]).name == "ssh" else ()
        return [*self.ssh, *options, self.hosts[index].login, command]


def check_reachable(hosts: tuple[Host, ...], here: frozenset[str]) -> None:
    """Raise `ConfigError` if the other hosts cannot reach the first one by its name."""
    if is_loopback(hosts[0].name) and any(host.name not in here for host in hosts):
        raise ConfigError(
            f"the first host is {hosts[0].name!r}, where no other machine can reach it; write its"
            " name or address, or give --master-addr"
        )


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def maybe_address(name: str) -> _Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def hosts_here(hosts: tuple[Host, ...]) -> frozenset[str]:
    """The names of those hosts that are this machine and this user's; this asks the resolver."""
    names = {"localhost", socket.gethostname(), socket.gethostname().partition(".")[0]}
    addresses = own_addresses()
    return frozenset(
        host.name
        for host in hosts
        if host.user in (None, getpass.getuser())
        and (host.name in names or any(a in addresses or a.is_loopback for a in _resolve(host)))
    )


def own_addresses() -> dict[_Address, str]:
    """This machine's addresses, and the interface that has each."""
    return {
        ipaddress.ip_address(entry.address.partition("%")[0]): interface
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }


def _resolve(host: Host) -> list[_Address]:
    address = maybe_address(host.name)
    if address is not None:
        return [address]
    try:
        found = socket.getaddrinfo(host.name, None)
    except OSError:  # a name that only ssh's configuration knows, perhaps
        return []
    return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]

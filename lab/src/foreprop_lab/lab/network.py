"""Links made by the kernel: a bridge, a veth pair per node, token buckets, cubic.

Everything lives in network namespaces without names, reached by ``unshare``: the machine's own
network is not touched, and the kernel takes all of it back when the last process has ended.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from foreprop_lab.setting.links import NETWORK_PREFIX, SWITCH_ADDRESS, Network

CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

INTERFACE = "eth0"
_BRIDGE = "bridge"
_PREFIX_BITS = 24
_CONGESTION_CONTROL = "cubic"
_TCP = Path("/proc/sys/net/ipv4")
_REMEMBERED_S = 86_400
"""How long a connection remembers its shortest round trip, by which Linux sizes its bursts.

By default it is five minutes, in which no training is silent; here a system may wait longer for its
turn. Then each connection begins with what its first packet meets in the queue, and those with long
bursts crowd out the others (lab/docs/notebook/full-size.md).
"""
_DEFAULT_SEND_BUFFER_BYTES = 4_194_304
"""Linux's default for the largest automatic send buffer (the third number of tcp_wmem)."""


class NetworkUnavailable(Exception):
    """This machine does not let us make namespaces or links; the message says why."""


def enter_namespaces() -> None:
    """Move this process into a new network, its children into a new process namespace.

    If this user is not root, a user namespace where they are is made, too. The first child is the
    process namespace's init: all others end with it. Raises `NetworkUnavailable`.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        _unshare(CLONE_NEWNET | CLONE_NEWPID)
    except PermissionError:
        try:
            _unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        except OSError as error:
            raise NetworkUnavailable(f"no user namespace: {error.strerror}") from error
    except OSError as error:
        raise NetworkUnavailable(f"no network namespace: {error.strerror}") from error


def enter_own_network() -> None:
    """Give this process of a node, and its children, a network of their own."""
    try:
        _unshare(CLONE_NEWNET)
    except OSError as error:
        raise NetworkUnavailable(f"no network namespace: {error.strerror}") from error


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Switch:
    """The bridge that joins the nodes; used in the process that has entered the namespaces."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._routes = IPRoute()
        try:
            _set_up(self._routes, "lo")
            self._routes.link("add", ifname=_BRIDGE, kind="bridge")
            self._bridge = _set_up(self._routes, _BRIDGE)
            if network.cross_traffic:
                self._routes.addr(
                    "add", index=self._bridge, address=SWITCH_ADDRESS, prefixlen=_PREFIX_BITS
                )
        except NetlinkError as error:
            raise NetworkUnavailable(f"no bridge: {error.args[-1]}") from error

    def plug_in(self, node: int, pid: int) -> None:
        """Make the link between the bridge and the network of process ``pid``."""
        port = f"port{node}"
        peer = {"ifname": INTERFACE, "net_ns_pid": pid}
        try:
            self._routes.link("add", ifname=port, kind="veth", peer=peer)
            index = _index(self._routes, port)
            self._routes.link("set", index=index, master=self._bridge, state="up")
            if self._network.shape_ingress:
                _shape(self._routes, index, self._network, node)
        except NetlinkError as error:
            raise NetworkUnavailable(f"no link for node {node}: {error.args[-1]}") from error


def configure_node(network: Network, node: int) -> None:
    """Set, inside a node's own network once it is plugged in, address, route, shaping, buffers."""
    address = network.address(node)
    try:
        with IPRoute() as routes:
            _set_up(routes, "lo")
            link = _index(routes, INTERFACE)
            routes.addr("add", index=link, address=address, prefixlen=_PREFIX_BITS)
            _set_up(routes, INTERFACE)
            routes.route(
                "replace",
                dst=f"{NETWORK_PREFIX}.0/{_PREFIX_BITS}",
                oif=link,
                prefsrc=address,
                scope="link",
                proto="kernel",
                metrics={"cc_algo": _CONGESTION_CONTROL},
            )
            _shape(routes, link, network, node)
    except NetlinkError as error:
        raise NetworkUnavailable(f"node {node}: {error.args[-1]}") from error
    least, default, _ = (_TCP / "tcp_wmem").read_text().split()
    largest = max(_DEFAULT_SEND_BUFFER_BYTES // network.buffer_scale, int(least))
    settings = {
        "tcp_wmem": f"{least} {min(int(default), largest)} {largest}",
        "tcp_min_rtt_wlen": str(_REMEMBERED_S),
    }
    for name, value in settings.items():
        try:
            (_TCP / name).write_text(value)
        except OSError as error:
            raise NetworkUnavailable(f"{_TCP / name} cannot be written: {error}") from error


def shape_node(network: Network, node: int) -> None:
    """Set anew, inside a node's own network, the rate of what it sends."""
    try:
        with IPRoute() as routes:
            _shape(routes, _index(routes, INTERFACE), network, node)
    except NetlinkError as error:
        raise NetworkUnavailable(f"node {node}: {error.args[-1]}") from error


def _index(routes: Any, name: str) -> int:
    return int(routes.link_lookup(ifname=name)[0])


def _set_up(routes: Any, name: str) -> int:
    index = _index(routes, name)
    routes.link("set", index=index, state="up")
    return index


def _shape(routes: Any, index: int, network: Network, node: int) -> None:
    rate = int(network.rate_of(node))
    burst_bytes, queue_bytes = network.bucket(node)
    routes.tc("replace", "tbf", index, rate=f"{rate}bit", burst=burst_bytes, limit=queue_bytes)


def interface_bytes() -> tuple[int, int]:
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            fields = numbers.split()
            return int(fields[8]), int(fields[0])
    raise NetworkUnavailable(f"no interface {INTERFACE}")

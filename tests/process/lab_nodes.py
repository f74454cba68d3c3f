"""What nodes of the lab's network do, and programs that hold or want a cluster of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import psutil
from pyroute2 import IPRoute

from foreprop.errors import ConfigError
from foreprop_lab.lab.cluster import Cluster
from foreprop_lab.lab.network import INTERFACE, NetworkUnavailable, interface_bytes
from foreprop_lab.setting.links import Network

RATE_BITS_PER_S = 40e6
PAYLOAD_BYTES = 1_500_000
PORT = 5000
TRIES = 3


# What the nodes do, each call on all of them.
def serve(node: int, connection: Connection, _: object) -> None:
    while True:
        function, *arguments = connection.recv()
        connection.send(function(node, *arguments))


def tell_pids(_: int, connection: Connection, __: object) -> None:
    """A node that is there, and says which process it is to those outside."""
    while True:
        connection.recv()
        connection.send(int(os.readlink("/proc/self")))


def facts(node: int) -> dict[str, Any]:
    interfaces = psutil.net_if_addrs()
    with IPRoute() as routes:
        index = routes.link_lookup(ifname=INTERFACE)[0]
        shapers = [
            queue.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")["rate"] * 8
            for queue in routes.get_qdiscs(index=index)
            if queue.get_attr("TCA_KIND") == "tbf"
        ]
    return {
        "interfaces": sorted(interfaces),
        "addresses": [a.address for a in interfaces[INTERFACE] if a.family == socket.AF_INET],
        "shapers": shapers,
        "tcp_wmem": Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split(),
        "environment": {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")},
    }


def congestion_control(node: int, network: Network) -> set[str]:
    """What connections from and to node 0 use where the node's own default is another."""
    Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")
    if node == 0:
        with socket.create_server((network.address(0), PORT)) as server:
            sockets = [server.accept()[0] for _ in range(network.nodes - 1)]
    else:
        sockets = [connect(network.address(0))]
    with contextlib.ExitStack() as stack:
        for sock in sockets:
            stack.enter_context(sock)
        names = [sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16) for sock in sockets]
    return {name.rstrip(b"\0").decode() for name in names}


def transfer(node: int, network: Network, flows: Sequence[tuple[int, int]]) -> float:
    """Send what the (from, to) say; how long this node took to receive all that comes to it."""
    senders = [
        threading.Thread(target=send_payload, args=(network.address(to),))
        for sender, to in flows
        if sender == node
    ]
    expected = sum(to == node for _, to in flows)
    with socket.create_server((network.address(node), PORT)) as server:
        for thread in senders:
            thread.start()
        connections = [server.accept()[0] for _ in range(expected)]
        started = time.monotonic()
        readers = [threading.Thread(target=read_all, args=(sock,)) for sock in connections]
        for thread in readers:
            thread.start()
        for thread in (*readers, *senders):
            thread.join()
    return time.monotonic() - started


def send_payload(address: str) -> None:
    with connect(address) as sock:
        sock.sendall(bytes(PAYLOAD_BYTES))


def read_all(sock: socket.socket) -> None:
    with sock:
        while sock.recv(1 << 16):
            pass


def connect(address: str) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=10)
        except ConnectionRefusedError:  # it does not listen yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def sent_bytes(node: int) -> int:
    return interface_bytes()[0]


def start_children(node: int) -> None:
    """One in a session of its own, one whose parent has gone."""
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    subprocess.run(["sh", "-c", "sleep 600 &"], check=True, start_new_session=True)


def refuse(node: int) -> None:
    if node == 1:
        raise ConfigError("nodes is 1; it does not like that")
    time.sleep(600)


def fail_at_once(node: int, connection: Connection, _: object) -> None:
    raise ValueError(f"node {node} cannot work")


def fastest(cluster: Cluster, network: Network, flows: Sequence[tuple[int, int]]) -> list[float]:
    """The nodes' shortest times of a few: nothing is faster than its link, a busy CPU is slower."""
    tries = [cluster.ask_all((transfer, network, flows)) for _ in range(TRIES)]
    return [min(seconds) for seconds in zip(*tries, strict=True)]


def hold(rate_bits_per_s: float) -> NoReturn:
    """A program that holds a cluster until it is killed; says what it found of it."""
    network = Network(nodes=2, rate_bits_per_s=rate_bits_per_s)
    try:
        cluster = Cluster(serve, None, nodes=2, network=network)
    except NetworkUnavailable as error:
        sys.exit(f"unavailable: {error}")
    found = cluster.ask_all((facts,))
    seconds = fastest(cluster, network, [(0, 1)])
    cluster.ask_all((start_children,))
    print(json.dumps({"facts": found, "seconds": seconds, "user": os.geteuid()}), flush=True)
    while True:
        signal.pause()


def try_cluster() -> None:
    network = Network(nodes=2, rate_bits_per_s=RATE_BITS_PER_S)
    try:
        Cluster(serve, None, nodes=2, network=network).close()
    except NetworkUnavailable as error:
        print(f"unavailable: {error}")

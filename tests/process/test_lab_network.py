"""Nodes in network namespaces: their links, and that nothing of them is left, whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
from pyroute2 import IPRoute

from foreprop.errors import ConfigError, PeerLost
from foreprop.lab.cluster import Cluster
from foreprop.lab.network import INTERFACE, NetworkUnavailable, interface_bytes
from foreprop.workload.network import Network
from tests.process.harness import ROOT

RATE_BITS_PER_S = 40e6
PAYLOAD_BYTES = 1_500_000
HEADERS = 1514 / 1448
WIRE_S = PAYLOAD_BYTES * HEADERS * 8 / RATE_BITS_PER_S
BUFFER_SCALE = 8
PORT = 5000
TRIES = 3
END_S = 20.0  # far more than it takes, on a machine that is busy with other things
NOBODY = 65534

pytestmark = [pytest.mark.process, pytest.mark.lab]


# What the nodes do, each call on all of them.
def serve(node: int, connection: Connection, _: object) -> None:
    while True:
        function, *arguments = connection.recv()
        connection.send(function(node, *arguments))


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


# The cluster's side.
def start(network: Network, work: Callable[..., None] = serve) -> Cluster:
    try:
        return Cluster(work, None, nodes=network.nodes, network=network)
    except NetworkUnavailable as error:
        pytest.skip(str(error))


def fastest(cluster: Cluster, network: Network, flows: Sequence[tuple[int, int]]) -> list[float]:
    """The nodes' shortest times of a few: nothing is faster than its link, a busy CPU is slower."""
    tries = [cluster.ask_all((transfer, network, flows)) for _ in range(TRIES)]
    return [min(seconds) for seconds in zip(*tries, strict=True)]


@pytest.fixture(scope="module")
def network() -> Network:
    return Network(nodes=3, rate_bits_per_s=RATE_BITS_PER_S, buffer_scale=BUFFER_SCALE)


@pytest.fixture(scope="module")
def cluster(network: Network) -> Iterator[Cluster]:
    with start(network) as cluster:
        yield cluster


def test_nodes_have_a_link_each_with_its_address_and_rate(
    cluster: Cluster, network: Network
) -> None:
    hosts = Path("/proc/sys/net/ipv4/tcp_wmem").read_text()
    for node, found in enumerate(cluster.ask_all((facts,))):
        assert found["interfaces"] == [INTERFACE, "lo"]
        assert found["addresses"] == [network.address(node)] == [f"10.213.0.{node + 1}"]
        assert found["shapers"] == [pytest.approx(RATE_BITS_PER_S, rel=1e-3)]
        assert int(found["tcp_wmem"][2]) == 4_194_304 // BUFFER_SCALE
        assert found["environment"] == {
            "RANK": str(node),
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "10.213.0.1",
        }
    assert Path("/proc/sys/net/ipv4/tcp_wmem").read_text() == hosts


def test_connections_between_nodes_use_cubic(cluster: Cluster, network: Network) -> None:
    assert cluster.ask_all((congestion_control, network)) == [{"cubic"}] * 3


def test_a_link_has_its_rate_in_both_directions_at_once(cluster: Cluster, network: Network) -> None:
    before = cluster.ask_all((sent_bytes,))
    seconds = fastest(cluster, network, [(0, 1), (1, 0)])
    sent = [b - a for a, b in zip(before, cluster.ask_all((sent_bytes,)), strict=True)]
    for node in (0, 1):
        assert 0.85 * WIRE_S < seconds[node] < 1.7 * WIRE_S
        assert TRIES * PAYLOAD_BYTES < sent[node] < 1.2 * TRIES * PAYLOAD_BYTES
    assert sent[2] < 1000


def test_two_senders_share_the_link_of_their_receiver(cluster: Cluster, network: Network) -> None:
    seconds = fastest(cluster, network, [(1, 0), (2, 0)])
    assert 0.85 * 2 * WIRE_S < seconds[0] < 1.7 * 2 * WIRE_S


def test_without_ingress_shaping_two_senders_exceed_the_rate() -> None:
    network = Network(nodes=3, rate_bits_per_s=RATE_BITS_PER_S, shape_ingress=False)
    with start(network) as cluster:
        seconds = fastest(cluster, network, [(1, 0), (2, 0)])
    assert 0.85 * WIRE_S < seconds[0] < 1.7 * WIRE_S


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


def program(call: str, python: str = sys.executable) -> list[str]:
    return [python, "-c", f"from tests.process.test_lab_network import *; {call}"]


def environment() -> dict[str, str]:
    """So that any Python of this version finds what this one does."""
    packages = [path for path in sys.path if path.endswith("-packages")]
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), *packages])}


def python_of(user: int | None) -> str:
    """One that the user may run: this one's files may be root's alone."""
    for path in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        with contextlib.suppress(OSError):
            subprocess.run([path, "-V"], user=user, stdout=subprocess.DEVNULL, check=True)
            return path
    pytest.skip(f"user {user} may not run this Python")


@contextlib.contextmanager
def holder(user: int | None) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    process = subprocess.Popen(
        program(f"hold({RATE_BITS_PER_S})", python_of(user)),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        user=user,
        group=user,
        extra_groups=[] if user is not None else None,
    )
    with process:
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            if not line and process.stderr is not None:
                said = process.stderr.read()
                if "unavailable: " in said or "Permission denied" in said:
                    pytest.skip(said)
                pytest.fail(said)
            yield process, json.loads(line)
        finally:
            process.kill()


def host() -> tuple[list[str], list[str]]:
    """The machine's links and named namespaces."""
    named = Path("/run/netns")
    return sorted(psutil.net_if_addrs()), sorted(os.listdir(named)) if named.exists() else []


def namespaces(processes: Sequence[psutil.Process]) -> set[str]:
    """The networks in which the processes are."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{process.pid}/ns/net"))
    return found


def wait_until_ended(processes: Sequence[psutil.Process], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while left := [process for process in processes if is_running(process)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.02)


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("user", [None, NOBODY], ids=["this user", "nobody"])
def test_a_killed_lab_leaves_nothing_behind(user: int | None) -> None:
    """Also shows that a user without rights has a cluster, inside a user namespace."""
    if user is not None and os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    before = host()
    with holder(user) as (process, said):
        assert said["user"] == (os.geteuid() if user is None else user)
        assert [found["interfaces"] for found in said["facts"]] == [[INTERFACE, "lo"]] * 2
        assert 0.85 * WIRE_S < said["seconds"][1] < 1.7 * WIRE_S
        processes = psutil.Process(process.pid).children(recursive=True)
        # the program, the namespace's init, two nodes, two children each: also those whose parents
        # have gone
        assert len(processes) == 8
        networks = namespaces(processes) - {os.readlink("/proc/self/ns/net")}
        assert len(networks) == 3  # the bridge's and the nodes'
        assert host() == before
        process.send_signal(signal.SIGKILL)
        wait_until_ended(processes, END_S)
    assert not namespaces(list(psutil.process_iter())) & networks
    assert host() == before


# Where no namespaces are to be had.
def try_cluster() -> None:
    network = Network(nodes=2, rate_bits_per_s=RATE_BITS_PER_S)
    try:
        Cluster(serve, None, nodes=2, network=network).close()
    except NetworkUnavailable as error:
        print(f"unavailable: {error}")


FORBID = {
    "networks of nodes": (
        'echo 1 > /proc/sys/user/max_net_namespaces && exec "$@"',
        "no network namespace",
    ),
    "users": (
        "echo 0 > /proc/sys/user/max_user_namespaces"
        ' && exec setpriv --bounding-set -sys_admin "$@"',
        "no user namespace",
    ),
}
"""Shell commands that run others inside a user namespace where something is forbidden."""


def forbidding(script: str, command: Sequence[str]) -> list[str]:
    return ["unshare", "--user", "--map-root-user", "sh", "-c", script, "sh", *command]


@pytest.mark.parametrize("what", FORBID)
def test_says_that_namespaces_are_not_to_be_had(what: str) -> None:
    script, message = FORBID[what]
    if shutil.which("unshare") is None or subprocess.run(forbidding(script, ["true"])).returncode:
        pytest.skip("this user cannot make a user namespace and forbid things in it")
    done = subprocess.run(
        forbidding(script, program("try_cluster()")), cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == f"unavailable: {message}: No space left on device\n", done.stderr


# Nodes that fail.
@pytest.fixture
def two_nodes() -> Network:
    return Network(nodes=2, rate_bits_per_s=RATE_BITS_PER_S)


def test_the_error_of_a_node_reaches_the_caller(two_nodes: Network) -> None:
    """Although the other one never answers; and then everything ends."""
    with start(two_nodes) as cluster:
        with pytest.raises(ConfigError, match=r"^nodes is 1; it does not like that$"):
            cluster.ask_all((refuse,))
        with pytest.raises(PeerLost, match=r"^node 1 of the lab has ended$"):
            cluster.ask_all((facts,))
        left = time.monotonic()
    assert time.monotonic() - left < END_S


def test_the_error_of_a_node_that_did_not_even_listen_reaches_the_caller(
    two_nodes: Network,
) -> None:
    before = psutil.Process().children()
    with start(two_nodes, fail_at_once) as cluster:
        wait_until_ended([p for p in psutil.Process().children() if p not in before], END_S)
        with pytest.raises(PeerLost, match="ValueError: node 0 cannot work"):
            cluster.ask_all((facts,))

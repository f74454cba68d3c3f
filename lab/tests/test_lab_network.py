"""Nodes in network namespaces: their links, and that nothing of them is left, whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from foreprop.errors import ConfigError, PeerLost
from foreprop_lab.lab.cluster import Cluster
from foreprop_lab.lab.network import INTERFACE, NetworkUnavailable
from foreprop_lab.setting.links import Network
from tests.process.harness import ROOT
from tests.process.lab_nodes import (
    PAYLOAD_BYTES,
    RATE_BITS_PER_S,
    TRIES,
    congestion_control,
    facts,
    fail_at_once,
    fastest,
    refuse,
    sent_bytes,
    serve,
)
from tests.tiers import long_cases

HEADERS = 1514 / 1448
WIRE_S = PAYLOAD_BYTES * HEADERS * 8 / RATE_BITS_PER_S
BUFFER_SCALE = 8
END_S = 20.0  # far more than it takes, on a machine that is busy with other things
NOBODY = 65534

pytestmark = [pytest.mark.process, pytest.mark.lab]


def start(network: Network, work: Callable[..., None] = serve) -> Cluster:
    try:
        return Cluster(work, None, nodes=network.nodes, network=network)
    except NetworkUnavailable as error:
        pytest.skip(str(error))


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


def program(call: str, python: str = sys.executable) -> list[str]:
    return [python, "-c", f"from tests.process.lab_nodes import *; {call}"]


SOURCES = (str(ROOT / "src"), str(ROOT / "lab" / "src"))


def environment() -> dict[str, str]:
    """So that any Python of this version finds what this one does."""
    packages = [path for path in sys.path if path.endswith("-packages")]
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *SOURCES, *packages])}


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


@pytest.mark.parametrize("user", [NOBODY, *long_cases(None)], ids=["nobody", "this user"])
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


@pytest.mark.alone
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

"""``foreprop doctor`` on the lab's links: what is wrong with one of them is found, and named."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from pyroute2 import IPRoute

from foreprop.tools.cli.doctor import examine_hosts
from foreprop.tools.doctor.findings import find
from foreprop.tools.doctor.records import Examination, Finding
from foreprop.tools.run.plan import Plan
from foreprop.tools.run.resources import Host
from foreprop_lab.lab.cluster import Cluster
from foreprop_lab.lab.network import INTERFACE, NetworkUnavailable
from foreprop_lab.setting.links import Network
from tests.process.detour import Detour
from tests.process.harness import PATH, ROOT, Zygote, running
from tests.process.light_probe import light_python
from tests.process.train_script import Scenario

pytestmark = [
    pytest.mark.process,
    pytest.mark.long,
    pytest.mark.alone,
    pytest.mark.lab,
    pytest.mark.timeout(110),
]

RATE = 100e6
PAYLOAD = 1448 / 1514
"""Of a link's bytes, what is not headers."""
NETWORK = Network(nodes=3, rate_bits_per_s=RATE)
NODES = range(NETWORK.nodes)
ADDRESSES = [NETWORK.address(node) for node in NODES]
FAKE_SSH = ROOT / "tests" / "process" / "fake_ssh.py"
PORT = 29500
TRIES = 3
_detours: dict[int, Detour] = {}


# What a node does.
def serve(node: int, connection: Connection, _: object) -> None:
    while True:
        which, function, arguments = connection.recv()
        connection.send(function(node, **arguments) if which in (None, node) else None)


def tell_pid(_: int) -> int:
    return int(os.readlink("/proc/self"))  # as those outside number it


def shape(_: int, value: float) -> None:
    """Give the node's outgoing link another rate, in bit/s."""
    burst_bytes, queue_bytes = Network(nodes=2, rate_bits_per_s=value).bucket()
    with IPRoute() as routes:
        (index,) = routes.link_lookup(ifname=INTERFACE)
        rate = f"{int(value)}bit"
        routes.tc("replace", "tbf", index, rate=rate, burst=burst_bytes, limit=queue_bytes)


def detour(node: int, **settings: Any) -> None:
    _detours[node] = Detour(NETWORK.address(node), **settings)


def end_detour(node: int) -> tuple[int, int]:
    """How many packets passed, and how many were dropped."""
    _detours[node].end()
    return _detours[node].passed, _detours[node].dropped


def set_mtu(_: int, value: int) -> None:
    with IPRoute() as routes:
        (index,) = routes.link_lookup(ifname=INTERFACE)
        routes.link("set", index=index, mtu=value)


@dataclass
class Counts:
    """Of packets; known when the detour has ended."""

    passed: int = 0
    dropped: int = 0


@dataclass
class Box:
    """The cluster, and a doctor outside of it."""

    cluster: Cluster
    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def on(self, node: int, function: Callable[..., Any], **arguments: Any) -> Any:
        return self.cluster.ask_all((node, function, arguments))[node]

    @contextlib.contextmanager
    def changed(
        self, node: int, function: Callable[..., Any], now: Any, usually: Any
    ) -> Iterator[None]:
        self.on(node, function, value=now)
        try:
            yield
        finally:
            self.on(node, function, value=usually)

    @contextlib.contextmanager
    def detour(self, node: int, **settings: Any) -> Iterator[Counts]:
        self.on(node, detour, **settings)
        counts = Counts()
        try:
            yield counts
        finally:
            counts.passed, counts.dropped = self.on(node, end_detour)

    def examine(
        self, names: list[str] | None = None, *, seconds: float = 0.5, **told: Any
    ) -> Examination:
        names = names or ADDRESSES
        pids = self.cluster.ask_all((None, tell_pid, {}))
        namespaces = dict(zip(names, pids, strict=True))
        log = str(self.folder / "logins")
        self.monkeypatch.setenv(
            "FAKE_SSH", json.dumps({"log": log, "namespaces": namespaces, **told})
        )
        plan = Plan(
            hosts=tuple(Host(name=name) for name in names),
            here=frozenset(),
            script=(),
            directory=str(self.folder),
            python=light_python(self.folder),
            ssh=(sys.executable, str(FAKE_SSH)),
            environment={"OMP_NUM_THREADS": "2"},
            master_address=names[0],
            port=PORT,
        )
        return examine_hosts(plan, seconds=seconds, wait_s=60.0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Tests undo what they change."""
    try:
        started = Cluster(serve, None, nodes=NETWORK.nodes, network=NETWORK)
    except NetworkUnavailable as error:
        pytest.skip(str(error))
    with started:
        yield started


@pytest.fixture
def box(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    monkeypatch.setenv("PYTHONPATH", PATH)
    return Box(cluster, tmp_path, monkeypatch)


def rates(found: Examination) -> dict[tuple[int, int], float]:
    return {(flow.source, flow.to): flow.bits_per_s for flow in found.alone}


def measure(box: Box, expected: Callable[[int], float], *, full: bool = False) -> Examination:
    """Again if rates are not as expected, by sender: this machine may be busy with other things.

    ``full``: all links are, both ways, when all hosts send at once.
    """
    for _ in range(TRIES):
        found = box.examine(seconds=1.0)
        if all(
            is_near(rate, expected(source)) for (source, _), rate in rates(found).items()
        ) and all(map(is_full, totals(found) if full else [])):
            break
    return found


def is_near(rate: float, link_rate: float) -> bool:
    return rate == pytest.approx(link_rate * PAYLOAD, rel=0.15)


def totals(found: Examination) -> list[float]:
    """Of each node, all that it sends and all that it gets when all hosts send at once."""
    return [
        sum(flow.bits_per_s for flow in found.together if node == end(flow))
        for node in NODES
        for end in (attrgetter("source"), attrgetter("to"))
    ]


def is_full(bits_per_s: float) -> bool:
    """Acknowledgements share the links, and all nodes this machine's few CPUs."""
    return 0.6 * RATE * PAYLOAD < bits_per_s < 1.05 * RATE


def of(found: Examination, check: str) -> list[Finding]:
    return [finding for finding in find(found) if finding.check == check]


def errors(found: Examination) -> list[Finding]:
    return [finding for finding in find(found) if finding.severity == "error"]


def test_healthy_links_are_measured_as_they_are_shaped(box: Box) -> None:
    found = measure(box, lambda _: RATE, full=True)
    assert [f for f in find(found) if f.severity != "hint" and f.check != "round trip"] == []
    assert [host.facts.address for host in found.hosts if host.facts] == ADDRESSES
    assert [host.facts.interface for host in found.hosts if host.facts] == [INTERFACE] * 3
    assert len(found.alone) == 6
    for rate in rates(found).values():
        assert is_near(rate, RATE), rates(found)
    assert all(map(is_full, totals(found))), totals(found)


def test_a_slow_link_is_named_and_its_rate_is_right(box: Box) -> None:
    slow = 20e6
    with box.changed(2, shape, slow, RATE):
        found = measure(box, lambda source: slow if source == 2 else RATE)
    assert errors(found) == []
    assert len(found.alone) == 6
    for (source, _), rate in rates(found).items():
        assert is_near(rate, slow if source == 2 else RATE), rates(found)
    (finding,) = of(found, "rate")
    assert finding.hosts == [ADDRESSES[2]]
    assert f"{ADDRESSES[2]} sends to every other host at 1" in finding.found


def test_a_delay_is_found_and_named(box: Box) -> None:
    with box.detour(1, delay_s=0.02) as packets:
        found = box.examine()
    assert packets.passed > 0
    assert errors(found) == []
    for trip in found.trips:
        if 1 in (trip.source, trip.to):
            assert 0.02 <= trip.median_s < 0.04
        else:
            assert trip.median_s < 0.01
    slow = [f for f in of(found, "round trip") if f.severity == "warning"]
    assert [finding.hosts for finding in slow] == [[ADDRESSES[1]]]


def test_a_firewall_is_found_with_its_port_and_both_hosts(box: Box) -> None:
    """Node 1 cannot connect to the rendezvous; all else works."""
    with box.detour(1, drop_port=PORT) as packets:
        found = box.examine()
    assert packets.dropped > 0
    (finding,) = errors(found)
    assert finding.check == "reach"
    assert finding.hosts == [ADDRESSES[1], ADDRESSES[0]]
    told = f"{ADDRESSES[1]} gets no answer from {ADDRESSES[0]} at {ADDRESSES[0]} port {PORT}"
    assert f"{told} (the rendezvous)" in finding.found
    assert len(found.alone) == 6


def test_a_host_whose_packets_vanish_does_not_hold_up_the_others(box: Box) -> None:
    """Both directions are named, and the two that are left are measured."""
    with box.detour(1, drop_all=True) as packets:
        found = box.examine()
    assert packets.dropped > 0
    unreached = {(a.source, a.to) for a in found.attempts if a.outcome == "timeout"}
    assert unreached == {(0, 1), (1, 0), (1, 2), (2, 1)}
    named = {tuple(finding.hosts) for finding in errors(found)}
    assert named == {(ADDRESSES[a], ADDRESSES[b]) for a, b in unreached}
    assert set(rates(found)) == {(0, 2), (2, 0)}


def test_different_mtus_are_named(box: Box) -> None:
    with box.changed(0, set_mtu, 1400, 1500):
        found = box.examine()
    (finding,) = (f for f in of(found, "link") if "MTU" in f.found)
    assert finding.hosts == [ADDRESSES[0]]


def test_torchruns_ranks_find_a_slow_link(zygote: Zygote, box: Box) -> None:
    """They meet in rank 0's own store, which ends when it does."""
    file, slow = box.folder / "hosts", 20e6
    file.write_text("\n".join(ADDRESSES))
    pids = box.cluster.ask_all((None, tell_pid, {}))
    namespaces = dict(zip(ADDRESSES, pids, strict=True))
    told = json.dumps({"log": str(box.folder / "logins"), "namespaces": namespaces})
    with box.changed(2, shape, slow, RATE), running(box.folder) as run:
        run.foreprop(
            zygote,
            run.environment(Scenario(), FAKE_SSH=told),
            *("run", "--resources", str(file), "--ssh", f"{sys.executable} {FAKE_SSH}"),
            *("-m", "foreprop", "doctor", "--seconds", "0.5"),
        )
        run.wait(90)
        assert run.codes() == [0], run.output()
        text = " ".join(line.removeprefix("[0] ") for line in run.output().splitlines())
        name = f"{socket.gethostname()} (rank 2)"
        assert f"{name} sends to every other host at 1" in " ".join(text.split())
        run.check_nothing_left()


# Names.
def hosts_files(box: Box, *lines: str) -> dict[str, str]:
    """For each of node0, node1, ... its own /etc/hosts."""
    found = {}
    for node in NODES:
        path = box.folder / f"hosts-{node}"
        name = lines[node].partition(" ")[2]
        usual = [f"{a} node{n}" for n, a in enumerate(ADDRESSES) if f"node{n}" != name]
        path.write_text("\n".join(("127.0.0.1 localhost", lines[node], *usual, "")))
        found[f"node{node}"] = str(path)
    return found


NAMES = [f"node{node}" for node in NODES]


def test_names_that_are_right_are_no_finding(box: Box) -> None:
    found = box.examine(NAMES, hosts_files=hosts_files(box, "", "", ""))
    assert [finding for finding in of(found, "names") if finding.severity != "hint"] == []
    assert errors(found) == []


def test_a_first_host_that_takes_itself_for_127_0_1_1(box: Box) -> None:
    """As Debian's installer writes it."""
    found = box.examine(NAMES, hosts_files=hosts_files(box, "127.0.1.1 node0", "", ""))
    (finding,) = errors(found)
    assert (finding.check, finding.hosts) == ("names", ["node0"])
    assert "on node0 the rendezvous 'node0' means 127.0.1.1" in finding.found
    assert {to for _, to in rates(found)} == {1, 2}  # node 0 can send, but nobody can send to it


def test_a_wrong_name(box: Box) -> None:
    """Node 2 looks for the rendezvous at node 1's address."""
    files = hosts_files(box, "", "", f"{ADDRESSES[1]} node0")
    found = box.examine(NAMES, hosts_files=files)
    names = [finding for finding in of(found, "names") if finding.severity == "warning"]
    assert [finding.hosts for finding in names] == [["node2"]]
    assert f"node2: {ADDRESSES[1]}" in names[0].found
    (finding,) = errors(found)
    assert (finding.check, finding.hosts) == ("reach", ["node2", "node0"])

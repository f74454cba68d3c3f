"""``foreprop run`` with the lab's network namespaces as hosts: they reach each other, not us."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from foreprop_lab.lab.cluster import Cluster
from foreprop_lab.lab.network import NetworkUnavailable
from foreprop_lab.setting.links import Network
from tests.process.harness import ROOT, Zygote, running
from tests.process.lab_nodes import tell_pids
from tests.process.train_script import Scenario

pytestmark = [pytest.mark.process, pytest.mark.lab, pytest.mark.timeout(110)]

NETWORK = Network(nodes=2, rate_bits_per_s=100e6)
FAKE_SSH = ROOT / "tests" / "process" / "fake_ssh.py"
TRAIN = ROOT / "tests" / "process" / "train_script.py"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    try:
        started = Cluster(tell_pids, None, nodes=NETWORK.nodes, network=NETWORK)
    except NetworkUnavailable as error:
        pytest.skip(str(error))
    with started:
        yield started


@pytest.mark.long
def test_it_trains_on_two_hosts(zygote: Zygote, tmp_path: Path, cluster: Cluster) -> None:
    """The port is a free one of the first host, in whose namespace alone it can be known."""
    addresses = [NETWORK.address(node) for node in range(NETWORK.nodes)]
    namespaces = dict(zip(addresses, cluster.ask_all(None), strict=True))
    told = {"log": str(tmp_path / "logins"), "namespaces": namespaces}
    hosts = tmp_path / "hosts"
    hosts.write_text("\n".join(addresses))
    with running(tmp_path) as run:
        run.foreprop(
            zygote,
            run.environment(Scenario(), FAKE_SSH=json.dumps(told)),
            *(
                "run",
                "--resources",
                str(hosts),
                "--ssh",
                f"{sys.executable} {FAKE_SSH}",
                str(TRAIN),
            ),
        )
        run.wait(90)
        assert run.codes() == [0], run.output()
        assert sorted((tmp_path / "logins").read_text().split()) == addresses
        assert f"address {addresses[0]}" in run.output()
        assert "[0] foreprop: 2 workers on 2 nodes, 2 servers" in run.output()
        assert sorted(run.results()) == [0, 1]
        assert len({result["sha256"] for result in run.results().values()}) == 1
        run.check_nothing_left()

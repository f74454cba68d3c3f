"""The real MXNet, over loopback: FOREPROP_MXNET_PYTHON names the Python of its environment."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from foreprop.plan.profile import load_profile
from foreprop.tools.run.host import free_port
from foreprop_lab.lab.mxnet import MxnetSystem
from foreprop_lab.lab.systems import Steps
from foreprop_lab.setting.labsetting import MXNET, LabSetting

NODES = 2
COMPUTE_S = 0.4
IDLE_S = 1.0

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        "FOREPROP_MXNET_PYTHON" not in os.environ,
        reason="needs FOREPROP_MXNET_PYTHON: mxnet==1.9.1 'numpy<1.24'",
    ),
]


class Peers:
    """A system on every node, each told by a thread of its own."""

    def __init__(self, name: str, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        setting = LabSetting(
            profile=load_profile("resnet50"),
            systems=(name,),
            nodes=NODES,
            scale=64,
            compute_s=COMPUTE_S,
            rate_bits_per_s=1e9,
            mxnet_python=Path(os.environ["FOREPROP_MXNET_PYTHON"]),
        )
        port = free_port()

        def start(node: int) -> MxnetSystem:
            address = f"127.0.0.{node + 1}"
            return MxnetSystem(
                setting, name, node=node, address=address, root_address="127.0.0.1", port=port
            )

        self.nodes = list(threads.map(start, range(NODES)))

    def steps(self, count: int) -> list[Steps]:
        return list(self._threads.map(lambda node: node.steps(count), self.nodes))

    def close(self) -> None:
        for node in self.nodes:
            node.close()


@contextlib.contextmanager
def both() -> Iterator[dict[str, Peers]]:
    """The threads outlive the peers, whose processes die with them."""
    with ThreadPoolExecutor(NODES) as threads, contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(contextlib.closing(Peers(name, threads))) for name in MXNET
        }


def cpu_s() -> float:
    return sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children())


def test_both_in_alternating_blocks() -> None:
    """Every block checks that each array has had all gradients of all workers."""
    with both() as peers:
        for _ in range(3):
            for system in peers.values():
                zero, one = system.steps(4)
                assert len(zero.step_s) == len(one.waited_s) == 4
                assert min(zero.step_s + one.step_s) > 0.99 * COMPUTE_S
                assert statistics.median(zero.waited_s) < COMPUTE_S
        before = cpu_s()
        time.sleep(IDLE_S)
        assert cpu_s() - before < 0.1 * IDLE_S  # they would disturb whoever is measured meanwhile
        assert {node.version for system in peers.values() for node in system.nodes} == {"1.9.1"}
    assert not psutil.Process().children()

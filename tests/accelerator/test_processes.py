"""Two workers, each a process of its own, on one accelerator: they share it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator.here import device_or_skip

DEVICE = device_or_skip()
ROOT = Path(__file__).parents[2]
WORLD = 2


def _run(script: str, *arguments: str, **settings: str) -> list[str]:
    """What each rank prints; every one is the only worker of its node, as far as it knows."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    common = {"WORLD_SIZE": str(WORLD), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment = os.environ | common | {f"FOREPROP_{k.upper()}": v for k, v in settings.items()}
    started = [
        subprocess.Popen(
            [sys.executable, script, *arguments],
            env=environment | {"RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        told = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * WORLD, told
    return told


@pytest.mark.parametrize("architecture", ["p2p", "ring"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_ends_alike_on_all_ranks(architecture: str, dtype: str) -> None:
    script = "examples/train_mixed_precision.py"
    told = _run(script, "--dtype", dtype, architecture=architecture)
    digests = [re.findall(r"SHA-256 of the weights (\w+)", text) for text in told]
    assert len(digests[0]) == 1
    assert digests[0] == digests[1]
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", told[0])]
    assert losses[-1] < losses[0]
    assert str(DEVICE) in told[0], told[0]

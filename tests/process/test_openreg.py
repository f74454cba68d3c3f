"""Pointer hygiene: training on torch's own device for tests, where it is installed.

It is in torch's source, test/cpp_extensions/open_registration_extension/torch_openreg, and in no
package index. With it on ``PYTHONPATH`` these tests run; lab/docs/devices.md has what they found.
"""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.process,
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("torch_openreg") is None,
        reason="torch_openreg, which is built from torch's source, is not installed",
    ),
]
FAULT = """
import ctypes, torch, torch_openreg
ctypes.string_at(torch.ones(4, device="openreg").data_ptr(), 4)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=100, check=False
    )


def test_the_device_faults_where_the_host_reads_its_memory() -> None:
    assert run("-c", FAULT).returncode == -signal.SIGSEGV


@pytest.mark.parametrize("streams", [True, False])
def test_nothing_on_the_host_reads_the_devices_memory(streams: bool) -> None:
    ran = run("-m", "tests.process.openreg_script", *(["streams"] if streams else []))
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = [line for line in ran.stdout.splitlines() if line.endswith(": the same bits")]
    assert [line.partition(":")[0] for line in found] == ["p3", "workers", "ring"]
    copied = ", copied through pinned host memory" if streams else " (no streams there"
    assert f"parameters on openreg:0{copied}" in ran.stdout

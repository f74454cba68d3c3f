"""The demo and every benchmark, as commands, tiny."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foreprop.engine.native import maybe_library
from foreprop.tools.cli.app import app
from foreprop_lab.datasets import (
    PACKAGE_FOLDER,
    DatasetUnavailable,
    data_folder,
    ensure_files,
    from_folder,
)
from foreprop_lab.lab.cluster import Cluster
from foreprop_lab.lab.network import NetworkUnavailable
from foreprop_lab.setting.links import Network

_TIMEOUT_S = 300.0
pytestmark = [pytest.mark.process, pytest.mark.timeout(_TIMEOUT_S + 60)]

# A shell that starts the tests in the background lets them, and so their children, ignore Ctrl-C.
_FOREPROP = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from foreprop.tools.cli.main import main
main()
"""
# As on a machine that makes no namespaces.
_FOREPROP_WITHOUT_LINKS = """
import foreprop_lab.demo.run as demo
from foreprop_lab.lab.network import NetworkUnavailable

Cluster = demo.Cluster

def cluster(*arguments, network, **others):
    if network is not None:
        raise NetworkUnavailable("no user namespace: Operation not permitted")
    return Cluster(*arguments, network=network, **others)

demo.Cluster = cluster
"""
DEMO = ("demo", "--nodes", "2", "--batch", "16", "--rate", "500Mbit", "--compute", "40ms")


@pytest.fixture
def fashion_mnist() -> None:
    """Skips the test where the data set would have to be downloaded."""
    folder = data_folder() / "fashion-mnist"
    here = {str(place): from_folder(place) for place in (folder, "/" / PACKAGE_FOLDER)}
    try:
        ensure_files(sources=here)
    except DatasetUnavailable:
        pytest.skip("Fashion-MNIST is not on this machine; `make demo` fetches it")


def do_nothing(*_: object) -> None:
    """A node's work."""


@pytest.fixture
def namespaces() -> None:
    """Skips the test where the kernel lets us make no network."""
    network = Network(nodes=2, rate_bits_per_s=1e9)
    try:
        Cluster(do_nothing, None, nodes=2, network=network).close()
    except NetworkUnavailable as error:
        pytest.skip(str(error))


def start(folder: Path, *arguments: str, before: str = "") -> subprocess.Popen[str]:
    """``foreprop ARGUMENTS`` in a folder and a process group of its own, after some Python."""
    return subprocess.Popen(
        [sys.executable, "-c", before + _FOREPROP, *arguments],
        cwd=folder,
        env={**os.environ, "COLUMNS": "160", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(folder: Path, *arguments: str, before: str = "") -> tuple[str, str]:
    """Standard output and error of a command that must succeed."""
    with start(folder, *arguments, before=before) as process:
        try:
            output, error = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, error
    return output, error


def row(output: str, name: str) -> list[str]:
    """The cells of a table's row."""
    (line,) = [
        line
        for line in output.splitlines()
        if line.startswith("│") and line.strip("│ ").startswith(name)
    ]
    return [cell.strip() for cell in line.strip("│").split("│")]


def check_presets(output: str, report: Path) -> None:
    """What the demo shows of kvstore and p3, whatever the network."""
    digests = {row(output, preset)[-1] for preset in ("kvstore", "p3")}
    assert len(digests) == 1
    assert re.fullmatch("[0-9a-f]{16}", digests.pop())
    page = report.read_text()
    assert page.count("<svg") == 2
    assert all(f">{preset}<" in page for preset in ("kvstore", "p3"))
    for preset in ("kvstore", "p3"):
        assert len(list((report.parent / preset).glob("*.trace.json"))) == 4
    assert not (report.parents[1] / "runs").exists()
    results = json.loads((report.parent / "results.json").read_text())
    assert [len(system["step_s"]) for system in results["systems"][:2]] == [20, 20]
    assert f"trains {results['systems'][1]['over']:.2f}x as fast as" in output


@pytest.mark.long
@pytest.mark.lab
@pytest.mark.usefixtures("fashion_mnist", "namespaces")
def test_the_demo_trains_prints_and_reports(tmp_path: Path) -> None:
    report = tmp_path / "out" / "report.html"
    output, _ = run(tmp_path, *DEMO, "--steps", "32", "--out", str(report))
    check_presets(output, report)
    assert "its link shaped by the kernel" in output
    assert "final weights identical among the presets, bit for bit" in output
    ddp, p3 = row(output, "ddp"), row(output, "p3")
    assert ddp[5] == "-"
    assert float(ddp[6].rstrip(" %")) == pytest.approx(float(p3[6].rstrip(" %")), abs=2.0)
    page = report.read_text()
    assert ">ddp<" in page
    assert "shaped by the kernel (tbf)" in page


@pytest.mark.long
@pytest.mark.usefixtures("fashion_mnist")
def test_without_namespaces_the_demo_paces_and_leaves_ddp_out(tmp_path: Path) -> None:
    report = tmp_path / "out" / "report.html"
    arguments = (*DEMO, "--steps", "32", "--out", str(report))
    output, _ = run(tmp_path, *arguments, before=_FOREPROP_WITHOUT_LINKS)
    check_presets(output, report)
    assert "No links made by the kernel (no user namespace: Operation not permitted)" in output
    assert "final weights identical, bit for bit" in output
    assert not [line for line in output.splitlines() if line.startswith("│ ddp")]
    assert ">ddp<" not in report.read_text()


@pytest.mark.long
@pytest.mark.usefixtures("fashion_mnist")
def test_ctrl_c_ends_the_demo_silently(tmp_path: Path) -> None:
    with start(tmp_path, *DEMO, "--steps", "5000") as process:
        told = ""
        deadline = time.monotonic() + _TIMEOUT_S
        while "preset p3" not in told and time.monotonic() < deadline:
            told += process.stderr.readline() if process.stderr else ""
        os.killpg(process.pid, signal.SIGINT)
        try:
            _, error = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert "foreprop:" not in error


def test_bench_wire(tmp_path: Path) -> None:
    output, _ = run(tmp_path, "bench", "wire", "--slices", "4", "--steps", "2")
    kinds = ("no compute", "no compute, no checksums", "with SGD", "with SGD, encrypted")
    kinds += ("workers update", "workers update, no checksums")
    for name in ("bare sockets", *(f"foreprop, {kind} " for kind in kinds)):
        assert float(row(output, name)[1]) > 0


@pytest.mark.long
def test_bench_alone(tmp_path: Path) -> None:
    output, _ = run(tmp_path, "bench", "alone", "--rounds", "3", "--steps", "2")
    kinds = ("plain", "plain, again", "parallelize", "with a server")
    rows = [row.split("│")[1:-1] for row in output.splitlines() if row.startswith("│")]
    assert [row[1].strip() for row in rows] == list(kinds) * 2
    assert all(float(row[2]) > 0 and float(row[3]) > 0 for row in rows)
    assert [float(row[3]) for row in rows[:: len(kinds)]] == [1.0, 1.0]


@pytest.mark.long
def test_bench_loopback(tmp_path: Path) -> None:
    """All of them train; only p2p has servers, which are in its ranks on the native plane."""
    sizes = ("--model", "gpt", "--rounds", "2", "--steps", "2")
    output, _ = run(tmp_path, "bench", "loopback", *sizes)
    rows = [row.split("│")[1:-1] for row in output.splitlines() if row.startswith("│")]
    assert [row[1].strip() for row in rows] == ["ddp", "ddp, again", "alone", "p2p", "ring"]
    assert float(rows[0][3]) == 1.0
    for row in rows:
        step_ms, _, training_ms, _, servers_ms = map(float, row[2:])
        assert 0 < training_ms < 2.5 * step_ms  # of two ranks
        has_processes = "p2p" in row[1] and maybe_library() is None
        assert (servers_ms > 0) == has_processes


@pytest.mark.long
def test_bench_compression(tmp_path: Path) -> None:
    """Of whole training fewer bytes cross, and of a codec by itself fewer are left."""
    sizes = ("--model", "gpt", "--rate", "1Gbit", "--rounds", "2", "--steps", "2")
    output, _ = run(tmp_path, "bench", "compression", *sizes)
    rows = [row.split("│")[1:-1] for row in output.splitlines() if row.startswith("│")]
    alone, steps = rows[:2], rows[2:]
    assert [row[1].strip() for row in alone] == ["gradients", "new values"]
    for row in alone:
        assert 0 < float(row[2]) < 100
        assert 0 < float(row[3]) < 100
        assert 40 < float(row[4].strip(" %")) < 95
    assert [row[1].strip() for row in steps] == ["none", "lossless"]
    assert steps[0][4].strip() == "100 %"
    assert 40 < float(steps[1][4].strip(" %")) < 95


def test_bench_loopback_of_a_model_that_is_not_there() -> None:
    result = CliRunner().invoke(app, ["bench", "loopback", "--model", "vgg"])
    assert result.exit_code == 2
    assert "no model is called 'vgg'" in result.output


@pytest.mark.long
def test_bench_overhead(tmp_path: Path) -> None:
    sizes = ("--slices", "20", "--parameters", "5", "--steps", "2")
    output, _ = run(tmp_path, "bench", "overhead", *sizes)
    for name in ("worker", "server", "waiting parameter"):
        assert float(row(output, name)[1]) >= 0

"""``foreprop server`` by itself: its options, its ends, and what it refuses."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from foreprop.errors import ConfigError
from foreprop.tools.cli.app import app
from foreprop.tools.cli.server import endpoint
from foreprop.tools.run.host import free_port
from tests.process.harness import ROOT, Zygote, running, torchruns_variables, wait_for
from tests.process.train_script import Scenario
from tests.tiers import long_cases

DEDICATED = ROOT / "tests" / "process" / "dedicated_script.py"

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


def test_help_has_every_option_and_its_unit() -> None:
    shown = CliRunner().invoke(app, ["server", "--help"], env={"COLUMNS": "120", "NO_COLOR": "1"})
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.output)
    for word in ("--rendezvous", "HOST:PORT", "--count", "--interface", "--wait", "Seconds"):
        assert word in text


def test_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert endpoint(None) == ("127.0.0.1", 29500)
    assert endpoint("node0:1234") == ("node0", 1234)
    assert endpoint("[fe80::1]:1234") == ("fe80::1", 1234)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "4321")
    assert endpoint(None) == ("10.0.0.1", 4321)
    for text in ("node0", ":1", "node0:", "node0:x", "node0:70000", "node0:-1"):
        with pytest.raises(ConfigError, match="it must be HOST:PORT"):
            endpoint(text)


def test_no_rendezvous_in_time(zygote: Zygote, tmp_path: Path) -> None:
    port = free_port()
    with running(tmp_path) as run:
        arguments = ("server", "--rendezvous", f"127.0.0.1:{port}", "--wait", "0.3")
        run.foreprop(zygote, run.environment(Scenario()), *arguments)
        run.wait()
        assert run.codes() == [1]
        expected = f"no workers' rendezvous at 127.0.0.1:{port} within 0.3 s"
        assert expected in run.output()
        assert "Traceback" not in run.output()
        run.check_nothing_left()


@pytest.mark.parametrize("meets", [True, *long_cases(False)])
def test_ctrl_c(zygote: Zygote, tmp_path: Path, meets: bool) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if meets else None
    port = store.port if store is not None else free_port()
    with running(tmp_path) as run:
        arguments = ("server", "--rendezvous", f"127.0.0.1:{port}")
        command = run.foreprop(zygote, run.environment(Scenario()), *arguments)
        said = "met the workers' rendezvous" if meets else "waits for the workers' rendezvous"
        wait_for(lambda: said in run.output(), run)
        os.killpg(command.pid, signal.SIGINT)
        run.wait()
        assert run.codes() == [130], run.output()
        assert "Traceback" not in run.output()
        run.check_nothing_left()
    del store


def test_a_run_that_needs_no_server(zygote: Zygote, tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with running(tmp_path) as run:
        arguments = ("server", "--rendezvous", f"127.0.0.1:{store.port}")
        run.foreprop(zygote, run.environment(Scenario()), *arguments)
        wait_for(lambda: "met the workers' rendezvous" in run.output(), run)
        del store
        run.wait()
        assert run.codes() == [1]
        assert "ended without asking this command for a server" in run.output()
        run.check_nothing_left()


def test_it_serves_a_training(zygote: Zygote, tmp_path: Path) -> None:
    """Which is started as by torchrun; the servers are forked."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    scenario = Scenario(settings={"dedicated_servers": 2, "link_rate_bits_per_s": 1e9})
    arguments = ("server", "--rendezvous", f"127.0.0.1:{store.port}", "--count", "2")
    with running(tmp_path) as run:
        variables = run.environment(scenario)
        command = run.start(zygote, variables, script=DEDICATED, arguments=arguments)
        for rank in range(2):
            told = torchruns_variables(rank, store.port, local_size=2)
            run.start(zygote, run.environment(scenario, **told))
        run.wait(but=[command])
        del store
        run.wait()
        assert run.codes() == [0, 0, 0], run.output()
        assert len({result["sha256"] for result in run.results().values()}) == 1
        assert "2 servers dedicated" in run.output()
        assert run.output().count(" is done") == 2
        run.check_nothing_left()


@pytest.mark.long
def test_the_example_with_dedicated_servers(zygote: Zygote, tmp_path: Path) -> None:
    """As its docstring says, but for the port and the number of workers."""
    port = str(free_port())
    with running(tmp_path) as run:
        variables = run.environment(Scenario(), FOREPROP_DATA=str(tmp_path / "none"))
        run.foreprop(
            zygote, variables, "server", "--rendezvous", f"127.0.0.1:{port}", "--count", "2"
        )
        example = ROOT / "examples" / "dedicated_servers.py"
        options = ("--nproc-per-node", "2", "--master-port", port)
        run.torchrun(zygote, variables, *options, script=example)
        run.wait()
        assert run.codes() == [0, 0], run.output()
        sums: Any = re.findall(r"rank \d: SHA-256 of the weights ([0-9a-f]{64})", run.output())
        assert len(sums) == 2
        assert len(set(sums)) == 1
        run.check_nothing_left()

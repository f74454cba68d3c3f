"""``foreprop doctor`` with real probes: on this machine, and under torchrun.

Hosts are reached directly (127.0.0.1 and 127.0.0.2) or by `fake_ssh` (198.51.100.2, which nobody
has), which can put something else in the probe's place.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from foreprop.config.launchers import environment_for_hosts
from foreprop.tools.cli.doctor import examine_hosts
from foreprop.tools.doctor.findings import find
from foreprop.tools.doctor.records import Examination, Finding
from foreprop.tools.run.host import free_port
from foreprop.tools.run.plan import Plan, hosts_here
from foreprop.tools.run.resources import parse_resources
from foreprop.version import __version__
from tests.process.harness import PATH, ROOT, Run, Zygote, running, wait_for
from tests.process.light_probe import LIGHT_TORCH, instead, light_python
from tests.process.train_script import Scenario
from tests.tiers import long_cases

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

FAKE_SSH = ROOT / "tests" / "process" / "fake_ssh.py"
TORCHRUN = Path(torch.__path__[0]) / "distributed" / "run.py"
LOCAL, FAR = "127.0.0.1", "198.51.100.2"


@dataclass
class Doctor:
    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def examine(
        self,
        hosts: str = f"{LOCAL}\n{FAR}",
        *,
        seconds: float = 0.02,
        wait_s: float = 60.0,
        **told: Any,
    ) -> Examination:
        """``told``: the plan's settings, and what `fake_ssh` is told (``ssh_...``)."""
        for_ssh = {k.removeprefix("ssh_"): v for k, v in told.items() if k.startswith("ssh_")}
        self.monkeypatch.setenv(
            "FAKE_SSH", json.dumps({"log": str(self.folder / "logins"), **for_ssh})
        )
        parsed = parse_resources(hosts, source="hosts", workers_per_node=1)
        settings: dict[str, Any] = {
            "hosts": parsed,
            "here": hosts_here(parsed),
            "script": (),
            "directory": str(self.folder),
            "python": light_python(self.folder),
            "ssh": (sys.executable, str(FAKE_SSH)),
            "environment": environment_for_hosts(),
            "master_address": LOCAL,
        }
        settings |= {k: v for k, v in told.items() if not k.startswith("ssh_")}
        return examine_hosts(Plan(**settings), seconds=seconds, wait_s=wait_s)


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    monkeypatch.setenv("PYTHONPATH", PATH)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Doctor(tmp_path, monkeypatch)


def errors(found: Examination) -> list[Finding]:
    return [finding for finding in find(found) if finding.severity == "error"]


def the_error(found: Examination, check: str, host: str = FAR) -> Finding:
    (finding,) = errors(found)
    assert (finding.check, finding.hosts) == (check, [host]), finding
    return finding


@pytest.mark.parametrize("torch_is", ["light", *long_cases("real")])
def test_hosts_that_could_train(doctor: Doctor, torch_is: str) -> None:
    """What a shell prints is no answer."""
    told: dict[str, Any] = {"python": sys.executable, "seconds": 0.1}
    if torch_is == "light":
        noisy = "echo Welcome; printf 'no line end'; " + instead("pass")
        told = {"ssh_instead": {FAR: noisy}}
    found = doctor.examine(f"{LOCAL}\n127.0.0.2\n{FAR} workers=2\n", **told)
    assert errors(found) == []
    assert (doctor.folder / "logins").read_text().split() == [FAR]
    assert [host.workers for host in found.hosts] == [1, 1, 2]
    version = torch.__version__ if torch_is == "real" else LIGHT_TORCH
    for host in found.hosts:
        assert host.facts is not None
        assert (host.facts.foreprop, host.facts.torch) == (__version__, version)
        assert (host.facts.address, host.facts.threads) == (LOCAL, "1")
    assert all(attempt.outcome == "connected" for attempt in found.attempts)
    assert len(found.attempts) == 6 + 2
    assert len(found.trips) == 3
    assert len(found.alone) == len(found.together) == 6
    flows = (*found.alone, *found.together)
    assert all(flow.error is None for flow in flows)
    if torch_is == "real":  # the other one measures for too short a time
        assert all(flow.bits_per_s > 1e6 for flow in flows)
    assert all(abs(trip.offset_s) <= trip.least_s for trip in found.trips)


# What is wrong with a host.
def examine_each(doctor: Doctor, odd: dict[str, str], **told: Any) -> dict[str, Finding]:
    """By host, its only error, where these commands are in the place of their probes."""
    hosts = "\n".join([LOCAL, *odd, *told.get("ssh_unreachable", [])])
    found = errors(doctor.examine(hosts, ssh_instead=odd, **told))
    by_host = {host: finding for finding in found for host in finding.hosts}
    assert len(by_host) == len(found), found
    return by_host


def test_hosts_that_cannot_be_examined(doctor: Doctor) -> None:
    """One cannot be reached; one has no such Python, one no foreprop, or another one; two end."""
    gone, pythonless, bare, other, dies, fails = (f"198.51.100.{n}" for n in range(2, 8))
    odd = {
        pythonless: "exec /none/python",
        bare: f"exec {sys.executable} -I -S -m foreprop.tools.doctor.probe",
        other: instead("probe.PROTOCOL = 99; probe.__version__ = '9.9'"),
        dies: instead("probe.reach = lambda *_, **__: probe.os._exit(3)"),
        fails: instead("probe.os.environ['FOREPROP_SLICE_ELEMS'] = 'few'"),
    }
    found = examine_each(doctor, odd, ssh_unreachable=[gone])
    assert {host: finding.check for host, finding in found.items()} == dict.fromkeys(
        [gone, *odd], "start"
    )
    said = {
        gone: "No route to host",
        pythonless: "Python cannot be started",
        bare: "No module named 'foreprop'",
        other: "another version of foreprop: its foreprop is 9.9",
        dies: "ended early: its probe ended with exit code 3",
        fails: "FOREPROP_SLICE_ELEMS is 'few'; it must be a whole number",
    }
    for host, text in said.items():
        assert text in found[host].found
    assert f"{FAKE_SSH} {gone} true" in found[gone].advice
    assert "--python" in found[pythonless].advice
    assert "foreprop cannot be imported" in found[bare].found


@pytest.mark.alone
def test_a_host_that_does_not_answer(doctor: Doctor) -> None:
    """The others are examined all the same; the sleeper is ended (the plugin would find it)."""
    started_s = time.monotonic()
    found = doctor.examine(
        f"{LOCAL}\n127.0.0.2\n{FAR}", wait_s=8.0, ssh_instead={FAR: "exec sleep 600"}
    )
    assert time.monotonic() - started_s < 40
    assert "no answer within 8 s" in the_error(found, "start").found
    assert len(found.alone) == 2


def test_hosts_that_have_something_else(doctor: Doctor) -> None:
    """Another foreprop, a torch that is broken, an interface that is not there."""
    old, broken, unplugged = (f"198.51.100.{n}" for n in range(2, 5))
    odd = {
        old: instead("import foreprop.tools.doctor.facts as facts; facts.__version__ = '9.9'"),
        broken: instead("sys.modules['torch'] = None"),
        unplugged: instead("probe.os.environ['FOREPROP_INTERFACE'] = 'eth77'"),
    }
    found = examine_each(doctor, odd)
    checks = {old: "versions", broken: "versions", unplugged: "address"}
    assert {host: finding.check for host, finding in found.items()} == checks
    usual = ", ".join([LOCAL, broken, unplugged])
    assert found[old].found == f"foreprop differs: {usual}: {__version__}; {old}: 9.9"
    assert "torch cannot be imported: ModuleNotFoundError" in found[broken].found
    assert "interface is 'eth77'" in found[unplugged].found


@pytest.mark.long
def test_a_clock_that_is_wrong(doctor: Doctor) -> None:
    wrong = "types.SimpleNamespace(**vars(time) | {'time': lambda: time.time() - 0.5})"
    command = instead(f"import time, foreprop.engine.traffic as traffic; traffic.time = {wrong}")
    found = doctor.examine(ssh_instead={FAR: command})
    (finding,) = (finding for finding in find(found) if finding.check == "clock")
    assert f"the clock of {FAR} is 500 ms behind that of {LOCAL}" in finding.found
    assert errors(found) == []


def test_a_port_that_is_taken_and_a_directory_that_is_not_there(doctor: Doctor) -> None:
    with socket.create_server((LOCAL, 0)) as sock:
        port = sock.getsockname()[1]
        found = errors(doctor.examine(port=port, directory="/none/such"))
    by_check = {finding.check: finding for finding in found}
    assert len(found) == len(by_check) == 2, found
    assert by_check["directory"].found == f"{LOCAL}, {FAR}: there is no directory /none/such"
    assert by_check["ports"].hosts == [LOCAL]
    assert f"cannot listen on port {port}: Address already in use" in by_check["ports"].found


@pytest.mark.long
def test_a_rendezvous_name_that_nobody_knows(doctor: Doctor) -> None:
    found = errors(doctor.examine(master_address="no.such.invalid"))
    assert {finding.check for finding in found} == {"names", "address", "reach"}
    assert any("cannot resolve the name 'no.such.invalid'" in f.found for f in found)


# By its own command.
def start(zygote: Zygote, run: Run, hosts: str, *arguments: str, **ssh: Any) -> psutil.Process:
    file = run.folder / "hosts"
    file.write_text(hosts)
    told = json.dumps({"log": str(run.folder / "logins"), **ssh})
    return run.foreprop(
        zygote,
        run.environment(Scenario(), FAKE_SSH=told),
        *("doctor", "--resources", str(file), "--master-addr", LOCAL, "--seconds", "0.1"),
        *("--ssh", f"{sys.executable} {FAKE_SSH}", "--python", light_python(run.folder)),
        *arguments,
    )


def test_the_command_shows_a_report(zygote: Zygote, tmp_path: Path) -> None:
    with running(tmp_path) as run:
        start(zygote, run, f"{LOCAL}\n{FAR}\n")
        run.wait()
        assert run.codes() == [0], run.output()
        assert "measuring 2 directions" in run.output()
        assert "Nothing keeps training from working" in run.output()
        run.check_nothing_left()


def test_an_error_is_exit_code_1_also_as_json(zygote: Zygote, tmp_path: Path) -> None:
    with running(tmp_path) as run:
        start(zygote, run, f"{LOCAL}\n{FAR}\n", "--json", unreachable=[FAR])
        run.wait()
        assert run.codes() == [1], run.output()
        told = json.loads(run.output())
        assert told["ok"] is False
        assert told["findings"][0]["hosts"] == [FAR]
        run.check_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, *long_cases(signal.SIGTERM, signal.SIGKILL)])
def test_a_signal_leaves_nothing(zygote: Zygote, tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path) as run:
        doctor = start(zygote, run, f"{LOCAL}\n{FAR}\n", "--seconds", "10")
        wait_for(lambda: "measuring" in run.output(), run)
        doctor.send_signal(number)
        run.wait()
        assert "Traceback" not in run.output()
        run.check_nothing_left()


# Under torchrun.
def torchrun(
    zygote: Zygote, run: Run, port: int, node: int, *arguments: str, **more: str
) -> psutil.Process:
    where = ("--master-addr", LOCAL, "--master-port", str(port), "--nnodes", "2")
    count = ("--node-rank", str(node), "--nproc-per-node", "2", "-m", "foreprop", "doctor")
    return run.start(
        zygote,
        run.environment(Scenario(), **more),
        script=TORCHRUN,
        arguments=[*where, *count, "--seconds", "0.1", *arguments],
    )


@pytest.mark.long
def test_torchruns_ranks_check_each_other(zygote: Zygote, tmp_path: Path) -> None:
    """One probe for each of the two nodes, of two workers each; rank 0 tells."""
    port = free_port()
    with running(tmp_path) as run:
        for node in range(2):
            torchrun(zygote, run, port, node, "--json")
        run.wait()
        assert run.codes() == [0, 0], run.output()
        told = json.loads("{" + run.outputs[0].read_text().partition("\n{\n")[2])
        hosts = told["examination"]["hosts"]
        name = socket.gethostname()
        assert [host["name"] for host in hosts] == [f"{name} (rank 0)", f"{name} (rank 2)"]
        assert [host["workers"] for host in hosts] == [2, 2]
        assert len(told["examination"]["alone"]) == 2
        assert "Nothing keeps" not in run.outputs[1].read_text()
        run.check_nothing_left()


@pytest.mark.long
def test_an_error_ends_torchrun_with_1(zygote: Zygote, tmp_path: Path) -> None:
    port = free_port()
    with running(tmp_path) as run:
        torchrun(zygote, run, port, 0)
        torchrun(zygote, run, port, 1, FOREPROP_INTERFACE="eth77")
        run.wait()
        assert run.codes()[0] == 1, run.output()
        assert "interface is 'eth77'" in " ".join(run.outputs[0].read_text().split())
        assert "Training would not work" in run.outputs[0].read_text()
        run.check_nothing_left()

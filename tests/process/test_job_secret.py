"""A job's secret among real processes: who gets it, who does not, and what it keeps out."""

from __future__ import annotations

import hashlib
import io
import json
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from foreprop.config.launchers import environment_for_hosts
from foreprop.core.authentication import PROOF_BYTES
from foreprop.core.wire import SIGNED
from foreprop.tools.run.host import free_port
from foreprop.tools.run.plan import Plan, hosts_here
from foreprop.tools.run.resources import parse_resources
from foreprop.tools.run.run import Launcher, Outcome
from tests.faults.wire_peers import Client
from tests.process.harness import (
    LIMIT_S,
    PATH,
    ROOT,
    Run,
    Zygote,
    running,
    torchruns_variables,
    wait_for,
)
from tests.process.train_script import Scenario
from tests.secretfile import secret_file
from tests.tiers import long_cases

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

FAKE_SSH = ROOT / "tests" / "process" / "fake_ssh.py"
TEXT = "a secret that nobody may see 0123456789"
LOCAL = "127.0.0.1\n127.0.0.2\n"
ONE = "127.0.0.1 workers=2\n"
REMOTE = "198.51.100.1\n198.51.100.2\n"
LOOK_AROUND = """
import hashlib, os, time
path = os.environ["FOREPROP_SECRET_FILE"]
data = open(path, "rb").read()
print(f"mode {os.stat(path).st_mode & 0o777:o} {hashlib.sha256(data).hexdigest()}", flush=True)
shown = [data, data.hex().encode()]
for process in os.listdir("/proc"):
    for name in ("cmdline", "environ"):
        try:
            found = open(f"/proc/{process}/{name}", "rb").read()
        except OSError:
            continue
        for text in shown:
            if text in found:
                print("seen in", name, "of", process, flush=True)
"""


@pytest.fixture
def secret(tmp_path: Path) -> str:
    return secret_file(tmp_path, text=TEXT)


# `foreprop run`.
def lines_of(hosts: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, own: str = "") -> Any:
    """What a script that looks for the secret prints on each rank."""
    script = folder / "look_around.py"
    script.write_text(LOOK_AROUND)
    monkeypatch.setenv("PYTHONPATH", PATH)
    monkeypatch.setenv("FAKE_SSH", json.dumps({"log": str(folder / "logins")}))
    if own:
        monkeypatch.setenv("FOREPROP_SECRET_FILE", own)
    parsed = parse_resources(hosts, source="hosts", workers_per_node=1)
    plan = Plan(
        hosts=parsed,
        here=hosts_here(parsed),
        script=(str(script),),
        directory=str(folder),
        python=sys.executable,
        ssh=(sys.executable, str(FAKE_SSH)),
        environment=environment_for_hosts(),
        master_address="127.0.0.1",
        grace_s=5.0,
    )
    out, err = io.BytesIO(), io.BytesIO()
    assert Launcher(plan, out, err).run() == Outcome(0), err.getvalue()
    return sorted(out.getvalue().decode().splitlines())


@pytest.mark.parametrize("hosts", [ONE, *long_cases(LOCAL, REMOTE)])
def test_every_rank_of_a_run_has_the_same_secret_and_nobody_sees_it(
    hosts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In no command line and no environment of any process on this machine, ssh's included."""
    first, second = lines_of(hosts, tmp_path, monkeypatch)
    assert first.startswith("[0] mode 600 ")
    assert first.removeprefix("[0] ") == second.removeprefix("[1] ")
    if hosts == REMOTE:
        again, _ = lines_of(hosts, tmp_path, monkeypatch)
        assert again != first  # each job has its own


@pytest.mark.long
def test_a_run_passes_on_the_secret_that_is_set(
    secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that `foreprop server`, started beside it, may have the same."""
    (line,) = lines_of("198.51.100.1\n", tmp_path, monkeypatch, own=secret)
    assert line == f"[0] mode 600 {hashlib.sha256(TEXT.encode()).hexdigest()}"


# torchrun.
def start_rank(
    run: Run, zygote: Zygote, rank: int, port: int, scenario: Scenario, **more: str
) -> psutil.Process:
    told = torchruns_variables(rank, port) | {"FORK_SERVERS": "1"}
    return run.start(zygote, run.environment(scenario, **told, **more))


def the_sum(run: Run) -> str:
    sums = {result["sha256"] for result in run.results().values()}
    assert len(sums) == 1, run.output()
    return str(sums.pop())


def test_a_stranger_before_the_true_rank_1_does_not_take_its_place(
    zygote: Zygote, tmp_path: Path, secret: str
) -> None:
    """It has read the session's id and server 0's address, as everybody can."""
    folders = [tmp_path / "plain", tmp_path / "secret"]
    sums = []
    for folder, more in zip(folders, ({}, {"FOREPROP_SECRET_FILE": secret}), strict=True):
        folder.mkdir()
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        with running(folder) as run:
            start_rank(run, zygote, 0, store.port, Scenario(), **more)
            if more:
                stranger_comes_as_rank_1(store.port)
            start_rank(run, zygote, 1, store.port, Scenario(), **more)
            run.wait()
            assert run.codes() == [0, 0], run.output()
            sums.append(the_sum(run))
            if more:
                assert "rank 1 has no secret, server 0 has one" in run.output()
                assert TEXT not in run.output()
            run.check_nothing_left()
        del store
    assert sums[0] == sums[1]


def stranger_comes_as_rank_1(port: int) -> None:
    limit = timedelta(seconds=LIMIT_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    entries = dist.PrefixStore("foreprop/0", store)
    head = len(SIGNED) + PROOF_BYTES
    session_id, _ = json.loads(bytes(entries.get("session/0"))[head:])
    address, server_port = bytes(entries.get("session/0/server/0"))[head:].decode().split()
    assert address == "127.0.0.1"
    client = Client(int(server_port), 1)
    try:
        client.greet(session_id)
        assert "rank 1 has no secret" in client.expect_failure().message
        client.expect_end()
        entries.set("session/0/server/1", "127.0.0.1 9")
        entries.set("session/0/refused", '{"kind":"HandshakeError","message":"an end"}')
    finally:
        client.close()


@pytest.mark.long
@pytest.mark.parametrize("encryption", ["none", "tls"])
def test_dedicated_servers_with_a_secret_in_a_range_of_ports(
    encryption: str, zygote: Zygote, tmp_path: Path, secret: str
) -> None:
    """A command with the secret serves; one without it is refused, and the run goes on."""
    port, first = free_port(), free_port_range(20)
    scenario = Scenario(settings={"dedicated_servers": 1})
    more = {"FOREPROP_SECRET_FILE": secret, "FOREPROP_PORT_RANGE": f"{first}-{first + 19}"}
    more["FOREPROP_ENCRYPTION"] = encryption
    where = ("--rendezvous", f"127.0.0.1:{port}")
    with running(tmp_path) as run:
        odd = run.foreprop(zygote, run.environment(scenario), "server", *where)
        run.torchrun(
            zygote,
            run.environment(scenario, **more),
            *("--nproc-per-node", "2", "--master-port", str(port)),
        )
        expected = "this server has no secret, and the store's entry"
        wait_for(lambda: expected in run.output(), run)
        run.foreprop(zygote, run.environment(scenario, **more), "server", *where)
        run.wait()
        codes = dict(zip(run.started, run.codes(), strict=True))
        assert codes.pop(odd) == 1, run.output()
        assert set(codes.values()) == {0}, run.output()
        the_sum(run)
        found = [line for line in run.output().splitlines() if " listens on 127.0.0.1 " in line]
        ports = [int(line.split()[-1]) for line in found]
        assert len(ports) == 1
        assert first <= ports[0] < first + 20
        run.check_nothing_left()


def free_port_range(count: int) -> int:
    """The first of so many ports that were free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return min(int(probe.getsockname()[1]), 65_535 - count)

"""``foreprop run``: several hosts, what they print, and that all of it ends together.

The hosts are this machine, reached directly (127.0.0.1 and 127.0.0.2) or by `fake_ssh`
(198.51.100.1 and 198.51.100.2, which nobody has): `launches`.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil
import pytest

from foreprop.config.launchers import environment_for_hosts
from foreprop.tools.run.records import START, Ready, decode
from foreprop.tools.run.restarts import Restarts
from foreprop.tools.run.run import Launcher, Outcome
from tests.process.elastic_script import Plan as ElasticPlan
from tests.process.harness import LIMIT_S, ROOT, Run, Zygote, running, wait_for
from tests.process.harness import SCRIPT as TRAIN
from tests.process.launches import FAKE_SSH, LOCAL, REMOTE, SCRIPT, Launch, prepared
from tests.process.train_script import Scenario
from tests.tiers import long_cases

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    return prepared(tmp_path, monkeypatch)


# What they print.
def test_every_line_has_its_rank(launch: Launch) -> None:
    """From hosts with unequal numbers of workers and GPU ids; the streams stay apart."""
    outcome = launch.run("127.0.0.1:3,5\n198.51.100.2\n", "all:lines=300", "all:long=70000")
    assert outcome == Outcome(0)
    assert launch.logins() == ["198.51.100.2"]
    where = f"of 3 in {launch.folder}, GPUs"
    for rank, gpus in enumerate(("3,5", "3,5", "None")):
        prefix = f"[{rank}] "
        assert [line.removeprefix(prefix) for line in launch.out if line.startswith(prefix)] == [
            f"rank {rank} {where} {gpus}",
            *(f"line {number} {'.' * 200}" for number in range(300)),
            "x" * 65_536,
            "x" * (70_000 - 65_536),
            "done without a line end",
        ]
        errors = [line for line in launch.err if line.startswith(prefix)]
        assert errors == [f"{prefix}error {number}" for number in range(300)]
    assert len(launch.out) == 3 * 304


# How it ends.
@pytest.mark.parametrize("hosts", [LOCAL, *long_cases(REMOTE)], ids=["local", "remote"])
def test_one_failure_ends_all_and_its_code_is_passed_on(launch: Launch, hosts: str) -> None:
    mark = str(launch.folder / "mark")
    first, second = hosts.split()
    actions = ("0:touch=" + mark, "0:sleep=600", "1:wait=" + mark, "1:exit=7")
    outcome = launch.run(hosts, *actions)
    assert outcome == Outcome(7, f"rank 1 on {second} ended with exit code 7")
    assert launch.logins() == ([first, second] if hosts == REMOTE else [])


@pytest.mark.long
def test_the_first_failure_is_named_not_what_follows(launch: Launch) -> None:
    """Rank 1 fails because rank 0 did, while torchrun still waits for its stubborn neighbour."""
    mark = str(launch.folder / "mark")
    outcome = launch.run(
        "127.0.0.1 workers=2\n127.0.0.2\n",
        *("1:stubborn=600", f"0:touch={mark}", "0:kill=9"),
        *(f"2:wait={mark}", "2:sleep=1", "2:exit=3"),
        grace_s=2.0,
    )
    assert outcome == Outcome(137, "rank 0 on 127.0.0.1 was killed by SIGKILL")


@pytest.mark.long
def test_who_has_lost_another_one_is_not_the_first(launch: Launch) -> None:
    """Rank 0 has failed, and takes longer to end than rank 1, which has heard of that."""
    mark = str(launch.folder / "mark")
    actions = ("1:lost=rank 0", f"1:touch={mark}", "1:exit=3")
    outcome = launch.run(LOCAL, *actions, "0:wait=" + mark, "0:sleep=1", "0:exit=7", grace_s=60.0)
    assert outcome == Outcome(7, "rank 0 on 127.0.0.1 ended with exit code 7")


@pytest.mark.long
def test_who_has_lost_another_one_says_so_if_that_does_not_end(launch: Launch) -> None:
    outcome = launch.run(LOCAL, "0:sleep=600", "1:lost=server 0", "1:exit=3", grace_s=1.0)
    told = "rank 1 on 127.0.0.2 ended with exit code 3, for it had lost server 0"
    assert outcome == Outcome(3, told)


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["p2p", "ring"])
def test_the_one_that_raises_is_named_and_not_who_hears_of_it(
    launch: Launch, architecture: str
) -> None:
    """A session whose rank 1 raises an error, and then has something else to do before it ends."""
    script = launch.folder / "raises.py"
    script.write_text(RAISES)
    variables = environment_for_hosts() | {"FOREPROP_ARCHITECTURE": architecture}
    outcome = launch.run(LOCAL, script=(str(script),), environment=variables)
    assert outcome == Outcome(1, "rank 1 on 127.0.0.2 ended with exit code 1"), launch.err


RAISES = """
import atexit, os, time
import torch
import foreprop

rank = int(os.environ["RANK"])
if rank == 1:
    atexit.register(time.sleep, 1.5)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with foreprop.parallelize(model, optimizer, step_timeout_s=20):
    for step in range(50):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if (rank, step) == (1, 5):
            raise ValueError("a mistake")
"""


@pytest.mark.long
def test_the_child_of_a_worker_is_ended_too(launch: Launch) -> None:
    """The plugin that looks for processes left behind would find it."""
    assert launch.run("127.0.0.1", "0:child=600", grace_s=1.0) == Outcome(0)


def test_a_host_without_the_directory(launch: Launch) -> None:
    outcome = launch.run(REMOTE, directory="/none/such")
    assert outcome.code == 1
    assert re.match(
        r"(198\.51\.100\.\d): there is no directory /none/such on \1; workers start in the"
        r" directory that `foreprop run` is called in: make it there, or give --directory",
        str(outcome.failure),
    )
    assert launch.out == []


def test_a_host_without_python(launch: Launch) -> None:
    outcome = launch.run(REMOTE, python="python-that-nobody-has")
    assert outcome.code == 1
    assert str(outcome.failure).endswith("has no python-that-nobody-has; give --python")


def test_a_host_that_cannot_be_reached(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reason is printed, the message says what to try, and no worker has started."""
    launch.tell_ssh(monkeypatch, unreachable=["198.51.100.2"])
    outcome = launch.run(REMOTE)
    assert outcome.code == 1
    ssh = f"{sys.executable} {FAKE_SSH}"
    assert outcome.failure == f"198.51.100.2 cannot be reached; try `{ssh} 198.51.100.2 true`"
    assert launch.err == [
        "[198.51.100.2] ssh: connect to host 198.51.100.2 port 22: No route to host"
    ]
    assert launch.out == []


@pytest.mark.long
def test_a_restart_goes_on_without_a_host_that_is_gone(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both train; the second one is switched off before the restart, for which one is enough."""
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        launch.tell_ssh(monkeypatch, unreachable=["198.51.100.2"])

    out, err = io.BytesIO(), io.BytesIO()
    mark = str(launch.folder / "mark")
    actions = ("0:touch=" + mark, "1:wait=" + mark, "1:kill=9")
    plan = launch.plan("127.0.0.1\n198.51.100.2\n", *actions)
    outcome = Restarts(plan, out, err, say=say, most=1, least_hosts=1).run()
    assert outcome == Outcome(0)
    assert said == [
        "rank 1 on 198.51.100.2 was killed by SIGKILL; restart 1 of 1",
        "goes on without 198.51.100.2: 198.51.100.2 cannot be reached; try"
        f" `{sys.executable} {FAKE_SSH} 198.51.100.2 true`",
    ]
    assert "[0] rank 0 of 2 in " in out.getvalue().decode()
    assert "[0] rank 0 of 1 in " in out.getvalue().decode()


@pytest.mark.long
def test_an_error_that_repeats_at_its_step_ends_it(launch: Launch) -> None:
    said: list[str] = []
    out, err = io.BytesIO(), io.BytesIO()
    plan = launch.plan("127.0.0.1", "0:step=7", "0:exit=3")
    outcome = Restarts(plan, out, err, say=said.append, most=5).run()
    ended = "rank 0 on 127.0.0.1 ended with exit code 3"
    told = "it ended at step 7 the last time, too, so a restart would not help"
    assert outcome == Outcome(3, f"{ended}; {told}")
    assert said == [f"{ended}; restart 1 of 5"]


@pytest.mark.long
def test_an_elastic_run_goes_on_without_a_host_that_fails(launch: Launch) -> None:
    said: list[str] = []
    mark = str(launch.folder / "mark")
    actions = ("1:exit=7", "0:wait=" + mark)
    plan = launch.plan(LOCAL, *actions, elastic=True)
    streams = io.BytesIO(), io.BytesIO()

    def say(text: str) -> None:
        said.append(text)
        Path(mark).touch()

    outcome = Launcher(plan, *streams, say=say).run()
    assert outcome == Outcome(0)
    assert said == ["rank 1 on 127.0.0.2 ended with exit code 7; goes on with 1 of 2"]


@pytest.mark.long
def test_an_elastic_run_whose_hosts_all_fail_has_the_first_failure(launch: Launch) -> None:
    said: list[str] = []
    mark = str(launch.folder / "mark")
    actions = ("1:exit=7", "0:wait=" + mark, "0:exit=3")
    plan = launch.plan(LOCAL, *actions, elastic=True)

    def say(text: str) -> None:
        said.append(text)
        Path(mark).touch()

    outcome = Launcher(plan, io.BytesIO(), io.BytesIO(), say=say).run()
    assert outcome == Outcome(7, "rank 1 on 127.0.0.2 ended with exit code 7")
    assert len(said) == 1


@pytest.mark.long
@pytest.mark.parametrize("dies", [0])
def test_an_elastic_training_goes_on_without_a_host(launch: Launch, dies: int) -> None:
    """Its worker and its server are killed, also where the rendezvous is."""
    said: list[str] = []
    scenario = ElasticPlan(steps=12, deaths={str(dies): (5, 2, 0.0)}, settings={})
    variables = {"PLAN": scenario.encode(), "RESULTS": str(launch.folder)}
    plan = launch.plan(
        LOCAL + "127.0.0.3\n",
        script=(str(ROOT / "tests" / "process" / "node_script.py"),),
        environment=environment_for_hosts() | variables,
        elastic=True,
    )
    out, err = io.BytesIO(), io.BytesIO()
    outcome = Launcher(plan, out, err, say=said.append).run()
    assert outcome == Outcome(0), (said, err.getvalue().decode()[-2000:])
    assert said == [f"rank {dies} on 127.0.0.{dies + 1} was killed by SIGKILL; goes on with 2 of 3"]
    results = [
        json.loads((launch.folder / f"rank-{rank}.json").read_text())
        for rank in range(3)
        if rank != dies
    ]
    assert len({result["sha256"] for result in results}) == 1


@pytest.mark.long
def test_a_script_that_is_not_there(launch: Launch) -> None:
    outcome = launch.run(LOCAL, script=("none.py",))
    assert outcome.code == 2
    assert re.fullmatch(
        r"rank [01] on 127\.0\.0\.[12] ended with exit code 2", outcome.failure or ""
    )
    assert any("can't open file" in line and line[:3] in ("[0]", "[1]") for line in launch.err)


# By its own command.
def start(
    zygote: Zygote, run: Run, hosts: str, *script: str | Path, **variables: str
) -> psutil.Process:
    file = run.folder / "hosts"
    file.write_text(hosts)
    fake_ssh = json.dumps({"log": str(run.folder / "logins")})
    environment = run.environment(Scenario(), FAKE_SSH=fake_ssh, **variables)
    return run.foreprop(
        zygote,
        environment,
        *("run", "--resources", str(file), "--master-addr", "127.0.0.1"),
        *("--ssh", f"{sys.executable} {FAKE_SSH}", "--grace", "2"),
        *map(str, script),
    )


def test_it_trains(zygote: Zygote, tmp_path: Path) -> None:
    with running(tmp_path) as run:
        hosts = "127.0.0.1\n198.51.100.2\n"
        start(zygote, run, hosts, TRAIN, FORK_SERVERS="1")
        run.wait()
        assert run.codes() == [0], run.output()
        assert len({result["sha256"] for result in run.results().values()}) == 1
        assert sorted(run.results()) == [0, 1]
        assert "[0] foreprop: 2 workers on 2 nodes, 2 servers" in run.output()
        run.check_nothing_left()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *long_cases(signal.SIGTERM)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_signal_ends_all(zygote: Zygote, tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path) as run:
        launcher = start(zygote, run, "127.0.0.1\n198.51.100.2\n", SCRIPT, "all:sleep=600")
        wait_for(lambda: run.output().count(" of 2 in ") == 2, run)
        os.killpg(launcher.pid, number)
        run.wait()
        assert run.codes() == [128 + number], run.output()
        assert f"foreprop run: ended by {number.name}" in run.output()
        assert "Traceback" not in run.output()
        run.check_nothing_left()


def test_a_killed_launcher_leaves_nothing(zygote: Zygote, tmp_path: Path) -> None:
    """Not even a worker that wants to stay, nor a child of one."""
    with running(tmp_path) as run:
        actions = ("0:child=600", "1:child=600", "1:stubborn=600", "0:sleep=600")
        launcher = start(zygote, run, "127.0.0.1\n198.51.100.2\n", SCRIPT, *actions)
        wait_for(lambda: run.output().count(" of 2 in ") == 2, run)
        wait_for(lambda: sum(p.name() == "sleep" for p in run.ours()) == 2, run)
        launcher.send_signal(signal.SIGKILL)
        run.wait()
        assert run.codes() == [-signal.SIGKILL]
        run.check_nothing_left()


@pytest.mark.long
def test_a_second_ctrl_c_waits_for_no_one(zygote: Zygote, tmp_path: Path) -> None:
    with running(tmp_path) as run:
        file = run.folder / "ready"
        actions = ("0:touch=" + str(file), "0:stubborn=600")
        launcher = start(zygote, run, "127.0.0.1\n", "--grace", "600", SCRIPT, *actions)
        wait_for(file.exists, run)
        launcher.send_signal(signal.SIGINT)
        wait_for(lambda: "shutting down workers" in run.output(), run)
        launcher.send_signal(signal.SIGINT)
        run.wait()
        assert run.codes() == [130]
        run.check_nothing_left()


@pytest.mark.long
@pytest.mark.parametrize("program", ["host", "agent"])
def test_a_killed_program_of_a_host_ends_all(zygote: Zygote, tmp_path: Path, program: str) -> None:
    with running(tmp_path) as run:
        start(zygote, run, LOCAL, SCRIPT, "all:sleep=600")
        wait_for(lambda: run.output().count(" of 2 in ") == 2, run)
        one_of(run.ours(), f"foreprop.tools.run.{program}").kill()
        run.wait()
        assert run.codes() == [1], run.output()
        how = r"torchrun on 127\.0\.0\.[12] (was killed by SIGKILL|ended with exit code 137)"
        assert re.search(rf"foreprop run: {how} before its workers", run.output())
        run.check_nothing_left()


@pytest.mark.long
def test_a_silent_launcher_counts_as_gone(launch: Launch) -> None:
    """A host whose connection is frozen hears nothing, not even an end of its input."""
    plan = launch.plan("127.0.0.1", "all:sleep=600")
    program = "import foreprop.tools.run.host as h; h.SILENCE_S = 1.0; raise SystemExit(h.main())"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as host:
        assert host.stdin is not None
        assert host.stdout is not None
        host.stdin.write(msgspec.json.encode(plan.task(0)) + b"\n")
        host.stdin.flush()
        ready = decode(host.stdout.readline().rstrip(b"\n"))
        assert isinstance(ready, Ready)
        host.stdin.write(START + b" %d %s\n" % (ready.port, b"5e" * 32))
        host.stdin.flush()
        assert host.wait(LIMIT_S) != 0


def one_of(processes: Sequence[psutil.Process], module: str) -> psutil.Process:
    return next(process for process in processes if module in process.cmdline())

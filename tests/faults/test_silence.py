"""Ranks and servers that fall silent: stopped, or cut off. Whoever is only busy is not silent."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from foreprop.config import Config
from foreprop.engine.pulses import WorkerPulses
from foreprop.engine.rendezvous import session_board
from foreprop.engine.stream import connect
from foreprop.engine.world import World
from foreprop.features.collectives.group import Group, RingPulses
from foreprop.tools.run.host import free_port
from tests.faults import silent_nodes
from tests.faults.cables import cables
from tests.faults.faults import EventInjector
from tests.faults.lost_peers import Soon, ranks
from tests.faults.silent_nodes import Try, run_try
from tests.process.harness import ROOT, Run, Zygote, running, torchruns_variables, wait_for
from tests.process.train_script import Scenario
from tests.tiers import long_cases

pytestmark = pytest.mark.process

DEDICATED = ROOT / "tests" / "process" / "dedicated_script.py"
HANGS_S = 60.0
SOON: dict[str, Any] = {"silence_report_s": 2.0, "silence_timeout_s": 5.0}
"""Beside other programs a process may have to wait for seconds."""
EVERYBODY_ENDS_S = 20.0
"""With the settings' defaults."""


# Who answers for a worker.
@contextlib.contextmanager
def watched_worker() -> Iterator[tuple[WorkerPulses, socket.socket, socket.socket]]:
    """With both ends of its connection to a server: its own, of which it has a copy, and that."""
    near, far = socket.socketpair()
    with near, far:
        worker = WorkerPulses(0, Config())
        worker.add(0, near.dup(), "server 0")
        far.settimeout(HANGS_S)
        yield worker, near, far


def test_a_process_answers_for_a_worker_and_ends_with_it() -> None:
    with watched_worker() as (worker, near, far):
        assert len(b"".join(far.recv(1) for _ in range(4))) == 4
        worker.close()
        near.close()
        while far.recv(100):
            pass


def test_the_process_that_answers_is_started_again() -> None:
    with watched_worker() as (worker, _, far):
        for _ in range(2):
            assert far.recv(1)
            process = worker._process
            assert process is not None
            process.kill()
            process.wait()
            while worker._process is process:
                assert far.recv(100)
        worker.close()


def test_ranks_of_a_ring_hear_each_other_and_no_stranger(
    capfd: pytest.CaptureFixture[str],
) -> None:
    config, store = Config(), dist.HashStore()
    fields = {"size": 3, "local_size": 3, "host": "127.0.0.1", "store": store, "raw_store": store}
    world = World(rank=0, **fields)  # type: ignore[arg-type]
    board = session_board(world, config)
    rings = [RingPulses(board, config, rank, 3, "127.0.0.1") for rank in range(3)]
    address, port, _ = board.lookup("pulses/0", "where rank 0 listens").split()
    strangers = [connect(address, int(port), timeout_s=HANGS_S) for _ in range(3)]
    strangers[0].sendall(b"another-session 00000001")
    strangers[1].sendall(b"this-session 00000000")  # nobody connects to itself
    strangers[2].shutdown(socket.SHUT_WR)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda ring: ring.meet("this-session"), rings))
    assert [len(ring.heard) for ring in rings] == [2, 2, 2]
    assert "will not notice" not in capfd.readouterr().err
    for each in (*strangers, *rings):
        each.close()


def test_who_has_yet_to_meet_the_failure_is_not_named_with_who_has_ended() -> None:
    """Rank 2 computes for longer than others wait: its connection says that it is there."""
    config = Config(architecture="ring")
    store = dist.HashStore()
    fields = {"size": 3, "local_size": 3, "host": "127.0.0.1", "store": store, "raw_store": store}
    worlds = [World(rank=rank, **fields) for rank in range(3)]  # type: ignore[arg-type]
    with ThreadPoolExecutor(3) as threads:
        groups = list(threads.map(lambda world: Group(world, config), worlds))
        list(threads.map(lambda group: group.open("this-session"), groups))
    groups[1].close()
    failure = groups[0].cause(RuntimeError("Connection closed by peer"))
    assert str(failure).startswith("rank 1 is gone"), failure
    for group in (groups[0], groups[2]):
        group.close()


HELD_OR_STOPPED = """
import ctypes, os, signal, socket, sys
from foreprop.config import Config
from foreprop.engine.pulses import WorkerPulses
pulses = WorkerPulses(0, Config())
pulses.add(0, socket.socket(fileno=int(sys.argv[1])), "server 0")
print("ready", flush=True)
if sys.argv[2] == "hold":
    ctypes.PyDLL(None).sleep(4)  # with the interpreter's lock
else:
    os.kill(os.getpid(), signal.SIGSTOP)
pulses.close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who is stopped")
@pytest.mark.parametrize("what", ["hold", "stop"])
def test_who_keeps_the_interpreter_to_itself_is_there_and_who_is_stopped_is_not(what: str) -> None:
    near, far = socket.socketpair()
    command = [sys.executable, "-c", HELD_OR_STOPPED, str(near.fileno()), what]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    started = subprocess.Popen(command, pass_fds=[near.fileno()], stdout=pipe, env=environment)
    near.close()
    with started, far:
        assert started.stdout is not None
        assert started.stdout.readline() == b"ready\n"
        if what == "hold":
            far.settimeout(HANGS_S)
            assert len(b"".join(far.recv(1) for _ in range(6))) == 6
        else:
            far.settimeout(3.0)
            with pytest.raises(TimeoutError):
                b"".join(far.recv(1) for _ in range(100))
            started.send_signal(signal.SIGCONT)
    assert started.returncode == 0


# Without `elastic`.
def ended_by_silence(run: Run, since_s: float, survivors: list[int], who: str) -> None:
    """All of them name it, and not sooner than they may."""
    results = run.results()
    for rank in survivors:
        found = results[rank]
        assert found.get("error") == "PeerLost", f"{rank}: {found}\n{run.output()}"
        assert re.search(who, found["message"]), f"{rank}: {found}"
        assert "(silence_timeout_s)" in found["message"], f"{rank}: {found}"
        assert float(found["at_s"]) > since_s + SOON["silence_timeout_s"] - 1.0


def scenario(injector: EventInjector, settings: dict[str, Any], **more: Any) -> Scenario:
    faults = tuple(injector.plan)
    return Scenario(steps=100_000, pause_s=0.02, settings=settings, faults=faults, **more)


RANK_1 = r"rank 1 \(node 0, host \S+ at 127.0.0.1\) is gone: server \d has heard nothing of it for"
SERVER_1 = r"server 1 \(beside rank 1\) on node 1 at 127.0.0.1 is gone: rank \d has heard nothing"
RING: dict[str, Any] = {"architecture": "ring"}
RING_1 = r"rank 1 \(host \S+\) at 127.0.0.1 is gone: rank \d has heard nothing of it for"
NODE_1 = rf"rank 1 \(node 1, host \S+ at 127.0.0.1\) is gone|{SERVER_1}"


@pytest.mark.parametrize(
    ("action", "local_size", "who"),
    [
        ("stop", 3, RANK_1),
        pytest.param("stop_server", 1, SERVER_1, marks=pytest.mark.long),
        pytest.param("stop_node", 1, NODE_1, marks=pytest.mark.long),
    ],
)
def test_all_ranks_end_and_name_who_is_silent(
    zygote: Zygote, tmp_path: Path, action: str, local_size: int, who: str
) -> None:
    injector = getattr(EventInjector(tmp_path).at(rank=1, step=3, phase="backward"), action)()
    server = {"plane": "python"} if action == "stop_server" else {}  # a process, then
    told = scenario(injector, SOON | server)
    with ranks(zygote, tmp_path, 3, told, local_size=local_size, fork=1) as run:
        survivors = [0, 1, 2] if action == "stop_server" else [0, 2]
        run.wait(but=[each for rank, each in enumerate(run.started) if rank not in survivors])
        ended_by_silence(run, injector.only_fault(run)["at_s"], survivors, who)
        assert "has heard nothing of" in run.output()
        assert "for 2 s (silence_report_s); after 5 s (silence_timeout_s)" in run.output()
        if action != "stop_server":
            assert run.started[1].status() == psutil.STATUS_STOPPED


def test_silence_in_a_ring_is_named_by_all(zygote: Zygote, tmp_path: Path) -> None:
    injector = EventInjector(tmp_path).at(rank=1, step=3, phase="backward").stop()
    with ranks(zygote, tmp_path, 3, scenario(injector, {**SOON, **RING}), local_size=3) as run:
        run.wait(but=[run.started[1]])
        since_s = injector.only_fault(run)["at_s"]
        ended_by_silence(run, since_s, [0, 2], rf"{RING_1} 5 s .*; rank \d was waiting for param")
        assert "for 2 s (silence_report_s); after 5 s (silence_timeout_s)" in run.output()
        run.started[1].send_signal(signal.SIGCONT)  # it learns that the others are gone
        run.wait()
        run.check_nothing_left()


@pytest.mark.long
@pytest.mark.parametrize(
    ("action", "rank", "who"),
    [
        ("stop", 1, rf"{RANK_1} 5 s".replace(r"server \d", "the relay of node 0")),
        ("stop_server", 0, r"server 0 \(beside rank 0\) at 127.0.0.1 is gone: the relay of node"),
        (
            "stop_relay",
            0,
            r"the relay of node 0(, host \S+| \(beside rank 0\) to server \d) at 127",
        ),
    ],
)
def test_silence_beside_a_relay_is_named_by_all(
    zygote: Zygote, tmp_path: Path, action: str, rank: int, who: str
) -> None:
    injector = getattr(EventInjector(tmp_path).at(rank=rank, step=3), action)()
    told = scenario(injector, SOON)
    with ranks(zygote, tmp_path, 4, told, local_size=2, fork=2) as run:
        survivors = [each for each in range(4) if each != rank or action != "stop"]
        run.wait(but=[each for n, each in enumerate(run.started) if n not in survivors])
        fault = injector.only_fault(run)
        ended_by_silence(run, fault["at_s"], survivors, who)


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize(
    ("action", "settings", "who"),
    [
        ("stop", {}, NODE_1),
        ("stop_server", {"plane": "python"}, NODE_1),  # where it is a process
        ("stop_node", {}, NODE_1),
        ("stop", RING, RING_1),
    ],
)
def test_all_ranks_end_within_twenty_seconds(
    zygote: Zygote, tmp_path: Path, action: str, settings: dict[str, Any], who: str, soon: Soon
) -> None:
    injector = getattr(EventInjector(tmp_path).at(rank=1, step=3), action)()
    with ranks(zygote, tmp_path, 3, scenario(injector, settings), fork=1) as run:
        survivors = [0, 2]
        run.wait(but=[run.started[1]])
        since_s = injector.only_fault(run)["at_s"]
        assert soon(time.monotonic() - since_s, EVERYBODY_ENDS_S), run.results()
        ended_by_silence(run, since_s, survivors, who)


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.lab
@pytest.mark.parametrize("settings", [{}, RING])
@pytest.mark.parametrize("cut_off", [1, 0])
def test_all_ranks_end_within_twenty_seconds_when_a_cable_is_out(
    zygote: Zygote, tmp_path: Path, cut_off: int, settings: dict[str, Any], soon: Soon
) -> None:
    """On both sides of it. The rendezvous store is rank 0's."""
    with cables(3) as net, running(tmp_path) as run:
        point = EventInjector(tmp_path).at(rank=cut_off, step=3)
        injector = point.unplug(cable=f"/run/netns/{net.switch} port{cut_off}")
        port = free_port()
        for rank, node in enumerate(net.nodes):
            told = torchruns_variables(rank, port, 3)
            told |= {"MASTER_ADDR": net.address(0), "TORCHELASTIC_USE_AGENT_STORE": "False"}
            variables = run.environment(scenario(injector, settings), FORK_SERVERS="1", **told)
            run.start(zygote, variables, netns=f"/run/netns/{node}")
        run.wait()
        since_s = injector.only_fault(run)["at_s"]
        assert soon(time.monotonic() - since_s, EVERYBODY_ENDS_S), run.results()
        others = [rank for rank in range(3) if rank != cut_off]
        lost = (
            rf"(rank {cut_off} \((node {cut_off}, |host )"
            rf"|server {cut_off} \(beside rank {cut_off}\) on n)"
        )
        ended_by_silence(run, since_s, others, lost)
        ended_by_silence(run, since_s, [cut_off], r"(rank|server) \d .* is gone")
        run.check_nothing_left()


@pytest.mark.parametrize("settings", [SOON, *long_cases({})])
def test_a_silent_dedicated_server_is_named(
    zygote: Zygote, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """It is stopped when all have made a step, with the command that has started it."""
    injector = EventInjector(tmp_path).at(rank=0, step=3).note()
    told = scenario(injector, {**settings, "dedicated_servers": 1, "architecture": "ps"})
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with running(tmp_path) as run:
        variables = run.environment(told)
        for rank in range(2):
            run.start(zygote, {**variables, **torchruns_variables(rank, store.port)})
        arguments = ("server", "--rendezvous", f"127.0.0.1:{store.port}", "--count", "1")
        command = run.start(zygote, variables, script=DEDICATED, arguments=arguments)
        wait_for(injector.fired, run)
        for server in command.children(recursive=True):
            server.send_signal(signal.SIGSTOP)
        run.wait(but=[command])
        who = r"server 0 \(dedicated\) at 127.0.0.1 is gone: rank \d has heard nothing of it"
        ended_by_silence(run, injector.only_fault(run)["at_s"], [0, 1], who)


@pytest.mark.parametrize(
    ("seconds", "settings"),
    [pytest.param(*each, marks=pytest.mark.long) for each in [(8, SOON), (20, {})]],
)
def test_who_holds_the_interpreters_lock_is_not_silent(
    zygote: Zygote, tmp_path: Path, seconds: int, settings: dict[str, Any]
) -> None:
    """No thread of its interpreter runs meanwhile, and the others wait."""
    injector = EventInjector(tmp_path).at(rank=1, step=3, phase="backward").hold(seconds=seconds)
    told = Scenario(steps=6, settings=settings, faults=tuple(injector.plan))
    with ranks(zygote, tmp_path, 3, told, fork=1) as run:
        run.wait()
        injector.only_fault(run)
        assert len({each["sha256"] for each in run.results().values()}) == 1, run.output()
        assert "has heard nothing of" not in run.output()
        run.check_nothing_left()


# With `elastic`.
@pytest.mark.lab
@pytest.mark.parametrize(
    ("kind", "victim"),
    [
        ("server", 1),
        *[
            pytest.param(*each, marks=pytest.mark.long)
            for each in [("cable", 0), ("power", 1), ("worker", 2), ("node", 0)]
        ],
    ],
)
def test_the_others_go_on_without_a_silent_node(
    zygote: Zygote, tmp_path: Path, kind: silent_nodes.Kind, victim: int
) -> None:
    given = Try(kind=kind, victim=victim, workers=3, settings=SOON)
    outcome = run_try(zygote, tmp_path, given)
    assert any("silence_report_s" in line for line in outcome.messages), outcome.messages


@pytest.mark.long
@pytest.mark.lab
def test_a_short_cut_is_told_and_nobody_leaves(zygote: Zygote, tmp_path: Path) -> None:
    given = Try(kind="cable", victim=1, workers=3, settings={"silence_report_s": 1.5})
    outcome = run_try(zygote, tmp_path, given, plugged_in_after_s=4.0)
    assert any(re.search("hears of .* again, after", line) for line in outcome.messages)
    results = [json.loads(path.read_text()) for path in tmp_path.glob("rank-*.json")]
    assert len({each["sha256"] for each in results}) == 1
    assert [each["stats"]["left"] for each in results] == [{}] * 3

"""Real worker processes, with or without torchrun, and what became of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from tests.process.train_script import Scenario

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "process" / "train_script.py"
PATH = os.pathsep.join([str(ROOT), str(ROOT / "src"), str(ROOT / "lab" / "src")])
"""``PYTHONPATH`` of what a test starts: this checkout, whatever is installed."""
FORKED = ROOT / "tests" / "process" / "forked.py"
LIMIT_S = 120.0
"""What ends a test that hangs: how fast the machine is must not matter."""
STACKS = signal.SIGUSR1
"""Has a forked process write its threads' stacks to its output (`zygote.become`)."""


def environment(mark: str, more: Mapping[str, str]) -> dict[str, str]:
    """For a process of a test: marked, and with nothing of this process's own settings."""
    own = ("FOREPROP_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    fixed = {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {**kept, **fixed, "RUN_MARK": mark, **more}


@dataclass
class Run:
    """Processes of one test. Leaving the block ends whatever is still there."""

    folder: Path
    temporary: Path  # TMPDIR of its processes
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: list[psutil.Process] = field(default_factory=list)
    outputs: list[Path] = field(default_factory=list)
    exit_codes: dict[int, int] = field(default_factory=dict)  # by process id

    def environment(self, scenario: Scenario, **more: str) -> dict[str, str]:
        variables = {"SCENARIO": scenario.encode(), "RESULTS": str(self.folder)}
        return environment(self.mark, {**variables, "TMPDIR": str(self.temporary), **more})

    def start(
        self,
        zygote: Zygote,
        variables: Mapping[str, str],
        *,
        script: Path = SCRIPT,
        arguments: Sequence[str] = (),
        netns: str = "",
    ) -> psutil.Process:
        """A Python program in a session of its own; ``netns``: the path of a network namespace."""
        request = {
            "script": str(script),
            "arguments": list(arguments),
            "environment": dict(variables),
            "output": str(self._new_output()),
            "netns": netns,
        }
        process = psutil.Process(zygote.fork(request))
        self.started.append(process)
        return process

    def torchrun(
        self,
        zygote: Zygote,
        variables: Mapping[str, str],
        *arguments: str,
        script: Path = SCRIPT,
    ) -> psutil.Process:
        module = Path(torch.__path__[0]) / "distributed" / "run.py"
        return self.start(zygote, variables, script=module, arguments=[*arguments, str(script)])

    def foreprop(
        self, zygote: Zygote, variables: Mapping[str, str], *arguments: str
    ) -> psutil.Process:
        module = ROOT / "src" / "foreprop" / "tools" / "cli" / "main.py"
        return self.start(zygote, variables, script=module, arguments=arguments)

    def _new_output(self) -> Path:
        self.outputs.append(self.folder / f"output-{len(self.outputs)}.txt")
        self.outputs[-1].touch()
        return self.outputs[-1]

    def output(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in self.outputs)

    def wait(self, timeout_s: float = LIMIT_S, *, but: Sequence[psutil.Process] = ()) -> None:
        """Until every started process has ended, but for some; fails with all output.

        Then the output also says where the threads of each process are.
        """
        deadline = time.monotonic() + timeout_s
        for process in self.started:
            while process not in but and not self._has_ended(process):
                if time.monotonic() > deadline:
                    self._ask_for_stacks()
                    raise TimeoutError(f"still running after {timeout_s} s:\n{self.output()}")
                time.sleep(0.02)

    def _ask_for_stacks(self) -> None:
        for process in self.started:
            if not self._has_ended(process):
                process.send_signal(STACKS)
        time.sleep(1)  # nobody says when they are written

    def _has_ended(self, process: psutil.Process) -> bool:
        if process.pid in self.exit_codes:
            return True
        pid, status = os.waitpid(process.pid, os.WNOHANG)
        if pid:
            self.exit_codes[pid] = os.waitstatus_to_exitcode(status)
        return bool(pid)

    def codes(self) -> list[int]:
        return [self.exit_codes[process.pid] for process in self.started]

    def results(self) -> dict[int, dict[str, Any]]:
        """What each rank has left, by rank."""
        found = sorted(self.folder.glob("rank-*.json"))
        return {int(p.stem.partition("-")[2]): json.loads(p.read_text()) for p in found}

    def ours(self) -> list[psutil.Process]:
        """Every process that descends from this run, also one whose parents have all died.

        What was forked shows its zygote's environment, but is in the session of its rank.
        """
        found, sessions = [], {process.pid for process in self.started}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                is_ours = os.getsid(process.pid) in sessions
                if (is_ours or process.environ().get("RUN_MARK") == self.mark) and is_running(
                    process
                ):
                    found.append(process)
        return found

    def check_nothing_left(self, within_s: float = LIMIT_S / 2) -> None:
        """No process of the run, and no file of ours in the temporary folder."""
        deadline = time.monotonic() + within_s
        left = self.ours()
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            left = [p for p in left if is_running(p)] or self.ours()  # to look at all takes long
        described = [f"{p.pid} {p.status()} {p.cmdline()[:6]}" for p in left]
        assert not left, f"left behind: {described}\n{self.output()}"
        files = [path.name for path in self.temporary.rglob("*foreprop*")]
        assert not files, f"left behind: {files}"

    def end(self) -> None:
        for process in self.ours():
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(TimeoutError):
            self.wait(5)


def is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Run]:
    # not in pytest's folder: the path of a loader's socket may have 107 bytes and no more
    with tempfile.TemporaryDirectory(prefix="run-", ignore_cleanup_errors=True) as temporary:
        run = Run(folder, Path(temporary))
        try:
            yield run
        finally:
            run.end()


class Zygote:
    """The process that forks workers (see zygote.py)."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "process" / "zygote.py")],
            env=environment("", {}),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def fork(self, request: Mapping[str, Any]) -> int:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        return int(stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=10)


@contextlib.contextmanager
def workers(
    zygote: Zygote,
    folder: Path,
    size: int,
    scenario: Scenario,
    *,
    local_size: int = 1,
    script: Path = SCRIPT,
    fork: int = 0,
    **more: str,
) -> Iterator[Run]:
    """Ranks 0 to ``size`` - 1, started as torchrun does, but by nobody who would end the others.

    ``local_size`` 1: every worker is a node of its own and has a server. The rendezvous store is
    ours, as it is torchrun's. ``fork``: the servers and relays of a node, if they are not to
    be programs of their own, which takes a second each (`tests.process.forked`).
    """
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with running(folder) as run:
        for rank in range(size):
            told = torchruns_variables(rank, store.port, size, local_size)
            if fork and told["LOCAL_RANK"] == "0":
                told["FORK_SERVERS"] = str(fork)
            run.start(zygote, run.environment(scenario, **told, **more), script=script)
        yield run
    del store


@contextlib.contextmanager
def forked_ranks(
    zygote: Zygote, folder: Path, size: int, script: Path, *arguments: str, **more: str
) -> Iterator[Run]:
    """A machine's ranks, which the script forks by `tests.process.forked.fork_ranks`."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    told = torchruns_variables(0, store.port, size, size)
    told |= {"TORCHELASTIC_RUN_ID": "none", "FORK_RANKS": str(size), "RESULTS": str(folder)}
    with running(folder) as run:
        variables = environment(run.mark, {**told, "TMPDIR": str(run.temporary), **more})
        run.start(zygote, variables, script=script, arguments=arguments)
        yield run
    del store


def torchruns_variables(rank: int, port: int, size: int = 2, local_size: int = 1) -> dict[str, str]:
    """What torchrun would tell a rank whose rendezvous store is at this port of this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % local_size),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def wait_for(condition: Callable[[], object], run: Run, timeout_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, run.output()
        time.sleep(0.05)

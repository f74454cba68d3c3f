"""The peers: MXNet's own KVStore and P3, run by another Python beside ours."""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from foreprop.core.slicing import BIG_ARRAY_ELEMS
from foreprop.errors import ConfigError, RemoteProtocolError, StepTimeout, TransportError
from foreprop_lab.lab import mxnet_worker
from foreprop_lab.lab.run import build_system as build_other
from foreprop_lab.lab.systems import Steps, System
from foreprop_lab.setting.labsetting import LAUNCH_SHARE, MXNET, LabSetting

P3 = "mxnet-p3"
_P3_SLICE_ELEMS = 40_000  # MXNet's default
_P3_VARIABLES = {"DMLC_PS_VAN_TYPE": "p3", "DMLC_PS_WATER_MARK": "10"}
"""P3's settings: without the water mark ZeroMQ takes 1000 messages at once, whatever priorities."""
_OWN_VARIABLES = ("DMLC_", "MXNET_", "PS_", "OMP_")
_NEEDED = "python3 -m venv ENV && ENV/bin/pip install mxnet==1.9.1 'numpy<1.24'"

_PORT = 29600
_START_GRACE_S = 120.0
_START_GRACE_S_PER_NODE = 15.0  # importing mxnet takes 2 s of a CPU in each process
_STEPS_GRACE_S = 60.0
_SLOWEST = 10
"""A system hangs if it takes longer than its grace and so many times the limit."""
_LOOK_S = 0.5  # how often to look after processes that we do not hear
_TAIL_BYTES = 2000


_Answer = TypeVar("_Answer", bound=msgspec.Struct)


class _Ready(msgspec.Struct, frozen=True, tag_field="kind", tag="ready"):
    version: str


class _Block(msgspec.Struct, frozen=True, tag_field="kind", tag="block"):
    step_s: list[float]
    waited_s: list[float]
    held_s: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Child:
    """A process of the other Python, and what it has written to its standard error."""

    role: str
    process: subprocess.Popen[bytes]
    log: IO[bytes]

    @classmethod
    def start(cls, role: str, python: Path, environment: Mapping[str, str]) -> _Child:
        """Start a process that Ctrl-C in a terminal does not reach: its group is its own.

        With -I the other Python sees nothing of ours, not even this folder's modules.
        """
        log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        talks = role == "worker"
        try:
            process = subprocess.Popen(
                [python, "-I", mxnet_worker.__file__, str(os.getpid())],
                env={**environment, "DMLC_ROLE": role},
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else log,
                stderr=log,
                process_group=0,
            )
        except OSError as error:
            log.close()
            why = f"mxnet_python is {python}, which cannot be run: {error.strerror}"
            raise ConfigError(f"{why}; make one with {_NEEDED}") from error
        return cls(role=role, process=process, log=log)

    def tail(self) -> str:
        """The end of what it wrote; the file's position, which it shares, does not move."""
        descriptor = self.log.fileno()
        start = max(0, os.fstat(descriptor).st_size - _TAIL_BYTES)
        return os.pread(descriptor, _TAIL_BYTES, start).decode(errors="replace").strip()

    def end(self) -> None:
        """Kill it: it has nothing to save, and P3's own shutdown hangs now and then."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.log):
            if stream is not None:
                with suppress(BrokenPipeError):  # what it has not read is still buffered
                    stream.close()


class MxnetSystem:
    """``mxnet-kvstore`` or ``mxnet-p3`` on one node: a server, a worker, on node 0 the scheduler.

    Making one returns when all nodes have joined, so all must make theirs at the same time. The
    thread that makes it must live: the processes die with it. After an error only call `close`.
    """

    version: str

    def __init__(
        self,
        setting: LabSetting,
        name: str,
        *,
        node: int,
        address: str,
        root_address: str,
        port: int,
    ) -> None:
        """Start the processes, with a ``port`` at node 0's ``root_address`` that no system has.

        Raises `ConfigError` if ``setting.mxnet_python`` has no mxnet that works, `TransportError`
        if a process ended, `StepTimeout` if the nodes have not come together.
        """
        if setting.mxnet_python is None:
            raise ConfigError("mxnet_python is None; it must be the Python of an environment")
        self._python = setting.mxnet_python
        self._name = name
        self._node = node
        self._limit_s = setting.limit_s
        self._children: list[_Child] = []
        self._received = b""
        variables = _environment(setting, name, f"{root_address}:{port}", address)
        try:
            self._start(variables)
            self._send_line(msgspec.json.encode(_task(setting, name)))
            grace_s = _START_GRACE_S + _START_GRACE_S_PER_NODE * setting.nodes
            ready = self._receive(_Ready, "start", grace_s + _SLOWEST * self._limit_s)
            self.version = ready.version
        except BaseException:
            self.close()
            raise

    def _start(self, variables: Mapping[str, str]) -> None:
        roles = ("scheduler", "server", "worker") if self._node == 0 else ("server", "worker")
        for role in roles:
            self._children.append(_Child.start(role, self._python, variables))

    def steps(self, count: int, first: int = 1) -> Steps:
        """Make steps; raises `TransportError` if a process ends, `StepTimeout` if steps do not."""
        del first  # nothing is drawn
        self._send_line(b"steps %d" % count)
        within_s = _STEPS_GRACE_S + _SLOWEST * count * self._limit_s
        block = self._receive(_Block, f"make {count} steps", within_s)
        return Steps(step_s=block.step_s, waited_s=block.waited_s, held_s=block.held_s)

    def close(self) -> None:
        """End every process at once, also one that hangs or is stopped. May be repeated."""
        while self._children:
            self._children.pop().end()

    @property
    def _worker(self) -> _Child:
        return self._children[-1]

    def _send_line(self, line: bytes) -> None:
        stdin = self._worker.process.stdin
        if stdin is None:
            raise ValueError("the worker's standard input is a pipe")
        with suppress(BrokenPipeError):  # it has ended: receiving says why
            stdin.write(line + b"\n")
            stdin.flush()

    def _receive(self, kind: type[_Answer], what: str, within_s: float) -> _Answer:
        """The worker's next line; raises meanwhile if a process ends."""
        deadline = time.monotonic() + within_s
        while b"\n" not in self._received:
            if data := self._maybe_read(max(0.0, min(_LOOK_S, deadline - time.monotonic()))):
                self._received += data
            else:
                self._check_children()
                self._check_deadline(deadline, what, within_s)
        line, _, self._received = self._received.partition(b"\n")
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as error:
            raise RemoteProtocolError(f"{self._whose('worker')} answered {line!r}") from error

    def _maybe_read(self, within_s: float) -> bytes | None:
        """What the worker writes, or None; at the end of its output wait until it has ended."""
        stdout = self._worker.process.stdout
        if stdout is None:
            raise ValueError("the worker's standard output is a pipe")
        poll = select.poll()
        poll.register(stdout, select.POLLIN)
        if not poll.poll(1000 * within_s):
            return None
        data = os.read(stdout.fileno(), 65536)
        if not data:
            with suppress(subprocess.TimeoutExpired):
                self._worker.process.wait(within_s)
        return data

    def _check_children(self) -> None:
        for child in reversed(self._children):  # if the worker ends, it is the one to say why
            code = child.process.poll()
            if code == mxnet_worker.UNUSABLE:
                why = f"mxnet_python is {self._python}, which has no mxnet that works"
                said = child.tail().rpartition("\n")[2]
                raise ConfigError(f"{why} ({said}); make one with {_NEEDED}")
            if code is not None:
                raise TransportError(
                    f"{self._whose(child.role)} ended with code {code}; it said:\n{child.tail()}"
                )

    def _check_deadline(self, deadline: float, what: str, within_s: float) -> None:
        if time.monotonic() >= deadline:
            raise StepTimeout(
                f"{self._whose('worker')} did not {what} in {within_s:.0f} s; it said:\n"
                f"{self._worker.tail()}"
            )

    def _whose(self, role: str) -> str:
        return f"the {role} of {self._name} on node {self._node}"


def _task(setting: LabSetting, name: str) -> dict[str, object]:
    task = {"layers": setting.layers, "p3": name == P3}
    return {**task, "launch_s": setting.launch_s, "launch_share": LAUNCH_SHARE}


def _environment(setting: LabSetting, name: str, root: str, address: str) -> dict[str, str]:
    """Our environment without what would change MXNet, and with what a node needs."""
    root_address, _, port = root.rpartition(":")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_OWN_VARIABLES)}
    return {
        **inherited,
        "DMLC_PS_ROOT_URI": root_address,
        "DMLC_PS_ROOT_PORT": port,
        "DMLC_NODE_HOST": address,
        "DMLC_NUM_SERVER": str(setting.nodes),
        "DMLC_NUM_WORKER": str(setting.nodes),
        **_knobs(setting),
        **(_P3_VARIABLES if name == P3 else {}),
    }


def _knobs(setting: LabSetting) -> dict[str, str]:
    """The settings for sizes divided as the arrays are, and for one thread in each process."""
    slice_elems = setting.slice_elems or _P3_SLICE_ELEMS
    return {
        "MXNET_KVSTORE_SLICE_THRESHOLD": str(setting.scaled(slice_elems)),
        "MXNET_KVSTORE_BIGARRAY_BOUND": str(setting.scaled(BIG_ARRAY_ELEMS)),
        "MXNET_CPU_WORKER_NTHREADS": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
    }


def build_system(
    name: str, rank: int, setting: LabSetting, *, paced: bool, bucket_bytes: int | None
) -> System:
    """Build a system for `foreprop_lab.lab.run.run_lab`, those of MXNet's, too."""
    if name not in MXNET:
        return build_other(name, rank, setting, paced=paced, bucket_bytes=bucket_bytes)
    network = setting.network
    return MxnetSystem(
        setting,
        name,
        node=rank,
        address=network.address(rank),
        root_address=network.address(0),
        port=_PORT + MXNET.index(name),
    )

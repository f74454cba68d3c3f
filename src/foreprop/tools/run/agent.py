"""torchrun with pipes for log files: ``python -m foreprop.tools.run.agent GRACE PLACE ARGUMENTS``.

Started by `host`. The arguments are torchrun's own and so is all that happens, but for three
things: the workers' standard output and error are pipes, whose lines leave as records with the
rank; a worker that fails is reported when it ends, not when torchrun has ended the others; and
workers that join a running session have the ranks of its `Place` (in JSON).

Workers also say how far they are, in a file in memory to which each appends a line per step: its
rank and the step, or its rank, "lost" and the peer whose loss ends it.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api as torch_launcher

from foreprop.config.launchers import ELASTIC, STEPS_FILE
from foreprop.tools.run.processes import end_with_parent, exit_at_once, write_all
from foreprop.tools.run.records import (
    LineSplitter,
    Place,
    Stream,
    WorkerFailed,
    encode_news,
    encode_output,
)

_CHUNK_BYTES = _STEPS_BYTES = 65_536
_STREAMS: tuple[Stream, Stream] = ("out", "err")


class WorkerWatch:
    """A thread that passes on what workers print, and says how they end.

    Records go to the descriptor: the launcher, or nowhere once it is gone.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._pipes: dict[int, tuple[int, Stream, LineSplitter]] = {}
        """The rank and stream that are written to a pipe, by its reading end."""
        wake_read, self._wake_write = os.pipe()
        self._stopping = False
        self._ends_expected = False
        self._reported: set[int] = set()
        self._steps: int | None = None
        self._selector.register(wake_read, selectors.EVENT_READ, partial(os.read, wake_read, 4096))
        self._thread = threading.Thread(target=self._run, name="foreprop-workers", daemon=True)
        self._thread.start()

    def open_pipe(self, rank: int, stream: Stream) -> str:
        """The path under which this process can open the writing end of a new pipe."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        self._pipes[read_end] = rank, stream, LineSplitter()
        self._selector.register(read_end, selectors.EVENT_READ, partial(self._pass_on, read_end))
        return f"/proc/{os.getpid()}/fd/{write_end}"

    def open_steps(self) -> str:
        """The path of the file into which workers write their steps."""
        self._steps = os.memfd_create("foreprop-steps")
        return f"/proc/{os.getpid()}/fd/{self._steps}"

    def watch_end(self, rank: int, pid: int) -> None:
        pidfd = os.pidfd_open(pid)
        self._selector.register(pidfd, selectors.EVENT_READ, partial(self._note_end, pidfd, rank))

    def expect_ends(self) -> None:
        """Report no worker any more: torchrun ends them now."""
        self._ends_expected = True

    def report(self, rank: int, code: int) -> None:
        """Tell the launcher that a worker has failed, unless it knows already."""
        if rank not in self._reported:
            self._reported.add(rank)
            step, lost = last_step(self._steps, rank), lost_by(self._steps, rank)
            self._write(encode_news(WorkerFailed(rank=rank, code=code, step=step, lost=lost)))

    def finish(self) -> None:
        """Pass on what is left; call when the workers have ended."""
        self._stopping = True
        os.write(self._wake_write, b".")
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select():
                key.data()
        for read_end, (rank, stream, splitter) in self._pipes.items():
            while self._pass_on(read_end):
                pass
            self._write(encode_output(stream, rank, splitter.finish()))

    def _note_end(self, pidfd: int, rank: int) -> None:
        self._selector.unregister(pidfd)
        code = None
        with contextlib.suppress(ChildProcessError):  # torch may have collected it already
            if ended := os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG):
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        os.close(pidfd)
        if code and not self._ends_expected:
            self.report(rank, code)

    def _pass_on(self, read_end: int) -> bool:
        """Pass on what a pipe holds; False if that was nothing."""
        rank, stream, splitter = self._pipes[read_end]
        try:
            data = os.read(read_end, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._write(encode_output(stream, rank, splitter.feed(data)))
        return bool(data)

    def _write(self, data: bytes) -> None:
        with self._lock:
            write_all(self._descriptor, data)


def last_step(descriptor: int | None, rank: int) -> int | None:
    """The last step that a rank has written into the file of steps."""
    for words in _words_of(descriptor, rank):
        if len(words) == 1 and words[0].isdigit():
            return int(words[0])
    return None


def lost_by(descriptor: int | None, rank: int) -> str:
    """The peer whose loss has ended a rank, as it wrote into the file of steps; or nothing."""
    for words in _words_of(descriptor, rank):
        if words[0] == b"lost" and len(words) > 1:
            return b" ".join(words[1:]).decode(errors="replace")
    return ""


def _words_of(descriptor: int | None, rank: int) -> Iterator[list[bytes]]:
    """A rank's lines without its number, the last one first."""
    if descriptor is None:
        return
    data = os.pread(descriptor, _STEPS_BYTES, max(0, os.fstat(descriptor).st_size - _STEPS_BYTES))
    for line in reversed(data.splitlines()):
        first, *words = line.split() or [b""]
        if first == b"%d" % rank and words:
            yield words


class PipeLogs(DefaultLogsSpecs):
    """Where torchrun is to send workers' output: to the watch's pipes, and nothing to files."""

    def __init__(self, watch: WorkerWatch) -> None:
        super().__init__(log_dir=os.devnull)
        self._watch = watch

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        logs = super().reify(envs)
        for local_rank, variables in envs.items():
            rank = int(variables["RANK"])
            for stream, paths in zip(_STREAMS, (logs.stdouts, logs.stderrs), strict=True):
                paths[local_rank] = self._watch.open_pipe(rank, stream)
        logs.tee_stdouts.clear()
        logs.tee_stderrs.clear()
        return logs


def take_place(group: Any, place: Place) -> None:
    """Give torchrun's worker group, which is alone, its ranks in the larger world that it joins."""
    group.group_rank, group.group_world_size = place.node_rank, place.nodes
    for worker in group.workers:
        worker.global_rank = worker.role_rank = place.first_rank + worker.local_rank
        worker.world_size = worker.role_world_size = place.world_size


def run_torchrun(arguments: list[str], watch: WorkerWatch, place: Place | None) -> int:
    """Run torchrun and return its exit code; each worker that failed has been reported by then."""
    parsed = torchrun.parse_args(arguments)  # type: ignore[no-untyped-call]
    config, command, command_arguments = torchrun.config_from_args(parsed)
    config.logs_specs = PipeLogs(watch)
    is_elastic = os.environ.get(ELASTIC) == str(True)

    class Agent(LocalElasticAgent):
        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            if place is not None:
                take_place(worker_group, place)
            pids: dict[int, Any] = super()._start_workers(worker_group)
            for worker in worker_group.workers:
                watch.watch_end(worker.global_rank, pids[worker.local_rank])
            return pids

        def _shutdown(self, *arguments: Any, **options: Any) -> None:
            watch.expect_ends()
            super()._shutdown(*arguments, **options)

        def _exit_barrier(self) -> None:
            if not is_elastic:  # others' hosts may be gone, and it would wait for them
                super()._exit_barrier()  # type: ignore[no-untyped-call]

    torch_launcher.LocalElasticAgent = Agent  # type: ignore[attr-defined]
    try:
        torch_launcher.elastic_launch(config, command)(*command_arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        watch.report(rank, failure.exitcode)
        return 1
    except SignalException as error:
        return 128 + error.sigval
    return 0


def main() -> int:
    end_with_parent(signal.SIGTERM)
    output = os.dup(1)
    os.dup2(2, 1)  # whatever torch prints is not a record
    grace_s, arguments = float(sys.argv[1]), sys.argv[3:]
    place = msgspec.json.decode(sys.argv[2], type=Place | None)
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(grace_s))
    watch = WorkerWatch(output)
    os.environ[STEPS_FILE] = watch.open_steps()
    try:
        return run_torchrun(arguments, watch, place)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is ending; torch's handler would raise
        watch.finish()


if __name__ == "__main__":
    exit_at_once(main)

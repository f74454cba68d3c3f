"""A server or relay process: ``python -m foreprop.servers.main FDS LIFELINE_FD TASK [--relay]``.

Started by a worker or by ``foreprop server``, never by hand. FDS is the server's listening socket;
of a relay the listening sockets, one for each server, and as many connections to the servers. It
ends when its session does, and at once when the process that holds the other end of its lifeline
ends.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from foreprop.config import Config
from foreprop.servers.processes import (
    RelayTask,
    ServerTask,
    build_relays,
    build_server,
    unlink_links,
)

_PR_SET_PDEATHSIG = 1


def main() -> int:
    sockets = [socket.socket(fileno=int(number)) for number in sys.argv[1].split(",")]
    lifeline_fd, text, is_relay = int(sys.argv[2]), sys.argv[3], "--relay" in sys.argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "--die-with-parent" in sys.argv:
        die_with_parent()  # for a stopped server (SIGSTOP), which cannot see its lifeline end
    task = (RelayTask if is_relay else ServerTask)(**json.loads(text))
    config = Config(**task.config)  # type: ignore[arg-type]
    threading.Thread(target=_end_with_parent, args=(lifeline_fd, task), daemon=True).start()
    if not is_relay:
        threading.Thread(target=_load_what_updates_need, daemon=True).start()
    invariants: Any = torch.sparse.check_sparse_tensor_invariants
    invariants.disable()  # or Adagrad warns; ours are sound
    gc.freeze()  # what has been imported stays: no collection need look at it again
    if isinstance(task, RelayTask):
        return _run_relays(task, config, sockets)
    return 1 if build_server(task, config).run(sockets[0]) else 0


def _run_relays(task: RelayTask, config: Config, sockets: Sequence[socket.socket]) -> int:
    listeners, upstreams = sockets[: len(sockets) // 2], sockets[len(sockets) // 2 :]
    relays = build_relays(task, config, upstreams)
    with ThreadPoolExecutor(len(relays)) as threads:
        failures = list(threads.map(lambda relay, listener: relay.run(listener), relays, listeners))
    return 1 if any(failures) else 0


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _load_what_updates_need() -> None:
    """torch.optim loads this (a second's work) when it is first used: better while workers join."""
    importlib.import_module("torch._dynamo")
    gc.freeze()  # these too


def _end_with_parent(lifeline_fd: int, task: ServerTask | RelayTask) -> None:
    os.read(lifeline_fd, 1)  # returns when the parent has gone, however it went
    unlink_links(task.session_id, task.node)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())

"""A server process: ``python -m foreprop.engine.main LISTENER_FD LIFELINE_FD TASK``.

Started by a worker or by ``foreprop server``, never by hand. It ends when its session does, and
at once when the process that holds the other end of its lifeline ends.
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
from typing import Any

import torch

from foreprop.config import Config
from foreprop.engine.launch import ServerTask, build_server, unlink_links

_PR_SET_PDEATHSIG = 1


def main() -> int:
    listener_fd, lifeline_fd, text = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "--die-with-parent" in sys.argv:
        die_with_parent()  # for a stopped server (SIGSTOP), which cannot see its lifeline end
    task = ServerTask(**json.loads(text))
    config = Config(**task.config)  # type: ignore[arg-type]
    threading.Thread(target=_end_with_parent, args=(lifeline_fd, task), daemon=True).start()
    threading.Thread(target=_load_what_updates_need, daemon=True).start()
    invariants: Any = torch.sparse.check_sparse_tensor_invariants
    invariants.disable()  # or Adagrad warns; ours are sound
    gc.freeze()  # what has been imported stays: no collection need look at it again
    server = build_server(task, config)
    return 1 if server.run(socket.socket(fileno=listener_fd)) else 0


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _load_what_updates_need() -> None:
    """torch.optim loads this (a second's work) when it is first used: better while workers join."""
    importlib.import_module("torch._dynamo")
    gc.freeze()  # these too


def _end_with_parent(lifeline_fd: int, task: ServerTask) -> None:
    os.read(lifeline_fd, 1)  # returns when the parent has gone, however it went
    unlink_links(task)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())

"""A server or relay process: ``python -m foreprop.backends FDS LIFELINE_FD TASK [--relay]``.

Started by a worker or by ``foreprop server``, never by hand. FDS is the server's listening socket;
of a relay the listening sockets, one for each server, as many connections to the servers, and as
many on which both say that they are there (`engine.pulses`). It ends when its session does, and at
once when the process that holds the other end of its lifeline ends. A world within one process has
the same servers in threads (`ThreadServer`).
"""

from __future__ import annotations

import gc
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

from foreprop.backends.composed import build_relays, build_server
from foreprop.backends.nocompiler import do_without_compiler
from foreprop.backends.processes import RelayTask, ServerTask, die_with_parent
from foreprop.config import Config
from foreprop.engine.pacing import unlink_links


def main() -> int:
    sockets = [socket.socket(fileno=int(number)) for number in sys.argv[1].split(",")]
    lifeline_fd, text, is_relay = int(sys.argv[2]), sys.argv[3], "--relay" in sys.argv
    # who ends a job (Slurm's scancel) may tell every process of it; workers may want to save first,
    # and this one ends with its worker
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if "--die-with-parent" in sys.argv:
        die_with_parent()  # for a stopped server (SIGSTOP), which cannot see its lifeline end
    task = (RelayTask if is_relay else ServerTask)(**json.loads(text))
    config = Config(**task.config)  # type: ignore[arg-type]

    def end_with_parent() -> None:
        os.read(lifeline_fd, 1)  # returns when the parent has gone, however it went
        unlink_links(task.session_id, task.node)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    do_without_compiler()
    invariants: Any = torch.sparse.check_sparse_tensor_invariants
    invariants.disable()  # or Adagrad warns; ours are sound
    gc.freeze()  # what has been imported stays: no collection need look at it again
    gc.enable()
    if isinstance(task, RelayTask):
        return _run_relays(task, config, sockets)
    return 1 if build_server(task, config).run(sockets[0]) else 0


def _run_relays(task: RelayTask, config: Config, sockets: Sequence[socket.socket]) -> int:
    servers = len(task.server_names)
    listeners, upstreams = sockets[:servers], sockets[servers : 2 * servers]
    relays = build_relays(task, config, upstreams)
    for relay, pulse in zip(relays, sockets[2 * servers :], strict=True):
        relay.watch(pulse)
    with ThreadPoolExecutor(len(relays)) as threads:
        failures = list(threads.map(lambda relay, listener: relay.run(listener), relays, listeners))
    return 1 if any(failures) else 0

"""A server or relay process: ``python -m foreprop.servers FDS LIFELINE_FD TASK [--relay]``.

Started by a worker or by ``foreprop server``, never by hand. FDS is the server's listening socket;
of a relay the listening sockets, one for each server, as many connections to the servers, and as
many on which both say that they are there (`link.pulses`). It ends when its session does, and at
once when the process that holds the other end of its lifeline ends. A world within one process has
the same servers in threads (`ThreadServer`).
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from foreprop.config import Config
from foreprop.link.pacing import NodeLinks, unlink_links
from foreprop.link.stream import SocketStream, Stream
from foreprop.servers.nocompiler import do_without_compiler
from foreprop.servers.processes import REPORT_S, ServerTask, node_links
from foreprop.servers.relaytask import RelayTask

if TYPE_CHECKING:
    from foreprop.path.server import Server
    from foreprop.relays.relay import Relay

_PR_SET_PDEATHSIG = 1


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
    threading.Thread(target=_end_with_parent, args=(lifeline_fd, task), daemon=True).start()
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


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _end_with_parent(lifeline_fd: int, task: ServerTask | RelayTask) -> None:
    os.read(lifeline_fd, 1)  # returns when the parent has gone, however it went
    unlink_links(task.session_id, task.node)
    os._exit(1)


def build_server(task: ServerTask, config: Config) -> Server:
    from foreprop.path.server import Server
    from foreprop.servers.composed import ServerComposer

    links = node_links(config, task.session_id, task.node, task.workers_per_node)
    if links is not None and not task.shares_node:
        links.unlink()
    wrap = links.wrap if links is not None else None
    server = Server(
        index=task.index,
        session_id=task.session_id,
        config=config,
        composer=ServerComposer(config=config),
        world_size=task.world_size,
        wrap=wrap,
    )
    if links is not None:
        weakref.finalize(server, links.close)  # in this process; another one's end closes them
    return server


def build_relays(
    task: RelayTask, config: Config, upstreams: Sequence[socket.socket]
) -> list[Relay]:
    """A node's relays, one to each server. ``upstreams``: the connections, by server."""
    from foreprop.relays.relay import Relay

    links = node_links(config, task.session_id, task.node, task.workers_per_node)
    relays = []
    for server, sock in enumerate(upstreams):
        name = task.server_names[server]
        stream = _upstream(task, config, server, sock)
        if links is not None:
            stream = links.wrap_to_node(stream, task.server_nodes[server])
        relay = Relay(
            server=server,
            server_name=name,
            node=task.node,
            first_rank=task.node * task.workers_per_node,
            session_id=task.session_id,
            config=config,
            world_size=task.world_size,
            upstream=stream,
        )
        relays.append(relay)
    if links is not None:
        close_with_the_last(links, relays)
    return relays


def close_with_the_last(links: NodeLinks, relays: Sequence[Relay]) -> None:
    """They share the links, whose descriptors may be others' once they are closed."""
    ends = iter([*([False] * (len(relays) - 1)), True])

    def end() -> None:
        if next(ends):
            links.close()

    for relay in relays:
        weakref.finalize(relay, end)


def _upstream(task: RelayTask, config: Config, server: int, sock: socket.socket) -> Stream:
    """To a server; the worker that has connected and authenticated is the node's first."""
    name = task.server_names[server]
    if config.encryption is None:
        return SocketStream(sock, name)
    from foreprop.core.authentication import Channel, Subject
    from foreprop.link.encrypted import connect_encrypted

    subject = Subject(task.session_id, f"server {server}", True)
    rank, nonces = task.node * task.workers_per_node, bytes.fromhex(task.nonces[server])
    return connect_encrypted(sock, name, Channel(subject, rank, nonces), config)


class ThreadServer:
    """A server, or a relay to one, in threads of this process."""

    def __init__(self, server: Server | Relay, listener: socket.socket) -> None:
        self._thread = threading.Thread(
            target=server.run, args=(listener,), name=f"foreprop-server{server.index}", daemon=True
        )
        self._server = server
        self._thread.start()

    def finish(self, *, kill_after_s: float, report: Callable[[], None]) -> None:
        self._thread.join(min(REPORT_S, kill_after_s))
        if self._thread.is_alive() and kill_after_s > REPORT_S:
            report()
            self._thread.join(kill_after_s - REPORT_S)
        self._server.cancel()
        self._thread.join()

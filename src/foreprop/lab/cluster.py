"""A cluster in a box: one process per node, each in a network of its own.

The calling process starts this module as a program, which enters new namespaces, makes the links
and forks the nodes. `Cluster.connections` lead from the caller to the nodes. All processes end
when the caller does, however it ends.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import psutil

from foreprop.engine.main import die_with_parent
from foreprop.errors import ForepropError, PeerLost
from foreprop.lab.network import (
    INTERFACE,
    Network,
    NetworkUnavailable,
    Switch,
    configure_node,
    enter_namespaces,
    enter_own_network,
)

Work = Callable[[int, Connection, Any], None]
"""What a node runs: ``work(node, connection, argument)``, a module's function."""

_RENDEZVOUS_PORT = 29400
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # only a process of one thread may enter a user namespace, or fork
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns of nodes without host names
    # memory that is freed is kept: fetching it anew from the kernel in every step would take the
    # emulated accelerators' host as long as computing
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "16000000000",
}
_END_S = 5.0


class Cluster:
    """Nodes on kernel-made links, or without links of their own if ``network`` is None.

    A context manager; leaving it ends every process. Raises `NetworkUnavailable`.
    """

    def __init__(self, work: Work, argument: Any, *, nodes: int, network: Network | None) -> None:
        port = _free_port() if network is None else _RENDEZVOUS_PORT
        task = pickle.dumps((work, argument, network, port))
        self.connections: list[Connection] = []
        theirs: list[Connection] = []
        for _ in range(nodes):
            ours, their = Pipe()
            self.connections.append(ours)
            theirs.append(their)
        report, their_report = Pipe(duplex=False)
        descriptors = [connection.fileno() for connection in (*theirs, their_report)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "foreprop.lab.cluster", ",".join(map(str, descriptors))],
            pass_fds=descriptors,
            stdin=subprocess.PIPE,
            env=os.environ | _ENVIRONMENT,
        )
        for connection in (*theirs, their_report):
            connection.close()
        try:
            self._start(task, report)
        except BaseException:
            self.close()
            raise
        finally:
            report.close()

    def _start(self, task: bytes, report: Connection) -> None:
        stdin = self._process.stdin
        if stdin is None:
            raise ValueError("the cluster's standard input is a pipe")
        with contextlib.suppress(BrokenPipeError), stdin:
            stdin.write(task)
        try:
            failure = report.recv()
        except EOFError as error:
            code = self._process.wait()
            raise PeerLost(f"the cluster's process ended with code {code}") from error
        if failure is not None:
            raise failure

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cpu_s(self) -> float:
        """CPU time that all processes of the cluster have used so far."""
        total = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    total += times.user + times.system
        return total

    def ask_all(self, question: object) -> list[Any]:
        """Send every node the same and collect the answers; raises what a node answers with."""
        for connection in self.connections:
            with contextlib.suppress(OSError):  # it has ended; what it left to read says why
                connection.send(question)
        answers: dict[int, Any] = {}
        while len(answers) < len(self.connections):
            some = self._answers([n for n in range(len(self.connections)) if n not in answers])
            answers |= some
            for answer in some.values():
                if isinstance(answer, BaseException):
                    raise answer
        return [answers[node] for node in range(len(self.connections))]

    def _answers(self, nodes: Sequence[int]) -> dict[int, Any]:
        """Those that are there first; raises for a node that ended, whatever others say of it."""
        ready = wait([self.connections[node] for node in nodes])
        return {node: self._answer(node) for node in nodes if self.connections[node] in ready}

    def _answer(self, node: int) -> Any:
        try:
            return self.connections[node].recv()
        except (EOFError, OSError) as error:
            raise PeerLost(f"node {node} of the lab has ended") from error

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill()  # and with it, by the kernel, whatever still runs below it
        self._process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


# In the cluster's own processes.
def main() -> None:
    """The program: enter the namespaces; the child that is forked then is their init."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller; its end is ours
    *nodes, report = (Connection(int(number)) for number in sys.argv[1].split(","))
    work, argument, network, port = pickle.load(sys.stdin.buffer)
    try:
        if network is not None:
            enter_namespaces()
    except NetworkUnavailable as error:
        report.send(error)
        return
    child = os.fork()
    if child:
        for connection in (*nodes, report):
            connection.close()
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    die_with_parent()
    _run_nodes(work, argument, network, port, nodes, report)


def _run_nodes(
    work: Work,
    argument: Any,
    network: Network | None,
    port: int,
    connections: Sequence[Connection],
    report: Connection,
) -> None:
    importlib.import_module("torch._dynamo")  # or every node's first optimizer would load it
    try:
        switch = Switch(network) if network is not None else None
        gates = []
        pids = []
        for node, connection in enumerate(connections):
            gate, theirs = Pipe()
            pid = os.fork()
            if not pid:
                gate.close()
                report.close()
                for other in connections:
                    if other is not connection:
                        other.close()
                _be_node(node, len(connections), work, argument, network, port, connection, theirs)
            theirs.close()
            gates.append(gate)
            pids.append(pid)
        for node, (gate, pid) in enumerate(zip(gates, pids, strict=True)):
            _pass(node, gate)  # it is in its own network
            if switch is not None:
                switch.plug_in(node, pid)
            gate.send(None)
        for node, gate in enumerate(gates):
            _pass(node, gate)
        report.send(None)
    except (NetworkUnavailable, PeerLost) as error:
        report.send(error)
        return
    report.close()
    for connection in connections:
        connection.close()
    for pid in pids:
        os.waitpid(pid, 0)


def _pass(node: int, gate: Connection) -> None:
    """Return when the node says that it has come so far; raises what kept it from that."""
    try:
        failure = gate.recv()
    except EOFError as error:
        raise PeerLost(f"node {node} of the lab has ended") from error
    if failure is not None:
        raise failure


def _be_node(
    node: int,
    nodes: int,
    work: Work,
    argument: Any,
    network: Network | None,
    port: int,
    connection: Connection,
    gate: Connection,
) -> None:
    """A node's life; does not return."""
    code = 1
    try:
        die_with_parent()
        try:
            if network is not None:
                enter_own_network()
            gate.send(None)
            gate.recv()
            if network is not None:
                configure_node(network, node)
        except NetworkUnavailable as error:
            gate.send(error)
            os._exit(1)
        gate.send(None)
        gate.close()
        _set_environment(node, nodes, network, port)
        work(node, connection, argument)
        code = 0
    except EOFError:
        code = 0  # the caller has left
    except BaseException as error:
        with contextlib.suppress(OSError):
            connection.send(_sendable(error))
    finally:
        sys.stderr.flush()
        os._exit(code)


def _sendable(error: BaseException) -> BaseException:
    if isinstance(error, ForepropError):
        return error
    return PeerLost("".join(traceback.format_exception(error)))


def _set_environment(node: int, nodes: int, network: Network | None, port: int) -> None:
    """What torchrun would set, with one worker per node."""
    address = network.address(0) if network is not None else "127.0.0.1"
    os.environ.update(
        RANK=str(node),
        LOCAL_RANK="0",
        WORLD_SIZE=str(nodes),
        LOCAL_WORLD_SIZE="1" if network is not None else str(nodes),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )
    if network is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


if __name__ == "__main__":
    main()
    os._exit(0)  # at once: unloading torch takes seconds

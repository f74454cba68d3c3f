"""A cluster in a box: one process per node (or several), each node in a network of its own.

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
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NamedTuple

import psutil

from foreprop.backends.processes import die_with_parent
from foreprop.engine.world import World
from foreprop.errors import ForepropError, PeerLost
from foreprop.tools.run.host import free_port
from foreprop_lab.lab.crosstraffic import PROCESS_NAME, fork_node_traffic, fork_switch_traffic
from foreprop_lab.lab.network import (
    INTERFACE,
    NetworkUnavailable,
    Switch,
    configure_node,
    enter_namespaces,
    enter_own_network,
)
from foreprop_lab.setting.links import Network

Work = Callable[[int, Connection, Any], None]
"""The function, of a module, that each worker runs: ``work(rank, connection, argument)``.

With one worker per node the rank is the node's number.
"""

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

    ``connections`` are by rank, and ranks are counted through the nodes. It is a context manager;
    leaving it ends every process. Raises `NetworkUnavailable`.
    """

    def __init__(
        self,
        work: Work,
        argument: Any,
        *,
        nodes: int,
        network: Network | None,
        workers_per_node: int = 1,
    ) -> None:
        port = free_port() if network is None else _RENDEZVOUS_PORT
        task = pickle.dumps(sys.path)  # where the work's module may be
        task += pickle.dumps((work, argument, network, port, workers_per_node))
        self._workers_per_node = workers_per_node
        self.connections: list[Connection] = []
        theirs: list[Connection] = []
        for _ in range(nodes * workers_per_node):
            ours, their = Pipe()
            self.connections.append(ours)
            theirs.append(their)
        report, their_report = Pipe(duplex=False)
        descriptors = [connection.fileno() for connection in (*theirs, their_report)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "foreprop_lab.lab.cluster", ",".join(map(str, descriptors))],
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
        """The CPU time that all processes of the cluster but cross traffic's have used so far."""
        total = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.name() != PROCESS_NAME:
                        times = process.cpu_times()
                        total += times.user + times.system
        return total

    def ask_all(self, question: object) -> list[Any]:
        """Send every worker the same and collect the answers; raises an error that is an answer."""
        for connection in self.connections:
            with contextlib.suppress(OSError):  # it has ended; what it left to read says why
                connection.send(question)
        answers: dict[int, Any] = {}
        while len(answers) < len(self.connections):
            # those that are there first: a node that has ended raises, whatever others say of it
            missing = [r for r in range(len(self.connections)) if r not in answers]
            ready = wait([self.connections[rank] for rank in missing])
            some = {r: self._answer(r) for r in missing if self.connections[r] in ready}
            answers |= some
            for answer in some.values():
                if isinstance(answer, BaseException):
                    raise answer
        return [answers[rank] for rank in range(len(self.connections))]

    def _answer(self, rank: int) -> Any:
        try:
            return self.connections[rank].recv()
        except (EOFError, OSError) as error:
            node, local = divmod(rank, self._workers_per_node)
            who = f"worker {local} of " * (self._workers_per_node > 1) + f"node {node}"
            raise PeerLost(f"{who} of the lab has ended") from error

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill()  # and with it, by the kernel, whatever still runs below it
        self._process.wait()


@contextlib.contextmanager
def children_start_undisturbed() -> Iterator[None]:
    """Start children in which Ctrl-C waits while they import: they inherit what this thread blocks.

    In this process another thread takes the signal, and Python handles it in the main one.
    """
    resource_tracker.ensure_running()  # starting it would unblock the signal again
    ended = threading.Event()
    taker = threading.Thread(target=ended.wait, name="foreprop-signals", daemon=True)
    taker.start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        ended.set()
        taker.join()


def busy_s() -> float:
    """The CPU time of the whole machine for work that would not make way for the lab's.

    What runs at a lower priority (``nice``) does not keep the lab waiting.
    """
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.nice - getattr(times, "iowait", 0.0))


def main() -> None:
    """Enter the namespaces and fork a child, which is their init, to run the nodes."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller; its end is ours
    *workers, report = (Connection(int(number)) for number in sys.argv[1].split(","))
    sys.path[:] = pickle.load(sys.stdin.buffer)
    work, argument, network, port, workers_per_node = pickle.load(sys.stdin.buffer)
    try:
        if network is not None:
            enter_namespaces()
    except NetworkUnavailable as error:
        report.send(error)
        return
    child = os.fork()
    if child:
        for connection in (*workers, report):
            connection.close()
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    die_with_parent()
    starts = range(0, len(workers), workers_per_node)
    nodes = [workers[start : start + workers_per_node] for start in starts]
    _run_nodes(_Task(work, argument, network, port), nodes, report)


class _Task(NamedTuple):
    """What the cluster's own processes are to do."""

    work: Work
    argument: Any
    network: Network | None
    port: int


def _run_nodes(task: _Task, nodes: Sequence[Sequence[Connection]], report: Connection) -> None:
    """Fork the nodes and join their networks; ``nodes`` are the connections of their workers."""
    network = task.network
    importlib.import_module("torch._dynamo")  # or every node's first optimizer would load it
    try:
        switch = Switch(network) if network is not None else None
        gates = []
        pids = []
        for node in range(len(nodes)):
            gate, theirs = Pipe()
            pid = os.fork()
            if not pid:
                gate.close()
                report.close()
                _close_others(nodes, node)
                _run_node(node, nodes, task, theirs)
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
        if network is not None:
            held = (report, *gates)
            fork_switch_traffic(network, lambda: _close_all(nodes, held))
        report.send(None)
    except (NetworkUnavailable, PeerLost) as error:
        report.send(error)
        return
    report.close()
    _close_others(nodes)
    for pid in pids:
        os.waitpid(pid, 0)


def _close_others(nodes: Sequence[Sequence[Connection]], node: int | None = None) -> None:
    for other, connections in enumerate(nodes):
        for connection in connections if other != node else ():
            connection.close()


def _close_all(nodes: Sequence[Sequence[Connection]], others: Sequence[Connection]) -> None:
    """Close in a child what it must not hold open: others wait for a connection's end."""
    _close_others(nodes)
    for connection in others:
        connection.close()


def _pass(node: int, gate: Connection) -> None:
    """Wait until a node says that it is ready to go on; raises what kept it from that."""
    try:
        failure = gate.recv()
    except EOFError as error:
        raise PeerLost(f"node {node} of the lab has ended") from error
    if failure is not None:
        raise failure


def _run_node(
    node: int, nodes: Sequence[Sequence[Connection]], task: _Task, gate: Connection
) -> None:
    """Run a node and its first worker in this process; does not return."""
    code, network, connection = 1, task.network, nodes[node][0]
    try:
        die_with_parent()
        try:
            if network is not None:
                enter_own_network()
            gate.send(None)
            gate.recv()
            if network is not None:
                configure_node(network, node)
                fork_node_traffic(
                    network, node, lambda: _close_all(nodes[node : node + 1], (gate,))
                )
        except NetworkUnavailable as error:
            gate.send(error)
            os._exit(1)
        gate.send(None)
        gate.close()
        local = _fork_workers(len(nodes[node]))
        connection = nodes[node][local]
        for other in nodes[node]:
            if other is not connection:
                other.close()
        _set_environment(node, local, nodes, task)
        task.work(node * len(nodes[node]) + local, connection, task.argument)
        code = 0
    except EOFError:
        code = 0  # the caller has left
    except BaseException as error:
        with contextlib.suppress(OSError):
            failure = error
            if not isinstance(error, ForepropError):
                failure = PeerLost("".join(traceback.format_exception(error)))
            connection.send(failure)
    finally:
        sys.stderr.flush()
        os._exit(code)


def _fork_workers(count: int) -> int:
    """Fork the node's other workers; returns which of them this process is."""
    for local in range(1, count):
        if not os.fork():
            die_with_parent()
            return local
    return 0


def _set_environment(
    node: int, local: int, nodes: Sequence[Sequence[Connection]], task: _Task
) -> None:
    """Set what torchrun would set, and that nobody else is on this network."""
    network, workers_per_node = task.network, len(nodes[node])
    size = len(nodes) * workers_per_node
    address = network.address(0) if network is not None else "127.0.0.1"
    os.environ.update(
        RANK=str(node * workers_per_node + local),
        LOCAL_RANK=str(local),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(workers_per_node if network is not None else size),
        MASTER_ADDR=address,
        MASTER_PORT=str(task.port),
    )
    if network is not None:
        World.private_network = True
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


if __name__ == "__main__":
    main()
    os._exit(0)  # at once: unloading torch takes seconds

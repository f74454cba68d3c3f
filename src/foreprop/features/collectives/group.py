"""One session's process group: the collectives of its ranks, and the board beside them.

All ranks call the same collectives in the same order. gloo notices a peer whose kernel closes the
connection. For one that is stopped or cut off it would wait until the step's time limit, so
`RingPulses` connects the ranks once more, to send signs of life (`engine.pulses`). The board, on
the job's store, has what collectives cannot say: what a rank waits for, that it is alive, or why
it failed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from foreprop.config import LOGGER, Config
from foreprop.engine.pulses import WorkerPulses
from foreprop.engine.rendezvous import Board, Look, parse_address, session_board, step_board
from foreprop.engine.stream import check_reachable, connect, is_loopback, listen, local_address
from foreprop.engine.world import TimedCall, World
from foreprop.errors import ForepropError, PeerLost, StepTimeout, TransportError
from foreprop.features.collectives.ring_machine import most_collectives

T = TypeVar("T")
_Gloo: Any = ProcessGroupGloo  # torch's annotations lack its methods
_ALIVE_S = 2.0
"""How long a rank that is alive takes to publish that, after a collective has failed."""
_LATE_S = 10.0
"""How long it may take on a busy machine: nobody takes two ranks for gone sooner."""
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""A variable with which a thread waits for a sum, and is told if it has failed, as by gloo."""
_LOOK_S = 0.02
_GRACE_S = 5.0
"""How long after us torch gives up: our message says what was waited for."""

_MEET_S = 5.0
_GREETING_S = 1.0
"""How long a new connection may say nothing before it is closed."""


class Group:
    """Collectives among all ranks of a session, as one rank sees them.

    Sums are of tensors on the CPU, by gloo, or if a ``gpu`` is given, on that, by NCCL.
    """

    def __init__(self, world: World, config: Config) -> None:
        # the board with the time limit of the start
        self.start_board = session_board(world, config)
        # the same keys with the time limit of a step
        self.board = step_board(world, config, self.start_board.key)
        self.rank = world.rank
        self.size = world.size
        self.address = local_address(world.host, config.interface)
        if world.size > world.local_size:
            check_reachable(self.address, world.host, config.interface)
            if world.rank == 0 and not is_loopback(world.host):
                report_open_collectives()
        self._world = world
        self._config = config
        self._group: Any = None
        self._nccl: Any = None
        self._pulses: RingPulses | None = None

    def open(self, session_id: str, gpu: torch.device | None = None) -> None:
        """Meet the other ranks and connect to them; raises what keeps one of them from coming."""
        if self.size > 1 and not self._world.in_process:  # of threads none is stopped alone
            self._pulses = RingPulses(
                self.start_board, self._config, self.rank, self.size, self.address
            )
            self._pulses.tell(lambda *_: self._world.hurry_store())  # whoever has it may be silent
        options = _Gloo._Options()
        options._threads = most_collectives(self._config.chunks_in_flight)
        options._timeout = timedelta(seconds=self._config.step_timeout_s + _GRACE_S)
        try:
            options._devices = [_Gloo.create_device(hostname=self.address)]
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.rank} cannot listen on {self.address}: {_first_line(error)}"
            ) from error
        store = PrefixStore(f"{self.board.key}/gloo", self._world.store)
        self.start_board.meet("arrived")
        if self._pulses is not None:
            self._pulses.meet(session_id)
        limit_s = self._config.join_timeout_s
        try:
            what = f"connecting rank {self.rank} to the others by gloo"
            self._group = within(limit_s, what, lambda: _Gloo(store, self.rank, self.size, options))
        except (dist.DistError, RuntimeError) as error:
            raise TransportError(
                f"rank {self.rank} at {self.address} cannot be connected to the others: {error}"
            ) from error
        if gpu is not None:
            self._nccl = self._open_nccl(gpu)

    def _open_nccl(self, gpu: torch.device) -> Any:
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=self._config.step_timeout_s + _GRACE_S)
        store = PrefixStore(f"{self.board.key}/nccl", self._world.store)
        try:
            with _environment(_BLOCKING_WAIT, "1"):
                group = nccl(store, self.rank, self.size, options)
            group.allreduce([torch.zeros(1, device=gpu)]).wait()  # connects
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.rank} cannot be connected to the others by NCCL: {_first_line(error)};"
                " NCCL_DEBUG=INFO tells more, NCCL_SOCKET_IFNAME names the interface, and"
                " collectives='gloo' does without"
            ) from error
        return group

    # Collectives.
    def sum(self, tensor: torch.Tensor) -> Any:
        """Begin to replace ``tensor`` by its sum over the ranks; returns torch's ``Work``."""
        group = self._opened if self._nccl is None else self._nccl
        return group.allreduce([tensor])

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Make ``tensor``, of any type, layout and device, rank 0's."""
        host = tensor.detach().to("cpu").contiguous()
        its_bytes = host.reshape(-1).view(torch.uint8)  # gloo knows few types
        try:
            self._opened.broadcast(its_bytes, 0).wait()
        except RuntimeError as error:
            raise self.cause(error) from error
        if self.rank:
            with torch.no_grad():
                tensor.copy_(host)

    @property
    def _opened(self) -> Any:
        if self._group is None:
            raise TransportError(f"rank {self.rank} is not connected to the other ranks")
        return self._group

    # Beside the collectives.
    def publish_state(self, text: str) -> None:
        with contextlib.suppress(TransportError):
            self.board.publish(f"state/{self.rank}", text)

    def states(self) -> str:
        """What the other ranks have published by `publish_state`, in words."""
        states = []
        for rank in range(self.size):
            if rank == self.rank:
                continue
            text = "has not said what it waits for: it may be computing, or gone"
            with contextlib.suppress(TransportError):
                found = self.board.peek(f"state/{rank}")
                text = text if found is None else found.decode(errors="replace")
            states.append(f"rank {rank} {text}")
        return "; ".join(states)

    # The end.
    def on_silence(self, lose: Callable[[int, str], object]) -> None:
        """Have ``lose`` called, in a thread, with a rank that is silent, and with that in words."""
        if self._pulses is not None:
            self._pulses.tell(lose)

    def cause(
        self, error: BaseException, awaited: Callable[[], str] = lambda: "the start"
    ) -> ForepropError:
        """Why a collective has failed: what another rank has published, or which one is gone.

        ``awaited`` says what this rank was waiting for.
        """
        started = time.monotonic()
        try:
            self.board.publish(f"alive/{self.rank}", "")
        except TransportError as lost:
            return PeerLost(f"rank {self.rank} {lost}", peer="rank 0")
        try:
            while missing := self._name_gone(self.board.missing("alive")):
                if time.monotonic() > started + (_ALIVE_S if len(missing) == 1 else _LATE_S):
                    break
                self.board.check_failed()
                time.sleep(_LOOK_S)
            self.board.check_failed()
        except ForepropError as failure:
            return failure
        if not missing:
            return TransportError(f"a collective failed on rank {self.rank}: {error}")
        names = " and ".join(f"rank {rank}" for rank in missing)
        verb = "is" if len(missing) == 1 else "are"
        return PeerLost(
            f"{names} {verb} gone: {_first_line(error)}; rank {self.rank} was waiting for"
            f" {awaited()}",
            peer=f"rank {missing[0]}",
        )

    def _name_gone(self, missing: list[int]) -> list[int]:
        """The ranks among the missing whose processes have ended; all, if none is known to have.

        A rank that lives may be missing, too: it may not have met a failing collective yet.
        """
        connected = set() if self._pulses is None else self._pulses.heard.watched()
        return [rank for rank in missing if rank not in connected] or missing

    def await_leaving(self, look: Look) -> None:
        """Return when no rank needs this one any more."""
        if self.size == 1:
            return
        work = self._opened.barrier()
        deadline = time.monotonic() + self._config.step_timeout_s
        try:
            while not work.is_completed():
                look()
                if time.monotonic() > deadline:
                    raise StepTimeout(
                        f"rank {self.rank} is done and waited {self._config.step_timeout_s:g} s"
                        f" (step_timeout_s) for the ranks that have not closed their session:"
                        f" {self.states()}"
                    )
                time.sleep(_LOOK_S / 4)
            work.wait()
        except ForepropError:
            raise
        except RuntimeError as error:
            raise self.cause(error) from error
        finally:
            del work  # gloo's connections last as long, also in the traceback of an error

    def forget_in_child(self) -> None:
        """Drop, in a forked child, what connects the parent to the other ranks."""
        if self._pulses is not None:
            self._pulses.forget_in_child()

    def close(self) -> None:
        if self._pulses is not None:
            self._pulses.close()
        if self._nccl is not None:
            self._nccl.abort()  # nothing is under way, or it never ends
        self._group = self._nccl = None


@functools.cache
def report_open_collectives() -> None:
    """Warn, once per process, that a job of several machines sends in the clear."""
    LOGGER.warning(
        "collectives are torch's: gloo and NCCL connect ranks without authentication and send in"
        " the clear, also where a secret is set. Whoever can reach these machines' ports may read"
        " and change gradients, or take a rank's place: put the machines into a VPN, or use servers"
        " (docs/security.md)"
    )


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].partition(". This is typically")[0]


def within(timeout_s: float, what: str, make: Callable[[], T]) -> T:
    """What ``make`` returns; raises `TransportError` if it takes too long, and leaves it alone."""
    call = TimedCall(make, what)
    threading.Thread(target=call.run, name="foreprop-within", daemon=True).start()
    if not call.done.wait(timeout_s):
        raise TransportError(f"{what} took longer than {timeout_s:g} s")
    if call.error is not None:
        raise call.error
    result: T = call.result
    return result


class RingPulses(WorkerPulses):
    """Signs of life in a ring: a connection from each rank to each other, beside gloo's own.

    A rank listens from the start, and connects when all are known to listen.
    """

    def __init__(self, board: Board, config: Config, rank: int, size: int, address: str) -> None:
        super().__init__(rank, config)
        self._board = board
        self._rank = rank
        self._size = size
        self._listener = listen(address)
        port = self._listener.getsockname()[1]
        board.publish(f"pulses/{rank}", f"{address} {port} {socket.gethostname()}")

    def meet(self, session_id: str) -> None:
        """Connect to the ranks below this one, and await those above it."""
        missing = {rank: self._reach(rank, session_id) for rank in range(self._rank)}
        deadline = time.monotonic() + _MEET_S
        awaited = dict.fromkeys(range(self._rank + 1, self._size), "it has not connected")
        with self._listener:
            while awaited and (left_s := deadline - time.monotonic()) > 0:
                self._listener.settimeout(left_s)
                try:
                    sock, _ = self._listener.accept()
                except TimeoutError:
                    break
                rank = _maybe_greeted_by(sock, session_id)
                if rank in awaited:
                    self._watch(rank, sock, *self._address_of(rank))
                    del awaited[rank]
                else:
                    sock.close()
        for rank, why in {**missing, **awaited}.items():
            if why:
                text = "rank %d will not notice if rank %d falls silent: %s"
                LOGGER.warning(text, self._rank, rank, why)

    def _reach(self, rank: int, session_id: str) -> str:
        """Connect to a rank, or say why it cannot be reached: a collective will notice a loss."""
        where, host = self._address_of(rank)
        try:
            address, port = parse_address(where, f"rank {rank}")
            sock = connect(address, port, timeout_s=_MEET_S)
            sock.sendall(_greeting(session_id, self._rank))
        except (OSError, TransportError) as error:
            return str(error)
        self._watch(rank, sock, where, host)
        return ""

    def _watch(self, rank: int, sock: socket.socket, where: str, host: str) -> None:
        self.add(rank, sock, f"rank {rank} (host {host}) at {where.partition(' ')[0]}")

    def _address_of(self, rank: int) -> tuple[str, str]:
        found = self._board.lookup(f"pulses/{rank}", f"where rank {rank} listens")
        where, _, host = found.rpartition(" ")
        return where, host

    def close(self) -> None:
        self._listener.close()
        super().close()


def _greeting(session_id: str, rank: int) -> bytes:
    return f"{session_id} {rank:08d}".encode()


def _maybe_greeted_by(sock: socket.socket, session_id: str) -> int | None:
    whole = _greeting(session_id, 0)
    sock.settimeout(_GREETING_S)
    try:
        data = sock.recv(len(whole), socket.MSG_WAITALL)
    except OSError:
        return None
    sock.settimeout(None)
    name, _, rank = data.decode(errors="replace").partition(" ")
    known = name == session_id and len(data) == len(whole) and rank.isdecimal()
    return int(rank) if known else None

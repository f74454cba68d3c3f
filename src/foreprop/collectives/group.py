"""One session's process group, and the board beside it."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from foreprop.cluster.rendezvous import Look, session_board, step_board
from foreprop.cluster.world import TimedCall, World
from foreprop.collectives.ringpulses import RingPulses
from foreprop.config import LOGGER, Config
from foreprop.core.ring_machine import most_collectives
from foreprop.errors import ForepropError, PeerLost, StepTimeout, TransportError
from foreprop.link.announced import check_reachable
from foreprop.link.stream import is_loopback, local_address

T = TypeVar("T")
_Gloo: Any = ProcessGroupGloo  # torch's annotations lack its methods
_ALIVE_S = 2.0
"""After a collective has failed, every rank that is alive has published that within this."""
_LATE_S = 10.0
"""A rank on a busy machine may take so long: nobody takes two for gone sooner."""
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""With this a thread waits for a sum, and is told if it has failed, as by gloo."""
_LOOK_S = 0.02
_GRACE_S = 5.0
"""torch gives up so long after we do, whose message says what was waited for."""


class Group:
    """Collectives among all ranks of a session. One rank's view.

    Sums are of tensors on the CPU, by gloo, or if a ``gpu`` is given, on that, by NCCL.
    """

    def __init__(self, world: World, config: Config) -> None:
        self.joining = session_board(world, config)
        """For the start, with its time limit."""
        self.board = step_board(world, config, self.joining.key)
        """The same keys, with the time limit of a step."""
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
        """Meet the other ranks; raises what keeps one of them from coming."""
        if self.size > 1 and not self._world.in_process:  # of threads none is stopped alone
            about = (self.joining, self._config, self.rank, self.size, self.address)
            self._pulses = RingPulses(*about)
            self._pulses.tell(lambda *_: self._world.hurry_store())  # whoever has it may be silent
        options = _Gloo._Options()
        options._threads = most_collectives(self._config.chunks_in_flight)
        options._timeout = timedelta(seconds=self._config.step_timeout_s + _GRACE_S)
        options._devices = [self._device()]
        store = PrefixStore(f"{self.board.key}/gloo", self._world.store)
        self.joining.meet("arrived")
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

    def _device(self) -> Any:
        try:
            return _Gloo.create_device(hostname=self.address)
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.rank} cannot listen on {self.address}: {_first_line(error)}"
            ) from error

    # Collectives: the same ones in the same order on every rank.
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
        """For the others' reports, when nothing goes on."""
        with contextlib.suppress(TransportError):
            self.board.publish(f"state/{self.rank}", text)

    def states(self) -> str:
        """What the other ranks have published of themselves."""
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
        """``lose`` is told which rank is stopped or cut off, and that in words; in a thread."""
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
            while missing := self.board.missing("alive"):
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

    def part(self, look: Look) -> None:
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
        """In a forked child: only the parent is there."""
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
    """Once per process, for a job of several machines."""
    LOGGER.warning(
        "collectives are torch's: gloo and NCCL connect ranks without authentication and send in"
        " the clear, also where a secret is set. Whoever can reach these machines' ports may read"
        " and change gradients, or take a rank's place: put the machines into a VPN, or use servers"
        " (docs/strangers.md)"
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
    """What ``make`` returns; `TransportError` if that takes too long, and it goes on in vain."""
    call = TimedCall(make, what)
    threading.Thread(target=call.run, name="foreprop-within", daemon=True).start()
    if not call.done.wait(timeout_s):
        raise TransportError(f"{what} took longer than {timeout_s:g} s")
    if call.error is not None:
        raise call.error
    result: T = call.result
    return result

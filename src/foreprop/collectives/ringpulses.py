"""Signs of life in a ring: a connection from each rank to each other, beside gloo's own.

gloo notices a peer whose kernel closes the connection. One that is stopped or cut off it waits for,
until the step's time limit. What goes over these connections is `link.pulses`'s.
"""

from __future__ import annotations

import socket
import time

from foreprop.cluster.rendezvous import Board
from foreprop.config import LOGGER, Config
from foreprop.errors import TransportError
from foreprop.link.pulses import WorkerPulses
from foreprop.link.stream import connect, listen
from foreprop.servers.launch import parse_address

_MEET_S = 5.0
_GREETING_S = 1.0
"""A stranger has no longer to say nothing."""


class RingPulses(WorkerPulses):
    """One rank's. It listens from the start, and connects when all are known to listen."""

    def __init__(self, board: Board, config: Config, rank: int, size: int, address: str) -> None:
        super().__init__(rank, config)
        self._board = board
        self._rank = rank
        self._size = size
        self._listener = listen(address)
        port = self._listener.getsockname()[1]
        board.publish(f"pulses/{rank}", f"{address} {port} {socket.gethostname()}")

    def meet(self, session_id: str) -> None:
        """Connect to the ranks before this one, and await those behind it."""
        missing = {rank: self._reach(rank, session_id) for rank in range(self._rank)}
        deadline = time.monotonic() + _MEET_S
        behind = dict.fromkeys(range(self._rank + 1, self._size), "it has not connected")
        with self._listener:
            while behind and (left_s := deadline - time.monotonic()) > 0:
                self._listener.settimeout(left_s)
                try:
                    sock, _ = self._listener.accept()
                except TimeoutError:
                    break
                rank = _greeted_by(sock, session_id)
                if rank in behind:
                    self._watch(rank, sock, *self._where(rank))
                    del behind[rank]
                else:
                    sock.close()
        for rank, why in {**missing, **behind}.items():
            if why:
                text = "rank %d will not notice if rank %d falls silent: %s"
                LOGGER.warning(text, self._rank, rank, why)

    def _reach(self, rank: int, session_id: str) -> str:
        """Why it cannot be reached, if so: if that is a loss, a collective says so."""
        where, host = self._where(rank)
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

    def _where(self, rank: int) -> tuple[str, str]:
        """Address and port as they were published, and the host's name."""
        found = self._board.lookup(f"pulses/{rank}", f"where rank {rank} listens")
        where, _, host = found.rpartition(" ")
        return where, host

    def close(self) -> None:
        """Whoever listens hears no more, and that the connection has ended."""
        self._listener.close()
        super().close()


def _greeting(session_id: str, rank: int) -> bytes:
    return f"{session_id} {rank:08d}".encode()


def _greeted_by(sock: socket.socket, session_id: str) -> int | None:
    """The rank at the other end; None: a stranger."""
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

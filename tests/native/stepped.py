"""The native machines, told the events of `foreprop.core` and answering with its instructions."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from foreprop.core.closing import RanksApart
from foreprop.core.collect import SendSquares, SliceUpdated, UpdateSlice
from foreprop.core.frames import (
    CameAfter,
    Closing,
    CompleteParameter,
    FailSession,
    Finish,
    FrameSent,
    GradientReady,
    InstallValue,
    MessageReady,
    NotifyArrived,
    PeerLeft,
    PrioritiesLearned,
    PullArrived,
    PullsDue,
    PushArrived,
    ReplyArrived,
    SendFrame,
    SlicesGoOn,
    SlicesLost,
    ValueArrived,
    ValuesAwaited,
    ValuesOffered,
)
from foreprop.core.membership import MemberLeft, PeerDropped
from foreprop.core.newcomers import AnswerJoin, JoinAsked, JoinSettled
from foreprop.core.sendqueue import Order, Reply, Turns
from foreprop.core.slicing import Slice
from foreprop.core.takeover import SlicesSettled
from foreprop.errors import InternalError, LocalProtocolError, RemoteProtocolError

_MOST = 100_000
_ERRORS = {-1: LocalProtocolError, -2: RemoteProtocolError, -3: RanksApart, -4: InternalError}
_ORDERS, _REPLIES = ("priority", "fifo"), ("broadcast", "notify", "pull")
FLAGS = "-ffp-contract=off -Wall -Wextra -Wshadow -Wno-missing-field-initializers -Werror".split()


@functools.cache
def library() -> ctypes.CDLL:
    """The machines' headers with a stepping interface, compiled for this run."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    here = Path(__file__).parent
    headers = here.parents[1] / "src/foreprop/engine/native"
    built = Path(tempfile.mkdtemp()) / "stepping.so"
    what = ["-std=c++20", "-O2", "-shared", "-fPIC", *FLAGS, f"-I{headers}", "-o", str(built)]
    subprocess.run([compiler, *what, str(here / "stepping.cpp")], check=True)
    found = ctypes.CDLL(str(built))
    shutil.rmtree(built.parent)
    found.fp_worker_new.restype = found.fp_server_new.restype = ctypes.c_void_p
    return found


def _numbers(*parts: Any) -> ctypes.Array[ctypes.c_int64]:
    flat: list[int] = []
    for part in parts:
        if isinstance(part, list | tuple):
            flat += part
        else:
            flat.append(int(part))
    return (ctypes.c_int64 * len(flat))(*flat)


def _list(each: Sequence[Any]) -> list[int]:
    """A length and the elements, which may be tuples of numbers."""
    found = [len(each)]
    for one in each:
        found += one if isinstance(one, list | tuple) else [one]
    return found


class _Stepped:
    """One machine; what it raises has the other's class and text."""

    _step: Any

    def __init__(self, machine: int) -> None:
        self._machine = ctypes.c_void_p(machine)
        self._out = (ctypes.c_int64 * _MOST)()
        self._text = ctypes.create_string_buffer(4096)

    def handle(self, event: Any) -> list[Any]:
        numbers = _numbers(*self._encoded(event))
        length = self._step(self._machine, numbers, self._out, _MOST, self._text, 4096)
        text = self._text.value.decode()
        if length < 0:
            raise _ERRORS[length](text)
        found, at = [], 0
        while at < length:
            fixed, ranks = (
                self._out[at : at + 13],
                self._out[at + 13 : at + 13 + self._out[at + 12]],
            )
            found.append(_decoded(fixed, tuple(ranks), text))
            at += 13 + len(ranks)
        return found

    def _encoded(self, event: Any) -> list[Any]:
        raise NotImplementedError


def _decoded(fixed: Sequence[int], ranks: tuple[int, ...], text: str) -> Any:
    what, peer, kind, step, slice_, priority, flags, token, *more = fixed
    average, measured, blamed, counted, _ = more
    made = [
        lambda: SendFrame(peer, kind, step, slice_, priority, flags, token),
        lambda: CompleteParameter(slice_, step),
        Finish,
        lambda: UpdateSlice(
            slice_, step, ranks, bool(average), bool(measured), tuple(range(counted))
        ),
        lambda: InstallValue(slice_),
        lambda: SendSquares(step, ()),
        lambda: FailSession(text, blamed, step),
        lambda: MemberLeft(-1, step, slice_, priority),
        lambda: AnswerJoin(-1, step, slice_, priority, bool(flags)),
    ]
    return made[what]()


def _message(code: int, event: MessageReady) -> list[Any]:
    peer, kind, step, priority, slice_, token, flags = event
    return [code, peer, kind, step, priority, slice_, token, flags]


class NativeWorker(_Stepped):
    """In the place of `WorkerMachine`."""

    def __init__(
        self,
        slices: Sequence[Slice],
        *,
        parameters: int,
        order: Order,
        reply: Reply,
        turns: Turns,
        packs: Sequence[Sequence[int]] = (),
        outlives: bool = False,
        window: tuple[Sequence[int], int, int] = ((), 0, 1),
    ) -> None:
        self._step = library().fp_worker_step
        sizes, window_bytes, servers = window
        setting = _numbers(
            _list([(piece.parameter, piece.server) for piece in slices]),
            parameters,
            _ORDERS.index(order),
            _REPLIES.index(reply),
            turns,
            [len(packs), *(number for pack in packs for number in _list(pack))],
            outlives,
            _list(sizes),
            window_bytes,
            servers,
        )
        super().__init__(library().fp_worker_new(setting))

    def __del__(self) -> None:
        library().fp_worker_free(self._machine)

    def counts(self) -> tuple[int, ...]:
        """Frames that are queued, the most that were, and slices that are awaited."""
        out = (ctypes.c_int * 3)()
        library().fp_worker_counts(self._machine, out)
        return tuple(out)

    def is_complete(self, parameter: int) -> bool:
        return bool(library().fp_worker_complete(self._machine, parameter))

    def about(self, slice_: int) -> tuple[int, ...]:
        """Its owner, the round that is claimed of it, whether that left it unchanged."""
        out = (ctypes.c_int64 * 4)()
        library().fp_worker_slice(self._machine, slice_, out)
        return tuple(out)

    def _encoded(self, event: Any) -> list[Any]:
        match event:
            case GradientReady():
                return [0, *event]
            case ValuesOffered():
                return [1]
            case ValuesAwaited(step):
                return [2, step]
            case MessageReady():
                return _message(3, event)
            case FrameSent(peer):
                return [4, peer]
            case ReplyArrived(slice_, step, server, _, flags):
                return [5, slice_, step, server, flags]
            case NotifyArrived():
                return [6, *event]
            case PullsDue():
                return [7]
            case PrioritiesLearned(order):
                return [8, _list(order)]
            case CameAfter(step):
                return [9, step]
            case SlicesLost(server, owners):
                return [10, -1 if server is None else server, _list(list(owners.items()))]
            case SlicesGoOn(rounds):
                return [11, _list([(slice_, *at) for slice_, at in rounds.items()])]
            case Closing():
                return [12]
        raise AssertionError(event)


class NativeServer(_Stepped):
    """In the place of `ServerMachine` with the rule `AllMembers`, or else `FirstMembers`.

    Of whose pushes an update counts it says only how many there are, and of who has left, or asks
    to join, not which rank that is.
    """

    def __init__(
        self,
        slices: Sequence[Slice],
        *,
        index: int,
        workers: int,
        order: Order,
        names: Sequence[str],
        reply: Reply,
        turns: Turns,
        started: int | None = None,
    ) -> None:
        """``started``: so many of the ``workers`` begin, and others may come; None: all stay."""
        self._step = library().fp_server_step
        own = [piece for piece in slices if piece.server == index]
        setting = _numbers(
            index,
            workers,
            workers if started is None else started,
            started is not None,
            _ORDERS.index(order),
            _REPLIES.index(reply),
            turns,
            _list([piece.number for piece in own]),
        )
        text = b"".join(names[piece.parameter].encode() + b"\0" for piece in own)
        super().__init__(library().fp_server_new(setting, text))

    def __del__(self) -> None:
        library().fp_server_free(self._machine)

    def _encoded(self, event: Any) -> list[Any]:
        match event:
            case PushArrived():
                return [0, *event]
            case ValueArrived():
                return [1, *event]
            case PullArrived(rank, slice_, step, priority):
                return [2, rank, slice_, step, priority]
            case SliceUpdated(squares):
                return [3, bool(squares)]
            case FrameSent(peer):
                return [4, peer]
            case MessageReady():
                return _message(5, event)
            case PeerLeft(rank):
                return [6, rank]
            case PeerDropped(rank):
                return [7, rank]
            case JoinAsked(rank, step):
                return [8, rank, step]
            case JoinSettled(rank, step):
                return [9, rank, step]
            case SlicesSettled(pieces, rounds):
                (piece,) = pieces
                return [10, piece.number, *rounds[piece.number]]
        raise AssertionError(event)

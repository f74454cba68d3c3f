"""Probes in torchrun's ranks, which talk through its store: the first rank of each machine.

Rank 0 asks and all others answer. A rank that is not the first of its machine says so and leaves.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from itertools import count

import msgspec
from torch.distributed import DistError

from foreprop.config import LaunchInfo
from foreprop.engine.rendezvous import Board
from foreprop.engine.world import World, current_world
from foreprop.errors import ForepropError, PeerLost, StepTimeout
from foreprop.tools.doctor.examine import Panel, Questions, examine
from foreprop.tools.doctor.probe import Probe
from foreprop.tools.doctor.records import (
    Answer,
    Command,
    End,
    Examination,
    Examined,
    Failure,
    decode_answer,
    decode_command,
)

_SILENCE_S = 600.0
"""How long a probe waits for rank 0, which asks every machine again long before."""
_END_S = 5.0


class Present(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank says of itself as soon as it is there."""

    rank: int
    local_rank: int
    hostname: str


def _board(world: World) -> Board:
    return Board(world, "doctor", timeout_s=_SILENCE_S, report_s=float("inf"), look=lambda: None)


def _publish(board: Board, key: str, record: msgspec.Struct) -> None:
    board.publish(key, msgspec.json.encode(record).decode())


def attend(world: World, info: LaunchInfo, hostname: str) -> None:
    """Answer, on a rank other than 0, until rank 0 ends it; raises `PeerLost`."""
    here = Present(rank=world.rank, local_rank=info.local_rank, hostname=hostname)
    board = _board(world)
    _publish(board, f"present/{world.rank}", here)
    if info.local_rank != 0:
        return
    probe = Probe()
    try:
        for number in count():
            key = f"{world.rank}/{number}"
            try:
                text = board.lookup(f"command/{key}", "rank 0's next question")
            except StepTimeout as error:
                why = f"foreprop doctor: {error}; rank 0 may have died"
                raise PeerLost(why, peer="rank 0") from error
            command = decode_command(text.encode())
            if isinstance(command, End):
                _publish(board, f"ended/{world.rank}", command)
                return
            _publish(board, f"answer/{key}", probe.answer(command))
    finally:
        probe.close()


def gather_present(world: World, wait_s: float) -> tuple[list[Present], list[int]]:
    """The ranks that are there, and those that did not come in time; for rank 0."""
    found, missing, board = [], [], _board(world)
    deadline_s = time.monotonic() + wait_s
    for rank in range(1, world.size):
        try:
            left_s = max(0.0, deadline_s - time.monotonic())
            data = board.lookup(f"present/{rank}", f"rank {rank}", timeout_s=left_s)
            found.append(msgspec.json.decode(data, type=Present))
        except StepTimeout:
            missing.append(rank)
    return found, missing


class RanksPanel(Panel):
    """The probes of the first ranks ``ranks``, by host, as rank 0 on host 0 sees them."""

    def __init__(self, world: World, ranks: list[int]) -> None:
        super().__init__()
        self._board = _board(world)
        self._ranks = ranks
        self._asked = [0] * len(ranks)
        self._probe = Probe()

    def __exit__(self, *_: object) -> None:
        self._probe.close()
        others = [h for h in range(1, len(self._ranks)) if h not in self.failures]
        deadline_s = time.monotonic() + _END_S
        try:
            for host in range(1, len(self._ranks)):
                self._publish(host, End())
            for host in others:  # the store may end with this process: let them read it
                left_s = max(0.0, deadline_s - time.monotonic())
                rank = self._ranks[host]
                self._board.lookup(f"ended/{rank}", f"rank {rank}", timeout_s=left_s)
        except (ForepropError, DistError, RuntimeError):
            pass  # who is gone need not know

    def _publish(self, host: int, command: Command) -> str:
        key = f"{self._ranks[host]}/{self._asked[host]}"
        self._asked[host] += 1
        _publish(self._board, f"command/{key}", command)
        return key

    def ask(self, commands: Mapping[int, Command], *, within_s: float) -> dict[int, Answer]:
        deadline_s = time.monotonic() + within_s
        keys = {h: self._publish(h, command) for h, command in commands.items() if h}
        answers: dict[int, Answer] = {}
        if 0 in commands:
            answers[0] = self._probe.answer(commands[0])
        for host, key in keys.items():
            left_s = max(0.1, deadline_s - time.monotonic())
            try:
                what = f"the answer of rank {self._ranks[host]}"
                data = self._board.lookup(f"answer/{key}", what, timeout_s=left_s)
                answers[host] = decode_answer(data.encode())
            except StepTimeout:
                text = f"no answer within {within_s:g} s"
                self.failures[host] = Failure(kind="silent", text=text)
            except msgspec.MsgspecError as error:
                text = f"its answer cannot be read ({error})"
                self.failures[host] = Failure(kind="other_version", text=text)
        return answers


def examine_ranks(
    info: LaunchInfo, say: Callable[[str], None], *, seconds: float, wait_s: float
) -> Examination | None:
    """Examine the machines of torchrun's ranks; None on all ranks but rank 0."""
    world, hostname = current_world(), socket.gethostname()
    if world.rank != 0:
        attend(world, info, hostname)
        return None
    present, missing = gather_present(world, wait_s)
    others = [rank for rank in present if rank.local_rank == 0]
    firsts = [0, *(rank.rank for rank in others)]
    names = [hostname, *(rank.hostname for rank in others)]
    bounds = [*firsts[1:], world.size]
    asked = Questions(
        names=tuple(f"{name} (rank {rank})" for name, rank in zip(names, firsts, strict=True)),
        workers=tuple(end - start for start, end in zip(firsts, bounds, strict=True)),
        rendezvous=info.master_address,
        look_up=(info.master_address,),
        serve_rendezvous=False,  # it is there: the ranks have met
        environments=({},) * len(firsts),
        seconds=seconds,
        wait_s=wait_s,
    )
    with RanksPanel(world, firsts) as panel:
        found = examine(panel, asked, say)
    text = f"it has not come to the rendezvous within {wait_s:g} s"
    absent = [
        Examined(name=f"rank {rank}", failure=Failure(kind="silent", text=text)) for rank in missing
    ]
    return msgspec.structs.replace(found, hosts=[*found.hosts, *absent])

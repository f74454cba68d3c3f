"""A worker of an elastic session that may have to die, and the same by plain arithmetic.

``PLAN`` is a JSON object (`Plan`), ``RESULTS`` a folder. A worker that has to die does so by
SIGKILL, and writes down when: somewhere in the backward pass or some milliseconds after, or when a
part of a push has left.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.core.membership import CountedReplay
from foreprop.core.slicing import Slice
from foreprop.core.wire import Kind
from foreprop.engine.connection import Connection
from foreprop.engine.stream import SocketStream
from tests.process.forked import end_process

SLICE_ELEMS = 3000
PARAMETERS = 6
"""Of the model."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    steps: int = 30
    pause_s: float = 0.0
    deaths: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    """By rank: in which step, at which parameter's gradient, and how many seconds after that."""
    cuts: dict[str, tuple[int, int, int, float]] = field(default_factory=dict)
    """By rank: in which step, to which server, how many whole pushes have left before it dies, and
    what share of the next one."""
    reply_cuts: dict[str, tuple[int, int, int, float]] = field(default_factory=dict)
    """The same of the server beside it, to which rank, of its replies (`node_script`)."""
    stops: dict[str, int] = field(default_factory=dict)
    """By rank: before which step it stops itself, as Ctrl-Z would."""
    awaits: int = 0
    """Before this step who was there at the start waits for somebody who joins."""
    every: int = 0
    """So many steps from one checkpoint to the next; 0: there are none."""
    settings: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @property
    def victims(self) -> list[int]:
        return sorted(map(int, {*self.deaths, *self.cuts, *self.reply_cuts}))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8)
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(8, 32, generator=generator)
    return F.mse_loss(model(x), x[:, :8] * (rank + 1))


def weights_hash(model: nn.Module) -> str:
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    return hashlib.sha256(weights).hexdigest()


def main() -> None:
    plan = Plan(**json.loads(os.environ["PLAN"]))
    rank = int(os.environ["RANK"])
    result: dict[str, Any] = {"pid": os.getpid()}
    try:
        train(plan, rank, result)
    except BaseException as error:
        result |= {"error": type(error).__name__, "message": str(error)}
        raise
    finally:
        write(rank, result)


def write(rank: int, result: Mapping[str, Any]) -> None:
    (Path(os.environ["RESULTS"]) / f"rank-{rank}.json").write_text(json.dumps(result))


def train(plan: Plan, rank: int, result: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    model, optimizer = build()
    about: Any = {"elastic": True, "slice_elems": SLICE_ELEMS, **plan.settings}
    if str(rank) in plan.cuts.keys() | plan.reply_cuts.keys():
        about["plane"] = "python"  # which sends its frames itself
    saved = Path(os.environ["RESULTS"]) / "checkpoints" if plan.every else None
    session = foreprop.parallelize(model, optimizer, resume=saved, **about)
    assert isinstance(session, foreprop.Session)
    pieces = session._training.backends.engines[0].slices  # type: ignore[attr-defined]
    result["pieces"] = [list(piece) for piece in pieces]
    ended_s: list[float] = []
    result["ended_s"] = ended_s
    die_at, number, after_s = plan.deaths.get(str(rank), (0, 0, 0.0))
    if str(rank) in plan.cuts:
        cut_frame(Kind.PUSH, *plan.cuts[str(rank)], lambda: die(rank, result))
    write(rank, {"began_s": time.monotonic()})
    joined = threading.Event()
    notices = session._training.backends.all[0].members.notices  # type: ignore[attr-defined]
    notices.view.on_membership.append(lambda *_: notices.arrivals and joined.set())
    result["joined_at"] = session.joined_at
    loop = None if saved is None else foreprop.checkpoint(saved, every=plan.every)
    done = (session.joined_at or 1) - 1 if loop is None else loop.step
    for step in range(done + 1, plan.steps + 1):
        if step == plan.awaits and session.joined_at is None:
            assert joined.wait(60), "nobody has joined"
        if step == die_at:
            timer = threading.Timer(after_s, die, (rank, result))
            timer.daemon = True
            [*model.parameters()][number].register_hook(lambda _, timer=timer: timer.start())
        if plan.stops.get(str(rank)) == step:
            write(rank, {"stopped": True})
            os.kill(os.getpid(), signal.SIGSTOP)
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        [parameter.sum() for parameter in model.parameters()]  # the step is done when it is here
        ended_s.append(time.monotonic())
        if loop is not None:
            loop.end_step()
        if plan.pause_s:
            time.sleep(plan.pause_s)
        if step == die_at:
            time.sleep(60)  # until the timer comes
    session.close()
    result["stats"] = {"left": {str(r): v for r, v in session.stats()["left"].items()}}
    result["sha256"] = weights_hash(model)


def die(rank: int, result: Mapping[str, Any]) -> None:
    write(rank, {**result, "died_s": time.monotonic()})
    os.kill(os.getpid(), signal.SIGKILL)


def cut_frame(
    kind: Kind, step: int, peer: int, place: int, share: float, die: Callable[[], object]
) -> None:
    """This process will die when this share of a frame's bytes has left.

    The frame is the one with this place, from 0, among those of the kind and step to this peer.
    """
    send, send_bytes = Connection.send, SocketStream.send
    place_of, due = itertools.count(), set[int]()

    def look(self: Connection, kind_: int, flags: int, step_: int, *about: Any) -> None:
        is_like_it = (kind_, step_, self.number) == (kind, step, peer)
        if is_like_it and next(place_of) == place:
            due.add(threading.get_ident())
        send(self, kind_, flags, step_, *about)

    def cut(self: SocketStream, header: bytes, payload: memoryview) -> None:
        if threading.get_ident() not in due:
            send_bytes(self, header, payload)
            return
        whole = header + bytes(payload)
        send_bytes(self, whole[: int(share * len(whole))], memoryview(b""))
        die()

    Connection.send, SocketStream.send = look, cut  # type: ignore[method-assign]


def by_arithmetic(
    workers: int, steps: int, pieces: Sequence[Slice], counted: Sequence[CountedReplay]
) -> str:
    """The hash that whoever is left has to have; ``counted`` is by server."""
    torch.set_num_threads(1)
    model, optimizer = build()
    for group in optimizer.param_groups:
        group["foreach"] = False
    parameters = list(model.parameters())
    for step in range(1, steps + 1):
        sets = [counted[piece.server].at(piece.number, step) for piece in pieces]
        gradients = {
            rank: torch.autograd.grad(loss_of(model, rank, step), parameters)
            for rank in range(workers)
            if any(rank in ranks for ranks in sets)
        }
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for piece, ranks in zip(pieces, sets, strict=True):
            part = slice(piece.start_elems, piece.stop_elems)
            total = gradients[ranks[0]][piece.parameter].reshape(-1)[part].clone()
            for rank in ranks[1:]:
                total += gradients[rank][piece.parameter].reshape(-1)[part]
            grad = parameters[piece.parameter].grad
            assert grad is not None
            grad.view(-1)[part] = total / len(ranks) if len(ranks) > 1 else total
        optimizer.step()
    return weights_hash(model)


if __name__ == "__main__":
    main()
    end_process()

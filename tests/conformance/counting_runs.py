"""Sessions with dedicated servers in threads, deaths on purpose, and the same by arithmetic."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from foreprop.cluster.seal import make_seal, open_entry
from foreprop.cluster.world import World
from foreprop.config import Config
from foreprop.core.membership import CountedReplay
from foreprop.core.slicing import Slice
from foreprop.link.stream import listen
from foreprop.servers.dedicated import PublishedSession, dedicated_key
from foreprop.servers.main import ThreadServer, build_server
from foreprop.servers.processes import ServerTask
from tests.conformance.parity import Batch, Build, build_seeded, snapshot

SERVERS = 2
ELASTIC: dict[str, Any] = {
    "elastic": True,
    "architecture": "ps",
    "dedicated_servers": SERVERS,
    "slice_elems": 10,
    "step_timeout_s": 30.0,
}


class Died(Exception):
    """A rank's process would be gone."""


@contextlib.contextmanager
def dedicated(world: World, **own: Any) -> Iterator[list[ThreadServer]]:
    """On rank 0: what `foreprop server` does, for one session, with threads; ``own``: its settings.

    Gives the servers, and returns when they have ended.
    """
    if world.rank:
        yield []
        return
    secret = own.get("secret_file")
    seal = None if secret is None else make_seal(secret, "raw", "a server")
    servers: list[ThreadServer] = []
    ended = threading.Event()

    def serve() -> None:
        store: Any = world.raw_store
        key = dedicated_key(1)
        while not store.check([key]):
            if ended.wait(0.005):
                return
        entry = open_entry(seal, key, bytes(store.get(key)), "a server")
        published = msgspec.json.decode(entry or b"", type=PublishedSession)
        timeouts = {name: published.config[name] for name in ("step_timeout_s", "stall_report_s")}
        config = Config(**timeouts, **own)
        for index in range(published.servers):
            task = ServerTask(
                index=index,
                session_id=published.session_id,
                world_size=published.world_size,
                config={},
                node=None,
                workers_per_node=published.workers_per_node,
                shares_node=False,
            )
            listener = listen("127.0.0.1", None)
            address, port = listener.getsockname()[:2]
            servers.append(ThreadServer(build_server(task, config), listener))
            name, place = f"{key}/server/{index}", f"{address} {port}"
            store.set(name, place if seal is None else seal.sign(name, place))

    thread = threading.Thread(target=serve, name="dedicated")
    thread.start()
    try:
        yield servers
    finally:
        ended.set()
        thread.join()
        for server in servers:
            server.finish(kill_after_s=30.0, report=lambda: None)


def newcomers_world(rank: int, size: int) -> World:
    """With a store of its own: nobody else's is there any more."""
    store = dist.HashStore()
    about: dict[str, Any] = {"store": store, "raw_store": store, "in_process": True}
    return World(rank=rank, size=size, local_size=1, host="127.0.0.1", **about)


def die(session: Any) -> None:
    """As if the process were killed: its connections end without a word."""
    for engine in session._training.backends.engines:
        for connection in engine.connections:
            connection.stream.close()
    raise Died


def pieces_of(session: Any) -> list[Slice]:
    return list(session._training.backends.engines[0].slices)


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    x, y = batch
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def counted_in(folder: Path, workers: int, pieces: Sequence[Slice]) -> list[CountedReplay]:
    """By server."""
    found = []
    for index in range(max(piece.server for piece in pieces) + 1):
        (path,) = folder.glob(f"server-{index}.*.counted")
        own = [piece.number for piece in pieces if piece.server == index]
        found.append(CountedReplay(path.read_text().splitlines(), workers, own))
    return found


def by_arithmetic(
    build: Build,
    by_rank: Sequence[Sequence[Batch]],
    pieces: Sequence[Slice],
    counted: Sequence[CountedReplay],
) -> dict[str, torch.Tensor]:
    """One process: each slice's gradients of those who were counted, in rank order, averaged."""
    return trained_by_arithmetic(build, by_rank, pieces, counted)[0]


def trained_by_arithmetic(
    build: Build,
    by_rank: Sequence[Sequence[Batch]],
    pieces: Sequence[Slice],
    counted: Sequence[CountedReplay],
    *,
    passes: int = 1,
    wire: torch.dtype = torch.float32,
    before_step: Callable[[nn.Module], object] = lambda model: None,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The model's and the optimizer's state; ``passes``: parts of a batch, which are added up."""
    model, optimizer = build_seeded(build)
    for group in optimizer.param_groups:
        group["foreach"] = False
    parameters = list(model.parameters())
    for step in range(1, len(by_rank[0]) + 1):
        gradients = []
        for batches in by_rank:
            model.zero_grad()
            for x, y in parts_of(batches[step - 1], passes):
                F.cross_entropy(model(x), y).backward()
            own = [p.grad.to(wire).float().reshape(-1) for p in parameters if p.grad is not None]
            gradients.append(own)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for piece in pieces:
            ranks = counted[piece.server].at(piece.number, step)
            part = slice(piece.start_elems, piece.stop_elems)
            total = gradients[ranks[0]][piece.parameter][part].clone()
            for rank in ranks[1:]:
                total += gradients[rank][piece.parameter][part]
            if len(ranks) > 1:
                total /= len(ranks)
            grad = parameters[piece.parameter].grad
            assert grad is not None
            grad.view(-1)[part] = total.to(wire)
        before_step(model)
        optimizer.step()
    return snapshot(model.state_dict()), snapshot(optimizer.state_dict())


def parts_of(batch: Batch, passes: int) -> list[Batch]:
    return list(zip(*(each.chunk(passes) for each in batch), strict=True))


def wait_for(event: threading.Event) -> None:
    assert event.wait(60), "it has not come"

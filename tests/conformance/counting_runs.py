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

import foreprop
from foreprop.backends.composed import build_server
from foreprop.backends.dedicated import PublishedSession, dedicated_key
from foreprop.backends.processes import ServerTask, ThreadServer
from foreprop.config import Config
from foreprop.core.codec import Place
from foreprop.core.membership import CountedReplay
from foreprop.core.slicing import Shard, Slice
from foreprop.engine.secret import Seal, load_key
from foreprop.engine.stream import listen
from foreprop.engine.world import World, open_entry
from foreprop.errors import PeerLost
from foreprop.features.compression.codecs import make
from tests.cluster import run_cluster
from tests.conformance.parity import Batch, Build, batches_of, build_seeded, snapshot, with_sgd

SERVERS = 2
ELASTIC: dict[str, Any] = {
    "elastic": True,
    "architecture": "ps",
    "dedicated_servers": SERVERS,
    "slice_elems": 10,
    "step_timeout_s": 30.0,
}


BACKUPS: dict[str, Any] = {
    "architecture": "p2p",
    "backup_workers": 1,
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
    seal = None if secret is None else Seal(load_key(secret), "raw", "a server")
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


Piece = Slice | Shard


def pieces_of(session: Any) -> list[Piece]:
    """What servers count: slices, and shards of tables."""
    engine = session._training.backends.engines[0]
    return [*engine.slices, *engine.shards]


def part_of(piece: Piece, whole: torch.Tensor, servers: int) -> torch.Tensor:
    """A view of a parameter's, or a gradient's."""
    if isinstance(piece, Slice):
        return whole.view(-1)[piece.start_elems : piece.stop_elems]
    return whole[piece.server :: servers]


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    x, y = batch
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def counted_in(folder: Path, workers: int, pieces: Sequence[Piece]) -> list[CountedReplay]:
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
    pieces: Sequence[Piece],
    counted: Sequence[CountedReplay],
) -> dict[str, torch.Tensor]:
    """One process: each slice's gradients of those who were counted, in rank order, averaged."""
    return trained_by_arithmetic(build, by_rank, pieces, counted)[0]


def trained_by_arithmetic(
    build: Build,
    by_rank: Sequence[Sequence[Batch]],
    pieces: Sequence[Piece],
    counted: Sequence[CountedReplay],
    *,
    passes: int = 1,
    wire: torch.dtype = torch.float32,
    codec: str = "none",
    before_step: Callable[[nn.Module], object] = lambda model: None,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The model's and the optimizer's state; ``passes``: parts of a batch, which are added up.

    ``codec``: of pushes. Each rank keeps what it leaves out of those that count.
    """
    pushes = Pushes(codec)
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
            own = [p.grad for p in parameters if p.grad is not None]
            dense = [g.coalesce().to_dense() if g.is_sparse else g for g in own]
            gradients.append([g.to(wire).float() for g in dense])
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for piece in pieces:
            ranks = counted[piece.server].at(piece.number, step)
            own = [
                pushes.decoded(
                    part_of(piece, its[piece.parameter], len(counted)), piece, rank, step
                )
                for rank, its in enumerate(gradients)
                if rank in ranks
            ]
            total = own[0].clone()
            for gradient in own[1:]:
                total += gradient
            if len(ranks) > 1:
                total /= len(ranks)
            grad = parameters[piece.parameter].grad
            assert grad is not None
            part_of(piece, grad, len(counted)).copy_(total.to(wire))
        before_step(model)
        optimizer.step()
    return snapshot(model.state_dict()), snapshot(optimizer.state_dict())


class Pushes:
    """Of codes what servers make, with a residual of each rank and slice."""

    def __init__(self, codec: str) -> None:
        self._codec = None if codec == "none" else make(codec)
        self.states: dict[tuple[int, int], Any] = {}

    def decoded(self, gradient: torch.Tensor, piece: Slice, rank: int, step: int) -> torch.Tensor:
        codec = self._codec
        if codec is None or codec.most_bytes(piece.elems) >= gradient.nbytes:
            return gradient
        place = Place(step, piece.number, rank)
        key = rank, piece.number
        if key not in self.states:
            self.states[key] = codec.new_state(piece.elems)
        out = torch.empty(piece.elems)
        codec.decode(codec.encode(gradient.contiguous(), self.states[key], place), out, place)
        return out


def parts_of(batch: Batch, passes: int) -> list[Batch]:
    return list(zip(*(each.chunk(passes) for each in batch), strict=True))


def wait_for(event: threading.Event) -> None:
    assert event.wait(60), "it has not come"


def session_of(world: World, model: Any, optimizer: Any, **settings: Any) -> Any:
    return foreprop.parallelize(model, optimizer, world=world, **settings)


def lose_one(
    folder: Path,
    victim: int,
    step: int,
    layer: int | None,
    build: Any = None,
    by_rank: Any = None,
    **settings: Any,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Rank ``victim`` dies in a step's backward pass at a layer, or after the step.

    Returns what each rank has in the end, its stats, and the session's slices.
    """
    build = build or with_sgd()
    by_rank = by_rank or batches_of(3, count=6)
    pieces: list[Any] = []
    stats: list[Any] = [None] * 3

    def work(world: World) -> Any:
        model, optimizer = build_seeded(build, seed=world.rank)
        try:
            with dedicated(world, counted_log=str(folder)):
                with session_of(world, model, optimizer, **{**ELASTIC, **settings}) as session:
                    pieces[:] = pieces_of(session)
                    for number, batch in enumerate(by_rank[world.rank], 1):
                        if world.rank == victim and number == step and layer is not None:
                            model[layer].weight.register_hook(lambda _: die(session))
                        make_step(model, optimizer, batch)
                        if world.rank == victim and number == step and layer is None:
                            session.flush()
                            die(session)
                    found = snapshot(model.state_dict())
                stats[world.rank] = session.stats()
                return found
        except (Died, PeerLost):
            return None

    found = run_cluster(3, work)
    assert found[victim] is None, "nobody has died"
    return found, stats, pieces


def late_run(
    folder: Path,
    build: Any = None,
    by_rank: Any = None,
    *,
    norms: list[list[float]] | None = None,
    **settings: Any,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Of three, rank 2 makes its second step when the others have made four; then all go on.

    ``norms``: of each rank's steps, to be noted.
    """
    build = build or with_sgd()
    by_rank = by_rank or batches_of(3, count=8)
    ahead = [threading.Event(), threading.Event()]
    pieces: list[Any] = []
    stats: list[Any] = [None] * 3

    def work(world: World) -> Any:
        model, optimizer = build_seeded(build, seed=world.rank)
        about = {**BACKUPS, "counted_log": str(folder), **settings}
        with session_of(world, model, optimizer, **about) as session:
            pieces[:] = pieces_of(session)
            for number, batch in enumerate(by_rank[world.rank], 1):
                if world.rank == 2 and number == 2:
                    for event in ahead:
                        wait_for(event)
                make_step(model, optimizer, batch)
                if norms is not None:
                    norms[world.rank].append(session.grad_norm)
                if world.rank < 2 and number == 4:
                    [parameter.sum() for parameter in model.parameters()]  # it is all there
                    ahead[world.rank].set()
            session.flush()
            found = snapshot(model.state_dict())
        stats[world.rank] = session.stats()
        return found

    return run_cluster(3, work), stats, pieces

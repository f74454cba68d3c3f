"""Raw ends of the wire around a real relay: the workers of its node, and its server."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from foreprop.backends.composed import ServerComposer
from foreprop.config import Config
from foreprop.core.manifest import Manifest
from foreprop.core.wire import Kind
from foreprop.engine.stream import SocketStream, listen
from foreprop.errors import Failure
from foreprop.features.nodes.relay import Relay
from tests.faults.wire_peers import GROUP, SESSION, Client, FakeServer, gradient, manifest_of

MANIFEST = manifest_of(world_size=4, workers_per_push=2)


@dataclass
class Node:
    """Ranks 2 and 3, their relay, and the far end of its way to server 0."""

    relay: Relay
    workers: list[Client]
    server: FakeServer
    failures: list[Failure | None] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def make_a_step(self) -> None:
        for slice_ in range(2):
            for worker in self.workers:
                worker.send(Kind.PUSH, gradient(1.0), step=1, slice_=slice_)
            assert self.server.expect(Kind.PUSH) == gradient(2.0)
            self.server.send(Kind.REPLY, gradient(7.0), step=1, slice_=slice_)
            for worker in self.workers:
                assert worker.expect(Kind.REPLY) == gradient(7.0)


@contextlib.contextmanager
def node(manifest: Manifest = MANIFEST) -> Iterator[Node]:
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    near, far = socket.socketpair()
    relay = Relay(
        why_not=ServerComposer().why_not,
        server=0,
        server_name="server 0",
        node=1,
        first_rank=2,
        session_id=SESSION,
        config=Config(join_timeout_s=20.0, step_timeout_s=10.0),
        upstream=SocketStream(near, "server 0"),
    )
    made = Node(relay, [], FakeServer(far, 0))

    def run() -> None:
        made.failures.append(relay.run(listener))
        made.ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        made.workers += [Client(port, rank) for rank in (2, 3)]
        for worker in made.workers:
            worker.hello(manifest)
        made.server.expect(Kind.MANIFEST)
        made.server.send(Kind.WELCOME)
        for worker in made.workers:
            worker.expect(Kind.WELCOME)
            worker.send(Kind.HYPERPARAMETERS, msgspec.json.encode((GROUP,)), step=1)
        made.server.expect(Kind.HYPERPARAMETERS)
        for slice_ in range(2):
            made.server.send(Kind.REPLY, gradient(0.0), slice_=slice_)
            for worker in made.workers:
                worker.expect(Kind.REPLY)
        yield made
    finally:
        for client in (*made.workers, made.server):
            client.close()
        relay.end()
        thread.join(60)
        assert not thread.is_alive(), "the relay hangs"

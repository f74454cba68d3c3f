"""Raw ends of the wire: a real server to be talked to badly, and a fake one to talk badly."""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch

from foreprop.backends.composed import ServerComposer
from foreprop.backends.composedworker import add_features, features_of
from foreprop.config import Config
from foreprop.core.authentication import NONCE_BYTES, Channel, ConnectingSide, Subject
from foreprop.core.manifest import Manifest, OptimizerInfo, ParameterInfo
from foreprop.core.wire import HEADER_BYTES, Header, Kind, decode_header, encode_header, sealed
from foreprop.engine.connection import greeting
from foreprop.engine.encrypted import EncryptedStream
from foreprop.engine.secret import load_key, prove
from foreprop.engine.server import Server
from foreprop.engine.stream import SocketStream, listen, load_checksum
from foreprop.engine.worker import WorkerEngine
from foreprop.errors import Failure, decode_failure
from foreprop.features.compression.pushcodecs import PushCodecs
from foreprop.version import __version__

SESSION = "a-session"
HANGS_S = 60.0
"""Who has not answered by then never will."""
ELEMS = 6
GROUP = {"lr": 0.5, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
GROUP |= {"maximize": False, "differentiable": False}


def manifest_of(world_size: int = 2, servers: int = 1, **changes: Any) -> Manifest:
    """Two parameters of six float32; a slice each; both on server 0 if there is one."""
    made = Manifest(
        foreprop=__version__,
        torch=torch.__version__.partition("+")[0],
        byteorder=sys.byteorder,
        session=SESSION,
        world_size=world_size,
        knobs=Config().knobs(servers),
        optimizer=OptimizerInfo(name="SGD", groups=(GROUP,)),
        parameters=tuple(
            ParameterInfo(name=name, shape=(ELEMS,), dtype="float32", group=0) for name in "ab"
        ),
        blob_bytes=(8,),
    )
    return msgspec.structs.replace(made, **changes)


def frame(
    kind: int,
    flags: int,
    rank: int,
    step: int,
    slice_: int,
    priority: int,
    payload: bytes = b"",
    says_bytes: int | None = None,
) -> bytes:
    """As it is sent, its checks included; it may say that more or less follows."""
    said = len(payload) if says_bytes is None else says_bytes
    header = encode_header(kind, flags, rank, step, slice_, priority, said)
    return sealed(header, payload, load_checksum()) + payload


class Client:
    """A worker's side of one connection, or a stranger's."""

    def __init__(self, port: int, rank: int = 0, *, buffer_bytes: int | None = None) -> None:
        self.sock = socket.socket()
        if buffer_bytes is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self.sock.settimeout(HANGS_S)
        self.sock.connect(("127.0.0.1", port))
        self.rank = rank

    def send(
        self,
        kind: int,
        payload: bytes = b"",
        *,
        step: int = 0,
        slice_: int = 0,
        flags: int = 0,
        rank: int | None = None,
        says_bytes: int | None = None,
    ) -> None:
        said = len(payload) if says_bytes is None else says_bytes
        sender = self.rank if rank is None else rank
        self.raw(frame(kind, flags, sender, step, slice_, 0, payload, said))

    def raw(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.sock.sendall(data)

    def authenticate(
        self,
        secret_file: str,
        session: str = SESSION,
        target: str = "server 0",
        *,
        encrypted: bool = False,
    ) -> Channel:
        """As a worker that has the job's secret."""
        subject, nonce = Subject(session, target, encrypted), secrets.token_bytes(NONCE_BYTES)
        side = ConnectingSide(load_key(secret_file), subject, self.rank, nonce)
        prove(self.sock, side, time.monotonic() + HANGS_S, lambda: None)
        self.sock.settimeout(HANGS_S)
        return side.channel

    def encrypt(self, channel: Channel, config: Config) -> None:
        """After the greeting."""
        self.sock = EncryptedSocket(self.sock, channel, config)  # type: ignore[assignment]

    def hello(self, manifest: Manifest | None = None) -> None:
        manifest = manifest or manifest_of()
        self.greet(manifest.session)
        self.send(Kind.MANIFEST, manifest.encode())

    def greet(self, session: str = SESSION) -> None:
        self.raw(greeting(session, self.rank))

    def receive(self) -> tuple[Header, bytes] | None:
        """The next frame; None at the connection's end."""
        try:
            head = self._exactly(HEADER_BYTES)
            if head is None:
                return None
            header = decode_header(head)
            return header, self._exactly(header.payload_bytes) or b""
        except ConnectionResetError:
            return None

    def _exactly(self, size: int) -> bytes | None:
        data = b""
        while len(data) < size:
            more = self.sock.recv(size - len(data))
            if not more:
                return None
            data += more
        return data

    def expect(self, kind: Kind) -> bytes:
        frame = self.receive()
        assert frame is not None, f"closed instead of {kind.name}"
        assert frame[0].kind == kind, (Kind(frame[0].kind).name, frame[1][:300])
        return frame[1]

    def expect_failure(self) -> Failure:
        while True:  # replies that were under way may come first
            frame = self.receive()
            assert frame is not None, "closed without a word"
            if frame[0].kind == Kind.FAILURE:
                return decode_failure(frame[1])

    def expect_end(self) -> None:
        while self.receive() is not None:
            pass

    def expect_closed(self) -> None:
        """The same, whatever comes before."""
        with contextlib.suppress(ConnectionResetError):
            while self.sock.recv(4096):
                pass

    def close(self) -> None:
        self.sock.close()


class EncryptedSocket:
    """What a client needs of a socket."""

    def __init__(self, sock: socket.socket, channel: Channel, config: Config) -> None:
        self._stream = EncryptedStream(sock, "server 0", channel, config, accepts=False)
        self.close = self._stream.close

    def sendall(self, data: bytes) -> None:
        self._stream.send(b"", memoryview(data))

    def recv(self, size: int) -> bytes:
        data = bytearray(size)
        return bytes(data[: self._stream.receive_into(memoryview(data))])


class Session:
    """A running server with two well-behaved workers."""

    def __init__(
        self, world_size: int = 2, composer: ServerComposer | None = None, **settings: Any
    ) -> None:
        self.listener = listen("127.0.0.1")
        self.port = self.listener.getsockname()[1]
        chosen = {"join_timeout_s": 20.0, "step_timeout_s": 10.0, **settings}
        self.config = Config(**chosen)
        self.server = Server(
            index=0,
            session_id=SESSION,
            config=self.config,
            composer=composer or ServerComposer(),
        )
        self.secret_file: str | None = settings.get("secret_file")
        self.failure: list[Failure | None] = []
        self._thread = threading.Thread(target=self._run, name="server under test")
        self._thread.start()
        self.workers: list[Client] = []
        self.others: list[Client] = []
        self._world_size = world_size
        self._step = 0

    def _run(self) -> None:
        self.failure.append(self.server.run(self.listener))

    def join(self) -> None:
        for rank in range(self._world_size):
            worker, encrypted = Client(self.port, rank), self.config.encryption is not None
            self.workers.append(worker)
            if self.secret_file is not None:
                channel = worker.authenticate(self.secret_file, encrypted=encrypted)
            worker.greet()
            if encrypted:
                worker.encrypt(channel, self.config)
            worker.send(Kind.MANIFEST, manifest_of(self._world_size).encode())
        for worker in self.workers:
            worker.expect(Kind.WELCOME)
        groups = msgspec.json.encode((GROUP,))
        for worker in self.workers:
            worker.send(Kind.HYPERPARAMETERS, groups, step=1)
        for slice_ in range(2):
            self.workers[0].send(Kind.VALUE, gradient(0.0), slice_=slice_)
            for worker in self.workers[1:]:
                worker.expect(Kind.REPLY)

    def make_a_step(self) -> None:
        """Both slices pushed by all; the new values are known: nothing of a stranger's is in."""
        self._step += 1
        for slice_ in range(2):
            for worker in self.workers:
                worker.send(Kind.PUSH, gradient(1.0), step=self._step, slice_=slice_)
            for worker in self.workers:
                assert worker.expect(Kind.REPLY) == gradient(-0.5 * self._step)

    def stranger(self, rank: int = 0) -> Client:
        self.others.append(Client(self.port, rank))
        return self.others[-1]

    def say_goodbye(self) -> None:
        for worker in self.workers:
            worker.send(Kind.BYE)
        self.wait()
        assert self.failure == [None]

    def wait(self) -> None:
        self._thread.join(HANGS_S)
        assert not self._thread.is_alive(), "the server hangs"

    def close(self) -> None:
        for client in (*self.workers, *self.others):
            client.close()
        self.server.end()
        self._thread.join(HANGS_S)


@contextlib.contextmanager
def session(*, joined: bool = True, **settings: Any) -> Iterator[Session]:
    made = Session(**settings)
    try:
        if joined:
            made.join()
        yield made
    finally:
        made.close()


def gradient(value: float) -> bytes:
    return bytes(torch.full((ELEMS,), value, dtype=torch.float32).numpy().tobytes())


class Memory:
    """A parameter's memory for a worker's engine without a training side."""

    def __init__(self) -> None:
        self._values = bytearray(4 * ELEMS)
        self._gradient = bytearray(gradient(1.0))

    @property
    def values(self) -> memoryview:
        return memoryview(self._values)

    def take_gradient(self, start_bytes: int, stop_bytes: int) -> memoryview:
        return memoryview(self._gradient)[start_bytes:stop_bytes]

    def sent_gradient(self, start_bytes: int, stop_bytes: int) -> memoryview | None:
        """As of workers that update; the test may change it."""
        return memoryview(self._gradient)[start_bytes:stop_bytes]


class FakeServer(Client):
    """The far end of a worker's connection."""

    def __init__(self, sock: socket.socket, index: int) -> None:
        self.sock = sock
        self.sock.settimeout(HANGS_S)
        self.rank = index


@contextlib.contextmanager
def engine(
    *, servers: int = 1, coded: bool = False, **settings: Any
) -> Iterator[tuple[WorkerEngine, Sequence[FakeServer]]]:
    """A worker (rank 0 of 2) that has joined, and the fake servers that it is connected to."""
    pairs = [socket.socketpair() for _ in range(servers)]
    fakes = [FakeServer(far, i) for i, (_, far) in enumerate(pairs)]
    config = Config(**{"step_timeout_s": 10.0, "join_timeout_s": 10.0, **settings})
    manifest = manifest_of(servers=servers, knobs=config.knobs(servers))
    streams = [SocketStream(near, f"server {i}") for i, (near, _) in enumerate(pairs)]
    made = WorkerEngine(manifest, [Memory(), Memory()], streams, rank=0, config=config)
    _, norm = add_features(made)
    features = features_of(norm)
    if coded:
        codecs = PushCodecs(made)
        made.receivers.put_before(codecs)
        features = replace(features, encode=codecs.encode)
    made.compose(features)
    try:
        for fake in fakes:
            fake.send(Kind.WELCOME)
        made.join()
        for fake in fakes:
            fake.expect(Kind.MANIFEST)
        yield made, fakes
    finally:
        made.close(failure=RuntimeError("the test is over"))
        for fake in fakes:
            fake.close()


def resident_bytes() -> int:
    with open("/proc/self/statm") as status:
        return int(status.read().split()[1]) * 4096

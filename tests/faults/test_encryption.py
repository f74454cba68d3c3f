"""What a listener, and who is on the path, can do where connections are encrypted."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from foreprop.config import Config
from foreprop.core.authentication import Channel, Subject
from foreprop.engine.encrypted import EncryptedStream
from foreprop.engine.native import maybe_library
from foreprop.engine.stream import connect
from foreprop.engine.world import World
from foreprop.errors import (
    ConfigError,
    ForepropError,
    HandshakeError,
    TransportError,
)
from tests.cluster import run_cluster
from tests.faults import seeded_training
from tests.faults.wire_peers import session
from tests.secretfile import secret_file
from tests.tiers import long_cases


@pytest.fixture
def encrypted(tmp_path: Path) -> dict[str, Any]:
    return {"secret_file": secret_file(tmp_path), "encryption": "tls"}


def train(world: World, **changes: Any) -> list[torch.Tensor]:
    """Of many frames, for streams to be changed in."""
    return seeded_training.train(world, times=10, **{"slice_elems": 1000, **changes})


LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "relays": (4, 2, {"local_aggregation": "on"}),
    "servers": (2, 1, {}),  # what is heard of them is compared below
    "several servers": (2, 1, {"servers_per_node": 2}),
    "paced links": (2, 1, {"link_rate_bits_per_s": 1e9}),
    "one lane": (2, 1, {"lanes": "one"}),
}


@pytest.mark.parametrize("name", ["relays", *long_cases(*list(LAYOUTS)[1:])])
def test_the_bits_are_those_without_encryption(name: str, encrypted: dict[str, Any]) -> None:
    size, local_size, changes = LAYOUTS[name]
    plain = run_cluster(size, lambda world: train(world, **changes), local_size=local_size)
    found = run_cluster(
        size, lambda world: train(world, **changes, **encrypted), local_size=local_size
    )
    for rank in range(size):
        assert all(map(torch.equal, plain[rank], found[rank]))


def test_planes_may_differ(encrypted: dict[str, Any]) -> None:
    """One rank's plane has a process that encrypts, the other one does it in its interpreter."""
    planes = ("auto", "python")
    plain = run_cluster(2, train)
    found = run_cluster(2, lambda world: train(world, plane=planes[world.rank], **encrypted))
    for rank in range(2):
        assert all(map(torch.equal, plain[rank], found[rank]))


# The process that encrypts.
needs_plane = pytest.mark.skipif(maybe_library() is None, reason="the plane was not built")


def encrypting() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if "foreprop.engine.encrypting" in child.cmdline()
    ]


@needs_plane
@pytest.mark.parametrize("which", [signal.SIGKILL, *long_cases(signal.SIGSTOP)])
def test_ranks_end_with_the_process_that_encrypts(
    which: signal.Signals, encrypted: dict[str, Any]
) -> None:
    """Who lost it says so, and leaves nothing; one that is stopped is killed in the end."""

    signals = iter([which])

    def end_it(step: int) -> None:
        for number in signals if step == 2 else ():
            encrypting()[0].send_signal(number)

    changes = {**encrypted, "step_timeout_s": 3.0, "before_step": end_it}
    found = run_cluster(2, lambda world: outcome(lambda: train(world, **changes)))
    assert all(isinstance(each, ForepropError) for each in found), found
    if which is signal.SIGKILL:
        assert any("ended with the process that encrypts it" in str(each) for each in found), found
    assert not encrypting()


# Whoever is on the path.
Change = Callable[[bytearray, int, bool], None]
"""Changes some bytes that begin at a place of their direction; the last: towards the server."""


class ManInTheMiddle:
    """What all connections of some ranks pass: bytes are recorded, and may be changed."""

    def __init__(self, change: Change | None = None) -> None:
        self.recorded: dict[tuple[int, bool], bytearray] = {}
        """By connection and whether it goes to a server."""
        self._change = change
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []

    def connect(self, address: str, port: int, *, timeout_s: float) -> socket.socket:
        """In the place of `engine.stream.connect`."""
        far = connect(address, port, timeout_s=timeout_s)
        listener = socket.create_server(("127.0.0.1", 0))
        near = socket.create_connection(listener.getsockname())
        inside, _ = listener.accept()
        listener.close()
        number = len(self._sockets)
        self._sockets += [inside, far]
        for source, target, to_server in ((inside, far, True), (far, inside, False)):
            thread = threading.Thread(target=self._pump, args=(number, source, target, to_server))
            self._threads.append(thread)
            thread.start()
        return near

    def _pump(self, number: int, source: socket.socket, target: socket.socket, up: bool) -> None:
        seen = self.recorded.setdefault((number, up), bytearray())
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(65_536)):
                if self._change is not None:
                    self._change(data, len(seen), up)
                seen += data
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
        for sock in self._sockets:
            sock.close()

    @property
    def everything(self) -> bytes:
        return b"|".join(map(bytes, self.recorded.values()))


@contextlib.contextmanager
def on_the_path(change: Change | None = None) -> Iterator[ManInTheMiddle]:
    path = ManInTheMiddle(change)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foreprop.backends.launch.connect", path.connect)
        try:
            yield path
        finally:
            path.close()


def test_a_listener_reads_no_gradient_and_no_parameter(encrypted: dict[str, Any]) -> None:
    """Nor names and sizes of parameters; without encryption it reads them all."""
    said: dict[str, bytes] = {}
    values: dict[str, list[torch.Tensor]] = {}
    for name, changes in {"plain": {}, "encrypted": encrypted}.items():
        with on_the_path() as path:
            about = {"update": "servers", **changes}  # new values are sent
            first, values[name] = run_cluster(2, lambda world, more=about: train(world, **more))
        said[name] = path.everything
        assert all(map(torch.equal, first, values["plain"]))
    wanted = [value.numpy().tobytes()[:64] for value in first] + [b'"SGD"', b"0.weight"]
    assert all(each in said["plain"] for each in wanted)
    assert not any(each in said["encrypted"] for each in wanted)
    assert len(said["encrypted"]) > len(said["plain"])  # it is the same training


class Flip:
    """One bit of one byte, in one direction of each connection."""

    def __init__(self, place: int, up: bool, mask: int = 1) -> None:
        self.fired = 0
        self._place, self._up, self._mask = place, up, mask

    def __call__(self, data: bytearray, start: int, to_server: bool) -> None:
        if to_server == self._up and start <= self._place < start + len(data):
            data[self._place - start] ^= self._mask
            self.fired += 1


def outcome(make: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor] | ForepropError:
    try:
        return make()
    except ForepropError as error:
        return error


@pytest.mark.parametrize("bits", [6, *long_cases(60)])
def test_a_bit_that_is_flipped_on_the_path_is_noticed_without_encryption(bits: int) -> None:
    """Whatever the frame is, every rank ends; who flips a bit and its check is not noticed."""
    drawn, flipped, damaged = random.Random(bits), 0, 0
    while flipped < bits:
        # of ten steps: who has the last one's answers has ended when another's come damaged
        place, up, bit = drawn.randrange(30_000), drawn.random() < 0.5, drawn.randrange(8)
        change = Flip(place, up, 1 << bit)
        with on_the_path(change):
            found = run_cluster(2, lambda world: outcome(lambda: train(world, join_timeout_s=2.5)))
        if not change.fired:
            continue  # no connection has as many bytes that way
        flipped += 1
        assert all(isinstance(each, ForepropError) for each in found), (place, up, bit, found)
        damaged += all("has come damaged: its CRC32C is 0x" in str(each) for each in found)
    assert damaged >= bits * 2 // 3  # the others were of greetings: strangers are told nothing


# of what is sent: handshakes, the manifest, then gradients; the last: a record's middle
PLACES = [20_003, *long_cases(3, 60, 100, 140, 300, 700, 900, 1300, 2000, 30_000)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("up", [True, False])
def test_what_is_changed_on_the_path_ends_in_an_error(
    place: int, up: bool, encrypted: dict[str, Any]
) -> None:
    changes = dict(encrypted) if place == 20_003 else {**encrypted, "join_timeout_s": 2.5}
    with on_the_path(Flip(place, up)):
        found = run_cluster(2, lambda world: outcome(lambda: train(world, **changes)))
    assert all(isinstance(each, ForepropError) for each in found), found
    if place == 20_003:
        text = str(found[0])
        assert re.search(r"what has come from (rank|server) \d .* is not what was sent", text), text
        assert "somebody on the path changes it" in text


# The handshakes.
def pair(
    first: tuple[Channel, str], second: tuple[Channel, str], timeout_s: float = 5.0
) -> list[EncryptedStream]:
    near, far = socket.socketpair()
    sides = zip((near, far), (first, second), ("server 0", "rank 1"), (False, True), strict=True)
    return [
        EncryptedStream(
            sock,
            peer,
            channel,
            Config(encryption="tls", secret_file=file, join_timeout_s=timeout_s),
            accepts=accepts,
        )
        for sock, (channel, file), peer, accepts in sides
    ]


def opened(streams: list[EncryptedStream]) -> list[TransportError]:
    """The errors of both ends, which shake hands at the same time."""
    errors: list[TransportError] = []

    def open_one(stream: EncryptedStream) -> None:
        try:
            stream.open()
            stream.send(b"x" * 28, memoryview(b""))
            stream.receive_into(memoryview(bytearray(28)))
        except TransportError as error:
            errors.append(error)
            stream.close()

    threads = [threading.Thread(target=open_one, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return errors


CHANNEL = Channel(Subject("a-session", "server 0", True), 1, bytes(64))
OTHERS = {
    "nonces": CHANNEL._replace(nonces=bytes(63) + b"1"),
    "rank": CHANNEL._replace(rank=2),
    "server": CHANNEL._replace(subject=Subject("a-session", "server 1", True)),
    "session": CHANNEL._replace(subject=Subject("another", "server 0", True)),
    "secret": CHANNEL,
}


def test_who_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    file = secret_file(tmp_path)
    silent, waiting = pair((CHANNEL, file), (CHANNEL, file), timeout_s=0.2)
    with pytest.raises(TransportError, match=r"rank 1 cannot be encrypted \(.*timed out"):
        waiting.open()
    silent.close()


@pytest.mark.parametrize("differing", OTHERS)
def test_connections_that_somebody_has_joined_are_refused(differing: str, tmp_path: Path) -> None:
    """Both ends have the secret, of two connections that were meant for others; or it has not."""
    file = secret_file(tmp_path)
    other = secret_file(tmp_path, "other", "f" * 32) if differing == "secret" else file
    streams = pair((CHANNEL, file), (OTHERS[differing], other))
    errors = opened(streams)
    assert len(errors) == 2
    assert any("cannot be encrypted (" in str(error) for error in errors), errors
    for stream in streams:
        stream.close()


def test_both_ways_at_once_and_any_sizes(tmp_path: Path) -> None:
    file = secret_file(tmp_path)
    streams = pair((CHANNEL, file), (CHANNEL, file))
    sizes = [0, 1, 16_355, 16_356, 16_357, 16_384, 100_000, 3_000_001]
    received: dict[int, bytearray] = {}

    def send(stream: EncryptedStream) -> None:
        for size in sizes:
            stream.send(b"h" * 28, memoryview(bytes([size % 251]) * size))

    def receive(number: int, stream: EncryptedStream) -> None:
        memory = bytearray(sum(sizes) + 28 * len(sizes))
        view = memoryview(memory)
        while view:
            view = view[stream.receive_into(view) :]
        received[number] = memory

    threads = [
        *(threading.Thread(target=send, args=(stream,)) for stream in streams),
        *(threading.Thread(target=receive, args=each) for each in enumerate(streams)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert received[0] == received[1] == b"".join(b"h" * 28 + bytes([n % 251]) * n for n in sizes)
    assert [way.version() for way in streams[0].ways] == ["TLSv1.3"] * 2
    streams[0].close()
    assert streams[1].receive_into(memoryview(bytearray(9))) == 0  # the end is told as ever
    streams[1].close()
    streams[1].close()


def test_a_stream_that_is_closed_wakes_who_is_blocked(tmp_path: Path) -> None:
    file = secret_file(tmp_path)
    streams = pair((CHANNEL, file), (CHANNEL, file))
    assert opened(streams) == []
    errors: list[BaseException | int] = []

    def receive() -> None:
        try:
            errors.append(streams[0].receive_into(memoryview(bytearray(9))))
        except TransportError as error:
            errors.append(error)

    def send() -> None:
        try:
            streams[0].send(b"", memoryview(bytes(50_000_000)))
        except TransportError as error:
            errors.append(error)

    threads = [threading.Thread(target=receive), threading.Thread(target=send)]
    for thread in threads:
        thread.start()
    streams[0].close()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 2, "somebody hangs"
    streams[1].close()


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x00\x10" + bytes(16), b"x" * 5000])
def test_who_has_the_secret_and_does_not_shake_hands_holds_up_nobody(
    said: bytes, encrypted: dict[str, Any]
) -> None:
    with session(joined=False, **encrypted) as running:
        odd = running.stranger(1)
        odd.authenticate(encrypted["secret_file"], encrypted=True)
        odd.greet()
        odd.raw(said)
        if said:
            odd.expect_closed()
        else:
            odd.close()
        running.join()
        running.make_a_step()
        running.say_goodbye()


# Told by name.
def test_a_rank_that_does_not_encrypt_is_told(encrypted: dict[str, Any]) -> None:
    def work(world: World) -> object:
        changes = {**encrypted, "join_timeout_s": 2.0}
        if world.rank:
            changes.pop("encryption")
        return outcome(lambda: train(world, **changes))

    _, one = run_cluster(2, work)
    assert isinstance(one, HandshakeError)
    assert "do not agree: encryption: rank 0 has tls, rank 1 has None" in str(one)


@pytest.mark.parametrize("server_encrypts", [True, False])
def test_a_server_that_does_not_encrypt_as_its_worker_is_told(
    server_encrypts: bool, encrypted: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    file = encrypted["secret_file"]
    changes = encrypted if server_encrypts else {"secret_file": file}
    sides = ("server 0", "rank 1") if server_encrypts else ("rank 1", "server 0")
    expected = "{} encrypts and {} does not: set encryption".format(*sides)
    with session(joined=False, **changes) as running:
        with pytest.raises(HandshakeError, match=expected):
            running.stranger(1).authenticate(file, encrypted=not server_encrypts)
        running.join()
        running.make_a_step()
        running.say_goodbye()
    assert expected in capfd.readouterr().err


def test_settings_that_do_not_go_together(encrypted: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="encryption is 'tls', whose keys are made of the job's"):
        Config(encryption="tls")
    with pytest.raises(ConfigError, match="encryption is 'ssl'; it must be"):
        Config(**{**encrypted, "encryption": "ssl"})
    for architecture in ("ring", "hybrid"):
        told = f"architecture is '{architecture}', and encryption is 'tls': torch's collectives"
        with pytest.raises(ConfigError, match=told):
            Config(architecture=architecture, **encrypted)  # type: ignore[arg-type]
    assert Config(architecture="auto", **encrypted).architecture == "p2p"


def test_without_the_package_that_makes_keys(
    encrypted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape("pip install '.[tls]' in a clone")):
        Config(**encrypted)

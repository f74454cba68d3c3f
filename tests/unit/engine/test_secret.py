"""The secret's file, what is signed with it in the store, and the ports of a range."""

from __future__ import annotations

import re
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed import HashStore

from foreprop.backends.dedicated import raw_board
from foreprop.config import Config
from foreprop.core.authentication import key_of
from foreprop.engine.rendezvous import Board, session_board
from foreprop.engine.secret import load_key
from foreprop.engine.stream import listen
from foreprop.engine.world import World
from foreprop.errors import ConfigError, HandshakeError, StepTimeout, TransportError
from foreprop.features.collectives.group import Group, report_open_collectives

TEXT = "0123456789abcdef"


def secret_file(folder: Path, text: str = TEXT, mode: int = 0o600) -> str:
    path = folder / f"{text[:8] or 'empty'}-{mode:o}.secret"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


# The file.
@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_for_its_owner_alone_is_read(tmp_path: Path, mode: int) -> None:
    assert load_key(secret_file(tmp_path, mode=mode)) == key_of(TEXT.encode())
    assert load_key(secret_file(tmp_path, TEXT + "\n")) == key_of(TEXT.encode())


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o601])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = secret_file(tmp_path, mode=mode)
    expected = f"secret_file is '{path}', which others than its owner may use (mode {mode:o}):"
    with pytest.raises(ConfigError, match=re.escape(f"{expected} chmod 600 {path}")):
        load_key(path)


def test_other_bad_files(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"cannot be read: No such file .* openssl rand -hex 32"):
        load_key(missing)
    with pytest.raises(ConfigError, match="which has 15 bytes; it must be at least 16"):
        load_key(secret_file(tmp_path, TEXT[:15]))
    with pytest.raises(ConfigError, match="which has more than 4096 bytes"):
        load_key(secret_file(tmp_path, "x" * 4097))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_key(str(tmp_path))


# The store.
def world_of(store: HashStore, rank: int = 0, size: int = 1, host: str = "h") -> World:
    fields = {"rank": rank, "size": size, "local_size": 1, "host": host, "scope": "foreprop/0"}
    return World(**fields, store=store, raw_store=store)  # type: ignore[arg-type]


def board_of(store: HashStore, file: str | None, rank: int = 0) -> Board:
    config = Config(secret_file=file, join_timeout_s=0.2)
    return session_board(world_of(store, rank), config)


def test_what_one_rank_publishes_counts_for_the_others(tmp_path: Path) -> None:
    store, file = HashStore(), secret_file(tmp_path)
    ours, theirs = board_of(store, file), board_of(store, file, 1)
    ours.publish("a", "wörd")
    ours.publish("empty", "")
    assert theirs.lookup("a", "a word") == "wörd"
    assert theirs.peek("empty") == b""
    ours.publish_bytes("b", bytes(range(200)))
    assert bytes(theirs.lookup_bytes("b", "bytes")) == bytes(range(200))
    assert TEXT.encode() not in store.get("session/0/a")


def test_what_is_not_signed_is_waited_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store, file = HashStore(), secret_file(tmp_path)
    board = board_of(store, file, 1)
    store.set("session/0/a", "a stranger's word")
    assert board.peek("a") is None
    board_of(store, file).publish("a", "true")
    assert board.lookup("a", "a word") == "true"
    err = capfd.readouterr().err
    assert (
        "rank 1: the store's entry 'session/0/a' is not signed, and does not count: a rank" in err
    )
    store.set("session/0/b", "a stranger's word")
    with pytest.raises(HandshakeError, match=r"rank 1 has a secret, .* 'session/0/b' is not sign"):
        board.lookup("b", "a word")
    with pytest.raises(StepTimeout):  # of a true timeout nothing else is said
        board.lookup("a-true-wait", "a word")


def test_another_secret_is_told_from_none(tmp_path: Path) -> None:
    store = HashStore()
    board_of(store, secret_file(tmp_path, "another secret of a job")).publish("a", "b")
    with pytest.raises(HandshakeError, match="signed with another secret: set FOREPROP_SECRET"):
        board_of(store, secret_file(tmp_path)).lookup("a", "a word")
    with pytest.raises(HandshakeError, match=r"rank 1 has no secret, and .* is signed with one"):
        board_of(store, None, 1).lookup("a", "a word")


def test_an_entry_counts_in_its_own_place_only(tmp_path: Path) -> None:
    """A stranger who copies it elsewhere: to another key, or out of a part of the store."""
    store, file = HashStore(), secret_file(tmp_path)
    ours = board_of(store, file)
    ours.publish("a", "b")
    store.set("session/0/c", store.get("session/0/a"))
    assert ours.peek("c") is None
    world = world_of(store)
    world.use_secret(Config(secret_file=file))
    assert raw_board(world, Config(), "session/0", _nothing).peek("a") is None


def _nothing() -> None:
    """Nothing has happened."""


def test_presence_counts_only_if_it_is_signed(tmp_path: Path) -> None:
    store, file = HashStore(), secret_file(tmp_path)
    board = board_of(store, file)
    store.set("session/0/arrived/0", "")
    assert board.missing("arrived") == [0]
    board.publish("arrived/0", "")
    assert board.missing("arrived") == []


def test_a_failure_is_published_although_a_stranger_has_written_one(tmp_path: Path) -> None:
    store, file = HashStore(), secret_file(tmp_path)
    fields = {"size": 2, "local_size": 2, "host": "h", "store": store, "raw_store": store}
    worlds = [World(rank=rank, **fields) for rank in range(2)]  # type: ignore[arg-type]
    ours, theirs = (session_board(world, Config(secret_file=file)) for world in worlds)
    store.set("session/0/refused", '{"kind":"HandshakeError","message":"a stranger"}')
    ours.check_failed()
    theirs.publish_failure(ConfigError("a true one"))
    with pytest.raises(ConfigError, match="a true one"):
        ours.check_failed()


@pytest.mark.parametrize(
    ("host", "rank", "told"),
    [("10.0.0.1", 0, 1), ("10.0.0.1", 1, 0), ("127.0.0.1", 0, 0), ("localhost", 0, 0)],
)
def test_several_machines_without_a_secret_are_told_once(
    host: str, rank: int, told: int, capfd: pytest.CaptureFixture[str]
) -> None:
    world = world_of(HashStore(), rank, 2, host)
    for _ in range(3):
        session_board(world, Config())
    assert capfd.readouterr().err.count("no secret is set: whoever can reach") == told


def test_in_a_network_of_its_own_a_job_needs_no_secret(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(World, "private_network", True)
    session_board(world_of(HashStore(), 0, 2, "10.0.0.1"), Config())
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("host", "rank", "told"), [("10.0.0.1", 0, 1), ("10.0.0.1", 1, 0), ("127.0.0.1", 0, 0)]
)
def test_several_machines_with_collectives_are_told_once(
    host: str,
    rank: int,
    told: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Although there is a secret: it is not for them."""
    report_open_collectives.cache_clear()
    monkeypatch.setattr("foreprop.features.collectives.group.local_address", lambda *_: "10.0.0.2")
    for _ in range(3):
        world = world_of(HashStore(), rank, 2, host)
        Group(world, Config(architecture="ring", secret_file=secret_file(tmp_path)))
    said = capfd.readouterr().err
    assert said.count("collectives are torch's: gloo and NCCL connect ranks without") == told
    assert "no secret" not in said


def test_a_secret_is_no_reason_to_say_anything(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    world = world_of(HashStore(), 0, 2, "10.0.0.1")
    session_board(world, Config(secret_file=secret_file(tmp_path)))
    assert capfd.readouterr().err == ""


# Ports.
@pytest.mark.parametrize("text", ["", "29600", "29600-", "0-5", "9-8", "1-65536", "a-b", "1-2-3"])
def test_what_is_no_range_of_ports(text: str) -> None:
    expected = f"port_range is {text!r}; it must be FIRST-LAST, ports from 1 to 65535, as"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        Config(port_range=text)


def test_listening_within_a_range_until_it_is_used_up() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(listen("127.0.0.1")).getsockname()[1]
        ports = f"{first}-{min(first + 2, 65535)}"
        taken: list[int] = []
        error = listen_until_none_is_free(stack, ports, taken)
        assert str(error).startswith(f"port_range is {ports!r}, and all of its 3 ports are")
        assert set(taken) <= {first + 1, first + 2}  # others may have had some of them


def listen_until_none_is_free(stack: ExitStack, ports: str, taken: list[int]) -> TransportError:
    for _ in range(4):
        try:
            sock = stack.enter_context(listen("127.0.0.1", ports))
        except TransportError as error:
            return error
        taken.append(sock.getsockname()[1])
    raise AssertionError(taken)


def test_a_range_at_an_address_of_another_machine() -> None:
    with pytest.raises(TransportError, match=r"cannot listen on 192\.0\.2\.1 port 29600"):
        listen("192.0.2.1", "29600-29601")


def test_a_listener_in_a_range_takes_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with (
        listen("127.0.0.1", f"{port}-{port}") as listener,
        socket.create_connection(("127.0.0.1", port)) as sock,
    ):
        assert listener.getsockname()[1] == port
        assert sock.getpeername()[1] == port

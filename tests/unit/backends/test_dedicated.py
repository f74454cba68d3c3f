"""What `foreprop server` takes from the store, which others than rank 0 may have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.distributed import HashStore

from foreprop.backends.dedicated import PublishedSession, Supervisor, dedicated_key
from foreprop.config import Config
from foreprop.core.authentication import key_of, sign
from foreprop.errors import ConfigError
from foreprop.version import __version__
from tests.secretfile import secret_file

TEXT = b"0123456789abcdef"
KEY = dedicated_key(1)


def announcement(**changes: Any) -> bytes:
    made = {
        "session_id": "1-abc",
        "world_size": 2,
        "servers": 1,
        "nodes": 1,
        "workers_per_node": 2,
        "foreprop": __version__,
        "config": {},
        **changes,
    }
    return msgspec.json.encode(made)


class Commanded(Supervisor):
    """A `Supervisor` that starts nothing, but notes what it would have started."""

    def __init__(self, config: Config, count: int = 1) -> None:
        self.said: list[str] = []
        self.indices: list[int] = []
        about: dict[str, Any] = {"host": "127.0.0.1", "port": 1, "wait_s": 1.0}
        super().__init__(count=count, config=config, report=self.said.append, **about)

    def _start_or_refuse(self, published: PublishedSession, index: int) -> str:
        self.indices.append(index)
        return "127.0.0.1 9"


@pytest.fixture
def secret(tmp_path: Path) -> str:
    return secret_file(tmp_path, text=TEXT.decode())


def test_an_announcement_names_no_path(tmp_path: Path) -> None:
    """Whatever it says of folders, files, ports and addresses is this command's own."""
    theirs = dict.fromkeys(
        ("trace", "watch", "secret_file", "interface", "counted_log"), "/somewhere"
    )
    config = {**theirs, "port_range": "1-2", "step_timeout_s": 7.0, "dedicated_servers": 5}
    published = msgspec.json.decode(announcement(config=config), type=PublishedSession)
    own = Config(trace=str(tmp_path / "trace"), interface="127.0.0.1", port_range="29600-29601")
    for command, trace in ((Commanded(own), own.trace), (Commanded(Config()), None)):
        made = command._settings(published)
        expected = {"step_timeout_s": 7.0, "trace": trace, "secret_file": None}
        mine = command._config
        expected |= {"interface": mine.interface, "port_range": mine.port_range}
        expected |= {"counted_log": None, "counted_replay": None, "plugins": None}
        assert made == expected
    assert "the script asks for traces; set FOREPROP_TRACE" in command.said[0]


@pytest.mark.parametrize("ours", [True, False])
def test_a_command_that_does_not_encrypt_as_the_script_refuses(ours: bool, secret: str) -> None:
    """Neither lets an announcement take encryption away, nor serves in the clear who expects it."""
    own = Config(secret_file=secret, encryption="tls" if ours else None)
    same, other = ("tls", None) if ours else (None, "tls")
    for theirs in (same, other):
        config = {"encryption": theirs}
        published = msgspec.json.decode(announcement(config=config), type=PublishedSession)
        if theirs == same:
            assert Commanded(own)._settings(published)["encryption"] == same
        else:
            with pytest.raises(ConfigError, match=f"encryption is {same!r} here, and {other!r} in"):
                Commanded(own)._settings(published)


@pytest.mark.parametrize(
    "changes",
    [
        {"servers": 2**40},
        {"world_size": 2**40},
        {"world_size": 0},
        {"nodes": -1},
        {"session_id": "x" * 65},
        {"config": {"a": ["b"]}},
    ],
)
def test_an_announcement_says_no_size_without_a_bound(changes: dict[str, Any]) -> None:
    check_refused(announcement(**changes))


@pytest.mark.parametrize("text", [b"", b"\xff", b'{"session_id":"\xff"}', b"[" * 5000])
def test_an_announcement_of_anything_does_not_end_the_command(text: bytes) -> None:
    check_refused(text)


def check_refused(text: bytes) -> None:
    store, command = HashStore(), Commanded(Config())
    store.set(KEY, text)  # type: ignore[arg-type]
    command._join_session(store, 1)  # type: ignore[arg-type]
    assert command.indices == []
    assert command.said[0].startswith("cannot join session 1: ")


@pytest.mark.parametrize(
    ("claimed", "indices"), [(0, [0, 1]), (2, [2, 3]), (-(2**40), []), (9, [])]
)
def test_a_count_in_the_store_starts_no_more_servers_than_were_given(
    claimed: int, indices: list[int]
) -> None:
    store, command = HashStore(), Commanded(Config(), count=2)
    store.set(KEY, announcement(servers=5))
    store.add(f"{KEY}/claimed", claimed)
    command._join_session(store, 1)  # type: ignore[arg-type]
    assert command.indices == indices


def test_only_a_signed_announcement_counts(secret: str, capfd: pytest.CaptureFixture[str]) -> None:
    store, command = HashStore(), Commanded(Config(secret_file=secret))
    store.set(KEY, announcement())
    command._join_session(store, 1)  # type: ignore[arg-type]
    assert (command.indices, command._unsigned, command.said) == ([], [1], [])
    assert "this server: the store's entry" in capfd.readouterr().err
    store.set(KEY, sign(key_of(TEXT), f"raw/{KEY}", announcement()))  # the true one comes
    command._join_session(store, 1)  # type: ignore[arg-type]
    assert command.indices == [0]
    told = sign(key_of(TEXT), f"raw/{KEY}/server/0", b"127.0.0.1 9")
    assert bytes(store.get(f"{KEY}/server/0")) == told


def test_a_server_without_the_secret_says_so() -> None:
    store, command = HashStore(), Commanded(Config())
    store.set(KEY, sign(key_of(TEXT), f"raw/{KEY}", announcement()))
    command._join_session(store, 1)  # type: ignore[arg-type]
    assert command.indices == []
    assert "this server has no secret, and the store's entry" in command.said[0]

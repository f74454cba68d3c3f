"""Calls of the rendezvous store end in time, whatever has become of the store."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from foreprop.config import Config
from foreprop.engine.rendezvous import session_board
from foreprop.engine.world import StoreCaller, StoreClient, World
from foreprop.errors import ForepropError, TransportError
from foreprop.features.collectives.group import within

LIMIT_S = 0.5


class Hanging:
    """In the place of a store whose machine has been cut off."""

    def __init__(self) -> None:
        self.back = threading.Event()
        self.calls = 0

    def check(self, keys: list[str]) -> bool:
        self.calls += 1
        self.back.wait(300)
        return False

    set = get = add = delete_key = check


def client_of(store: object, limit_s: float = 60.0) -> StoreClient:
    caller = StoreCaller(store, "10.0.0.1")  # type: ignore[arg-type]
    caller.limit_s = limit_s
    return StoreClient(store, caller)  # type: ignore[arg-type]


@pytest.mark.leaks_ok(reason="the helper thread stays with the process's one store")
def test_a_store_that_does_not_answer_is_given_up_once() -> None:
    store = Hanging()
    client = client_of(store, LIMIT_S)
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"10\.0\.0\.1.*check has not been answered within"):
        client.check("a")
    assert LIMIT_S <= time.monotonic() - started < 60
    for call in (lambda: client.set("a", "b"), lambda: client.maybe_get("a")):
        with pytest.raises(TransportError, match="check has not been answered"):
            call()
    assert time.monotonic() - started < 60
    assert store.calls == 1
    store.back.set()
    deadline = time.monotonic() + 60
    while True:  # it is used again once it answers
        try:
            assert not client.check("a")
            break
        except TransportError:
            assert time.monotonic() < deadline


@pytest.mark.leaks_ok(reason="the helper thread stays with the process's one store")
def test_a_lookup_keeps_its_time() -> None:
    store = Hanging()
    world = World(rank=1, size=2, local_size=1, host="10.0.0.1", store=store, raw_store=store)  # type: ignore[arg-type]
    board = session_board(world, Config(step_timeout_s=LIMIT_S))
    started = time.monotonic()
    with pytest.raises(TransportError, match="rank 1, which waited for rank 0's word, lost the"):
        board.lookup("a", "rank 0's word")
    assert time.monotonic() - started < 60
    store.back.set()


@pytest.mark.leaks_ok(reason="the helper thread stays with the process's one store")
def test_a_real_store() -> None:
    host = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = client_of(dist.PrefixStore("p", host))
    client.set("a", "b")
    client.set("c", b"\x00d")
    assert (client.maybe_get("a"), client.maybe_get("c")) == (b"b", b"\x00d")
    assert client.maybe_get("e") is None
    assert client.check("a")
    assert [client.add("n", 2), client.add("n", 3)] == [2, 5]
    client.delete("a", "c")
    assert not client.check("a")
    client.set_all({"f": "1", "g": b"2"})
    assert (client.maybe_get("f"), client.maybe_get("g")) == (b"1", b"2")


@pytest.mark.leaks_ok(reason="the helper thread stays with the process's one store")
def test_a_store_that_has_gone_is_an_error_of_ours() -> None:
    host = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = client_of(
        dist.TCPStore("127.0.0.1", host.port, is_master=False, timeout=timedelta(seconds=60))
    )
    client.set("a", "b")
    del host
    with pytest.raises(ForepropError, match="lost the rendezvous store at"):
        use_for_a_while(client)


def use_for_a_while(client: StoreClient) -> None:
    for _ in range(100):
        client.set("a", "b")
        time.sleep(0.01)


def test_what_takes_too_long_is_left_to_itself() -> None:
    done = threading.Event()
    with pytest.raises(TransportError, match=r"meeting took longer than 0\.1 s"):
        within(0.1, "meeting", lambda: done.wait(60))
    done.set()
    assert within(60.0, "meeting", lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(60.0, "meeting", lambda: 1 // 0)

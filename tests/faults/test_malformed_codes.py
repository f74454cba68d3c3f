"""Codes that no codec gives: an error that names the slice, on the side that gets them."""

from __future__ import annotations

import pytest

from foreprop.compression.pushcodecs import PushCodecs
from foreprop.config import Config
from foreprop.core.wire import Kind
from foreprop.errors import RemoteProtocolError
from tests.faults.wire_peers import ELEMS, engine, gradient, manifest_of, session

pytestmark = pytest.mark.timeout(60)

CODES = {
    "garbage": (b"\7" * 21, "lossless: a plane of 6 elements has encoding 7"),
    "short": (b"\0" * 5, "lossless: 5 bytes; the planes' lengths take more"),
    "long": (b"\0" * (4 * ELEMS + 1), f"carries {4 * ELEMS + 1} bytes"),
}


@pytest.mark.parametrize("name", CODES)
def test_a_push_with_a_code_that_nobody_gives(name: str) -> None:
    code, says = CODES[name]
    knobs = Config(compression="lossless").knobs(1)
    with session(joined=False) as running:
        workers = [running.stranger(rank) for rank in range(2)]
        for worker in workers:
            worker.hello(manifest_of(knobs=knobs))
        for worker in workers:
            worker.expect(Kind.WELCOME)
        workers[0].send(Kind.VALUE, gradient(0.0))
        workers[1].expect(Kind.REPLY)
        workers[0].send(Kind.PUSH, code, step=1)
        failure = workers[1].expect_failure()
        assert says in failure.message
        running.wait()


@pytest.mark.parametrize("name", CODES)
def test_a_reply_with_a_code_that_nobody_gives(name: str) -> None:
    code, says = CODES[name]
    with engine(compression="lossless") as (worker, (server,)):
        PushCodecs(worker)
        worker.push(0, 1)
        server.expect(Kind.PUSH)
        server.send(Kind.REPLY, gradient(0.5), step=1)
        worker.wait(0, 1)
        worker.push(0, 2)
        server.expect(Kind.PUSH)
        server.send(Kind.REPLY, code, step=2)
        with pytest.raises(RemoteProtocolError) as error:
            worker.wait(0, 2)
        assert says in str(error.value)


def test_a_difference_before_any_values() -> None:
    with engine(compression="lossless") as (worker, (server,)):
        PushCodecs(worker)
        worker.push(0, 1)
        server.expect(Kind.PUSH)
        server.send(Kind.REPLY, b"\0" * 20, step=1)
        with pytest.raises(RemoteProtocolError, match="is a difference; its values have not come"):
            worker.wait(0, 1)

"""Codes that no codec gives: an error that names the slice, on the side that gets them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from foreprop.config import Config
from foreprop.core.codec import Place
from foreprop.core.wire import Flag, Kind
from foreprop.engine.tensors import encode_state
from foreprop.errors import RemoteProtocolError
from foreprop.features.compression.codecs import make
from tests.faults.relay_peers import node
from tests.faults.wire_peers import ELEMS, Client, engine, gradient, manifest_of, session

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
    with engine(coded=True, compression="lossless") as (worker, (server,)):
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


# Relays: the workers' side as it is, the server's in int8, in 1 + 4 / 6 bytes per element.
CODED = manifest_of(world_size=4, workers_per_push=2, knobs=Config(compression="int8").knobs(1))
CODE_BYTES = 4 + ELEMS


def test_a_relay_encodes_sums_and_passes_codes_on() -> None:
    with node(CODED) as running:
        for worker in running.workers:
            worker.send(Kind.PUSH, gradient(1.0), step=1)
        code = running.server.expect(Kind.PUSH)
        assert len(code) == CODE_BYTES
        out = torch.empty(ELEMS)
        make("int8").decode(memoryview(bytearray(code)), out, Place(1, 0, 2))
        assert torch.allclose(out, torch.full((ELEMS,), 2.0))
        running.server.send(Kind.REPLY, code, step=1)
        for worker in running.workers:
            assert worker.expect(Kind.REPLY) == code


@pytest.mark.parametrize("size_bytes", [CODE_BYTES + 1, 4 * ELEMS + 1])
def test_a_code_that_is_too_long_for_a_relay(size_bytes: int) -> None:
    with node(CODED) as running:
        for worker in running.workers:
            worker.send(Kind.PUSH, gradient(1.0), step=1)
        running.server.expect(Kind.PUSH)
        running.server.send(Kind.REPLY, bytes(size_bytes), step=1)
        failure = running.workers[0].expect_failure()
        assert failure.kind == "RemoteProtocolError"
        assert f"carries {size_bytes} bytes" in failure.message


RESIDUAL = Flag.RESIDUAL
WRONG_RESIDUALS: dict[str, tuple[int, Callable[[Client], None], str]] = {
    "another worker": (
        1,
        lambda w: w.send(Kind.STATE_PULL, flags=RESIDUAL),
        "is not its node's first",
    ),
    "no such slice": (
        0,
        lambda w: w.send(Kind.STATE_PULL, flags=RESIDUAL, slice_=99),
        "no codec is for slice 99 here",
    ),
    "another array": (
        0,
        lambda w: w.send(Kind.STATE, encode_state({"momentum": torch.ones(6)}), flags=RESIDUAL),
        "slice 0 keeps ['error'], not ['momentum']",
    ),
    "a number": (
        0,
        lambda w: w.send(Kind.STATE, encode_state({"error": 1.0}), flags=RESIDUAL),
        "slice 0 keeps ['error']",
    ),
}


@pytest.mark.parametrize("name", WRONG_RESIDUALS)
def test_residuals_that_a_relay_has_not(name: str) -> None:
    worker, say, says = WRONG_RESIDUALS[name]
    with node(CODED) as running:
        say(running.workers[worker])
        failure = running.server.expect_failure()
        assert failure.kind == "RemoteProtocolError"
        assert says in failure.message


def test_a_difference_before_any_values() -> None:
    with engine(coded=True, compression="lossless") as (worker, (server,)):
        worker.push(0, 1)
        server.expect(Kind.PUSH)
        server.send(Kind.REPLY, b"\0" * 20, step=1)
        with pytest.raises(RemoteProtocolError, match="is a difference; its values have not come"):
            worker.wait(0, 1)

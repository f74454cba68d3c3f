"""A worker of an elastic session that may have to die together with the server beside it.

As `tests.process.elastic_script`, whose plan it takes. ``FORK_SERVERS``: so many are forked.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import psutil

from foreprop.core.wire import Kind
from tests.process import elastic_script
from tests.process.elastic_script import Plan, cut_frame, write
from tests.process.forked import end_process, fork_servers


def die_with_server(rank: int, result: Mapping[str, Any]) -> None:
    """As if the machine lost its power: the server is gone before it can miss its worker."""
    write(rank, {**result, "died_s": time.monotonic()})
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def die_with_worker(rank: int, worker: int) -> None:
    """The same in the server; ``worker``: the process."""
    write(rank, {"ended_s": [], "died_s": time.monotonic()})
    os.kill(worker, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def in_server(rank: int, worker: int) -> None:
    """What is to happen in its process."""
    plan = Plan(**json.loads(os.environ["PLAN"]))
    if cut := plan.reply_cuts.get(str(rank)):
        cut_frame(Kind.REPLY, *cut, partial(die_with_worker, rank, worker))


if __name__ == "__main__":
    before = partial(in_server, int(os.environ["RANK"]), os.getpid())
    fork_servers(int(os.environ.get("FORK_SERVERS", "0")), before)
    elastic_script.die = die_with_server
    elastic_script.main()
    end_process()

"""A worker for the tests of ``foreprop run``: says hello, then does as told for its rank.

``run_script.py RANK:ACTION=VALUE...``, one after the other; the actions are in `ACTIONS`, and the
rank may be ``all``. ``RANK+`` is one that joins.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


def lines(text: str) -> None:
    for number in range(int(text)):
        print(f"line {number} ", end="")
        print("." * 200)
        print(f"error {number}", file=sys.stderr)


def child(text: str) -> None:
    """A process that nobody would end, in a session of its own."""
    subprocess.Popen(["sleep", text], start_new_session=True)


def stubborn(text: str) -> None:
    """Ignore SIGTERM and SIGINT for some seconds."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(float(text))


ACTIONS: dict[str, Callable[[str], object]] = {
    "lines": lines,
    "long": lambda length: print("x" * int(length)),
    "child": child,
    "touch": lambda name: Path(name).touch(),
    "wait": lambda name: wait_for(Path(name)),
    "exit": lambda code: sys.exit(int(code)),
    "kill": lambda number: os.kill(os.getpid(), int(number)),
    "step": lambda text: step(text),
    "lost": lambda peer: report_lost(int(os.environ["RANK"]), peer),
    "sleep": lambda seconds: time.sleep(float(seconds)),
    "stubborn": stubborn,
    "show": lambda name: print(f"{name}={os.environ[name]}"),
    "secret": lambda _: print(
        "secret", Path(os.environ["FOREPROP_SECRET_FILE"]).read_bytes().hex()
    ),
    "serve": lambda text: serve(text),
}


def report_lost(rank: int, peer: str) -> None:
    """Say so, as a session does."""
    from foreprop.config import launchers

    launchers.report_lost(rank, peer)


def step(text: str) -> None:
    """Say how far this worker has come, as a loop with checkpoints does."""
    from foreprop.config.launchers import tell_agent

    tell_agent(b"%d %d" % (int(os.environ["RANK"]), int(text)))


def serve(text: str) -> None:
    """Say that there are servers at these addresses, as an elastic session does."""
    file = Path(os.environ["FOREPROP_SERVERS_FILE"])
    unfinished = file.with_suffix(".new")
    unfinished.write_text("".join(f"{address}\n" for address in text.split(",")))
    unfinished.replace(file)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def main() -> None:
    rank = os.environ["RANK"]
    where = f"{os.environ['WORLD_SIZE']} in {os.getcwd()}"
    print(f"rank {rank} of {where}, GPUs {os.environ.get('CUDA_VISIBLE_DEVICES')}")
    me = rank + "+" * ("FOREPROP_JOIN" in os.environ)
    for told in sys.argv[1:]:
        whose, _, action = told.partition(":")
        if whose in (me, "all"):
            name, _, value = action.partition("=")
            ACTIONS[name](value)
    print("done without a line end", end="")


if __name__ == "__main__":
    main()

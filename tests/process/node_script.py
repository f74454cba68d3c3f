"""A worker of an elastic session that may have to die together with the server beside it.

As `tests.process.elastic_script`, whose plan it takes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import psutil

from tests.process import elastic_script


def die_with_server(rank: int, result: Mapping[str, Any]) -> None:
    """As if the machine lost its power: the server is gone before it can miss its worker."""
    elastic_script.write(rank, {**result, "died_s": time.monotonic()})
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    elastic_script.die = die_with_server
    elastic_script.main()

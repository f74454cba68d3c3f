"""Starts Python programs that have torch imported already: forks instead of starting.

Reads requests from standard input, one JSON object per line (``script``, ``environment``,
``output``, ``netns``), and answers each with the new process's id. The process runs the script as
``__main__`` to its ordinary end, with every exit handler. It is a child of whoever adopts orphans.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # while torch is imported: it would look through all of that again and again

import ctypes
import faulthandler
import importlib
import json
import os
import pkgutil
import runpy
import signal
import sys
from typing import Any

import torch.distributed.run
import torch.utils.data

import foreprop

_CLONE_NEWNET = 0x40000000
_SHARED = "config core engine params features.members backends session".split()
"""Folders of foreprop that sessions with servers load: here once, and not in each process."""


def serve() -> dict[str, Any] | None:
    """Fork for each request; returns the request in the new process, None at the end."""
    for line in sys.stdin:
        read_end, write_end = os.pipe()
        if os.fork():
            os.close(write_end)
            pid = os.read(read_end, 20)
            os.close(read_end)
            os.wait()
            os.write(1, pid + b"\n")
        elif os.fork():
            os._exit(0)  # so that the new process is an orphan, to be adopted
        else:
            os.write(write_end, str(os.getpid()).encode())
            os.close(write_end)
            os.close(read_end)
            return dict(json.loads(line))
    return None


def become(request: dict[str, Any]) -> str:
    os.setsid()
    # whoever runs the tests in the background may have had Ctrl-C ignored, for all that follows
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1)
    # a fork has no thread of torch's pool: while this is the only one, and not two at a time
    torch.set_num_threads(1)
    os.close(output)
    os.close(null)
    if request.get("netns"):
        namespace = os.open(request["netns"], os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(namespace)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["script"], *request.get("arguments", [])]
    return str(request["script"])


def load() -> None:
    getattr(foreprop, "parallelize")  # noqa: B009 - loaded at its first use
    importlib.import_module("foreprop.tools.cli.server")
    for folder in _SHARED:
        package = importlib.import_module(f"foreprop.{folder}")
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    load()
    gc.freeze()  # else each process would look through torch's objects, at the latest as it ends
    gc.enable()
    wanted = serve()
    if wanted is not None:
        runpy.run_path(become(wanted), run_name="__main__")

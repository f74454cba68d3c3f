"""Forms that several threads meet for the first time at the same moment."""

from __future__ import annotations

import subprocess
import sys

import pytest

_WORK = """
import gc, sys, threading
from typing import Any, TypedDict
import msgspec
from foreprop.session.stored import check_form
from foreprop.engine.rendezvous import decode_entry

sys.setswitchinterval(1e-6)
gc.set_threshold(20)
for number in range(20):
    inner = TypedDict(f"Inner{number}", {"a": int, "b": "list[int]"})
    outer = TypedDict(f"Outer{number}", {"x": inner, "y": list[inner], "z": dict[str, inner]})
    entry = msgspec.defstruct(f"Entry{number}", [("x", outer), ("y", list[inner])])
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        check_form({"x": {"a": 1, "b": [1]}, "y": [], "z": {}}, outer)
        decode_entry('{"x": {"x": {"a": 1, "b": []}, "y": [], "z": {}}, "y": []}', entry, "it")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("alive")
"""


@pytest.mark.process
def test_threads_that_meet_a_form_at_once_do_not_end_the_process() -> None:
    """msgspec 0.22 makes what it knows of a type at its first use, without a lock."""
    done = subprocess.run([sys.executable, "-c", _WORK], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr[-2000:]

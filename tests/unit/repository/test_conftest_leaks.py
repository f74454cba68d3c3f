"""The leak detector finds each kind of leak, and only leaks."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest

from tests.leaks import Snapshot, find_leaks, wait_for_leaks

ROOT = Path(__file__).parents[3]
SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]

LEAKY_TESTS = """
import os, subprocess, sys, threading, time
import pytest

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]
kept = []

def test_thread():
    threading.Thread(target=time.sleep, args=(60,), daemon=True, name="forgotten").start()

def test_process():
    kept.append(subprocess.Popen(SLEEPER))

def test_orphan():
    code = "import subprocess, sys; subprocess.Popen(sys.argv[1:])"
    subprocess.run([sys.executable, "-c", code, *SLEEPER], check=True)

def test_descriptor():
    os.open(__file__, os.O_RDONLY)

@pytest.mark.leaks_ok(reason="to test the exemption")
def test_exempt():
    os.open(__file__, os.O_RDONLY)

def test_clean():
    thread = threading.Thread(target=time.sleep, args=(0.02,))
    thread.start()
"""


def test_a_thread_is_found_until_it_ends() -> None:
    before = Snapshot.take()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()
    assert find_leaks(before).describe() == "left behind: thread 'forgotten'"
    stop.set()
    thread.join()
    assert not find_leaks(before)


def test_a_process_is_found_and_killed() -> None:
    before = Snapshot.take()
    with subprocess.Popen(SLEEPER) as process:
        leaks = find_leaks(before)
        assert leaks.processes == {psutil.Process(process.pid)}
        assert str(process.pid) in leaks.describe()
        leaks.kill_processes()
    assert not find_leaks(before)


def test_pythons_own_helpers_are_no_leak() -> None:
    """Its fork server, as of loaders with workers since Python 3.14; what that starts is one."""
    before = Snapshot.take()
    process = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,))
    try:
        process.start()
        leaks = find_leaks(before)
        assert leaks.processes == {psutil.Process(process.pid)}
        process.kill()
        process.join()
        process.close()
        assert not wait_for_leaks(before, grace_s=10), find_leaks(before).describe()
    finally:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
    assert not wait_for_leaks(before, grace_s=10)


def test_a_descriptor_is_found_by_what_it_points_at() -> None:
    first = os.open(os.devnull, os.O_RDONLY)
    before = Snapshot.take()
    os.close(first)
    same_target = os.open(os.devnull, os.O_RDONLY)
    assert not find_leaks(before)
    ours, theirs = socket.socketpair()
    try:
        assert len(find_leaks(before).descriptors) == 2
    finally:
        ours.close()
        theirs.close()
        os.close(same_target)
    assert not find_leaks(before)


def test_the_grace_is_not_used_up_when_nothing_leaked() -> None:
    before = Snapshot.take()
    assert not wait_for_leaks(before, grace_s=600)  # this test's own limit is shorter


def said_by_pytest(folder: Path, *arguments: str) -> str:
    """In a fork: this process has imported what it needs, and would keep what leaks."""
    output = folder / "output"
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # pytest's threads
        child = os.fork()
    if not child:
        try:
            os.chdir(folder)
            with output.open("w") as file:
                sys.stdout = sys.stderr = file
                pytest.main(["-p", "conftest", "-p", "no:cacheprovider", "-rE", *arguments])
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return output.read_text()


def test_the_fixture_fails_each_leaky_test_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "test_leaky.py").write_text(LEAKY_TESTS)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nleak_grace_s = 0.5\nmarkers =\n    leaks_ok(reason): exempt\n"
    )
    said = said_by_pytest(tmp_path, "-c", "pytest.ini", "test_leaky.py")
    errors = [line.split("::")[1] for line in said.splitlines() if line.startswith("ERROR")]
    names = [error.split(" ")[0] for error in errors]
    assert names == ["test_thread", "test_process", "test_orphan", "test_descriptor"], said
    assert "6 passed, 4 errors" in said

"""Native programs under sanitizers: planes that many threads use, and what strangers may send."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
HERE = Path(__file__).parent
HEADERS = HERE.parents[1] / "src/foreprop/engine/native"
FLAGS = ["-std=c++20", "-O1", "-g1", "-pthread", "-ffp-contract=off", "-DFOREPROP_SANITIZED"]
SANITIZERS = {
    "memory": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "threads": ["-fsanitize=thread"],
}


def compiled(name: str, sanitizer: str, to: Path) -> Path:
    """A program beside this file; skips where it cannot be compiled, or not with this sanitizer."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    flags = [*FLAGS, *SANITIZERS[sanitizer]]
    probe = to / "probe.cpp"
    probe.write_text("int main() {}\n")
    for command in (
        [compiler, *flags, str(probe), "-o", str(to / "probe")],
        [str(to / "probe")],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no sanitizer for {sanitizer} here: {done.stderr.strip()[-200:]}")
    built = to / name
    what = [f"-I{HEADERS}", str(HERE / f"{name}.cpp"), "-o", str(built)]
    subprocess.run([compiler, *flags, *what], check=True)
    return built


def run(program: Path, *arguments: str) -> str:
    done = subprocess.run(
        [str(program), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TSAN_OPTIONS": "history_size=4"},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-20_000:]
    return done.stdout


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_planes_that_many_threads_use(sanitizer: str, tmp_path: Path) -> None:
    out = run(compiled("hammer", sanitizer, tmp_path), "20")
    assert "3 ranks, 20 steps" in out


def test_what_strangers_send(tmp_path: Path) -> None:
    """`fuzz SECONDS SEED` runs for longer, and for another seed."""
    out = run(compiled("fuzz", "memory", tmp_path), "5")
    (frames,) = re.findall(r"(\d+) frames fed", out)
    assert int(frames) > 100

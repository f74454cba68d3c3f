"""The commands of users' pages run: each in a folder with a small ``train.py``, on this machine.

What a page has others fill in is filled in here: hosts are addresses of this machine, and a job of
several machines is one of this one.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, commands

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(600)]
USERS = [page for page in PAGES if page.parent != ROOT / "lab" / "docs"]
ELSEWHERE = {
    "foreprop compare": "takes minutes: tests/process/test_compare.py",
    "foreprop lab run": "takes minutes: lab/tests/test_lab_run.py",
    "foreprop server": "needs the workers that it serves: tests/process/test_server_command.py",
    "foreprop top": "shows a job as it runs: tests/process/test_watching.py",
    "python -m pytest": "is about an accelerator: scripts/device runs it where there is one",
}
"""Commands that need more than a folder, and where they run."""
SCRIPT = """\
import torch
import foreprop

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(512, 8), torch.arange(512) % 3)
with foreprop.parallelize(model, optimizer) as session:
    loader = foreprop.shard(torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
print("trained")
"""
PORTS = iter(range(21_000 + 100 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]), 32_768))
"""Below those that the system gives to connections, which may take one that was free."""
TRAINS = re.compile(r"\btrain\.py\b|examples/train_")


def here(words: list[str]) -> list[str]:
    """A command as this machine can run it, with a port of its own."""
    filled: list[str] = []
    for before, word in pairwise(["", *words]):
        if before == "--nnodes":
            word = "1"
        elif before == "--master-port":
            word = str(next(PORTS))
        elif before == "--nodes" and ":" in word:
            word = "2:2"
        if word == "...":
            filled += ["--nproc-per-node", "2"]
        else:
            filled.append(re.sub(r"\b10\.[09]\.0\.1\b", "127.0.0.1", word).replace("=wg0", "=lo"))
    if "torchrun" in filled and "--master-port" not in filled:
        at = filled.index("torchrun") + 1
        filled[at:at] = ["--master-port", str(next(PORTS))]
    return filled


def all_commands() -> list[str]:
    return sorted({shlex.join(words) for page in USERS for words in commands(page)})


def why_elsewhere(line: str) -> str | None:
    return next((why for start, why in ELSEWHERE.items() if line.startswith(start)), None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("127.0.0.1\n127.0.0.2\n")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shutil.copy(ROOT / "examples" / "language_model.json", tmp_path / "mine.json")
    return tmp_path


@pytest.mark.parametrize("line", all_commands())
def test_it_runs(line: str, folder: Path) -> None:
    words = shlex.split(line)
    if (why := why_elsewhere(line)) is not None:
        pytest.skip(why)
    words = here(words)
    environment = dict(os.environ)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if ">" in words:
        words = words[: words.index(">")]
    program = Path(sys.executable).with_name(words[0])
    process = subprocess.Popen(
        [str(program), *words[1:]],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, out[-4000:]
    if TRAINS.search(line):
        assert re.search(r"trained|loss|accuracy", out), out[-4000:]


def test_what_runs_elsewhere_is_on_the_pages() -> None:
    for start in ELSEWHERE:
        assert any(line.startswith(start) for line in all_commands()), start

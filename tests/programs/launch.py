"""Run one variant of one program under torchrun, with real server processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.programs import source
from tests.programs.program import Program

ROOT = Path(__file__).parents[2]
WARM_UP_STEPS = 2
LONGEST_S = 240.0


@dataclass
class Outcome:
    """What all ranks of one run left behind; ``error`` is empty if it went through."""

    error: str = ""
    losses: list[list[float]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def median_step_s(self) -> float:
        return statistics.median(self.step_s) if self.step_s else float("nan")


def run(program: Program, variant: str, world: int, folder: Path) -> Outcome:
    """Everything is in ``folder`` afterwards. `NotHere` if the source cannot be had."""
    prepare(program, variant, folder)
    output = _torchrun(folder, world, program)
    (folder / "output.txt").write_text(output)
    return _collect(folder, world, output)


def prepare(program: Program, variant: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    source.copy_out(program, folder / "program")
    program.patch(folder / "program", variant)
    task: dict[str, Any] = {
        "variant": variant,
        "path": program.path,
        "arguments": list(program.arguments),
        "stand_ins": list(program.stand_ins),
        "steps": program.steps,
        "group": program.group,
    }
    (folder / "task.json").write_text(json.dumps(task))


def _torchrun(folder: Path, world: int, program: Program) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
    command += [str(Path(__file__).parent / "rank.py"), str(folder)]
    process = subprocess.Popen(
        command,
        env=_environment(program, folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        _end(process)
        output, _ = process.communicate()
        output += f"\nended after {LONGEST_S:g} s\n"
    finally:
        _end(process)
    return output


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _environment(program: Program, folder: Path) -> dict[str, str]:
    own = ("FOREPROP_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    path = [str(ROOT), str(ROOT / "src"), str(source.folder() / "site")]
    fixed = {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "1",
        "PYTHONHASHSEED": "0",
    }
    settings = {n: v for n, v in os.environ.items() if n.startswith("FOREPROP_")}
    return {**kept, **fixed, **settings, **program.environment}


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _collect(folder: Path, world: int, output: str) -> Outcome:
    outcome = Outcome()
    for rank in range(world):
        path = folder / f"rank-{rank}.json"
        if not path.exists():
            last = output.strip().splitlines()[-1:] or [""]
            outcome.error = outcome.error or f"rank {rank} ended early: {last[0][:200]}"
            continue
        record = json.loads(path.read_text())
        outcome.losses.append(record["losses"])
        outcome.digests.append(record["digest"])
        outcome.step_s += record["step_s"][WARM_UP_STEPS:]
        outcome.error = _more_telling(outcome.error, record["error"])
    if not outcome.error:
        outcome.parameters = torch.load(folder / "parameters.pt")
    return outcome


def _more_telling(error: str, other: str) -> str:
    """The cause is with the rank that did not merely lose the others."""
    if not error or error.startswith(("PeerLost", "rank ")):
        return other or error
    return error

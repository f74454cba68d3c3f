"""docs/recipes.md's job for Slurm, and Lightning's own start there, with stand-ins for srun."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.harness import ROOT, Run, running
from tests.process.train_script import Scenario

pytestmark = [pytest.mark.process, pytest.mark.timeout(200), pytest.mark.long]

FAKE = ROOT / "tests" / "process" / "fake_slurm.py"
LIGHTNING = ROOT / "tests" / "process" / "lightning_cases.py"
TRAINING = ROOT / "tests" / "process" / "train_script.py"
NODES = ("127.0.0.1", "127.0.0.2")


def recipe() -> str:
    page = (ROOT / "docs" / "recipes.md").read_text()
    found = re.search(r"^## Slurm$.*?^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def asked(job: str, option: str) -> int:
    """What a job's ``#SBATCH`` line says."""
    found = re.search(rf"^#SBATCH --{option}=(\d+)$", job, re.MULTILINE)
    assert found, option
    return int(found[1])


def free_job() -> int:
    """The number of a job whose port, as the recipe counts, is free."""
    for number in range(os.getpid() % 10_000, 20_000):
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", 20_000 + number % 10_000))
            except OSError:
                continue
            return number
    raise AssertionError("no port is free")


def slurms(run: Run, job: str, *, per_node: int, nodes: tuple[str, ...] = NODES) -> dict[str, str]:
    """What sbatch tells a job's script, and Slurm's programs on its PATH."""
    programs = run.temporary / "bin"
    programs.mkdir()
    for name in ("srun", "scontrol"):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} {name} "$@"\n')
        (programs / name).chmod(0o755)
    (programs / "torchrun").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    )
    (programs / "torchrun").chmod(0o755)
    return {
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        "SLURM_JOB_ID": str(free_job()),
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_NODELIST": ",".join(nodes),
        "SLURM_NNODES": str(len(nodes)),
        "SLURM_NTASKS_PER_NODE": str(per_node),
        "SLURM_CPUS_PER_TASK": str(asked(job, "cpus-per-task")),
    }


def call(run: Run, command: list[str], variables: dict[str, str]) -> int:
    """Its exit status; what it prints is the run's."""
    run.outputs.append(path := run.folder / "job.txt")
    with path.open("w") as file:
        done = subprocess.run(
            command, env=variables, stdout=file, stderr=subprocess.STDOUT, timeout=150
        )
    return done.returncode


def run_job(run: Run, job: str, scenario: Scenario) -> int:
    """The recipe's, with two nodes of one worker each, and the tests' training script."""
    script = run.folder / "job.sh"
    fewer = job.replace("--nproc-per-node 4", "--nproc-per-node 1")
    assert fewer != job
    script.write_text(fewer.replace("train.py", str(TRAINING)))
    told = slurms(run, job, per_node=asked(job, "ntasks-per-node"))
    return call(run, ["bash", str(script)], run.environment(scenario, **told))


def test_the_recipes_job_trains_on_two_nodes(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        assert run_job(run, recipe(), Scenario()) == 0, run.output()
        results = run.results()
        assert sorted(results) == [0, 1]
        assert len({result["sha256"] for result in results.values()}) == 1, run.output()
        assert "2 workers on 2 nodes, 2 servers" in run.output()
        run.check_nothing_left()


def test_lightning_under_srun_alone(tmp_path: Path) -> None:
    """Lightning takes ranks and address from Slurm's variables; there is no torchrun, no RANK."""
    pytest.importorskip("lightning", reason="needs pip install foreprop[lightning]")
    with running(tmp_path) as run:
        told = slurms(run, recipe(), per_node=2, nodes=NODES[:1])
        srun = str(run.temporary / "bin" / "srun")
        command = [srun, sys.executable, str(LIGHTNING), "2", "clip_norm"]
        assert call(run, command, run.environment(Scenario(), **told)) == 0, run.output()
        results = run.results()
        assert sorted(results) == [0, 1]
        assert run.output().count("2 workers on") == 1, "Lightning has started more"
        for result in results.values():
            ddp, ours = (result["clip_norm"][name] for name in ("ddp", "foreprop"))
            assert ours["losses"] == pytest.approx(ddp["losses"], rel=1e-3)
        run.check_nothing_left(within_s=30)

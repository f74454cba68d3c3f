"""In Slurm's place, on this machine: ``fake_slurm.py srun ...`` and ``fake_slurm.py scontrol ...``.

``SLURM_JOB_NODELIST`` is a list with commas, of which ``scontrol show hostnames`` prints each.
``srun`` starts ``SLURM_NTASKS_PER_NODE`` tasks for each, with the variables by which a task knows
its place. With ``--kill-on-bad-exit=1`` the first that fails ends the others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence


def nodes() -> list[str]:
    return os.environ["SLURM_JOB_NODELIST"].split(",")


def variables(node: int, local: int, per_node: int) -> dict[str, str]:
    """What Slurm tells a task (srun(1), "output environment variables")."""
    told = {
        "SLURM_NNODES": len(nodes()),
        "SLURM_NODEID": node,
        "SLURM_LOCALID": local,
        "SLURM_PROCID": node * per_node + local,
        "SLURM_NTASKS": len(nodes()) * per_node,
        "SLURM_NODELIST": os.environ["SLURM_JOB_NODELIST"],
    }
    return {name: str(value) for name, value in told.items()}


def srun(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpus-per-task", type=int)
    parser.add_argument("--kill-on-bad-exit", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args(words)
    per_node = int(os.environ["SLURM_NTASKS_PER_NODE"])
    tasks = [
        subprocess.Popen(asked.command, env={**os.environ, **variables(node, local, per_node)})
        for node in range(len(nodes()))
        for local in range(per_node)
    ]
    while (codes := [task.poll() for task in tasks]).count(None):
        if asked.kill_on_bad_exit and any(codes):
            for task in tasks:
                task.terminate()
        time.sleep(0.05)
    return max(abs(task.wait()) for task in tasks)


def main() -> int:
    program, *words = sys.argv[1:]
    if program == "srun":
        return srun(words)
    assert words[:2] == ["show", "hostnames"]
    print("\n".join(words[2].split(",")))
    return 0


if __name__ == "__main__":
    sys.exit(main())

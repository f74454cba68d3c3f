"""How far simulation by symmetry is off: beside the simulation of every node, ResNet-50 unscaled.

python -m foreprop_lab.benchmarks.symmetric_steps lab/docs/results/symmetric-steps.json
"""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foreprop.plan.profile import load_profile
from foreprop.tools.cli.options import writable
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.simulate.run import simulate_system
from foreprop_lab.simulate.setting import SimulatedSetting

REPRESENTATIVES = (1, 4)
Case = dict[str, Any]
PLAIN: list[Case] = [
    {"system": system, "nodes": nodes, "balance": balance}
    for nodes in (4, 16, 32, 64)
    for system in ("p3", "slicing", "kvstore", "wfbp", "tensorflow")
    for balance in (0.5, 1.0, 2.0)
    if nodes <= 16 or (system == "slicing" and nodes == 32) or system == "p3"
]
COARSE: list[Case] = [
    {"system": "p3", "nodes": nodes, "balance": balance, "slice_elems": 500_000}
    for nodes in (16, 32)
    for balance in (1.0, 2.0)
]
DISTURBED: list[Case] = [
    {"system": system, "nodes": 16, "balance": balance, "steps": 10, **disturbance}
    for system in ("ddp", "p3")
    for balance in (1.0,)
    for disturbance in (
        {"slow_nodes": 1, "slowdown": 0.5},
        {"jitter": 0.3},
        {"step_jitter": 0.1},
        {"step_jitter": 0.3},
    )
]


def main(path: str, cases: Sequence[Case] = (*PLAIN, *COARSE, *DISTURBED)) -> list[Case]:
    """Write steps and errors to ``path``, and print each."""
    writable(Path(path).parent)
    done: list[Case] = []
    for case in cases:
        every_s = step_s(case, symmetric=False)
        errors = {n: step_s(case, representatives=n) / every_s - 1 for n in REPRESENTATIVES}
        done.append({**case, "step_s": every_s, "errors": errors})
        print(case, f"{every_s:.4f} s", *(f"{error:+.1%}" for error in errors.values()), flush=True)
        Path(path).write_text(json.dumps(done, indent=1) + "\n")
    return done


def step_s(case: Case, *, symmetric: bool = True, representatives: int = 1) -> float:
    """The mean over a case's steps and nodes, after a step that does not count."""
    asked = dict(case)
    system, steps = asked.pop("system"), asked.pop("steps", 2)
    setting = SimulatedSetting(
        profile=load_profile("resnet50"),
        systems=(system,),
        scale=1,
        compute_s=0.25,
        symmetric=symmetric,
        representatives=representatives,
        **asked,
    )
    bucket_bytes = 25 * 2**20 if system == "ddp" else None
    simulated = simulate_system(
        system, setting, Hosts(), steps=1 + steps, bucket_bytes=bucket_bytes
    )
    weights = [crowd.members for crowd in setting.crowds]
    each = [statistics.fmean(step_s[1:]) for step_s in simulated.step_s]
    return statistics.fmean(each, weights=weights)


if __name__ == "__main__":
    main(sys.argv[1])

"""The refined model beside the simulator, and beside what the lab measured.

python -m foreprop_lab.benchmarks.modelled_steps lab/docs/results/modelled-steps.json \\
    lab/docs/results/results.json
"""

import json
import statistics
import sys
from pathlib import Path

from foreprop.config import PRESETS, Config
from foreprop.core.slicing import BIG_ARRAY_ELEMS
from foreprop.errors import ConfigError
from foreprop.plan.deployment import BUCKET_BYTES, Deployment
from foreprop.plan.profile import load_profile
from foreprop.plan.refined import step_s
from foreprop.tools.cli.options import writable
from foreprop_lab.setting.labsetting import DDP, RING, LabSetting
from foreprop_lab.setting.records import read_records
from foreprop_lab.simulate.run import simulate_lab
from foreprop_lab.simulate.setting import SimulatedSetting

SYSTEMS = ("p3", "slicing", "kvstore", "wfbp", "tensorflow", "ring", "ddp")
MODELS = ("resnet50", "inceptionv3", "vgg19", "sockeye")
NODES = (2, 4, 8)
BALANCES = (0.5, 0.75, 1.0, 1.5, 2.0)
Point = dict[str, float | str]


def main(
    path: str,
    results: str,
    models: tuple[str, ...] = MODELS,
    nodes: tuple[int, ...] = NODES,
    balances: tuple[float, ...] = BALANCES,
) -> list[Point]:
    """Write the points to ``path``, and print each system's errors beside the lab's ``results``."""
    writable(Path(path).parent)
    print("beside the lab")
    show(measured(results))
    points = [
        point
        for model in models
        for count in nodes
        for balance in balances
        for point in compare(model, count, balance)
    ]
    print("beside the simulator")
    show(points)
    Path(path).write_text(json.dumps(points, indent=1) + "\n")
    return points


def deployment_of(setting: LabSetting, system: str) -> Deployment:
    """The deployment of a preset, ``ring`` or ``ddp`` in a setting, with sizes scaled alike."""
    known = (*PRESETS, RING, DDP)
    if system not in known:
        raise ConfigError(f"system is {system!r}; the model knows {', '.join(known)}")
    served = system in PRESETS
    return Deployment(
        layers=setting.layers,
        architecture="p2p" if served else "ring" if system == RING else "ddp",
        preset=system if served else "p3",
        nodes=setting.nodes,
        workers_per_node=setting.workers_per_node,
        rate_bits_per_s=setting.rate,
        slice_elems=setting.slice_elems_of(system),
        big_array_elems=setting.scaled(BIG_ARRAY_ELEMS),
        chunk_elems=setting.scaled(Config().chunk_elems),
        bucket_bytes=setting.scaled(BUCKET_BYTES),
    )


def compare(model: str, nodes: int, balance: float) -> list[Point]:
    setting = SimulatedSetting(
        profile=load_profile(model),
        systems=SYSTEMS,
        nodes=nodes,
        compute_s=2.0,
        balance=balance,
        iterations=2,
        warm_up=1,
    )
    return [
        {
            "system": record.system,
            "model": model,
            "nodes": nodes,
            "balance": balance,
            "step_s": record.iteration_s.median,
            "modelled_s": step_s(deployment_of(setting, record.system)),
        }
        for record in simulate_lab(setting)
    ]


def measured(results: str) -> list[Point]:
    """The points of all records with the usual slices that were not CPU-bound."""
    points: list[Point] = []
    for record in read_records(Path(results)):
        if record.system not in SYSTEMS or not record.has_usual_slices or record.cpu_bound:
            continue
        setting = SimulatedSetting(
            profile=load_profile(record.model),
            systems=(record.system,),
            nodes=record.nodes,
            scale=record.scale,
            compute_s=record.compute_s,
            rate_bits_per_s=record.rate_bits_per_s,
            slice_elems=record.slice_elems * record.scale,
        )
        points.append(
            {
                "system": record.system,
                "model": record.model,
                "nodes": record.nodes,
                "balance": round(record.balance, 2),
                "step_s": record.iteration_s.median,
                "modelled_s": step_s(deployment_of(setting, record.system)),
            }
        )
    return points


def show(points: list[Point]) -> None:
    for system in SYSTEMS:
        of_system = [p for p in points if p["system"] == system]
        if of_system:
            print(system, describe(of_system))


def describe(points: list[Point]) -> str:
    errors = [float(p["modelled_s"]) / float(p["step_s"]) - 1 for p in points]
    absolute = [abs(error) for error in errors]
    worst = max(points, key=lambda p: abs(float(p["modelled_s"]) / float(p["step_s"]) - 1))
    return (
        f"{len(errors)} points, error {statistics.median(absolute):.1%} in the median,"
        f" {max(absolute):.1%} at most ({worst['model']}, {worst['nodes']} nodes,"
        f" {worst['balance']}), {statistics.fmean(errors):+.1%} on average"
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

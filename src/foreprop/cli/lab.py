"""``foreprop lab run``: a cluster in a box, real peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foreprop.cli.clone import load
from foreprop.cli.measured import (
    EGRESS_ONLY,
    STALENESS,
    UNEVEN_OPTIONS,
    USUAL_SYSTEMS,
    Model,
    Out,
    ProfileFile,
    completed,
    compression_lines,
    keep,
    over_ddp_lines,
    say_environment,
    say_notices,
    table,
)
from foreprop.cli.options import STEPS, compute, filling, rate, systems, writable
from foreprop.cli.output import console, print_table, say
from foreprop.lab.run import Build, run_lab
from foreprop.workload.setting import MXNET, SYSTEMS, LabSetting


@filling(
    LabSetting,
    rate_bits_per_s=rate(),
    compute_s=compute(),
    iterations=STEPS,
    systems=systems(
        SYSTEMS,
        default=USUAL_SYSTEMS,
        more="; p3@200000: with slices of that size; p3+int8: with a codec; ddp+fp16,"
        " ddp+powersgd:2: with torch's hooks",
    ),
    shape_ingress=EGRESS_ONLY,
    staleness=STALENESS,
    **UNEVEN_OPTIONS,
)
def run(
    model: Model = None,
    profile: ProfileFile = None,
    *,
    out: Out = Path("runs/lab"),
    **given: Any,
) -> None:
    """Measure several systems in one cluster, their steps interleaved; write results.json.

    Nodes are network namespaces joined by links that the kernel shapes; accelerators are emulated;
    autograd, optimizers and sockets are real. efficiency is the limit, which no schedule can beat,
    over the median step.

    Examples:
      foreprop lab run --model resnet50 --nodes 4 --balance 1.0
      foreprop lab run --profile mine.json --rate 100Mbit --compute 2s --systems p3,ring,ddp
      foreprop lab run --model resnet50 --balance 4 --systems p3,p3+auto,ddp+powersgd:2
      foreprop lab run --systems p3 --step-jitter 0.3 --staleness 4 --out runs/apart
      foreprop lab run --model vgg19 --jitter 0.2 --slow-nodes 1 --steps 10 --out runs/uneven
    """
    setting = LabSetting(**completed(model, profile, given))
    results = writable(out) / "results.json"
    shown = console()
    with shown.status("") as status:
        result = run_lab(setting, build=_build(setting), progress=status.update)
    say_notices(shown, result)
    print_table(shown, table(setting, result.records))
    for line in compression_lines(result.records):
        say(shown, line)
    say_environment(shown, setting)
    keep(shown, results, result.records)
    for line in over_ddp_lines(result.records):
        say(shown, line, "bold")


def _build(setting: LabSetting) -> Build | None:
    """What builds the setting's systems, if the lab does not by itself."""
    peers = [name for name in setting.systems if name in MXNET]
    if not peers:
        return None
    build: Build = load("experiments.mxnet:build_system", f"the system {peers[0]}")
    return build

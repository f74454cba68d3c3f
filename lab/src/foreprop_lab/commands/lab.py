"""``foreprop lab run``: a cluster in a box, real peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foreprop.tools.cli.options import filling, systems, writable
from foreprop.tools.cli.output import console
from foreprop_lab.commands.measured import (
    EGRESS_ONLY,
    STALENESS,
    UNEVEN_OPTIONS,
    USUAL_SYSTEMS,
    Model,
    Out,
    ProfileFile,
    completed,
    print_notices,
    show,
)
from foreprop_lab.commands.options import LAUNCH, STEPS, compute, rate
from foreprop_lab.lab.run import Build, run_lab
from foreprop_lab.setting.labsetting import MXNET, SYSTEMS, LabSetting


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
    launch_s=LAUNCH,
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
      foreprop lab run --model resnet50 --nodes 3 --launch 8us --systems p3,ring,ddp
      foreprop lab run --systems p3 --step-jitter 0.3 --staleness 4 --out runs/apart
      foreprop lab run --model vgg19 --jitter 0.2 --slow-nodes 1 --steps 10 --out runs/uneven
    """
    setting = LabSetting(**completed(model, profile, given))
    results = writable(out) / "results.json"
    shown = console()
    build: Build | None = None  # the lab builds the systems by itself, but for these
    if any(name in MXNET for name in setting.systems):
        from foreprop_lab.lab.mxnet import build_system as build
    with shown.status("") as status:
        result = run_lab(setting, build=build, progress=status.update)
    print_notices(shown, result)
    show(shown, setting, result.records, results)

"""``foreprop lab layers``: real layers in a cluster in a box, eager and compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from foreprop.tools.cli.options import Shown, filling, systems, writable
from foreprop.tools.cli.output import console
from foreprop_lab.commands.measured import EGRESS_ONLY, Out, print_notices, show
from foreprop_lab.commands.options import STEPS, compute, rate
from foreprop_lab.experiments.layers.training import (
    LAYERS_SYSTEMS,
    LayersSetting,
    build_system,
    real_profile,
)
from foreprop_lab.lab.run import run_lab
from foreprop_lab.setting.labsetting import UNEVEN

_NOT_HERE = ("workers_per_node", "mxnet_python", "seed", "staleness", *UNEVEN)


@filling(
    LayersSetting,
    _NOT_HERE,
    rate_bits_per_s=rate(),
    compute_s=compute("2s", help="What the device computes per step, as 250ms."),
    iterations=STEPS,
    scale=Shown(help="Divides slices, windows and buffers; the model stays."),
    systems=systems(LAYERS_SYSTEMS, default=",".join(LAYERS_SYSTEMS)),
    shape_ingress=EGRESS_ONLY,
)
def layers(
    model: Annotated[str, typer.Option(help="transformer, resnet or lstm.")] = "transformer",
    *,
    out: Out = Path("runs/layers"),
    **given: Any,
) -> None:
    """Measure real layers, eager and compiled, in one cluster; write results.json.

    A small transformer or ResNet of torch's layers is trained with p3: as it is, with each block
    compiled, and compiled whole, their steps interleaved. What the layers compute is real, the
    time for it is an emulated device's. efficiency is the limit, which no schedule can beat, over
    the median step.

    Examples:
      foreprop lab layers --model transformer --nodes 4 --balance 1.0
      foreprop lab layers --model resnet --systems eager,whole --compute 3s --out runs/resnet
      foreprop lab layers --model lstm --balance 4 --systems eager,eager+lossless
    """
    setting = LayersSetting(profile=real_profile(model), **given)
    results = writable(out) / "results.json"
    shown = console()
    with shown.status("") as status:
        result = run_lab(setting, build=build_system, progress=status.update)
    print_notices(shown, result)
    show(shown, setting, result.records, results)

"""``foreprop lab simulate``: the lab without a cluster."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from foreprop.quantities import parse_time
from foreprop.tools.cli.options import Shown, filling, systems, writable
from foreprop.tools.cli.output import console, print_json
from foreprop.tools.compare.result import write_records
from foreprop_lab.commands.measured import (
    EGRESS_ONLY,
    STALENESS,
    UNEVEN_OPTIONS,
    USUAL_SYSTEMS,
    Model,
    Out,
    ProfileFile,
    completed,
    show,
)
from foreprop_lab.commands.options import STEPS, compute, rate
from foreprop_lab.simulate.run import simulate_lab
from foreprop_lab.simulate.setting import SIMULATED_SYSTEMS, SimulatedSetting


@filling(
    SimulatedSetting,
    ("mxnet_python", "trace"),
    rate_bits_per_s=rate(),
    compute_s=compute(),
    iterations=STEPS,
    systems=systems(SIMULATED_SYSTEMS, default=USUAL_SYSTEMS),
    shape_ingress=EGRESS_ONLY,
    **UNEVEN_OPTIONS,
    latency_s=Shown(name="latency", kind=str, default="100us", read=partial(parse_time, "latency")),
    symmetric=Shown(declared=("--symmetric/--every-node",)),
    staleness=STALENESS,
)
def simulate(
    model: Model = None,
    profile: ProfileFile = None,
    *,
    out: Out = Path("runs/simulated"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the records as JSON, and nothing else.")
    ] = False,
    **given: Any,
) -> None:
    """Predict what `run` would measure, without a cluster; write results.json.

    The presets and ring are foreprop's own state machines, on a simulated clock with simulated
    links; ddp is a model of DistributedDataParallel. The same options give the same records. Many
    nodes are simulated by symmetry, which is exact for ring and ddp, and close for the presets.
    Codecs are for the presets; ring and ddp send float32 beside them.

    Examples:
      foreprop lab simulate --model resnet50 --nodes 16 --rate 10Gbit --compute 180ms --scale 1
      foreprop lab simulate --model vgg19 --nodes 256 --balance 1.0 --latency 50us
      foreprop lab simulate --profile mine.json --rate 25Gbps --scale 1 --json
      foreprop lab simulate --systems p3 --slow-nodes 1 --slowdown 1.0 --staleness async
      foreprop lab simulate --model vgg19 --balance 4 --compression auto --systems p3,ddp
    """
    setting = SimulatedSetting(**completed(model, profile, given))
    results = writable(out) / "results.json"
    shown = console(to_errors=as_json)
    with shown.status("") as status:
        records = simulate_lab(setting, progress=status.update)
    if as_json:
        print_json(records)
        write_records(results, records)
        return
    show(shown, setting, records, results)

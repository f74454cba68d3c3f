"""Real training on one GPU that four nodes share, over links of a chosen rate: foreprop beside DDP.

    python -m foreprop_lab.benchmarks.gpu --model resnet50 --batch 64 --rate 4e9

Each node is a process in a network namespace of its own, as in `foreprop lab`, joined by the
kernel's links. All train the same model of torchvision on the one GPU, which so is each node's
slow one. Layers, autograd, copies and kernels are the real ones; only the network is emulated.
Systems take turns, a block of steps each. A step goes from the end of a forward pass to the end of
the next, by the device's events. ``alone`` exchanges nothing.

Systems are ``alone``, ``ddp``, ``ddp-bf16``, presets and ``ring``. What follows a preset's name or
``ring``: ``-bf16`` on the wire, ``+CODEC`` compresses (``p3+auto``), ``@ELEMS`` cuts slices.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from foreprop.errors import ConfigError
from foreprop.tools.cli.options import writable
from foreprop_lab.benchmarks.gpunode import DISCARDED_STEPS, PLAIN, Setting, config_of, serve
from foreprop_lab.lab.cluster import Cluster, busy_s
from foreprop_lab.setting.links import Network

SYSTEMS = ("alone", "ddp", "ddp-bf16", "p3", "p3-bf16", "p3+auto", "ring")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all systems in turns; medians over blocks and nodes, seconds."""
    setting = Setting(options.model, options.batch, options.half, options.compiled, options.device)
    network = Network(nodes=options.nodes, rate_bits_per_s=options.rate)
    found: dict[str, list[float]] = {name: [] for name in options.systems}
    cpus: dict[str, list[float]] = {name: [] for name in options.systems}
    sent: dict[str, float] = {}
    sums: dict[str, list[float]] = {}
    with Cluster(serve, setting, nodes=options.nodes, network=network) as cluster:
        device = cluster.ask_all(("device", ""))[0]
        for name in options.systems:
            _say(f"{name}: starting")
            cluster.ask_all(("build", name))
            cluster.ask_all(("steps", name, 6))
        for turn in range(options.blocks):
            order = [*options.systems[turn % len(found) :], *options.systems[: turn % len(found)]]
            for name in order:
                busy, began = busy_s(), time.monotonic()
                answers = cluster.ask_all(("steps", name, options.steps + DISCARDED_STEPS))
                share = (busy_s() - busy) / (time.monotonic() - began) / (os.cpu_count() or 1)
                cpus[name].append(share)
                found[name] += map(statistics.fmean, zip(*(a[0] for a in answers), strict=True))
                sent[name] = statistics.fmean(a[1] for a in answers)
        for name in options.systems:
            sums[name] = cluster.ask_all(("sum", name))
            cluster.ask_all(("close", name))
    return {
        "setting": setting._asdict() | {"nodes": options.nodes, "rate_bits_per_s": options.rate},
        "device": device,
        "torch": torch.__version__,
        "systems": {
            name: {
                "step_s": statistics.median(steps),
                "p10_p90_s": _outer_tenths(steps),
                "sent_bytes": sent[name],
                "cpu_share": statistics.median(cpus[name]),
                "ranks_end_alike": len(set(sums[name])) == 1,
            }
            for name, steps in found.items()
        },
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _outer_tenths(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]


def print_table(result: dict[str, Any]) -> None:
    """Print milliseconds, and what they are over those of ``alone`` and ``ddp``."""
    systems = result["systems"]
    print(json.dumps(result["setting"]), result["device"], "torch", result["torch"])
    print("system      ms/step     p10     p90 /alone   /ddp MB sent  CPUs alike")
    for name, one in systems.items():
        step_s, (low_s, high_s) = one["step_s"], one["p10_p90_s"]
        ratios = [step_s / systems[n]["step_s"] if n in systems else 0 for n in ("alone", "ddp")]
        print(
            f"{name:11}{step_s * 1e3:8.1f}{low_s * 1e3:8.1f}{high_s * 1e3:8.1f}",
            f"{ratios[0]:6.3f} {ratios[1]:6.3f}{one['sent_bytes'] / 1e6:8.1f}",
            f"{one['cpu_share']:5.0%} {one['ranks_end_alike']}",
            flush=True,
        )


def systems(text: str) -> list[str]:
    """The systems that a text names; raises ArgumentTypeError for a name that is none."""
    names = text.split(",")
    for name in names:
        if name not in PLAIN:
            try:
                config_of(name or "nothing")
            except (ConfigError, ValueError) as error:
                raise argparse.ArgumentTypeError(f"{name!r} is no system: {error}") from error
    return names


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--model", default="resnet50", help="of torchvision; transformer; small")
    made.add_argument("--batch", type=int, default=64, help="samples of each node")
    made.add_argument("--nodes", type=int, default=4)
    made.add_argument("--rate", type=float, default=4e9, help="of each link, bit/s")
    made.add_argument("--half", action="store_true", help="layers compute in bfloat16")
    made.add_argument("--compiled", action="store_true", help="by torch.compile, whole")
    made.add_argument("--device", default="cuda:0", help="that all nodes share")
    made.add_argument("--steps", type=int, default=10, help="in a block")
    made.add_argument("--blocks", type=int, default=3, help="of each system")
    made.add_argument("--systems", type=systems, default=list(SYSTEMS))
    made.add_argument("--out", type=Path, help="for the results, as JSON")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.out is not None:
        writable(options.out.parent)
    result = measure(options)
    print_table(result)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""Everything that a machine with a GPU does within ten minutes: `scripts/device`.

    scripts/device --out runs/device
    scripts/device --dry-run                # on a CPU, with a small model: does it run at all?

First the tests of `tests/accelerator`. Then `foreprop_lab.benchmarks.gpu` at each rate, with the
batch for which computing takes as long as the bytes do (balance 1.0): there schedules differ most.
What no time is left for is left out, and that is said.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from foreprop.plan import limit
from foreprop_lab.benchmarks import gpu
from foreprop_lab.benchmarks.gpunode import DISCARDED_STEPS, make_model

_ROOT = Path(__file__).parents[4]
_TESTS_SHARE = 0.4
"""The most of the time that the tests may take."""
_START_S = 40.0
"""How long the nodes' processes, and what each system needs at first, take."""
_LONGEST_STEP = 3.0
"""The slowest system's step at balance 1.0, over one without communication."""
_MOST_BATCH = 1024
_NOTHING_COLLECTED = 5
"""pytest's exit code where all files skip themselves, for want of a device."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    has_models = importlib.util.find_spec("torchvision") is not None
    made.add_argument("--device", default="cuda:0")
    made.add_argument("--model", default="resnet50" if has_models else "transformer")
    made.add_argument("--rates", type=_numbers, default=[5e9, 10e9], help="of links, bit/s")
    made.add_argument("--systems", type=gpu.systems, default=list(gpu.SYSTEMS))
    made.add_argument("--nodes", type=int, default=4)
    made.add_argument("--steps", type=int, default=8, help="in a block")
    made.add_argument("--blocks", type=int, default=3, help="of each system, at most")
    made.add_argument("--probes", type=_numbers, default=[32, 96], help="batches to begin with")
    made.add_argument("--limit-s", type=float, default=570.0, help="for all of it")
    made.add_argument("--no-tests", action="store_true", help="the benchmark alone")
    made.add_argument("--dry-run", action="store_true", help="on the CPU, tiny")
    made.add_argument("--out", type=Path, default=Path("runs/device"), help="folder")
    return made


_DRY = {"device": "cpu", "model": "small", "nodes": 2, "steps": 2, "blocks": 1, "probes": [2, 6]}


def _numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all; the exit code is 0 if the tests pass and all ranks end alike."""
    options = parser().parse_args(arguments)
    if options.dry_run:
        vars(options).update(_DRY)
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"runs": [], "left_out": []}
    clock = Clock(options.limit_s)
    if not options.no_tests:
        found["tests"] = run_tests(options.out / "tests.log", clock.left_s * _TESTS_SHARE)
    size_bytes = 4 * elements(options.model)
    probes = [(batch, compute_s(options, batch)) for batch in map(int, options.probes)]
    for rate in options.rates:
        wire_s = limit.wire_s(
            size_bytes * limit.HEADER_FACTOR, nodes=options.nodes, rate_bits_per_s=rate
        )
        batch = batch_for(wire_s, probes)
        blocks = blocks_within(clock.left_s, wire_s, options)
        if not blocks:
            found["left_out"].append(f"{rate / 1e9:g} Gbit/s: {clock.left_s:.0f} s are left")
            continue
        result = gpu.measure(gpu_options(options, batch, rate, options.systems, blocks))
        alone_s = result["systems"].get("alone", {}).get("step_s")
        result |= {"wire_s": wire_s, "balance": alone_s and wire_s / alone_s, "blocks": blocks}
        found["runs"].append(result)
        (options.out / "device.json").write_text(json.dumps(found, indent=1))
        _print(result)
    found["seconds"] = clock.passed_s
    (options.out / "device.json").write_text(json.dumps(found, indent=1))
    for line in found["left_out"]:
        print(f"left out: {line}")
    print(f"{found['seconds']:.0f} s; {options.out / 'device.json'}")
    return 0 if is_good(found) else 1


def is_good(found: dict[str, Any]) -> bool:
    """Whether tests have passed, and every system's ranks have ended alike."""
    ends = [
        one["ranks_end_alike"] or name == "alone"
        for run in found["runs"]
        for name, one in run["systems"].items()
    ]
    passed = bool(found.get("tests", {}).get("passed", True))
    return passed and bool(ends) and all(ends)


class Clock:
    def __init__(self, limit_s: float) -> None:
        self._started_s, self._limit_s = time.monotonic(), limit_s

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self._started_s

    @property
    def left_s(self) -> float:
        return self._limit_s - self.passed_s


def run_tests(log: Path, limit_s: float) -> dict[str, Any]:
    """Run the accelerator's tests, for so long at most."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "tests/accelerator"]
    if torch.accelerator.is_available() and importlib.util.find_spec("xdist") is not None:
        command += ["-n", "6"]
    started_s = time.monotonic()
    with log.open("wb") as output:
        code = -1
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = subprocess.run(
                command, cwd=_ROOT, stdout=output, stderr=output, timeout=limit_s, check=False
            ).returncode
    lines = log.read_text(errors="replace").splitlines() or [""]
    says = lines[-1] if code >= 0 else f"not done within {limit_s:.0f} s"
    print(f"tests/accelerator: {says}")
    seconds = time.monotonic() - started_s
    return {"passed": code in (0, _NOTHING_COLLECTED), "says": says, "seconds": seconds}


def elements(model: str) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make_model(model).parameters())


def gpu_options(
    options: argparse.Namespace, batch: int, rate: float, systems: Sequence[str], blocks: int
) -> argparse.Namespace:
    """The options with which `foreprop_lab.benchmarks.gpu` is called."""
    made = gpu.parser().parse_args([])
    about = {name: getattr(options, name) for name in ("model", "nodes", "device", "steps")}
    vars(made).update(about, batch=batch, rate=rate, systems=list(systems), blocks=blocks)
    return made


def compute_s(options: argparse.Namespace, batch: int) -> float:
    """The time of a step without communication, of all nodes on the one device at once."""
    found = gpu.measure(gpu_options(options, batch, max(options.rates), ["alone"], 1))
    seconds: float = found["systems"]["alone"]["step_s"]
    print(f"alone, batch {batch}: {seconds * 1e3:.1f} ms", flush=True)
    return seconds


def batch_for(wire_s: float, probes: Sequence[tuple[int, float]]) -> int:
    """The batch that computes for so long, by the line through two that were tried."""
    (few, few_s), (many, many_s) = probes[0], probes[-1]
    each_s = (many_s - few_s) / (many - few)
    if each_s <= 0:  # too small to tell: the larger one
        return many
    return min(max(1, round(few + (wire_s - few_s) / each_s)), _MOST_BATCH)


def blocks_within(left_s: float, wire_s: float, options: argparse.Namespace) -> int:
    """How many blocks are done in the time; 0 if not even one."""
    steps_s = _LONGEST_STEP * wire_s * (options.steps + DISCARDED_STEPS) * len(options.systems)
    most: int = options.blocks
    return max(0, min(most, int((left_s - _START_S) / steps_s)))


def _print(result: dict[str, Any]) -> None:
    balance = result["balance"]
    shown = "" if balance is None else f", balance {balance:.2f}"
    print(f"bytes alone: {result['wire_s'] * 1e3:.1f} ms{shown}")
    gpu.print_table(result)


if __name__ == "__main__":
    sys.exit(main())

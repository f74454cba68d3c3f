"""`benchmarks.device`: what a machine with a GPU is asked for, with a CPU in the GPU's place."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from foreprop_lab.benchmarks import device, gpu
from foreprop_lab.benchmarks.gpunode import config_of


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("p3", {"architecture": "p2p", "wire_dtype": None, "compression": None}),
        ("p3-bf16", {"architecture": "p2p", "wire_dtype": "bfloat16", "compression": None}),
        ("p3+auto", {"wire_dtype": None, "compression": "auto"}),
        ("p3@100000", {"slice_elems": 100_000}),
        ("p3-bf16@25000", {"slice_elems": 25_000, "wire_dtype": "bfloat16"}),
        ("ring", {"architecture": "ring"}),
        ("kvstore", {"architecture": "p2p", "granularity": "array"}),
    ],
)
def test_a_system_s_name_says_its_settings(name: str, expected: dict[str, Any]) -> None:
    config = config_of(name)
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize("text", ["p4", "p3@many", "p3@0", "ddp,", "ddp-fp8"])
def test_an_unknown_system_is_refused_before_anything_starts(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no system: "):
        gpu.systems(text)


def test_the_usual_systems_are_systems() -> None:
    assert gpu.systems(",".join(gpu.SYSTEMS)) == list(gpu.SYSTEMS)


@pytest.mark.parametrize(
    ("wire_s", "batch"), [(0.3, 64), (0.145, 33), (0.7, 144), (0.02, 8), (0.0, 4), (100.0, 1024)]
)
def test_the_batch_computes_as_long_as_the_bytes_take(wire_s: float, batch: int) -> None:
    """A step of 32 samples takes 140 ms, and each one more takes 5 ms."""
    assert device.batch_for(wire_s, [(32, 0.14), (96, 0.46)]) == batch


def test_the_batch_is_one_at_least() -> None:
    assert device.batch_for(0.01, [(32, 0.5), (96, 0.6)]) == 1


def test_where_the_batch_does_not_tell_the_larger_one_is_taken() -> None:
    assert device.batch_for(0.3, [(2, 0.5), (6, 0.4)]) == 6


def test_a_run_is_as_long_as_there_is_time() -> None:
    options = device.parser().parse_args(["--steps", "8", "--systems", "alone,ddp"])
    step_s = 3 * 0.5 * 10 * 2
    assert device.blocks_within(1000.0, 0.5, options) == 3
    assert device.blocks_within(40 + 1.5 * step_s, 0.5, options) == 1
    assert device.blocks_within(40 + 0.9 * step_s, 0.5, options) == 0
    assert device.blocks_within(-5.0, 0.5, options) == 0


class Faked:
    """What `foreprop_lab.benchmarks.gpu` was asked for; nothing is measured."""

    def __init__(self, *, alike: bool = True) -> None:
        self.asked: list[argparse.Namespace] = []
        self._alike = alike

    def __call__(self, options: argparse.Namespace) -> dict[str, Any]:
        self.asked.append(options)
        one = {
            "step_s": options.batch / 1000,
            "p10_p90_s": (0.1, 0.2),
            "sent_bytes": 1e6,
            "cpu_share": 0.5,
            "ranks_end_alike": self._alike,
        }
        systems = {name: dict(one) for name in options.systems}
        return {"setting": {"batch": options.batch}, "device": "d", "torch": "t"} | {
            "systems": systems
        }


def run(faked: Faked, out: Path, *more: str) -> tuple[int, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "measure", faked)
        code = device.main(["--model", "small", "--no-tests", "--out", str(out), *more])
    return code, json.loads((out / "device.json").read_text())


def test_each_rate_has_its_batch_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faked = Faked()
    code, found = run(faked, tmp_path, "--rates", "5e9,10e9")
    assert code == 0
    assert [each.systems for each in faked.asked[:2]] == [["alone"]] * 2
    assert [each.rate for each in faked.asked[2:]] == [5e9, 10e9]
    assert [each.batch for each in faked.asked[2:]] == [24, 12]  # 24.4 and 12.2 ms
    assert [run["balance"] for run in found["runs"]] == pytest.approx([1.0, 1.0], rel=0.05)
    assert all(list(run["systems"]) == list(gpu.SYSTEMS) for run in found["runs"])
    printed = capsys.readouterr().out
    for name in gpu.SYSTEMS:
        assert printed.count(f"\n{name} ") == 2


def test_runs_without_time_left_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run(Faked(), tmp_path, "--limit-s", "20")
    assert code == 1  # nothing was measured
    assert found["runs"] == []
    assert [line.partition(":")[0] for line in found["left_out"]] == ["5 Gbit/s", "10 Gbit/s"]
    assert "left out: 10 Gbit/s" in capsys.readouterr().out


def test_ranks_that_end_apart_are_no_success(tmp_path: Path) -> None:
    assert run(Faked(alike=False), tmp_path)[0] == 1


@pytest.mark.process
@pytest.mark.lab
@pytest.mark.long
@pytest.mark.timeout(600)
def test_it_runs_dry(tmp_path: Path) -> None:
    """With the tests, which skip themselves without a device, and every new system."""
    systems = ["alone", "ddp", "p3-bf16", "p3+auto", "p3@25000"]
    given = ["--dry-run", "--rates", "1e9", "--systems", ",".join(systems), "--out", str(tmp_path)]
    assert device.main(given) == 0
    found = json.loads((tmp_path / "device.json").read_text())
    assert found["tests"]["passed"]
    (only,) = found["runs"]
    assert list(only["systems"]) == systems
    assert only["systems"]["p3-bf16"]["sent_bytes"] < 0.6 * only["systems"]["ddp"]["sent_bytes"]

"""accelerate and transformers with foreprop find what they find with their own DDP; examples run.

huggingface_script.py has the cases. Losses and learning rates are compared line by line, and so are
parameters. Norms that are added up in another order make the last bits differ, which AdamW turns
into whole steps where a gradient is nearly zero.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.process.harness import ROOT, Run, Zygote, environment, forked_ranks, running

pytest.importorskip("transformers", reason="needs pip install foreprop[huggingface]")

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

SCRIPT = ROOT / "tests" / "process" / "huggingface_script.py"
TORCHRUN = Path(torch.__path__[0]) / "distributed" / "run.py"
ORDINARY = "clipped accumulated"
TRAINER = "unclipped bf16 adafactor checkpointed resumed twice scaled scaled_fused"
ACCELERATE = "autocast overflowing whole_steps state_saved two_models"
OF_THREE = f"{ORDINARY} resumed scaled state_saved two_models"
"""Of the others only who adds up differs, which the cases do not see."""

CLOSE = {"loss": 1e-4, "eval_loss": 1e-4, "eval": 1e-4, "held_out": 1e-4, "learning_rate": 0.0}
CLOSE |= {"lr": 0.0, "skipped": 0.0, "norm": 1e-3, "grad_norm": 1e-3}
"""By how much what is found may differ."""

NO_GRADIENT = "c_attn.bias"
"""The keys' bias has none but rounding, of which Adafactor makes whole steps."""


def values(found: Any) -> list[float]:
    return list(found) if isinstance(found, list) else [found]


def check_same(case: str, result: dict[str, Any]) -> None:
    ddp, ours = result["ddp"], result["foreprop"]
    assert ddp["loss"], case
    for name, wanted in ddp.items():
        if case == "twice" and name == "grad_norm":
            continue  # where servers update it is the last step's
        one, other = values(wanted), values(ours[name])
        assert len(one) == len(other), (case, name)
        for x, y in zip(one, other, strict=True):
            same = math.isclose(x, y, rel_tol=CLOSE[name], abs_tol=CLOSE[name])
            assert same or (math.isnan(x) and math.isnan(y)), (case, name, one, other)
    apart = {k: v for k, v in result["apart"].items() if not k.endswith(NO_GRADIENT)}
    assert max(apart.values()) < 1e-2, (case, apart)


def check_cases(zygote: Zygote, folder: Path, ranks: int, cases: str) -> None:
    with running(folder) as run:
        variables = environment(
            run.mark, {"RESULTS": str(folder), "CASES": cases, "HF_HUB_OFFLINE": "1"}
        )
        run.torchrun(
            zygote, variables, "--standalone", "--nproc-per-node", str(ranks), script=SCRIPT
        )
        check_results(run, ranks, cases)


def check_results(run: Run, ranks: int, cases: str) -> None:
    run.wait(500)
    assert run.codes() == [0], run.output()
    results = run.results()
    run.check_nothing_left()
    assert sorted(results) == list(range(ranks))
    for result in results.values():
        assert list(result) == cases.split()
        for case, found in result.items():
            check_same(case, found)
    check_more(results[0])


def check_more(results: dict[str, Any]) -> None:
    """That the cases are what they are meant to be."""
    for case in ("scaled", "overflowing"):
        if case in results:
            rates = results[case]["foreprop"]["learning_rate" if case == "scaled" else "lr"]
            assert rates[0] == rates[1], "the first step was to be skipped"
    if "overflowing" in results:
        assert 0 < results["overflowing"]["foreprop"]["skipped"] < 9
    if "clipped" in results:
        ours = results["clipped"]["foreprop"]
        assert max(ours["grad_norm"]) > 0.5
        for line in ours["report"]:
            assert line["foreprop/sent_bytes_per_step"] > 0
            assert line["foreprop/received_bytes_per_step"] > 0
            assert line["foreprop/steps_per_s"] > 0
            assert 0 <= line["foreprop/waiting_share"] <= line["foreprop/waiting_share_max"] <= 1


def test_the_ordinary_loop_of_each(zygote: Zygote, tmp_path: Path) -> None:
    more = {"CASES": ORDINARY, "HF_HUB_OFFLINE": "1"}
    with forked_ranks(zygote, tmp_path, 2, SCRIPT, **more) as run:
        check_results(run, 2, ORDINARY)


@pytest.mark.long
def test_three_ranks(zygote: Zygote, tmp_path: Path) -> None:
    check_cases(zygote, tmp_path, 3, OF_THREE)


@pytest.mark.long
def test_what_else_a_trainer_can_do(zygote: Zygote, tmp_path: Path) -> None:
    check_cases(zygote, tmp_path, 2, TRAINER)


@pytest.mark.long
def test_what_else_an_accelerator_can_do(zygote: Zygote, tmp_path: Path) -> None:
    check_cases(zygote, tmp_path, 2, ACCELERATE)


@pytest.mark.long
@pytest.mark.parametrize("name", ["trainer", "accelerate"])
def test_an_example_prints_what_it_prints_with_ddp(
    zygote: Zygote, tmp_path: Path, name: str
) -> None:
    script = ROOT / "examples" / f"train_with_{name}.py"
    size = {"trainer": ["--steps", "6"], "accelerate": ["--epochs", "2"]}[name]
    told = []
    for number, more in enumerate(([], ["--ddp"])):
        (folder := tmp_path / str(number)).mkdir()
        with running(folder) as run:
            run.start(
                zygote,
                environment(run.mark, {"TMPDIR": str(run.temporary)}),
                script=TORCHRUN,
                arguments=["--standalone", "--nproc-per-node", "2", str(script), *size, *more],
            )
            run.wait(300)
            assert run.codes() == [0], run.output()
            told.append(re.findall(r"losses: .*|epoch \d: .*", run.output()))
            run.check_nothing_left(within_s=60)
    assert told[0] == told[1] != []


@pytest.mark.long
def test_trls_trainer(zygote: Zygote, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs pip install trl, which `dev` leaves out")
    check_cases(zygote, tmp_path, 2, "tuned")


@pytest.mark.long
def test_the_example_for_ray(tmp_path: Path) -> None:
    pytest.importorskip(
        "ray.train", reason="needs pip install foreprop[ray], which `dev` leaves out"
    )
    told = []
    for more in ([], ["--ddp"]):
        run = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "train_with_ray.py"), *more],
            env=environment("", {"RAY_AUTH_MODE": "disabled", "TMPDIR": "/tmp"}),
            capture_output=True,
            text=True,
            timeout=290,
            check=False,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        told.append(re.findall(r"the last loss is [\d.]+", run.stdout + run.stderr)[:1])
    assert told[0] == told[1] != []

"""The examples of docs/examples.md, as users start them: ranks agree, models learn, runs resume."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.process.harness import (
    FORKED,
    ROOT,
    Run,
    Zygote,
    environment,
    running,
    torchruns_variables,
)
from tests.tiers import long_cases

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

TORCHRUN = Path(torch.__path__[0]) / "distributed" / "run.py"


def start(
    run: Run, zygote: Zygote, name: str, *arguments: str, ranks: int = 2, **more: str
) -> None:
    """An example under torchrun; with one rank plainly, as ``python examples/NAME``."""
    script = ROOT / "examples" / name
    variables = environment(run.mark, {"TMPDIR": str(run.temporary), "FORK_SERVERS": "0", **more})
    if ranks == 1:
        run.start(zygote, variables, script=FORKED, arguments=[str(script), *arguments])
        return
    options = ["--standalone", "--nproc-per-node", str(ranks)]
    run.start(zygote, variables, script=TORCHRUN, arguments=[*options, str(script), *arguments])


def ended(run: Run, ranks: int, programs: int = 1) -> str:
    """The SHA-256 that all ranks print at the end of the example started last."""
    run.wait(200)
    assert not any(run.codes()[-programs:]), run.output()
    told = "".join(path.read_text() for path in run.outputs[-programs:])
    found = re.findall(r"SHA-256 of the weights ([0-9a-f]{64})", told)
    assert len(found) == ranks, run.output()
    assert len(set(found)) == 1, run.output()
    return str(found[0])


def losses(run: Run) -> list[float]:
    return [float(text) for text in re.findall(r"epoch \d+: loss ([0-9.]+)", run.output())]


@pytest.mark.parametrize("ranks", [2, *long_cases(1)])
def test_a_transformer_clips_and_accumulates(zygote: Zygote, tmp_path: Path, ranks: int) -> None:
    """Ranks that are started as torchrun would, or one, plainly."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with running(tmp_path) as run:
        for rank in range(ranks):
            told = torchruns_variables(rank, store.port, ranks, ranks) if ranks > 1 else {}
            told["FORK_SERVERS"] = str(1 - rank)
            start(run, zygote, "train_transformer.py", ranks=1, **told)
        ended(run, ranks, programs=ranks)
        first, *_, last = losses(run)
        assert last < 0.7 * first
        if ranks > 1:
            assert "foreprop: update=workers\n" in run.output()
        run.check_nothing_left()
    del store


@pytest.mark.long
def test_several_workers_per_node(zygote: Zygote, tmp_path: Path) -> None:
    """Two nodes of two workers: what docs/examples.md says to try on one machine."""
    with running(tmp_path) as run:
        two = {"FOREPROP_WORKERS_PER_NODE": "2"}
        start(run, zygote, "train_transformer.py", "--epochs", "1", ranks=4, **two)
        ended(run, 4)
        assert "4 workers on 2 nodes" in run.output()
        run.check_nothing_left()


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision(zygote: Zygote, tmp_path: Path, dtype: str) -> None:
    with running(tmp_path) as run:
        start(run, zygote, "train_mixed_precision.py", "--dtype", dtype)
        ended(run, 2)
        first, *_, last = losses(run)
        assert last < 0.2 * first
        run.check_nothing_left()


def options(epochs: int, folder: Path) -> tuple[str, ...]:
    return ("--epochs", str(epochs), "--checkpoints", str(folder))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resnet_goes_on(zygote: Zygote, tmp_path: Path, ranks: int) -> None:
    """Three epochs at once, and from a checkpoint in the middle of the second: the same bits."""
    folder = tmp_path / "resumed"
    with running(tmp_path) as run:
        start(run, zygote, "train_resnet.py", *options(3, tmp_path / "straight"), ranks=ranks)
        straight = ended(run, ranks)
        start(run, zygote, "train_resnet.py", *options(2, folder), ranks=ranks)
        assert ended(run, ranks) != straight
        start(run, zygote, "train_resnet.py", *options(3, folder), ranks=ranks)
        assert ended(run, ranks) == straight
        resumed = run.outputs[-1].read_text()
        assert "epoch 1:" not in resumed
        assert "epoch 3: validation accuracy" in resumed
        run.check_nothing_left()
    state = torch.load(max(folder.glob("step-*")) / "shared.pt", weights_only=True)
    assert "0.weight" in state["sessions"][0]["model"]  # plain PyTorch's

"""torchft through the faults: FOREPROP_TORCHFT_PYTHON names the Python of its environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from foreprop_lab.experiments.faults.run import run_faults
from foreprop_lab.experiments.faults.trial import KILL, REJOIN, TORCHFT, FaultSetting

pytestmark = [
    pytest.mark.lab,
    pytest.mark.process,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        "FOREPROP_TORCHFT_PYTHON" not in os.environ,
        reason="needs FOREPROP_TORCHFT_PYTHON: torchft==0.2.0",
    ),
]


def test_it_goes_on_after_each_fault_and_takes_a_worker_back(tmp_path: Path) -> None:
    setting = FaultSetting(
        scale=64,
        nodes=3,
        compute_s=0.2,
        pause_s=12.0,
        silent_s=5.0,
        systems=(TORCHFT,),
        torchft_python=Path(os.environ["FOREPROP_TORCHFT_PYTHON"]),
    )
    (trial,) = run_faults(setting, tmp_path, lambda text: None)
    assert trial.version == "0.2.0"
    for fault, until_s in trial.windows():
        others = [each for each in trial.workers if each.rank != fault.node]
        late = until_s - setting.pause_s / 4
        assert all(any(late <= end < until_s for end in each.ends_s) for each in others), fault
        if fault.name == KILL:
            killed = trial.workers[fault.node]
            assert not any(fault.at_s + 1.0 < end < until_s for end in killed.ends_s)
    assert trial.faults[-1].name == REJOIN
    assert trial.back_s(trial.faults[-1]) is not None

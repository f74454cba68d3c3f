"""The perceptron, tiny: every system trains it on links of its own, and learns."""

from __future__ import annotations

import pytest

from foreprop.errors import ConfigError
from foreprop_lab.datasets import DatasetUnavailable
from foreprop_lab.experiments.mlp.run import run_mlp
from foreprop_lab.experiments.mlp.training import DDP, MLP_SYSTEMS, P2P, RING, SERVERS, MlpSetting

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.lab]


@pytest.mark.timeout(400)
def test_every_system_trains_it_and_dedicated_servers_are_on_nodes_of_their_own() -> None:
    setting = MlpSetting(
        workers=2, systems=MLP_SYSTEMS, rate_bits_per_s=200e6, compute_s=0.05, hidden=256, steps=10
    )
    try:
        records = run_mlp(setting)
    except DatasetUnavailable as error:
        pytest.skip(str(error))
    except ConfigError as error:
        if "links have to be made by the kernel" not in str(error):
            raise
        pytest.skip(str(error))
    by_system = {record.system: record for record in records}
    assert tuple(by_system) == MLP_SYSTEMS
    for record in records:
        assert record.loss_last < record.loss_first - 0.1
        assert record.step_s.median >= 0.05
        assert record.steps == 10
    # the same training, whoever adds up: servers even to the last bit
    served = {by_system[name].loss_last for name in (*SERVERS, P2P)}
    assert len(served) == 1
    for name in (RING, DDP):
        assert by_system[name].loss_last == pytest.approx(served.copy().pop(), rel=1e-3)
    # all pushes meet in the one server's link; of peers each has half of the model, and a worker
    assert by_system["1ps"].step_s.median > 1.1 * by_system[P2P].step_s.median

"""What the Lightning strategies take and refuse, and what is found of Lightning."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from foreprop.errors import ConfigError
from foreprop.params.modelhooks import bare_optimizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing Lightning
    from lightning.fabric.wrappers import _FabricOptimizer

    from foreprop.integrations import lightningparts
    from foreprop.integrations.lightning import (
        ForepropFabricStrategy,
        ForepropMonitor,
        ForepropStrategy,
        summary,
    )

STRATEGIES = (ForepropStrategy, ForepropFabricStrategy)


# What is found of Lightning
@pytest.mark.parametrize("kind", STRATEGIES)
def test_the_name_is_registered(kind: type) -> None:
    for registry, strategy in (
        (lightningparts.TRAINER_REGISTRY, ForepropStrategy),
        (lightningparts.FABRIC_REGISTRY, ForepropFabricStrategy),
    ):
        if strategy is kind:
            assert type(registry.get("foreprop")) is kind


def test_what_has_moved_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        lightningparts.find("lightning.pytorch", "core.optimizer", "_Moved")
    assert "lightning.pytorch.core.optimizer._Moved is not in this Lightning" in str(caught.value)
    assert "2.6.6" in str(caught.value)
    with pytest.raises(ConfigError, match="elsewhere"):
        lightningparts.find("lightning.pytorch", "elsewhere", "Trainer")


def test_a_hook_that_is_called_otherwise_is_named() -> None:
    """Otherwise our method would never be called, and nobody would notice."""
    with pytest.raises(ConfigError, match=r"DDPStrategy\.wrap_model is not in this Lightning"):
        lightningparts.check_hooks(
            lightningparts.TrainerDDP, ("setup", "wrap_model"), "lightning.pytorch"
        )


def test_every_overridden_hook_is_checked() -> None:
    for kind, base, checked in (
        (ForepropStrategy, lightningparts.TrainerDDP, lightningparts.STRATEGY_HOOKS),
        (ForepropFabricStrategy, lightningparts.FabricDDP, lightningparts.FABRIC_HOOKS),
    ):
        own = {name for name in vars(kind) if not name.startswith("_")}
        assert own & set(dir(base)) <= set(checked)
        assert own - set(dir(base)) <= {"sessions", "close"}


def test_lightning_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"pip install '\.\[lightning\]'"):
        lightningparts.find("no_such_lightning.pytorch", "", "Trainer")


@pytest.mark.long
def test_the_older_packages_are_taken_where_they_are_imported() -> None:
    program = """
import warnings
warnings.simplefilter("ignore")
import pytorch_lightning as pl
from foreprop.integrations.lightning import ForepropStrategy
assert issubclass(ForepropStrategy, pl.strategies.DDPStrategy)
assert type(pl.Trainer(strategy="foreprop", devices=1, accelerator="cpu", logger=False).strategy) \
    is ForepropStrategy
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_optimizers_of_lightning_are_seen_through() -> None:
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    wrapped: Any = _FabricOptimizer(plain, ForepropFabricStrategy())
    assert bare_optimizer(wrapped) is plain
    strategy = ForepropStrategy()
    strategy.optimizers = [plain]
    (own,) = strategy._lightning_optimizers
    assert own is not plain
    assert bare_optimizer(own) is plain


# What is refused
@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"find_unused_parameters": True}, "find_unused_parameters is an option of Distributed"),
        ({"ddp_comm_hook": print}, "wire_dtype='bfloat16' halves the bytes"),
        ({"wire_dtype": "int8"}, "wire_dtype"),
        ({"no_such": 1}, "no_such"),
        ({"preset": "p4"}, "p4"),
    ],
)
def test_settings_are_checked_at_once(kind: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kind(**settings)


def test_clipping_twice_is_refused() -> None:
    class Clipping:
        gradient_clip_val = 0.5

    strategy: Any = ForepropStrategy(clip_grad_norm=1.0)
    with pytest.raises(ConfigError, match=r"Trainer\(gradient_clip_val=0.5\) and ForepropStrategy"):
        strategy._check_clipping(Clipping())
    strategy = ForepropStrategy()
    strategy._check_clipping(Clipping())


def test_fabric_needs_a_model_for_each_optimizer() -> None:
    strategy = ForepropFabricStrategy()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="SGD has parameters of 0 of the 0 models"):
        strategy.setup_optimizer(optimizer)
    strategy.setup_module(model)
    with pytest.raises(ConfigError, match="no optimizer of that model was set up with Fabric"):
        strategy.backward(model(torch.ones(1, 2)).sum(), model)


@pytest.mark.parametrize("steps", [0, -3])
def test_the_monitor_s_steps(steps: int) -> None:
    with pytest.raises(ConfigError, match=f"every_n_steps is {steps}"):
        ForepropMonitor(every_n_steps=steps)


def test_the_monitor_needs_the_strategy() -> None:
    class Other:
        strategy = object()

    monitor: Any = ForepropMonitor()
    with pytest.raises(ConfigError, match="ForepropMonitor is with object; it needs Trainer"):
        monitor.on_train_start(Other(), None)


# What is logged
def test_the_straggler_is_who_waits_least() -> None:
    ranks = torch.tensor([[10.0, 4, 300, 200], [10, 1, 300, 200], [10, 5, 300, 200]])
    assert summary(ranks, steps=20) == pytest.approx(
        {
            "foreprop/steps_per_s": 2.0,
            "foreprop/waiting_share": (0.4 + 0.1 + 0.5) / 3,
            "foreprop/sent_bytes": 45.0,
            "foreprop/received_bytes": 30.0,
            "foreprop/straggler": 1.0,
            "foreprop/straggler_excess": 9 / 6 - 1,
        }
    )

"""All that `foreprop.integrations.lightning` takes from Lightning, found by name.

Some of it is private. Where a version has moved something, the import says what, and which versions
are known to work. Lightning comes as one package, ``lightning``, or as ``pytorch_lightning`` with
``lightning_fabric``; the classes of the two are not the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from foreprop.errors import ConfigError, how_to_install

TESTED = ("2.5.6", "2.6.6")
"""The versions that the tests have passed with."""

STRATEGY_HOOKS = (
    "configure_ddp",
    "lightning_module",
    "num_processes",
    "on_exception",
    "optimizers",
    "setup",
    "teardown",
    "training_step",
    "validation_step",
)
"""What is overridden or read of Trainer's DDPStrategy."""
FABRIC_HOOKS = ("backward", "num_processes", "setup_module", "setup_optimizer", "teardown")
"""What is overridden or read of Fabric's."""


def packages() -> tuple[str, str]:
    """The packages of Trainer and Fabric that the program has imported, or else that are there."""
    if "lightning.pytorch" in sys.modules:
        alone = False
    elif "pytorch_lightning" in sys.modules:
        alone = True
    else:
        alone = find_spec("lightning") is None
    if alone:
        return "pytorch_lightning", "lightning_fabric"
    return "lightning.pytorch", "lightning.fabric"


def find(package: str, module: str, name: str) -> Any:
    """``package.module.name``; `ConfigError` if this Lightning has it elsewhere."""
    where = f"{package}.{module}" if module else package
    try:
        return getattr(import_module(where), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(_moved(package, f"{where}.{name}")) from error


def check_hooks(kind: type, names: Sequence[str], package: str) -> None:
    """Raise `ConfigError` if what is overridden is not called by that name any more."""
    for name in names:
        if not hasattr(kind, name):
            raise ConfigError(_moved(package, f"{kind.__module__}.{kind.__qualname__}.{name}"))


def _moved(package: str, name: str) -> str:
    root = package.partition(".")[0]
    if find_spec(root) is None:
        return f"Lightning is not installed: {how_to_install('lightning')}"
    version = getattr(import_module(root), "__version__", "of an unknown version")
    return (
        f"{name} is not in this Lightning ({version}), and foreprop builds on it: install one of"
        f" the tested versions ({', '.join(TESTED)}), or a newer foreprop"
    )


if TYPE_CHECKING:
    from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
    from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDP
    from lightning.fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.core.optimizer import _MockOptimizer as NoOptimizer
    from lightning.pytorch.strategies import DDPStrategy as TrainerDDP
    from lightning.pytorch.strategies import StrategyRegistry as TRAINER_REGISTRY
    from lightning.pytorch.trainer.states import TrainerFn
else:
    _TRAINER, _FABRIC = packages()
    Callback = find(_TRAINER, "", "Callback")
    LightningModule = find(_TRAINER, "", "LightningModule")
    Trainer = find(_TRAINER, "", "Trainer")
    NoOptimizer = find(_TRAINER, "core.optimizer", "_MockOptimizer")
    TrainerDDP = find(_TRAINER, "strategies", "DDPStrategy")
    TRAINER_REGISTRY = find(_TRAINER, "strategies", "StrategyRegistry")
    TrainerFn = find(_TRAINER, "trainer.states", "TrainerFn")
    FabricDDP = find(_FABRIC, "strategies", "DDPStrategy")
    FABRIC_REGISTRY = find(_FABRIC, "strategies", "STRATEGY_REGISTRY")
    BackwardSyncControl = find(_FABRIC, "strategies.strategy", "_BackwardSyncControl")
    check_hooks(TrainerDDP, STRATEGY_HOOKS, _TRAINER)
    check_hooks(FabricDDP, FABRIC_HOOKS, _FABRIC)

__all__ = [
    "FABRIC_REGISTRY",
    "TRAINER_REGISTRY",
    "BackwardSyncControl",
    "Callback",
    "FabricDDP",
    "LightningModule",
    "NoOptimizer",
    "Trainer",
    "TrainerDDP",
    "TrainerFn",
]

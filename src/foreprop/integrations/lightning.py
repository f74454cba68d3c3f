"""Lightning: ``Trainer(strategy="foreprop")`` and ``Fabric(strategy="foreprop")``.

Importing this module registers the name with both. With settings it is
``Trainer(strategy=ForepropStrategy(wire_dtype="bfloat16"))``. Clipping, accumulation, precision,
checkpoints and samplers stay Lightning's: see docs/trainers.md.
"""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from foreprop.config import Preset
from foreprop.errors import ConfigError
from foreprop.integrations.lightningparts import (
    FABRIC_REGISTRY,
    TRAINER_REGISTRY,
    BackwardSyncControl,
    Callback,
    FabricDDP,
    LightningModule,
    NoOptimizer,
    Trainer,
    TrainerDDP,
    TrainerFn,
)
from foreprop.integrations.lightningsessions import (
    FABRIC_ARGUMENTS,
    TRAINER_ARGUMENTS,
    SessionGroup,
    divide_arguments,
    forward_begins,
    share_parameters,
)
from foreprop.session.session import Session

__all__ = ["ForepropFabricStrategy", "ForepropMonitor", "ForepropStrategy"]


_COMMON = (
    "foreprop: the optimizers have parameters in common, so they make their steps by themselves:"
    " no exchange overlaps with the next forward pass"
)


class ForepropStrategy(TrainerDDP):
    """The Trainer's strategy: one process per device, as with Lightning's DDP, by foreprop.

    Takes foreprop's settings by name, ``preset``, and of Lightning's DDPStrategy ``accelerator``,
    ``parallel_devices``, ``cluster_environment``, ``checkpoint_io``, ``precision_plugin``,
    ``process_group_backend``, ``timeout`` and ``start_method``. Raises `ConfigError` for others.
    """

    def __init__(self, *, preset: Preset | None = None, **settings: Any) -> None:
        own, settings = divide_arguments(settings, TRAINER_ARGUMENTS)
        self._group = SessionGroup(preset, settings)
        super().__init__(**own)

    @property
    def sessions(self) -> tuple[Session, ...]:
        return tuple(self._group.open)

    @property
    def _module(self) -> LightningModule:
        if self.lightning_module is None:
            raise ConfigError("the strategy has no LightningModule yet: call trainer.fit(module)")
        return self.lightning_module

    def configure_ddp(self) -> None:
        """Put nothing around the model."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._check_clipping(trainer)
        model = self._module
        optimizers = [o for o in self.optimizers if not isinstance(o, NoOptimizer)]
        if not optimizers or share_parameters(optimizers):
            # gradients are averaged when they are read, whoever makes the steps
            self._group.begin(model, None, self.num_processes)
            if optimizers and self.is_global_zero:
                print(_COMMON, file=sys.stderr, flush=True)
            return
        for optimizer in optimizers:
            self._group.begin(model, optimizer, self.num_processes)

    def _check_clipping(self, trainer: Trainer) -> None:
        config, by_trainer = self._group.config, trainer.gradient_clip_val
        for name in ("clip_grad_norm", "clip_grad_value"):
            if getattr(config, name) is not None and by_trainer:
                raise ConfigError(
                    f"gradients would be clipped twice: Trainer(gradient_clip_val={by_trainer!r})"
                    f" and ForepropStrategy({name}={getattr(config, name)!r}); leave one out"
                )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        forward_begins(self._module)
        return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        forward_begins(self._module)
        return super().validation_step(*args, **kwargs)

    def on_exception(self, exception: BaseException) -> None:
        self._group.leave(exception)
        super().on_exception(exception)

    def teardown(self) -> None:
        self._group.close()
        super().teardown()


class _SyncsPerStep(BackwardSyncControl):
    # ``fabric.no_backward_sync`` has nothing to do: foreprop averages once per step

    def no_backward_sync(
        self, module: torch.nn.Module, enabled: bool
    ) -> AbstractContextManager[None]:
        return nullcontext()


class ForepropFabricStrategy(FabricDDP):
    """Fabric's strategy. Takes `ForepropStrategy`'s arguments, and ``precision`` for its plugin.

    The sessions begin in ``fabric.setup(model, optimizer)`` and end with the process, or in
    `close`. A model that is given to ``fabric.setup_module`` waits for its optimizer.
    """

    def __init__(self, *, preset: Preset | None = None, **settings: Any) -> None:
        own, settings = divide_arguments(settings, FABRIC_ARGUMENTS)
        self._group = SessionGroup(preset, settings)
        super().__init__(**own)
        self._backward_sync_control = _SyncsPerStep()
        self._modules: list[torch.nn.Module] = []
        self._without_optimizer: list[torch.nn.Module] = []

    @property
    def sessions(self) -> tuple[Session, ...]:
        return tuple(self._group.open)

    def setup_module(self, module: torch.nn.Module) -> Any:
        self._modules.append(module)
        self._without_optimizer.append(module)
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found = [m for m in self._modules if any(id(p) in owned for p in m.parameters())]
        if len(found) != 1:
            raise ConfigError(
                f"{type(optimizer).__name__} has parameters of {len(found)} of the"
                f" {len(self._modules)} models that were set up with Fabric; it must be one: set"
                " the model up before its optimizer, and put models that share an optimizer into"
                " one torch.nn.Module"
            )
        module = found[0]
        self._group.begin(module, optimizer, self.num_processes)
        self._without_optimizer = [
            other for other in self._without_optimizer if other is not module
        ]
        return optimizer

    def backward(
        self, tensor: torch.Tensor, module: torch.nn.Module | None, *args: Any, **kwargs: Any
    ) -> None:
        """Raise `ConfigError` if gradients come that nobody averages."""
        super().backward(tensor, module, *args, **kwargs)
        for model in self._without_optimizer:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    raise ConfigError(
                        f"parameter {name} of {type(model).__name__} has a gradient, and no"
                        " optimizer of that model was set up with Fabric: call fabric.setup(model,"
                        " optimizer), or freeze what is not trained"
                    )

    def close(self) -> None:
        """End all sessions, on every rank; models and optimizers are ordinary ones again."""
        self._group.close()

    def teardown(self) -> None:
        self.close()
        super().teardown()


class ForepropMonitor(Callback):
    """Logs what foreprop does to the Trainer's loggers, every ``log_every_n_steps`` steps.

    ``foreprop/steps_per_s``; ``foreprop/waiting_share``, of the ranks' time, in mean;
    ``foreprop/sent_bytes`` and ``foreprop/received_bytes``, per step, all ranks together;
    ``foreprop/straggler``, the rank that waits least for the others, and
    ``foreprop/straggler_excess``, how much longer than the median rank it is busy, as a share. All
    are of the steps since the last time. Costs one small all-gather each time.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigError(f"every_n_steps is {every_n_steps!r}; it must be 1 or more, or None")
        self._every = every_n_steps
        self._step = 0
        self._before = torch.zeros(4, dtype=torch.float64)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(trainer.strategy, ForepropStrategy):
            raise ConfigError(
                f"ForepropMonitor is with {type(trainer.strategy).__name__}; it needs"
                " Trainer(strategy='foreprop')"
            )
        self._step = trainer.global_step
        self._before = _totals(trainer.strategy)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        every = self._every or getattr(trainer, "log_every_n_steps")  # noqa: B009 - likewise
        step = trainer.global_step
        if not every or step // every == self._step // every:
            return
        strategy: Any = trainer.strategy
        totals = _totals(strategy)
        mine = (totals - self._before).to(strategy.root_device)
        rows = [torch.zeros_like(mine) for _ in range(strategy.world_size)]
        torch.distributed.all_gather(rows, mine)
        ranks = torch.stack(rows).cpu()
        for logger in trainer.loggers:
            logger.log_metrics(summary(ranks, step - self._step), step=step)
        self._step, self._before = step, totals


def _totals(strategy: ForepropStrategy) -> torch.Tensor:
    """This rank's seconds by the clock, seconds waited, bytes sent and bytes received: (4,)."""
    stats = [session.stats() for session in strategy.sessions]
    names = ("waited_s", "pushed_bytes", "reply_bytes")
    sums = [float(sum(one[name] for one in stats)) for name in names]
    return torch.tensor([time.monotonic(), *sums], dtype=torch.float64)


def summary(ranks: torch.Tensor, steps: int) -> dict[str, float]:
    """The figures to be logged. ``ranks``: (ranks, 4), by how much `_totals` grew in the steps."""
    elapsed, waited, sent, received = ranks.unbind(1)
    busy = elapsed - waited
    slowest = int(busy.argmax())
    return {
        "foreprop/steps_per_s": steps / float(elapsed.max()),
        "foreprop/waiting_share": float((waited / elapsed).mean()),
        "foreprop/sent_bytes": float(sent.sum()) / steps,
        "foreprop/received_bytes": float(received.sum()) / steps,
        "foreprop/straggler": float(slowest),
        "foreprop/straggler_excess": float(busy[slowest] / busy.median()) - 1,
    }


def register() -> None:
    """Make the name ``"foreprop"`` known to Trainer and Fabric."""
    for registry, strategy in (
        (TRAINER_REGISTRY, ForepropStrategy),
        (FABRIC_REGISTRY, ForepropFabricStrategy),
    ):
        registry.register(
            "foreprop", strategy, description="foreprop: what is needed first is sent first",
            override=True,
        )  # fmt: skip


register()

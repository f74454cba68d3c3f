"""Hugging Face: a `transformers.Trainer` whose model and optimizer have a foreprop session.

All that is used of transformers and not documented: `create_accelerator_and_postprocess` makes
``self.accelerator``, `train` frees its memory and then gives it model and optimizer, and a loop's
line of the log has its ``loss``. The rest is in `integrations.accelerate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from foreprop.integrations.accelerate import ForepropAccelerator, asks_servers, config_of
from foreprop.integrations.window import Share, Window, logged
from foreprop.session.session import Session


class ForepropTrainer(Trainer):  # type: ignore[misc]  # transformers is not type-checked here
    """`transformers.Trainer`, trained by foreprop where it would be by DDP.

    For a trainer of your own, or TRL's: ``class MyTrainer(ForepropTrainer, SFTTrainer): ...``.
    The log also has ``foreprop/...``: steps per second, how much of their time ranks wait, bytes
    of this rank, and the rank that the others wait for.

    Args:
        *arguments: `Trainer`'s own, as are ``options``.
        foreprop: settings for `foreprop.parallelize`, over preset and environment.

    Raises `ConfigError` for FSDP, DeepSpeed and tensor parallelism.
    """

    accelerator: Any

    def __init__(
        self, *arguments: Any, foreprop: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self._settings = dict(foreprop or {})
        self.report = SessionReport()
        super().__init__(*arguments, **options)
        self.add_callback(self.report)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        clip = self.args.max_grad_norm
        if clip > 0 and asks_servers(config_of(self._settings)):
            self._settings.setdefault("clip_grad_norm", clip)
        self.report.accelerator = ForepropAccelerator.taking_over(self.accelerator, self._settings)

    @property
    def session(self) -> Session | None:
        sessions = self.accelerator.sessions
        return sessions[-1] if sessions else None

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        if "loss" in logs:  # a loop's line
            logs |= self.report.take()
        super().log(logs, *arguments, **options)


class SessionReport(TrainerCallback):  # type: ignore[misc]
    """Gathers, when a line is about to be logged, what all ranks' sessions did since the last."""

    def __init__(self) -> None:
        self.accelerator: ForepropAccelerator | None = None
        self._window: Window | None = None
        self._found: dict[str, float] = {}

    def take(self) -> dict[str, float]:
        """Take what there is to be logged. Any rank may call it by itself."""
        found, self._found = self._found, {}
        return {f"foreprop/{name}": value for name, value in found.items()}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        sessions = () if self.accelerator is None else self.accelerator.sessions
        self._window = Window(sessions[-1]) if sessions else None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # on every rank alike: `Trainer` decides before its callbacks whether to log
        if not control.should_log or self.accelerator is None or self._window is None:
            return
        own = torch.tensor([self._window.close()], dtype=torch.float64)
        gathered = self.accelerator.gather(own.to(self.accelerator.device))
        shares = [Share(*row) for row in gathered.tolist()]
        self._found = logged(shares, self.accelerator.process_index)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.on_step_end(args, state, control)

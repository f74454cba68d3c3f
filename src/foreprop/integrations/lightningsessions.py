"""The sessions of one Lightning strategy: from its settings to their end."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from foreprop.config import Config, Preset
from foreprop.engine.world import current_world, is_alone
from foreprop.errors import ConfigError
from foreprop.params.modelhooks import BeforeForward, FirstForward
from foreprop.session.composition import parallelize
from foreprop.session.session import Session

_SHARED_ARGUMENTS = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "process_group_backend",
    "timeout",
    "start_method",
)
"""What both kinds of Lightning's DDPStrategy take."""
TRAINER_ARGUMENTS = (*_SHARED_ARGUMENTS, "precision_plugin")
FABRIC_ARGUMENTS = (*_SHARED_ARGUMENTS, "precision")
_OF_DDP = (
    *inspect.signature(DistributedDataParallel.__init__).parameters,
    "ddp_comm_state",
    "ddp_comm_hook",
    "ddp_comm_wrapper",
    "model_averaging_period",
)


def divide_arguments(
    given: Mapping[str, Any], lightnings: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Lightning's own arguments, and foreprop's settings; `ConfigError` for what is DDP's."""
    own = {name: value for name, value in given.items() if name in lightnings}
    settings = {name: value for name, value in given.items() if name not in lightnings}
    for name in settings:
        if name in _OF_DDP:
            advice = "; wire_dtype='bfloat16' halves the bytes" if "comm" in name else ""
            raise ConfigError(
                f"{name} is an option of DistributedDataParallel, which is not used here, and"
                f" foreprop needs nothing in its place: leave it out{advice}"
            )
    return own, settings


class SessionGroup:
    """The sessions of one strategy. Its settings are checked when it is made."""

    def __init__(self, preset: Preset | None, settings: Mapping[str, Any]) -> None:
        self.config = Config.resolve(preset, **settings)
        self.open: list[Session] = []
        self._preset = preset
        self._settings = dict(settings)
        self._optimizers: list[torch.optim.Optimizer | None] = []

    def begin(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        local_size: int,
    ) -> None:
        """Open a session. ``local_size``: this node's processes."""
        world = None
        if not is_alone():  # by Lightning's process group: its launcher sets no RANK
            world = current_world()
            world.local_size = local_size
        about = {**self._settings, "world": world}
        session = parallelize(model, optimizer, preset=self._preset, **about)
        self.open.append(session)
        self._optimizers.append(optimizer)

    def close(self) -> None:
        """Close all sessions, on every rank. The optimizers keep their state, as after DDP."""
        optimizers = [optimizer for optimizer in self._optimizers if optimizer is not None]
        states = [optimizer.state_dict() for optimizer in optimizers]
        sessions, self.open, self._optimizers = self.open, [], []
        for session in sessions:
            session.close()
        for optimizer, state in zip(optimizers, states, strict=True):
            if state["state"] and not optimizer.state:
                optimizer.load_state_dict(state)

    def leave(self, error: BaseException) -> None:
        """Leave all sessions for an error: the others learn of it, and nothing is awaited."""
        sessions, self.open, self._optimizers = self.open, [], []
        for session in sessions:
            session.__exit__(type(error), error, error.__traceback__)


def forward_begins(model: torch.nn.Module) -> None:
    """Call the session's hooks on the model's forward pass.

    A step method is about to run, which may call the model's layers and not the model.
    """
    for hook in list(model._forward_pre_hooks.values()):
        if isinstance(hook, BeforeForward | FirstForward):
            hook(model, ())


def share_parameters(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    owned = [id(p) for o in optimizers for group in o.param_groups for p in group["params"]]
    return len(set(owned)) < len(owned)

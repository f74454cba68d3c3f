"""The sessions of one Lightning strategy: from its settings to their end."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from foreprop.cluster.world import World, current_world, is_alone
from foreprop.config import Config, Preset
from foreprop.errors import ConfigError
from foreprop.hooks.modelhooks import BeforeForward, FirstForward
from foreprop.session.session import Session, parallelize

_SHARED_ARGUMENTS = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "process_group_backend",
    "timeout",
    "start_method",
)
"""What both kinds of Lightning's DDPStrategy take, and ours passes on."""
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
    """What `parallelize` has made for one strategy. Its settings are checked here and now."""

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
        """``local_size``: this node's processes."""
        about = {**self._settings, "world": _world(local_size)}
        session = parallelize(model, optimizer, preset=self._preset, **about)
        self.open.append(session)
        self._optimizers.append(optimizer)

    def close(self) -> None:
        """On every rank. The optimizers keep their state, as they do after DDP."""
        optimizers = [optimizer for optimizer in self._optimizers if optimizer is not None]
        states = [optimizer.state_dict() for optimizer in optimizers]
        sessions, self.open, self._optimizers = self.open, [], []
        for session in sessions:
            session.close()
        for optimizer, state in zip(optimizers, states, strict=True):
            if state["state"] and not optimizer.state:
                optimizer.load_state_dict(state)

    def leave(self, error: BaseException) -> None:
        """This rank's training has ended with an error: the others are told, nothing is awaited."""
        sessions, self.open, self._optimizers = self.open, [], []
        for session in sessions:
            session.__exit__(type(error), error, error.__traceback__)


def _world(local_size: int) -> World | None:
    """This process's, by Lightning's process group: its launcher sets no RANK."""
    if is_alone():
        return None
    world = current_world()
    world.local_size = local_size
    return world


def forward_begins(model: torch.nn.Module) -> None:
    """A step method is about to run, in which the model's layers may be called without its own.

    A session's hooks on the model's forward pass do there what they do in it.
    """
    for hook in list(model._forward_pre_hooks.values()):
        if isinstance(hook, BeforeForward | FirstForward):
            hook(model, ())


def share_parameters(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Whether two of them have a parameter in common."""
    owned = [id(p) for o in optimizers for group in o.param_groups for p in group["params"]]
    return len(set(owned)) < len(owned)

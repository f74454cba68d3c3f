"""The one line that makes a model's training data-parallel."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Unpack

import torch

from foreprop.cluster.world import World, current_world, is_alone
from foreprop.config import Config, Preset
from foreprop.errors import ConfigError
from foreprop.hooks.managed import bare_model, bare_optimizer
from foreprop.session.contract import Session
from foreprop.session.features import needs_servers
from foreprop.session.session import ConnectedSession

if TYPE_CHECKING:
    from foreprop.config.typed import Settings


def parallelize(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    preset: Preset | None = None,
    config: Config | None = None,
    world: World | None = None,
    scaler: torch.amp.GradScaler | None = None,
    **settings: Unpack[Settings],
) -> Session:
    """Train ``model`` with ``optimizer`` on all ranks in step; both are changed in place.

    Call it on every rank, after the model is on its device and all parameter groups are there,
    before the first forward pass. Rank 0's parameters, buffers and optimizer state become
    everybody's. Ranks and addresses come from torchrun; started plainly the world is this process,
    and this is plain PyTorch, without servers, unless the model has remote tables.

    Args:
        model: any module; its parameters keep their identity, names and class. Embeddings with
            sparse gradients may be on the meta device: their rows are on the servers only.
        optimizer: any; over (some of) its parameters. Without one gradients are averaged when
            they are read.
        preset: ``p3`` (default), ``slicing``, ``kvstore``, ``wfbp`` or ``tensorflow``.
        config: all settings at once, instead of ``preset`` and ``settings``.
        world: who takes part, connected as with several, though it be one process; by default
            found from the environment.
        scaler: the ``GradScaler`` that scales this optimizer's loss; changed in place, too.
        **settings: single fields of `Config`, over preset and environment.

    Raises:
        ConfigError: a setting, parameter or optimizer that cannot be used; nothing is changed.
        HandshakeError: the ranks do not agree; both sides' values are in the message.
        StepTimeout, PeerLost: another process did not come, or went away.
    """
    if config is not None and (preset is not None or settings):
        raise ConfigError("give either config, or preset and single settings, not both")
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; it must be a torch.nn.Module")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer"
        )
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ConfigError(f"scaler is a {type(scaler).__name__}; it must be a torch.amp.GradScaler")
    config = config or Config.resolve(preset, **settings)
    model = bare_model(model)
    optimizer = bare_optimizer(optimizer)
    if world is None and is_alone() and not needs_servers(model, optimizer, config):
        from foreprop.session.alone import LoneSession

        return LoneSession(model, optimizer, config, scaler)
    return connect(model, optimizer, config, world=world, scaler=scaler)


def connect(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    *,
    world: World | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> ConnectedSession:
    """With servers, or a ring, in a world of one, too: for what measures them."""
    world = world or current_world(config.join_timeout_s)
    session = ConnectedSession(model, optimizer, world, config, scaler)
    if session.rank == 0 and session.world_size > 1:
        print(f"foreprop: {session.describe()}", file=sys.stderr, flush=True)
    return session

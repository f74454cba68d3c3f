"""What a session is made of: a feature is loaded when it is chosen."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from foreprop.config import Config
from foreprop.path.parameter import SynchronisedParameter
from foreprop.servers.backend import Backend, Setup

if TYPE_CHECKING:
    from foreprop.gradients.averaged import AveragedParameter
    from foreprop.gradients.averaging import Averaging
    from foreprop.path.managedparameter import ManagedParameter
    from foreprop.path.stalereaders import StaleReaders
    from foreprop.session.training import Training


def needs_servers(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, config: Config
) -> bool:
    """Whether a world of one has to have servers: for remote tables, or as they are there."""
    groups = [] if optimizer is None else optimizer.param_groups
    own = (parameter for group in groups for parameter in group["params"])
    tensors = itertools.chain(model.parameters(), own, model.buffers())
    return config.dedicated_servers > 0 or any(tensor.is_meta for tensor in tensors)


def connect_backend(setup: Setup) -> Backend:
    """The backend for the architecture that is asked for and the parameters that there are."""
    rows = [info.rows for info in setup.infos]
    if is_served(setup.config) or all(rows):
        from foreprop.servers.served import ServedBackend

        return ServedBackend(setup)
    if any(rows):
        from foreprop.collectives.hybrid import HybridBackend

        return HybridBackend(setup)
    from foreprop.collectives.ring import RingBackend

    return RingBackend(setup)


def needs_another_backend(before: Config, after: Config, nodes: int) -> bool:
    """Whether a session must connect anew for these settings, its parameters being as they are."""
    if is_served(after) != is_served(before):
        return True
    sizes = {config.cut_elems(config.servers_on(nodes)) for config in (before, after)}
    return is_served(after) and len(sizes) > 1


def is_served(config: Config) -> bool:
    """Whether servers have the dense parameters, too, and not collectives."""
    return config.architecture not in ("ring", "hybrid", "auto")


def make_parameter(
    training: Training, index: int, name: str, parameter: torch.nn.Parameter
) -> ManagedParameter:
    """The parameter of this number, as the session's choice so far has it."""
    info = training.engine.parameters[index]
    if info.init is not None:
        from foreprop.tables.remote import RemoteTable

        return RemoteTable(index, name, parameter, training, *training.backend.rows_of(index))
    if info.rows:
        from foreprop.tables.rowparameter import RowParameter

        return RowParameter(index, name, parameter, training, *training.backend.rows_of(index))
    wanted = index < training.user.optimized
    if wanted and training.choice is not None and not training.by_workers:
        return SynchronisedParameter(index, name, parameter, training)
    from foreprop.gradients.averaged import AveragedParameter

    averaging = _averaging_of(training)
    averaged = AveragedParameter(index, name, parameter, training, averaging, wanted=wanted)
    averaging.parameters.append(averaged)
    return averaged


def _averaging_of(training: Training) -> Averaging:
    if training.averaging is None:
        from foreprop.gradients.averaging import Averaging

        training.averaging = Averaging(
            training.user.optimizer,
            training.fixed_passes,
            collectives=not is_served(training.config),
        )
    return training.averaging


def served_instead(training: Training, averaged: AveragedParameter) -> SynchronisedParameter:
    """In the first step, when it is known that servers update: with what it has shown so far."""
    averaged.detach()
    served = SynchronisedParameter(averaged.index, averaged.name, averaged.parameter, training)
    passes, discards = averaged.passes - averaged.discards, averaged.discards
    served.take_over(averaged.gradient, averaged.start, passes=passes, discards=discards)
    return served


def stale_readers_for(config: Config) -> StaleReaders | None:
    if not config.check_stale:
        return None
    from foreprop.path.stalereaders import StaleReaders

    return StaleReaders()

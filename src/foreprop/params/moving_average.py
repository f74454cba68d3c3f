"""The parameters' moving averages, as state dicts with the model's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from foreprop.engine.sums import move_average, start_average
from foreprop.errors import ConfigError


class LocalAverages:
    """Moving averages that the worker keeps itself, one per parameter."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], decay: float) -> None:
        self._parameters = parameters
        self._decay = decay
        self.values: list[torch.Tensor] = []

    def start(self) -> None:
        self.values = [start_average(parameter) for parameter in self._parameters]

    def move(self, number: int) -> None:
        """Move by the parameter's new value. Any thread, without gradients."""
        move_average(self.values[number], self._parameters[number], self._decay)


def averaged_state_dict(
    model: torch.nn.Module,
    parameters: Sequence[torch.nn.Parameter],
    averages: Sequence[torch.Tensor],
) -> dict[str, Any]:
    """The model's state dict, copied, with ``averages`` in the place of ``parameters``."""
    number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
    found: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        number = number_of.get(id(value))
        if number is not None:
            average = averages[number].reshape(value.shape)
            device = average.device if value.is_meta else value.device  # a remote table's is here
            found[name] = average.to(device, copy=True)
        else:
            found[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
    return found


def averages_from(
    state: Mapping[str, Any], model: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]
) -> list[torch.Tensor]:
    """The inverse of `averaged_state_dict`, by parameter; raises `ConfigError`.

    Parameters of the optimizer that the model does not have begin anew: nobody ever sees their
    averages.
    """
    names = {id(value): name for name, value in model.state_dict(keep_vars=True).items()}
    averages = []
    for parameter in parameters:
        name = names.get(id(parameter))
        value = state.get(name) if name is not None else None
        if parameter.is_meta and value is not None and not value.is_meta:
            raise ConfigError(
                f"the moving averages have values for {name}, whose rows are on the servers only:"
                " use session.load_tables(folder), and leave it out here"
            )
        average = start_average(parameter)
        if name is not None and not parameter.is_meta:
            if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                found = tuple(value.shape) if isinstance(value, torch.Tensor) else value
                raise ConfigError(
                    f"the moving averages have {found} for {name}; it must be a tensor of shape"
                    f" {tuple(parameter.shape)}"
                )
            with torch.no_grad():
                average.copy_(value)
        averages.append(average)
    return averages

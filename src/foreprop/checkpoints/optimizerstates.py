"""Whether what an optimizer was given by a checkpoint is a state of its own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from foreprop.path.optimizer import why_not_elementwise

State = dict[str, Any]


def check_loaded(optimizer: torch.optim.Optimizer) -> None:
    """torch takes anything, and fails in a step: raise ValueError for what is no such state now."""
    for group in optimizer.param_groups:
        for name, usual in optimizer.defaults.items():
            if name not in group or not _is_like(group[name], usual):
                found = f"{group[name]!r:.60}" if name in group else "not there"
                raise ValueError(f"{name} of the optimizer is {found}, and is usually {usual!r}")
    if why_not_elementwise(optimizer) is not None:
        return  # its state may have any form
    for group in optimizer.param_groups:
        usual = _usual_state(optimizer, group)
        for parameter in group["params"]:
            if state := optimizer.state.get(parameter):
                _check_state(state, usual, parameter)
    keys: list[Any] = list(optimizer.state)
    if others := [key for key in keys if not isinstance(key, torch.Tensor)]:
        raise ValueError(f"the optimizer has state of {others[:9]}, which are no parameters")


def _is_like(value: Any, usual: Any) -> bool:
    """Whether an optimizer could have been given this number in the other one's place."""
    if isinstance(usual, tuple | list):
        same = isinstance(value, tuple | list) and len(value) == len(usual)
        return same and all(map(_is_like, value, usual))
    if usual is None or isinstance(usual, bool):
        return value is None or isinstance(value, bool)
    if isinstance(value, torch.Tensor):  # as a learning rate may be
        return isinstance(usual, float | int | torch.Tensor) and value.numel() == 1
    return isinstance(value, float | int if isinstance(usual, float | int) else type(usual))


def _usual_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> State:
    """What it keeps of one element; raises whatever it raises for numbers that it does not take."""
    place = next((each.device for each in group["params"] if not each.is_meta), None)
    element = torch.zeros(1, requires_grad=True, device=place)
    element.grad = torch.zeros_like(element)
    names = inspect.signature(type(optimizer)).parameters.keys() & group.keys()
    scratch = type(optimizer)([element], **{name: group[name] for name in names - {"params"}})
    scratch.step()
    return dict(scratch.state[element])


def _check_state(state: State, usual: State, parameter: torch.Tensor) -> None:
    for name, like in usual.items():
        value: Any = state.get(name)
        if not isinstance(like, torch.Tensor):
            fits = _is_like(value, like)
        else:
            shape = parameter.shape if like.dim() else ()
            fits = isinstance(value, torch.Tensor) and value.shape == shape
        if not fits or (name == "step" and not float(value) >= 0):
            raise ValueError(f"{name} of a parameter of {tuple(parameter.shape)} is {value!r:.60}")

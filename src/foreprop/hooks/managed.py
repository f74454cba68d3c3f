"""Which parameters the open sessions of this process have."""

from __future__ import annotations

import weakref
from collections.abc import Sequence, Set
from typing import Protocol

import torch

from foreprop.errors import ConfigError


class Owner(Protocol):
    """A session."""

    def give_away(self, parameter: torch.Tensor) -> bool:
        """Another session's optimizer has it; False if this one's has it too."""


_managed: dict[int, tuple[str, weakref.ref[Owner]]] = {}
"""By the parameter's id: its name in the session, and the session."""


def is_managed(parameter: torch.Tensor) -> bool:
    """Whether an open session has the parameter."""
    return id(parameter) in _managed


def managed_ids() -> Set[int]:
    return _managed.keys()


def claim(name: str, parameter: torch.Tensor, owner: Owner) -> None:
    _managed[id(parameter)] = (name, weakref.ref(owner))


def release(parameter: torch.Tensor, owner: Owner) -> None:
    """Nobody has it any more, unless it is another session's by now."""
    _, reference = _managed.get(id(parameter), ("", None))
    if reference is not None and reference() is owner:
        del _managed[id(parameter)]


def check_unmanaged(named: Sequence[tuple[str, torch.nn.Parameter, int]]) -> None:
    """Take over what another session only reads; refuse what it updates."""
    for name, parameter, _ in named:
        if id(parameter) not in _managed:
            continue
        theirs, reference = _managed[id(parameter)]
        session = reference()
        if session is None or not session.give_away(parameter):
            raise ConfigError(
                f"parameter {name} belongs to another open session, as {theirs}:"
                " give each parameter to one optimizer, and close() a session before another one"
                " takes its parameters"
            )

"""A copy of the user's optimizer, pickled or not, is an ordinary one, with its state."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from foreprop.hooks.modelhooks import without_own

OWN_ATTRIBUTES = ("step", "zero_grad")
"""What a session puts into the optimizer's own attributes."""


def keep_copy_plain(
    optimizer: torch.optim.Optimizer,
    before: dict[str, Any],
    pull_state: Callable[[], None],
    drop_state: Callable[[], None],
) -> Callable[[], None]:
    """From now on; the returned function ends it.

    ``before``: of the attributes that are the session's meanwhile, those that the user had. The
    state is where ``pull_state`` puts it, until ``drop_state``.
    """
    attributes = vars(optimizer)

    def reduce_ex(self: torch.optim.Optimizer, protocol: Any) -> Any:
        pull_state()
        names = [name for name in (*OWN_ATTRIBUTES, "__reduce_ex__") if name in attributes]
        ours = {name: attributes.pop(name) for name in names}
        attributes.update(before)
        try:
            return _detached(self.__reduce_ex__(protocol), self.state)
        finally:
            attributes.update(ours)
            drop_state()

    attributes["__reduce_ex__"] = types.MethodType(reduce_ex, optimizer)
    return lambda: attributes.pop("__reduce_ex__", None)


def _detached(reduced: Any, state: Any) -> Any:
    """With a state of its own, for the optimizer's is emptied when it has been looked at."""
    if reduced is state:
        return state.copy()
    if type(reduced) is tuple:
        return tuple(_detached(part, state) for part in reduced)
    if type(reduced) is dict:
        plain = without_own(reduced)
        return {key: _detached(v, state) if v is state else v for key, v in plain.items()}
    return reduced

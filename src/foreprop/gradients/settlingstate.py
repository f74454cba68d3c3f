"""An optimizer's state that is as after `step()` whenever somebody looks at it.

Deferred updates (`gradients.localstep`) change the state when they are made. So whoever reads or
edits ``optimizer.state`` between steps, to show it, to change it or to start anew, has them made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch


class SettlingState(defaultdict[Any, dict[str, Any]]):
    """In the place of ``optimizer.state``; has pending updates made before each use."""

    def __init__(self, state: dict[Any, dict[str, Any]], settle: Callable[[], None]) -> None:
        super().__init__(dict, state)
        self._settle = settle
        self.unsettled = UnsettledState(self)
        """The same entries, for the updates themselves."""

    def __getitem__(self, key: Any) -> dict[str, Any]:
        self._settle()
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: dict[str, Any]) -> None:
        self._settle()
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._settle()
        super().__delitem__(key)

    def __contains__(self, key: object) -> bool:
        self._settle()
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        self._settle()
        return super().__iter__()

    def __len__(self) -> int:
        self._settle()
        return super().__len__()

    def copy(self) -> defaultdict[Any, dict[str, Any]]:  # type: ignore[override]
        """An ordinary one."""
        self._settle()
        return self._plain()

    def __reduce__(self) -> Any:
        self._settle()
        return defaultdict, (dict,), None, None, iter(self._plain().items())

    def _plain(self) -> defaultdict[Any, dict[str, Any]]:
        plain: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        plain.update(dict.items(self))
        return plain


def _after_settling(name: str) -> Callable[..., Any]:
    own: Callable[..., Any] = getattr(defaultdict, name)

    def method(self: SettlingState, *args: Any, **kwargs: Any) -> Any:
        self._settle()
        return own(self, *args, **kwargs)

    return method


for _name in "get items keys values pop popitem clear update setdefault __repr__".split():
    setattr(SettlingState, _name, _after_settling(_name))


class UnsettledState:
    """What the steps of torch.optim use of a state."""

    def __init__(self, state: SettlingState) -> None:
        self._state = state

    def __getitem__(self, key: Any) -> dict[str, Any]:
        if not dict.__contains__(self._state, key):
            dict.__setitem__(self._state, key, {})
        return dict.__getitem__(self._state, key)

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self._state, key)


def settling_state(optimizer: torch.optim.Optimizer, settle: Callable[[], None]) -> SettlingState:
    """Of the optimizer, put there if it is not: `load_state_dict` makes a new state."""
    state = optimizer.state
    if not isinstance(state, SettlingState):
        state = SettlingState(state, settle)
        optimizer.state = state
    return state


def give_plain_state(optimizer: torch.optim.Optimizer) -> None:
    """The session is over: an ordinary state, with what is there now."""
    state = optimizer.state
    if isinstance(state, SettlingState):
        optimizer.state = state._plain()

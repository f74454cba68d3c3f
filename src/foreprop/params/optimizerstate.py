"""The optimizer's state is as after `step()` whenever somebody looks at it, whoever updates.

A `SettlingState` stands for ``optimizer.state``, and calls ``settle`` before each use. Where the
workers update that makes deferred updates (`params.localstep`), which change the state.

Where servers, or the engine's own optimizers, have the state, `ShownState` fetches it when it is
looked at, and sends it back if it is edited. Who reads it is shown what single-process training
would have at that point. Who edits, resets or replaces it has the next step go by that, as after
`load_state_dict`: rank 0's counts, and all ranks are to do the same.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from foreprop.errors import TrainingLoopError


class SettlingState(defaultdict[Any, dict[str, Any]]):
    """A state that calls ``settle`` before each use; a copy of it is an ordinary one."""

    def __init__(self, state: dict[Any, dict[str, Any]], settle: Callable[[], None]) -> None:
        super().__init__(dict, state)
        self._settle = settle
        self.unsettled = UnsettledState(self)

    def copy(self) -> defaultdict[Any, dict[str, Any]]:  # type: ignore[override]
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


_METHODS = (
    "get items keys values pop popitem clear update setdefault"
    " __getitem__ __setitem__ __delitem__ __contains__ __iter__ __len__ __repr__"
).split()
for _name in _METHODS:
    setattr(SettlingState, _name, _after_settling(_name))


class UnsettledState:
    """The same entries for the updates themselves, as the steps of torch.optim use them."""

    def __init__(self, state: SettlingState) -> None:
        self._state = state

    def __getitem__(self, key: Any) -> dict[str, Any]:
        if not dict.__contains__(self._state, key):
            dict.__setitem__(self._state, key, {})
        return dict.__getitem__(self._state, key)

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self._state, key)


def settling_state(optimizer: torch.optim.Optimizer, settle: Callable[[], None]) -> SettlingState:
    # `load_state_dict` makes a new state
    state = optimizer.state
    if not isinstance(state, SettlingState):
        state = SettlingState(state, settle)
        optimizer.state = state
    return state


def give_plain_state(optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state
    if isinstance(state, SettlingState):
        optimizer.state = state._plain()


_Contents = dict[int, dict[str, Any]]


class ShownState:
    """The state that servers have, shown in the optimizer between two steps. Training thread.

    ``fetch`` puts it into the optimizer, ``forget`` takes it out, ``replace`` sends it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        fetch: Callable[[], None],
        forget: Callable[[], None],
        replace: Callable[[], None],
    ) -> None:
        self._optimizer = optimizer
        self._fetch = fetch
        self._forget = forget
        self._replace = replace
        self.seen: _Contents | None = None
        """What has been shown since the last step, by identity."""
        self.installed: SettlingState | None = None
        """What stands for ``optimizer.state`` while its uses are watched."""
        self._quiet = False
        self._lent = False  # to a `state_dict()`
        self._kept: list[Any] = []  # what is seen, so that no other object gets its id

    def watch(self) -> None:
        """Show the state to whoever uses ``optimizer.state``, from now on."""
        self.installed = settling_state(self._optimizer, self.show)

    def end(self) -> None:
        self.installed = None
        give_plain_state(self._optimizer)

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        """Do not watch the uses of whoever puts the state there."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def show(self) -> None:
        """Put the state of the last step into the optimizer, if it is not there."""
        if self._quiet or (self.installed is not None and self.seen is not None):
            return
        with self.quietly():
            self._fetch()
            if self.installed is not None:
                state: dict[Any, dict[str, Any]] = self._optimizer.state
                self.seen = self._contents()
                self._kept = [[*own.values()] for own in dict.values(state)]

    def lend(self) -> None:
        """Lend it to `state_dict`, until `take_back`: it is not kept twice."""
        self._lent = self.seen is None
        self.show()

    def take_back(self) -> None:
        if self._lent:
            self._lent = False
            self._hide()

    def loaded(self) -> None:
        """Send the state that is there: `load_state_dict` has put it there, or it is edited."""
        with self.quietly():
            self._replace()
        self.seen = None
        if self.installed is not None:
            self.watch()

    def take(self) -> None:
        """Take the state back, before a step's first gradient leaves; send it if it is edited."""
        if self.installed is None:
            return
        if self._is_edited():
            self.loaded()
        elif self.seen is not None:
            self._hide()

    def _hide(self) -> None:
        self.seen = None
        self._kept.clear()
        with self.quietly():
            self._forget()

    def check_unedited(self) -> None:
        """Raise at `step()` for an edit since gradients left: servers went by the old state."""
        if self.installed is not None and self._is_edited():
            raise TrainingLoopError(
                "optimizer.state was changed between backward() and step(), when some gradients"
                " had been sent and updates made by the old state. Change it between step() and"
                " the next backward(), or set parallelize(..., update='workers')."
            )

    def _is_edited(self) -> bool:
        if not isinstance(self._optimizer.state, SettlingState):  # another one has been assigned
            return True
        return self.seen is not None and self._contents() != self.seen

    def _contents(self) -> _Contents:
        # edits of a tensor show in its version
        state: dict[Any, dict[str, Any]] = self._optimizer.state
        return {
            id(parameter): {
                key: (id(value), value._version) if isinstance(value, torch.Tensor) else value
                for key, value in own.items()
            }
            for parameter, own in dict.items(state)
            if own
        }

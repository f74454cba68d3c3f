"""`optimizer.state` while others update: fetched when it is looked at, sent back if it is edited.

Servers, or the engine's own optimizers, have the state. Who reads it is shown what single-process
training would have at that point; who edits, resets or replaces it has the next step go by that,
as after `load_state_dict`: rank 0's counts, and all ranks are to do the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from foreprop.errors import TrainingLoopError
from foreprop.gradients.settlingstate import SettlingState, give_plain_state, settling_state

_Contents = dict[int, dict[str, Any]]


class ShownState:
    """Between two steps. Not thread-safe: for the training thread."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        fetch: Callable[[], None],
        forget: Callable[[], None],
        replace: Callable[[], None],
    ) -> None:
        """``fetch`` puts it into the optimizer, ``forget`` takes it out, ``replace`` sends it."""
        self._optimizer = optimizer
        self._fetch = fetch
        self._forget = forget
        self._replace = replace
        self._watches = False
        self._quiet = False
        self._lent = False  # to who asked for it once
        self._seen: _Contents | None = None
        self._kept: list[Any] = []  # what is seen, so that no other object gets its id

    def watch(self) -> None:
        """From now on whoever uses ``optimizer.state`` is shown it."""
        self._watches = True
        settling_state(self._optimizer, self.show)

    def end(self) -> None:
        """The optimizer has its state itself, or the session is over."""
        self._watches = False
        give_plain_state(self._optimizer)

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        """For those who put the state there."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def show(self) -> None:
        """Have the state of the last step in the optimizer."""
        if self._quiet or (self._watches and self._seen is not None):
            return
        with self.quietly():
            self._fetch()
            if self._watches:
                self._see()

    def lend(self) -> None:
        """For `state_dict`, until `take_back`: it is not kept twice."""
        self._lent = self._seen is None
        self.show()

    def take_back(self) -> None:
        if self._lent:
            self._lent = False
            self._hide()

    def loaded(self) -> None:
        """`load_state_dict` has put another one there: the next step goes by that."""
        with self.quietly():
            self._replace()
        self._seen = None
        if self._watches:
            self.watch()

    def take(self) -> None:
        """A step begins: send what has been edited."""
        if not self._watches:
            return
        if self._is_edited():
            self.loaded()
        elif self._seen is not None:
            self._hide()

    def _hide(self) -> None:
        self._seen = None
        self._kept.clear()
        with self.quietly():
            self._forget()

    def check_unedited(self) -> None:
        """At `step()`, when some gradients have left: servers have gone by the old state."""
        if self._watches and self._is_edited():
            raise TrainingLoopError(
                "optimizer.state was changed between backward() and step(), when some gradients"
                " had been sent and updates made by the old state. Change it between step() and"
                " the next backward(), or set parallelize(..., update='workers')."
            )

    def _is_edited(self) -> bool:
        if not isinstance(self._optimizer.state, SettlingState):  # another one has been assigned
            return True
        return self._seen is not None and self._contents() != self._seen

    def _see(self) -> None:
        self._seen = self._contents()
        state: dict[Any, dict[str, Any]] = self._optimizer.state
        self._kept = [[*own.values()] for own in dict.values(state)]

    def _contents(self) -> _Contents:
        """What is there, by identity; edits of a tensor show in its version."""
        state: dict[Any, dict[str, Any]] = self._optimizer.state
        return {
            id(parameter): {
                key: (id(value), value._version) if isinstance(value, torch.Tensor) else value
                for key, value in own.items()
            }
            for parameter, own in dict.items(state)
            if own
        }

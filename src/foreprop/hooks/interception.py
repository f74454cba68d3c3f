"""Functions of torch that are replaced while a session is open, and given back afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_lock = threading.Lock()


class Interception:
    """Puts ``wrap(original)`` in a function's place for as long as anybody holds it.

    ``owner``: its module or class; a class may inherit it.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self._owner = owner
        self._name = name
        self._wrap = wrap
        self._original: Callable[..., Any] | None = None
        self._ours: Callable[..., Any] | None = None
        self._inherited = False
        self._holders = 0

    def hold(self) -> Callable[[], None]:
        """Put it in place; the returned function ends this hold."""
        with _lock:
            self._holders += 1
            if self._holders == 1:
                self._original = getattr(self._owner, self._name)
                self._inherited = self._name not in vars(self._owner)
                self._ours = self._wrap(self._original)
                setattr(self._owner, self._name, self._ours)
        return self._release

    def _release(self) -> None:
        with _lock:
            self._holders -= 1
            if self._holders or vars(self._owner).get(self._name) is not self._ours:
                return
            if self._inherited:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, self._original)

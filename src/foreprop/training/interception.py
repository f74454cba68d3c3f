"""Functions of torch that are replaced while a session is open, and given back afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

_lock = threading.Lock()


class Interception:
    """Puts ``wrap(original)`` in a function's place for as long as anybody holds it."""

    def __init__(
        self,
        module: ModuleType,
        name: str,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self._module = module
        self._name = name
        self._wrap = wrap
        self._original: Callable[..., Any] | None = None
        self._ours: Callable[..., Any] | None = None
        self._holders = 0

    def hold(self) -> Callable[[], None]:
        """Put it in place; the returned function ends this hold."""
        with _lock:
            self._holders += 1
            if self._holders == 1:
                self._original = getattr(self._module, self._name)
                self._ours = self._wrap(self._original)
                setattr(self._module, self._name, self._ours)
        return self._release

    def _release(self) -> None:
        with _lock:
            self._holders -= 1
            if not self._holders and getattr(self._module, self._name) is self._ours:
                setattr(self._module, self._name, self._original)

"""A parameter's first use in a forward pass, which gives the order of priorities."""

from __future__ import annotations

from typing import Any

from foreprop.path.managedparameter import FirstUses, Watched


class FirstUse:
    """Of one parameter: reported to the session while it is ``watched``."""

    def __init__(self, parameter: Watched, session: FirstUses) -> None:
        self.watched = False
        self._parameter = parameter
        self._session = session

    def begins(self) -> None:
        """An operation with the parameter begins."""
        if self.watched:
            self._session.first_use_begins(self._parameter)

    def is_awaited_after(self, result: Any) -> bool:
        """An operation has returned ``result``: whether its first use is still to come."""
        if self.watched and self._session.is_first_use(self._parameter, result):
            self.watched = False
        return self.watched

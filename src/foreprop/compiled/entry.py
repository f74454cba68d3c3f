"""What a session does when its thread enters compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from foreprop.compiled import tracing

if TYPE_CHECKING:
    from foreprop.path.managedparameter import ManagedParameter


class Entering(Protocol):
    """A session."""

    parameters: list[ManagedParameter]
    first: Any
    user: Any
    life: Any

    def forward_started(self) -> None: ...
    def synchronise_buffers(self) -> None: ...


class CompiledEntry:
    """Of one session, from the first entry on."""

    def __init__(self, session: Entering, tables: Sequence[Any]) -> None:
        """``tables``: parameters held by rows, which do not wait inside compiled code."""
        self._session = session
        by_rows = {table.index for table in tables}
        dense = [p for p in session.parameters if p.index not in by_rows]
        others, leave = tracing.watch_compiler(p.parameter for p in dense)
        session.life.add_undo(leave)
        ids = {id(tensor) for tensor in others}
        self._others = [*by_rows, *(p.index for p in dense if id(p.parameter) in ids)]

    def entered(self, *, everything: bool) -> None:
        """``everything``: what comes, a conversion, must see all parameters as ordinary ones."""
        session = self._session
        if not everything and not session.first.is_over and torch.is_grad_enabled():
            session.forward_started()
        numbers = range(len(session.parameters)) if everything else self._others
        for number in numbers:
            session.parameters[number].unwatch()
            session.parameters[number].settle_if_stepped()
        if session.user.buffers and not session.user.model.training:
            session.synchronise_buffers()

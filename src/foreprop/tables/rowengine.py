"""What the row-wise parameters, and the files of remote tables, ask of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from foreprop.path.engines import Engine
from foreprop.tables.exchange import Pull
from foreprop.tables.kept import KeptRows
from foreprop.tables.parts import RowPart


class RowEngine(Protocol):
    """Where rows come from and their gradients go, by the parameter's number."""

    def push_rows(
        self, parameter: int, step: int, gradient: RowPart | None, *, flags: int
    ) -> None: ...
    def send_row_values(self, parameter: int, step: int, table: torch.Tensor) -> None:
        """Rank 0: the table as it is now counts from ``step`` on."""

    def pull_rows(self, parameter: int, step: int, numbers: torch.Tensor) -> Pull: ...
    def wait_for_rows(self, pull: Pull) -> torch.Tensor: ...
    def settle_rows(self) -> None:
        """Block until the servers have updated all tables as of this rank's last pushes."""

    def kept_rows(self, parameter: int) -> Iterator[KeptRows]:
        """Of a remote table: all that is kept of its rows, in parts."""

    def send_kept_rows(self, parameter: int, part: KeptRows, *, anew: bool = False) -> None:
        """Rank 0: replace rows of a remote table, or all; blocks until the servers have them."""


class RowBackend(Protocol):
    """What remote tables ask of a session's backend."""

    session_id: str

    @property
    def engine(self) -> Engine: ...
    @property
    def rows(self) -> RowEngine: ...

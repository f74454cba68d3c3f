"""What every session offers, of several processes or of one: the type that users name."""

from __future__ import annotations

import abc
import os
from collections.abc import Mapping
from typing import Any

import torch

from foreprop.config import Config


class Session(abc.ABC):
    """One model and optimizer in synchronous data-parallel training. Made by `parallelize`.

    A class without behaviour, and no Protocol, whose ``isinstance`` would ask for values.
    """

    @property
    @abc.abstractmethod
    def config(self) -> Config:
        """The settings, as they are now: ``architecture="auto"`` changes some."""

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """This process's number among those that train."""

    @property
    @abc.abstractmethod
    def world_size(self) -> int:
        """How many processes train."""

    @property
    @abc.abstractmethod
    def planning(self) -> bool:
        """Whether ``architecture="auto"`` or ``slice_elems="auto"`` is still to be decided."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Wait until every parameter shows the result of the last `optimizer.step()`."""

    @property
    @abc.abstractmethod
    def grad_norm(self) -> float | None:
        """The global 2-norm of the last step's aggregated gradients, before clipping.

        What ``torch.nn.utils.clip_grad_norm_`` returns. Blocks until all ranks' gradients of that
        step are aggregated, so ask late: after the next forward pass it is there. None before the
        first step, and unless ``clip_grad_norm`` is set or a scaler was given.
        """

    @abc.abstractmethod
    def ema_state_dict(self) -> dict[str, Any]:
        """A copy of the model's state dict with the moving averages instead of the parameters.

        Any rank may ask by itself, between steps. The averages are in float32 at least. Needs
        ``ema``; raises `ConfigError` otherwise.
        """

    @abc.abstractmethod
    def load_ema_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `ema_state_dict` gave, on every rank alike; buffers are left alone."""

    @abc.abstractmethod
    def master_state_dict(self) -> dict[str, Any]:
        """A copy of the model's state dict with the parameters in full.

        With ``wire_dtype`` servers keep more of them than the workers see; where there are no
        servers it is just a copy. Any rank may ask by itself, between steps.
        """

    @abc.abstractmethod
    def rows(self, name: str, numbers: torch.Tensor) -> torch.Tensor:
        """A copy of some rows of a parameter as they are after the last `optimizer.step()`.

        ``numbers``: integers of any shape, on any device; the result has that shape and the rows'.
        Only these rows are fetched. Any rank may ask by itself, between steps. Raises `IndexError`
        for rows that are not there.
        """

    @abc.abstractmethod
    def set_rows(self, name: str, numbers: torch.Tensor, values: torch.Tensor) -> None:
        """Change some rows of a remote table by hand, between steps, on every rank alike.

        ``numbers``: (N,), each once; ``values``: (N, elements per row); rank 0's count. Their
        optimizer state stays. Blocks until the servers have them.
        """

    @abc.abstractmethod
    def save_tables(self, folder: str | os.PathLike[str]) -> None:
        """Write all remote tables into a folder: values, optimizer state and averages, in full.

        Any rank may, by itself, between steps; nobody needs room for a table. Rows that were never
        updated or set take no space: they begin alike again.
        """

    @abc.abstractmethod
    def load_tables(self, folder: str | os.PathLike[str]) -> None:
        """Go on from what `save_tables` wrote, with any number of servers and workers.

        On every rank alike, between steps; rank 0 reads. Raises `ConfigError` on all ranks for
        tables that do not fit, of which nothing is loaded.
        """

    @abc.abstractmethod
    def stats(self) -> dict[str, Any]:
        """Totals since the start: bytes, frames, seconds waited (by parameter), queue depth."""

    @abc.abstractmethod
    def describe(self) -> str:
        """One line: who takes part, how, and over which interface."""

    @abc.abstractmethod
    def close(self) -> None:
        """Finish what is under way, say goodbye, stop this process's servers. Idempotent.

        Called at exit by itself. Afterwards model and optimizer are ordinary PyTorch again; the
        optimizer's state has stayed with the servers, if there are any: take ``state_dict()``
        before. Returns when all ranks have closed theirs, or at the latest after
        ``step_timeout_s``, with a `StepTimeout` that names who has not; with several sessions the
        last one to be closed waits, for all. Where another error is under way (a ``finally``),
        that stays the one that is raised, with a note of what went wrong here.
        """

    @abc.abstractmethod
    def __enter__(self) -> Session: ...

    @abc.abstractmethod
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...

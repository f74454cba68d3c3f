"""What `shard` returns: somebody's loader, read for one rank and one batch ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from foreprop.data.loadercopy import Share
from foreprop.data.sharedstream import SharedStream
from foreprop.errors import ConfigError
from foreprop.tables.lookahead import lookahead

_OWN = frozenset({"_loader", "_share", "_original", "_batches", "epoch"})


class ShardedLoader:
    """Iterates over this rank's share; each pass is one epoch, and shuffles anew.

    Attributes are those of the loader that was given; setting one sets it there.
    """

    def __init__(self, loader: Any, share: Share | None, original: Any) -> None:
        self._loader = loader
        self._share = share
        self._original = original

    @property
    def epoch(self) -> int:
        """Which the next pass is; of a loader that was divided already, its sampler's."""
        if self._share is not None:
            return self._share.epoch
        return int(getattr(getattr(self._loader, "sampler", None), "epoch", 0))

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next pass is; for resuming a run."""
        if self._share is not None:
            self._share.set_epoch(epoch)
        batches = getattr(self._loader, "batch_sampler", None)
        told = [self._loader, batches, getattr(batches, "sampler", None)]
        told += [getattr(self._loader, name, None) for name in ("sampler", "dataset")]
        for owner in told:
            if owner is not self._share and hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._share, SharedStream):
            self._share.begin_pass()
        return lookahead.follow(self._checked(iter(self._loader)))

    def _checked(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Raises `ConfigError` at the first batch of a loader that has not asked for its share."""
        for batch in batches:
            if self._share is not None and not self._share.drawn:
                raise ConfigError(
                    f"{type(self._original).__name__}.__iter__ reads neither its sampler nor its"
                    " batch_sampler, so shard() cannot divide it: let it take every world_size-th"
                    " batch, beginning with number rank, and say shard(loader, divided=True)"
                )
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _OWN:
            raise AttributeError(name)
        where = self._original if name in ("dataset", "worker_init_fn") else self._loader
        return getattr(where, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)


class ShardedIterator(ShardedLoader):
    """Of a generator's result: there is one pass, which goes on where it was left."""

    _batches: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = super().__iter__()
        return next(self._batches)

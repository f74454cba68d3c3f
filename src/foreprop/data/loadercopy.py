"""Loaders with another sampler or data set: copies, which stay of the same class, with all else."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from foreprop.data.draws import SharedOrder
from foreprop.data.sharedstream import InitWorker, SharedStream
from foreprop.data.turns import Turn

Share = SharedOrder | SharedStream


def divide_loader(loader: Any, turn: Turn, seed: int) -> tuple[Any, Share]:
    """A copy of ``loader`` that reads one rank's share, and that share."""
    if "base_dataloader" in vars(loader):  # accelerate's, which hold the loader that they prepare
        base, share = divide_loader(loader.base_dataloader, turn, seed)
        return _changed(loader, base_dataloader=base), share
    if isinstance(loader.dataset, IterableDataset):
        return _divide_stream(loader, turn, seed)
    if loader.batch_sampler is None:
        sampler, share = _divide_batches(loader.sampler, turn, seed)
        return _restarted(_changed(loader, sampler=sampler)), share
    batches, share = _divide_batches(loader.batch_sampler, turn, seed)
    sampler = batches.sampler if type(batches) is BatchSampler else loader.sampler
    return _restarted(_changed(loader, batch_sampler=batches, sampler=sampler)), share


def _divide_stream(loader: Any, turn: Turn, seed: int) -> tuple[Any, Share]:
    """Made batches (``batch_size=None``) are not filled up: nobody knows how large they are."""
    batched = loader.batch_size is not None
    turn = replace(turn, fill=batched, rounds=loader.batch_size or 1)
    share = SharedStream(loader.dataset, turn, seed)
    if loader.num_workers:
        share.show_workers()
    changes: dict[str, Any] = {"dataset": share}
    if loader.worker_init_fn is not None:
        changes["worker_init_fn"] = InitWorker(loader.worker_init_fn)
    return _restarted(_changed(loader, **changes)), share


def _divide_batches(batches: Any, turn: Turn, seed: int) -> tuple[Any, SharedOrder]:
    """Torch's own batches are of divided samples; those of others are dealt out whole."""
    inner = getattr(batches, "sampler", None)
    if type(batches) is BatchSampler:
        share = SharedOrder(inner, replace(turn, rounds=batches.batch_size), seed)
        return _changed(batches, sampler=share), share
    if isinstance(inner, BatchSampler) and not isinstance(batches, BatchSampler):
        inner, share = _divide_batches(inner, turn, seed)  # repeats it for ever, as timm's does
        return _changed(batches, sampler=inner), share
    share = SharedOrder(batches, turn, seed)
    return share, share


def _changed(original: Any, **changes: Any) -> Any:
    """A copy, past the loader's own refusal of new values."""
    changed = copy.copy(original)
    vars(changed).update(changes)
    return changed


def _restarted(loader: Any) -> Any:
    """Iterators that the original's constructor has begun read the undivided data: begin anew."""
    begun = [name for name, value in vars(loader).items() if isinstance(value, _BaseDataLoaderIter)]
    vars(loader)["_iterator"] = None
    for name in begun:
        if name != "_iterator":
            vars(loader)[name] = DataLoader.__iter__(loader)
    return loader

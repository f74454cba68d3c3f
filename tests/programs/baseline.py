"""The same program on DDP: what its author would have written. Programs see it as ``baseline``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler


class TransparentDDP(DistributedDataParallel):
    """DDP on which the wrapped module's own attributes are found, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class DealtLoader:
    """A loader over a DistributedSampler, whose epoch is set before every pass."""

    def __init__(self, loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> None:
        self._loader = loader
        self._sampler = sampler
        self._epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self._sampler.set_epoch(self._epoch)
        self._epoch += 1
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


_kept: list[Any] = []


def change_ddp(**options: Any) -> None:
    """Every DDP from now on, also a program's own, has these options.

    Its reducer stays: with it torch 2.13 may wait for ever for a thread of gloo's, which waits for
    the interpreter.
    """
    make = DistributedDataParallel.__init__

    def made(self: DistributedDataParallel, *arguments: Any, **own: Any) -> None:
        make(self, *arguments, **{**own, **options})
        _kept.append(self.reducer)

    DistributedDataParallel.__init__ = made  # type: ignore[method-assign]


class Baseline:
    """``rebucketed``: sums are to be added up in another order."""

    def __init__(self, *, rebucketed: bool) -> None:
        self._rebucketed = rebucketed

    def wrap(self, model: torch.nn.Module, **options: Any) -> TransparentDDP:
        return TransparentDDP(model, **options)

    def deal(self, loader: DataLoader[Any]) -> DealtLoader:
        """This rank's share, as DistributedSampler divides it."""
        sampler: DistributedSampler[Any] = DistributedSampler(
            loader.dataset, shuffle=isinstance(loader.sampler, RandomSampler), seed=0
        )
        share: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            sampler=sampler,
            drop_last=loader.drop_last,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            generator=loader.generator,
        )
        return DealtLoader(share, sampler)

    def average(self, model: torch.nn.Module) -> None:
        """What DDP does after a backward pass, for code that DDP's forward pass does not see."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        torch._foreach_div_(gradients, dist.get_world_size())
        if not self._rebucketed:
            for gradient in gradients:
                dist.all_reduce(gradient)
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        torch.nn.utils.vector_to_parameters(flat, gradients)

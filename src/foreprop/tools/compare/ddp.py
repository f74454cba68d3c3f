"""torch's DistributedDataParallel under a model that stays the script's own.

The model's forward pass goes through a `DistributedDataParallel` of a module that calls the model's
real one. So buckets, reducer and hooks are torch's own, and the script sees the model that it made.

Of several backward passes in a step only the last one reduces, as with ``no_sync()``: from the
second step on, if the first had several that changed no parameter in between. (A script that moves
parameters between two passes needs both averages.)
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from foreprop.errors import ConfigError


class Inner(torch.nn.Module):
    """The model with its own forward pass, whatever stands in ``model.forward`` now."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self._own_forward = model.forward

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._own_forward(*inputs, **named)


def bf16_hook(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    # `register_comm_hook` only allows torch's own hook with NCCL, but gloo works, under this name
    return bf16_compress_hook(group, bucket)


# DDP looks at a hook's annotations, which are texts in this file
bf16_hook.__annotations__ = dict(bf16_compress_hook.__annotations__)


class ReducedForward:
    """A replacement of a model's ``forward``, which copies and files of the model do not have."""

    def __init__(self, model: torch.nn.Module, run: Callable[..., Any]) -> None:
        self._model = model
        self._run = run

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self._run(*inputs, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._model), self._model)
        return types.MethodType(type(self._model).forward, copied)

    def __reduce__(self) -> Any:
        return getattr, (self._model, "forward")


class Reduction:
    """DDP for one model, until `end`; for the training thread."""

    def __init__(
        self, model: torch.nn.Module, *, bf16: bool = False, find_unused: bool = False
    ) -> None:
        check_plain(model)
        self._model = model
        self._before = vars(model).get("forward")
        self._own_forward = model.forward
        self._ddp: DistributedDataParallel | None = DistributedDataParallel(
            Inner(model), find_unused_parameters=find_unused
        )
        if bf16:
            self._ddp.register_comm_hook(None, bf16_hook)
        self._passes, self._expected = 0, 1
        self._is_reduced, self._accumulates = True, True
        self._versions: int | None = None
        model.forward = ReducedForward(model, self._forward)

    def _forward(self, *inputs: Any, **named: Any) -> Any:
        ddp = self._ddp
        if ddp is None or not (torch.is_grad_enabled() and self._model.training):
            return self._own_forward(*inputs, **named)
        ddp.require_backward_grad_sync = self._passes + 1 >= self._expected
        return ddp(*inputs, **named)

    def begin_backward(self) -> None:
        versions = sum(parameter._version for parameter in self._model.parameters())
        if self._passes == 0:
            self._versions = versions
        elif versions != self._versions:
            self._accumulates, self._expected = False, 1
        self._passes += 1
        self._is_reduced = self._ddp is not None and self._ddp.require_backward_grad_sync

    def begin_step(self, *, has_closure: bool) -> None:
        """Have gradients reduced before the optimizer uses them; a closure makes passes itself."""
        if has_closure:
            self._accumulates = False
        elif self._passes and not self._is_reduced:
            average(self._model.parameters())
        self._expected = max(1, self._passes) if self._accumulates else 1
        self._passes, self._is_reduced = 0, True

    def end(self) -> None:
        """Give the model back to the script.

        Call this before the process group ends: a reducer that outlives it may have torch wait for
        ever for a thread of gloo's, which waits for the interpreter.
        """
        self._ddp = None
        if self._before is None:
            vars(self._model).pop("forward", None)
        else:
            self._model.forward = self._before
        gc.collect()


def average(parameters: Iterable[torch.Tensor]) -> None:
    """Average over the ranks gradients that no pass has reduced, after fewer passes than before."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.div_(dist.get_world_size())
            dist.all_reduce(parameter.grad)


def check_plain(model: torch.nn.Module) -> None:
    """Raise `ConfigError` for a model that cannot be put in DDP here."""
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ConfigError(
                f"model{f'.{name}' if name else ''} is in a DistributedDataParallel already: give"
                " parallelize() the plain module, and the comparison puts it in DDP itself"
            )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(
            "the model has remote tables (parameters on the meta device), which only foreprop"
            " trains: leave alone and ddp out with --systems, or make the tables in memory"
        )


class ProcessGroup:
    """The default process group: the script's if it has made one, else ours, which we end."""

    def __init__(self, backend: str, timeout_s: float) -> None:
        self._is_ours = not dist.is_initialized()
        if self._is_ours:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))

    def end(self) -> None:
        if self._is_ours and dist.is_initialized():
            dist.destroy_process_group()


def usual_backend(model: torch.nn.Module) -> str:
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    return "nccl" if on_gpu and dist.is_nccl_available() else "gloo"

"""Other libraries' wrappers around the model or the optimizer: taken off where that is exact.

A model in DistributedDataParallel would be averaged twice. While a session is open, the forward
pass of such a wrapper goes straight to the module in it, so that its reducer never begins. The
class does that (`params.modelhooks`), so nothing of it is in a wrapper that is saved or copied.
Options of DDP that change its results are refused, and so are wrappers of a part of the parameters
(FSDP) and libraries that exchange gradients themselves. A SyncBatchNorm is refused where it would
not synchronise: torch silently takes the rank's own statistics where there is no process group.
"""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from foreprop.errors import ConfigError, TrainingLoopError
from foreprop.params.interception import EXCHANGING, SHOWING, is_managed

_DDP = "torch.nn.parallel.DistributedDataParallel"
_SHARDED = ("torch.distributed.fsdp", "torch.distributed._composable")
_OWN_STATISTICS = "Or leave it a torch.nn.BatchNorm, if a rank's own statistics are good enough"
_HALF = "; wire_dtype='bfloat16' of parallelize() halves the bytes"
_OPTIONS = (
    ("_comm_hooks", "a communication hook (register_comm_hook)", _HALF),
    ("mixed_precision", "mixed_precision", "; use torch.autocast"),
    ("_delay_all_reduce_params", "delay_all_reduce_named_params", ""),
    ("parameters_to_ignore", "parameters that it ignores", ""),
    ("_use_python_reducer", "the Python reducer (torch._dynamo.config.optimize_ddp)", ""),
)
"""What changes DDP's results: (attribute, what the user did, more advice)."""


def unwrap_model(model: torch.nn.Module, *, alone: bool = True) -> torch.nn.Module:
    """The module in a DistributedDataParallel; raises `ConfigError` for what cannot be trained.

    ``alone``: this process trains by itself, so no SyncBatchNorm need synchronise.
    """
    for name, module in model.named_modules():
        said = f"model.{name}" if name else "model"
        _check_module(module, said)
        if isinstance(module, torch.nn.SyncBatchNorm) and not alone:
            _check_synchronises(module, said)
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model


def unwrap_optimizer(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    kind = type(optimizer)
    if kind.__module__.partition(".")[0] in EXCHANGING:
        raise ConfigError(
            f"optimizer is {_name(kind)}, which exchanges gradients itself: give parallelize() the"
            " torch.optim.Optimizer in it"
        )
    inner = getattr(optimizer, "optimizer", None)
    if not kind.__module__.startswith(SHOWING) or not isinstance(inner, torch.optim.Optimizer):
        return optimizer
    if getattr(optimizer, "scaler", None) is not None:
        _follow_step(optimizer)
    return unwrap_optimizer(inner)


def _follow_step(outer: Any) -> None:
    # accelerate's optimizer with a GradScaler took its optimizer's step at its start; it takes it
    # again, the session's by then, when its state is restored
    own = outer.step
    if hasattr(own, "_follows_foreprop"):
        return

    @functools.wraps(own)
    def step(self: Any, *arguments: Any, **options: Any) -> Any:
        self.__setstate__(self.__getstate__())
        return own(*arguments, **options)

    step._follows_foreprop = True  # type: ignore[attr-defined]
    outer.step = types.MethodType(step, outer)  # a method, as schedulers expect


def _name(kind: type) -> str:
    return f"{kind.__module__.partition('.')[0]}'s {kind.__name__}"


def _check_module(module: torch.nn.Module, name: str) -> None:
    if isinstance(module, DistributedDataParallel):
        _check_options(module)
    if isinstance(module, torch.nn.DataParallel) and module.device_ids:
        raise ConfigError(
            f"{name} is a torch.nn.DataParallel on devices {module.device_ids}, which copies the"
            " parameters in every forward pass: leave it out, and start one process per device"
        )
    kinds = type(module).__mro__
    if any(kind.__module__.startswith(_SHARDED) for kind in kinds):
        names = {kind.__name__ for kind in kinds}
        said = f"a {kinds[0].__name__} of {kinds[0].__module__}"
        if "FSDPModule" in names:
            said = "sharded by torch.distributed.fsdp.fully_shard (FSDP2)"
        elif "FullyShardedDataParallel" in names:
            said = "a torch.distributed.fsdp.FullyShardedDataParallel (FSDP)"
        raise ConfigError(
            f"{name} is {said}: each rank has a part of the parameters only, and foreprop needs"
            " whole ones. Leave it out, and give parallelize() the plain module"
        )
    if others := [kind for kind in kinds if kind.__module__.partition(".")[0] in EXCHANGING]:
        raise ConfigError(
            f"{name} is {_name(others[0])}, which exchanges gradients itself: give parallelize()"
            " the plain module and a plain torch.optim.Optimizer"
        )
    for own, parameter in module.named_parameters(recurse=False):
        if type(parameter.data).__module__.startswith("torch.distributed.tensor"):
            raise ConfigError(
                f"parameter {own} of {name} is a DTensor (tensor parallelism, fully_shard):"
                " foreprop needs a plain tensor, the whole of it on every rank"
            )


def _check_synchronises(module: torch.nn.SyncBatchNorm, name: str) -> None:
    tensors = itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))
    if any(tensor.device.type == "cpu" for tensor in tensors):
        raise ConfigError(
            f"{name} is a torch.nn.SyncBatchNorm on a CPU, where torch does not compute it, with"
            f" foreprop or without. {_OWN_STATISTICS}; or move the model to a GPU first"
        )
    if not dist.is_initialized():
        raise ConfigError(
            f"{name} is a torch.nn.SyncBatchNorm, but there is no process group for its statistics,"
            " so each rank would silently normalise by its own. Call"
            " torch.distributed.init_process_group('nccl') before parallelize(), and keep it while"
            f" you train. {_OWN_STATISTICS}"
        )


def _check_options(wrapper: DistributedDataParallel) -> None:
    advice = f"Leave {_DDP} out, and give parallelize() the module in it"
    for attribute, name, more in _OPTIONS:
        if getattr(wrapper, attribute, None):
            raise ConfigError(
                f"the model is in a {_DDP} with {name}; since parallelize() its gradients do not go"
                f" through it. {advice}{more}"
            )
    part, world = dist.get_world_size(wrapper.process_group), dist.get_world_size()
    if part != world:
        raise ConfigError(
            f"the model is in a {_DDP} whose process_group has {part} of {world} ranks; foreprop"
            f" averages over all ranks. {advice}, if that is what you want"
        )


# What the class does while a session is open.
_checked: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def _is_taken_off(wrapper: DistributedDataParallel) -> bool:
    """Whether a session has the wrapper's parameters; raises if it has only some of them."""
    if not any(is_managed(parameter) for parameter in wrapper.module.parameters()):
        return False
    if wrapper not in _checked:
        _check_options(wrapper)
        others = [
            name
            for name, parameter in wrapper.module.named_parameters()
            if parameter.requires_grad and not is_managed(parameter)
        ]
        if others:
            raise ConfigError(
                f"a {_DDP} has parameters that parallelize() synchronises already, and others:"
                f" {', '.join(others[:5])}. Leave it out around the model that you gave to"
                " parallelize(), or give parallelize() all of it"
            )
        _checked.add(wrapper)
    return True


def _make(original: Callable[..., Any], wrapper: Any, /, *arguments: Any, **options: Any) -> None:
    original(wrapper, *arguments, **options)
    _is_taken_off(wrapper)


def _pass_on(original: Callable[..., Any], wrapper: Any, /, *inputs: Any, **named: Any) -> Any:
    if not _is_taken_off(wrapper):
        return original(wrapper, *inputs, **named)
    if wrapper.device_ids:
        moved, moved_named = wrapper.to_kwargs(inputs, named, wrapper.device_ids[0])
        inputs, named = moved[0], moved_named[0]
    if wrapper._check_sync_bufs_pre_fwd() and _reads_buffers(wrapper.module):
        wrapper._sync_buffers()
    synchronises = torch.is_grad_enabled() and wrapper.require_backward_grad_sync
    wrapper.require_forward_param_sync = synchronises  # at the next forward pass
    return wrapper.module(*inputs, **named)


def _reads_buffers(model: torch.nn.Module) -> bool:
    """Whether rank 0's buffers must be everybody's before a forward pass, as with DDP."""
    # not those of batch norms: in training they are not read, and in evaluation and checkpoints
    # foreprop shows rank 0's
    return any(
        next(module.buffers(recurse=False), None) is not None
        for module in model.modules()
        if not isinstance(module, _NormBase)
    )


def _refuse(advice: str) -> Callable[..., Any]:
    def refused(
        original: Callable[..., Any], wrapper: Any, /, *arguments: Any, **options: Any
    ) -> Any:
        if _is_taken_off(wrapper):
            raise TrainingLoopError(
                f"{original.__name__}() of a {_DDP} was called, but since parallelize() the"
                f" model's gradients do not go through it. {advice}"
            )
        return original(wrapper, *arguments, **options)

    return refused


INSTEAD: Mapping[str, Callable[..., Any]] = {
    "__init__": _make,
    "forward": _pass_on,
    "join": _refuse(
        "Give every rank equally many batches instead, as foreprop.shard(loader) does."
    ),
    "register_comm_hook": _refuse(f"Leave the hook out{_HALF}."),
}
"""Called with the class's own method, the wrapper, and the arguments."""

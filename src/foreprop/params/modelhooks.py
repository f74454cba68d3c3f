"""A session's hooks on the user's model and optimizer, and the buffers that they show.

No copy has the hooks: whoever copies, pickles or converts a model is led past them by
`params.copies`, and wrappers of other libraries by `params.wrappers`. Both are loaded when that
happens first. Hooks are registered by the functions of ``torch.nn.Module``: script modules do not
have them all as methods.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from foreprop.engine.memory import bytes_of
from foreprop.errors import ConfigError
from foreprop.params.interception import (
    EXCHANGING,
    SHOWING,
    WAITS_AT_ENTRY,
    Interception,
    OwnHook,
    call_watchers,
)
from foreprop.params.waiting import wait_and_use, wait_and_use_plain, waits_for


class CallingHook(OwnHook):
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


class BeforeModule(OwnHook):
    """``wait="modules"``: waits for the parameters that the module owns itself."""

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():  # compiled code has waited at its entry
            wait_and_use([p for p in module._parameters.values() if p is not None], lambda: None)


def before_loading(module: Any, hook: OwnHook) -> RemovableHandle:
    register: Any = torch.nn.Module._register_load_state_dict_pre_hook
    handle: RemovableHandle = register(module, hook, with_module=True)
    return handle


def before_forward(module: Any, hook: OwnHook) -> RemovableHandle:
    register: Any = torch.nn.Module.register_forward_pre_hook
    handle: RemovableHandle = register(module, hook)
    return handle


# Copies and conversions.
def _reducing(reduce_ex: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reduce_ex)
    def wrapper(self: torch.nn.Module, protocol: Any) -> Any:
        from foreprop.params.copies import reduce_module

        return reduce_module(reduce_ex, self, protocol)

    return wrapper


def _converting(convert: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(convert)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        from foreprop.params.copies import convert_modules

        call_watchers(everything=True)
        return convert_modules(convert, args, kwargs)

    return wrapper


def _making_parameter(new: Callable[..., Any]) -> Any:
    # torch asks of which class the tensor is in ``nn.Parameter(layer.weight)``, which so must wait
    @functools.wraps(new)
    def wrapper(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
        if waits_for(data) is None:
            return new(cls, data, requires_grad)
        return wait_and_use_plain(data, lambda plain: new(cls, plain, requires_grad))

    return staticmethod(wrapper)


_COPIES = Interception(torch.nn.Module, "__reduce_ex__", _reducing)
_PARAMETERS = Interception(torch.nn.Parameter, "__new__", _making_parameter)
_CONVERSIONS: dict[tuple[str, str], Interception] = {}
_CONVERTERS = (
    ("torch.jit._script", "_script_impl"),
    ("torch.jit._trace", "_trace_impl"),
    ("torch.jit._trace", "trace_module"),
    ("torch.jit", "trace_module"),
    ("torch.export", "export"),
    ("torch.export._trace", "_export"),  # for who has imported `export` by name
)


def keep_copies_plain() -> list[Callable[[], None]]:
    """Let no copy of a model have the session's hooks; the returned functions end that."""
    releases = [_COPIES.hold(), _PARAMETERS.hold()]
    for module, name in _CONVERTERS:
        owner = sys.modules.get(module)
        if owner is not None and hasattr(owner, name):
            key = (module, name)
            known = _CONVERSIONS.setdefault(key, Interception(owner, name, _converting))
            releases.append(known.hold())
    return releases


OWN_ATTRIBUTES = ("step", "zero_grad", "add_param_group")
"""What a session puts into the optimizer's own attributes."""


def keep_copy_plain(
    optimizer: torch.optim.Optimizer,
    before: dict[str, Any],
    pull_state: Callable[[], None],
    drop_state: Callable[[], None],
) -> Callable[[], None]:
    """Let no copy of the optimizer have the session's attributes; the returned function ends that.

    ``before`` has those that the user had in their place. The state is in the optimizer from
    ``pull_state`` until ``drop_state``.
    """

    def reduce_ex(self: torch.optim.Optimizer, protocol: Any) -> Any:
        from foreprop.params.copies import reduce_optimizer

        pull_state()
        try:
            return reduce_optimizer(self, protocol, before, (*OWN_ATTRIBUTES, "__reduce_ex__"))
        finally:
            drop_state()

    attributes = vars(optimizer)
    attributes["__reduce_ex__"] = types.MethodType(reduce_ex, optimizer)
    return lambda: attributes.pop("__reduce_ex__", None)


class ModelHook(OwnHook):
    """Calls a session's method with ``about``, as long as the session is there."""

    def __init__(self, method: Callable[..., None], *about: Any) -> None:
        self._method = weakref.WeakMethod(method)
        self._about = about

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *_: Any) -> None:
        method = self._method()
        if method is not None:
            method(*self._about)


class BeforeForward(ModelHook):
    """Calls the method before a forward pass in evaluation mode."""

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        if not module.training and not _in_compiled_code():
            super().__call__()


class FirstForward(ModelHook):
    """Calls the method before a forward pass that will be differentiated."""

    def __call__(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not _in_compiled_code():
            super().__call__()


class BeforeStateDict(ModelHook):
    """Calls the method before the module is copied, too."""

    def before_copy(self) -> None:
        self()


def _in_compiled_code() -> bool:
    # what the hooks do has been done at its entry, see `params.interception`
    return WAITS_AT_ENTRY and torch.compiler.is_compiling()


class ModelBuffers:
    """A model's buffers, by module and name: a module may put another tensor there at any time."""

    def __init__(self, model: torch.nn.Module) -> None:
        seen: set[int] = set()
        self._places: list[tuple[torch.nn.Module, str]] = []
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                if buffer.numel() and id(buffer) not in seen:
                    seen.add(id(buffer))
                    self._places.append((module, name))
        self.size_bytes = packed_bytes(self.now())

    def __len__(self) -> int:
        return len(self._places)

    def now(self) -> list[torch.Tensor]:
        return [module._buffers[name] for module, name in self._places]  # type: ignore[misc]

    def check_size(self) -> None:
        size_bytes = packed_bytes(self.now())
        if size_bytes != self.size_bytes:
            raise ConfigError(
                f"the model's buffers had {self.size_bytes} bytes at parallelize() and have"
                f" {size_bytes} now; their shapes and types must stay"
            )


def pack(tensors: Sequence[torch.Tensor]) -> bytes:
    """The tensors' bytes, one after the other."""
    return b"".join(bytes(bytes_of(tensor.detach().cpu().contiguous())) for tensor in tensors)


def unpack_into(tensors: Sequence[torch.Tensor], data: memoryview) -> None:
    """The inverse of `pack`, in place."""
    offset = 0
    # a graph that waits for its backward pass may have kept a running average, though it does not
    # read that: an evaluation between the two passes is no error
    autograd: Any = torch.autograd
    with torch.no_grad(), autograd._unsafe_preserve_version_counter(tuple(tensors)):
        for tensor in tensors:
            received = torch.empty(tensor.shape, dtype=tensor.dtype)
            size = received.numel() * received.element_size()
            bytes_of(received)[:] = data[offset : offset + size]
            tensor.copy_(received)
            offset += size


def packed_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# Other libraries' wrappers around the model or the optimizer would average what a session has, too:
# `params.wrappers` takes them off.
_WRAPPING = ("torch.nn.parallel", "torch.distributed", *EXCHANGING)


def bare_model(model: torch.nn.Module, *, alone: bool = True) -> torch.nn.Module:
    """What is to be trained in ``model``; raises `ConfigError` for what cannot be.

    ``alone``: this process trains by itself, so nothing need be synchronised.
    """

    def may_wrap(module: torch.nn.Module) -> bool:
        kinds = [*type(module).__mro__, *(type(p.data) for p in module.parameters(recurse=False))]
        wraps = any(kind.__module__.startswith(_WRAPPING) for kind in kinds)
        return wraps or isinstance(module, torch.nn.SyncBatchNorm)

    if not any(may_wrap(module) for module in model.modules()):
        return model
    from foreprop.params.wrappers import unwrap_model

    return unwrap_model(model, alone=alone)


def bare_optimizer(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """The optimizer in accelerate's or Lightning's; `ConfigError` if it communicates itself."""
    if not type(optimizer).__module__.startswith((*SHOWING, *EXCHANGING)):
        return optimizer
    from foreprop.params.wrappers import unwrap_optimizer

    return unwrap_optimizer(optimizer)


def watch_wrappers() -> list[Callable[[], None]]:
    """Have wrappers around synchronised models pass on only; the returned functions end that."""
    return [interception.hold() for interception in _INTERCEPTIONS]


def _led_past(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(self: DistributedDataParallel, *arguments: Any, **options: Any) -> Any:
            from foreprop.params.wrappers import INSTEAD

            return INSTEAD[name](original, self, *arguments, **options)

        return method

    return wrap


_INTERCEPTIONS = [
    Interception(DistributedDataParallel, name, _led_past(name))
    for name in ("__init__", "forward", "join", "register_comm_hook")
]

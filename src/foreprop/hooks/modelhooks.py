"""Our hooks on the user's model and optimizer, which no copy of them has.

Whoever copies, pickles or converts one is led past them: `hooks.copies`, loaded when that happens.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from foreprop.hooks.interception import Interception, entered
from foreprop.path.waiting import used


class OwnHook:
    """A hook of ours. Where somebody copies it himself, his copy is one that does nothing."""

    def before_copy(self) -> None:
        """The module that has the hook is about to be pickled or copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (nullcontext(), "__exit__")  # which any Python can load


class CallingHook(OwnHook):
    """Calls a function with whatever it is called with."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


class BeforeModule(OwnHook):
    """``wait="modules"``: waits for the parameters that the module owns itself."""

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():  # then this has been done at the entry
            used([p for p in module._parameters.values() if p is not None], lambda: None)


def before_loading(module: Any, hook: OwnHook) -> RemovableHandle:
    """Like ``module.register_load_state_dict_pre_hook``, also on script modules."""
    register: Any = torch.nn.Module._register_load_state_dict_pre_hook
    handle: RemovableHandle = register(module, hook, with_module=True)
    return handle


def before_forward(module: Any, hook: OwnHook) -> RemovableHandle:
    """Like ``module.register_forward_pre_hook``, also on script modules."""
    register: Any = torch.nn.Module.register_forward_pre_hook
    handle: RemovableHandle = register(module, hook)
    return handle


# Copies and conversions.
def _reducing(reduce_ex: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reduce_ex)
    def wrapper(self: torch.nn.Module, protocol: Any) -> Any:
        from foreprop.hooks.copies import reduce_module

        return reduce_module(reduce_ex, self, protocol)

    return wrapper


def _converting(convert: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(convert)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        from foreprop.hooks.copies import convert_modules

        entered()
        return convert_modules(convert, args, kwargs)

    return wrapper


_COPIES = Interception(torch.nn.Module, "__reduce_ex__", _reducing)
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
    """From now on; the returned functions end it."""
    releases = [_COPIES.hold()]
    for module, name in _CONVERTERS:
        owner = sys.modules.get(module)
        if owner is not None and hasattr(owner, name):
            key = (module, name)
            known = _CONVERSIONS.setdefault(key, Interception(owner, name, _converting))
            releases.append(known.hold())
    return releases


OWN_ATTRIBUTES = ("step", "zero_grad")
"""What a session puts into the optimizer's own attributes."""


def keep_copy_plain(
    optimizer: torch.optim.Optimizer,
    before: dict[str, Any],
    pull_state: Callable[[], None],
    drop_state: Callable[[], None],
) -> Callable[[], None]:
    """Of the optimizer, from now on; the returned function ends it.

    ``before``: of the attributes that are the session's meanwhile, those that the user had. The
    state is where ``pull_state`` puts it, until ``drop_state``.
    """

    def reduce_ex(self: torch.optim.Optimizer, protocol: Any) -> Any:
        from foreprop.hooks.copies import reduce_optimizer

        pull_state()
        try:
            return reduce_optimizer(self, protocol, before, (*OWN_ATTRIBUTES, "__reduce_ex__"))
        finally:
            drop_state()

    attributes = vars(optimizer)
    attributes["__reduce_ex__"] = types.MethodType(reduce_ex, optimizer)
    return lambda: attributes.pop("__reduce_ex__", None)

"""Our hooks on the user's model and optimizer, which no copy of them has.

`copy.deepcopy`, `pickle`, `torch.save`, `torch.jit.script`, `torch.jit.trace` and
`torch.export.export` of a model in a session give what they give in plain PyTorch. A module's
`__reduce_ex__` leaves our hooks out, and conversions, which would compile them, do not see them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from foreprop.hooks.compiled import entered
from foreprop.hooks.interception import Interception
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


def _own(hook: Any) -> OwnHook | None:
    hook = getattr(hook, "hook", hook)  # torch wraps some
    return hook if isinstance(hook, OwnHook) else None


def _has_own(value: Any) -> bool:
    return isinstance(value, dict) and any(_own(hook) for hook in value.values())


def without_own(value: Any) -> Any:
    """A module's or an optimizer's state as `__reduce_ex__` gives it, without our hooks."""
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(without_own(part) for part in value)
    if not isinstance(value, dict):
        return value
    if _has_own(value):
        return type(value)((key, hook) for key, hook in value.items() if not _own(hook))
    if any(_has_own(part) for part in value.values()):
        return {key: without_own(part) if _has_own(part) else part for key, part in value.items()}
    return value


def _reducing(reduce_ex: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reduce_ex)
    def wrapper(self: torch.nn.Module, protocol: Any) -> Any:
        for hooks in list(vars(self).values()):
            for hook in list(hooks.values()) if _has_own(hooks) else ():
                if (own := _own(hook)) is not None:
                    own.before_copy()
        return without_own(reduce_ex(self, protocol))

    return wrapper


@contextlib.contextmanager
def _hidden(modules: Iterator[torch.nn.Module]) -> Iterator[None]:
    """Modules without our hooks, until it ends."""
    kept: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    for module in modules:
        for hooks in vars(module).values():
            if _has_own(hooks):
                kept.append((hooks, dict(hooks)))
                _replace(hooks, without_own(hooks))
    try:
        yield
    finally:
        for hooks, before in kept:
            now = dict(hooks)
            gone = {key for key, hook in before.items() if key not in now and not _own(hook)}
            _replace(hooks, {k: v for k, v in before.items() if k not in gone} | now)


def _replace(hooks: dict[Any, Any], others: Mapping[Any, Any]) -> None:
    """In place: torch's handles know the dictionary."""
    hooks.clear()
    hooks.update(others)


def _converting(convert: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(convert)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        entered()
        found = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.nn.Module)]
        with _hidden(part for module in found for part in module.modules()):
            return convert(*args, **kwargs)

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

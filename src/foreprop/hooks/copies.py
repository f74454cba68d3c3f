"""Copies and conversions of a user's model or optimizer, made as if no session had them.

`copy.deepcopy`, `pickle`, `torch.save`, `torch.jit.script`, `torch.jit.trace` and
`torch.export.export` of a model in a session give what they give in plain PyTorch. A module's
`__reduce_ex__` leaves our hooks out, and conversions, which would compile them, do not see them. A
copy of the optimizer is an ordinary one, with its state. `hooks.modelhooks` loads this when the
first is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from foreprop.hooks.modelhooks import OwnHook


def _own(hook: Any) -> OwnHook | None:
    hook = getattr(hook, "hook", hook)  # torch wraps some
    return hook if isinstance(hook, OwnHook) else None


def _has_own(value: Any) -> bool:
    return isinstance(value, dict) and any(_own(hook) for hook in value.values())


def _without_own(value: Any) -> Any:
    """A module's or an optimizer's state as `__reduce_ex__` gives it, without our hooks."""
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_without_own(part) for part in value)
    if not isinstance(value, dict):
        return value
    if _has_own(value):
        return type(value)((key, hook) for key, hook in value.items() if not _own(hook))
    if any(_has_own(part) for part in value.values()):
        return {key: _without_own(part) if _has_own(part) else part for key, part in value.items()}
    return value


def reduce_module(reduce_ex: Callable[..., Any], module: torch.nn.Module, protocol: Any) -> Any:
    """What ``reduce_ex`` gives, without our hooks."""
    for hooks in list(vars(module).values()):
        for hook in list(hooks.values()) if _has_own(hooks) else ():
            if (own := _own(hook)) is not None:
                own.before_copy()
    return _without_own(reduce_ex(module, protocol))


def convert_modules(
    convert: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call it while the modules among its arguments are without our hooks."""
    found = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.nn.Module)]
    with _hidden(part for module in found for part in module.modules()):
        return convert(*args, **kwargs)


@contextlib.contextmanager
def _hidden(modules: Iterator[torch.nn.Module]) -> Iterator[None]:
    """Modules without our hooks, until it ends."""
    kept: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    for module in modules:
        for hooks in vars(module).values():
            if _has_own(hooks):
                kept.append((hooks, dict(hooks)))
                _replace(hooks, _without_own(hooks))
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


def reduce_optimizer(
    optimizer: torch.optim.Optimizer,
    protocol: Any,
    before: Mapping[str, Any],
    replaced: Sequence[str],
) -> Any:
    """While its state is there: without the attributes that are ``replaced``.

    ``before``: those of them that the user had.
    """
    attributes = vars(optimizer)
    ours = {name: attributes.pop(name) for name in replaced if name in attributes}
    attributes.update(before)
    try:
        return _detached(optimizer.__reduce_ex__(protocol), optimizer.state)
    finally:
        attributes.update(ours)


def _detached(reduced: Any, state: Any) -> Any:
    """With a state of its own, for the optimizer's is emptied when it has been looked at."""
    if reduced is state:
        return state.copy()
    if type(reduced) is tuple:
        return tuple(_detached(part, state) for part in reduced)
    if type(reduced) is dict:
        plain = _without_own(reduced)
        return {key: _detached(v, state) if v is state else v for key, v in plain.items()}
    return reduced

"""Copies and conversions of a user's model or optimizer, made as if no session had them.

`copy.deepcopy`, `pickle`, `torch.save`, `torch.jit.script`, `torch.jit.trace` and
`torch.export.export` of a model in a session give what they give in plain PyTorch. A module's
`__reduce_ex__` leaves the session's hooks out. Conversions would compile them, so they are taken
off meanwhile, in place: torch's handles know the dictionaries that they are in. A copy of the
optimizer is an ordinary one, with a state of its own. `params.modelhooks` loads this module when
the first copy is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from foreprop.params.interception import OwnHook


def _own(hook: Any) -> OwnHook | None:
    hook = getattr(hook, "hook", hook)  # torch wraps some
    return hook if isinstance(hook, OwnHook) else None


def _has_own(value: Any) -> bool:
    return isinstance(value, dict) and any(_own(hook) for hook in value.values())


def _without_own(value: Any) -> Any:
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
    for hooks in list(vars(module).values()):
        for hook in list(hooks.values()) if _has_own(hooks) else ():
            if (own := _own(hook)) is not None:
                own.before_copy()
    return _without_own(reduce_ex(module, protocol))


def convert_modules(
    convert: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call ``convert`` while the modules among its arguments are without the session's hooks."""
    given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.nn.Module)]
    kept: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    for module in (part for whole in given for part in whole.modules()):
        for hooks in vars(module).values():
            if _has_own(hooks):
                kept.append((hooks, dict(hooks)))
                _replace(hooks, _without_own(hooks))
    try:
        return convert(*args, **kwargs)
    finally:
        for hooks, before in kept:
            now = dict(hooks)
            gone = {key for key, hook in before.items() if key not in now and not _own(hook)}
            _replace(hooks, {k: v for k, v in before.items() if k not in gone} | now)


def _replace(hooks: dict[Any, Any], others: Mapping[Any, Any]) -> None:
    hooks.clear()
    hooks.update(others)


def reduce_optimizer(
    optimizer: torch.optim.Optimizer,
    protocol: Any,
    before: Mapping[str, Any],
    replaced: Sequence[str],
) -> Any:
    """What the optimizer's ``__reduce_ex__`` gives, without the session's attributes.

    These are ``replaced``; ``before`` has those of them that the user had. The state is there.
    """
    attributes = vars(optimizer)
    ours = {name: attributes.pop(name) for name in replaced if name in attributes}
    attributes.update(before)
    try:
        return _detached(optimizer.__reduce_ex__(protocol), optimizer.state)
    finally:
        attributes.update(ours)


def _detached(reduced: Any, state: Any) -> Any:
    # a state of its own, for the optimizer's is emptied when it has been looked at
    if reduced is state:
        return state.copy()
    if type(reduced) is tuple:
        return tuple(_detached(part, state) for part in reduced)
    if type(reduced) is dict:
        plain = _without_own(reduced)
        return {key: _detached(v, state) if v is state else v for key, v in plain.items()}
    return reduced

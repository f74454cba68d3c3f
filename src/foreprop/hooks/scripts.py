"""TorchScript (`torch.jit`): what enters it is watched; `hooks.scripted` is loaded when it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from foreprop.hooks.interception import Interception

_ENTRIES = {
    torch._C.ScriptFunction: ("__call__", "save", "save_to_buffer"),
    torch._C.ScriptMethod: ("__call__",),
    torch._C.ScriptModule: (
        "save",
        "save_to_buffer",
        "_save_for_mobile",
        "_save_to_buffer_for_mobile",
        "__copy__",
        "__deepcopy__",
    ),
    torch._C: ("_freeze_module", "_save_jit_module", "_save_jit_module_to_bytes"),
}


def _entering(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        from foreprop.hooks.scripted import run_settled

        return run_settled(run, args, kwargs)

    return wrapper


_INTERCEPTIONS = [
    Interception(owner, name, _entering)
    for owner, names in _ENTRIES.items()
    for name in names
    if hasattr(owner, name)
]


def watch_scripts() -> list[Callable[[], None]]:
    """Have scripted code wait, in every thread; the returned functions end it."""
    return [interception.hold() for interception in _INTERCEPTIONS]

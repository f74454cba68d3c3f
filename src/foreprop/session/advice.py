"""What to do instead, added to autograd's error about values that a reply has replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from foreprop.hooks.interception import Interception

_SYMPTOM = "modified by an inplace operation"
_ADVICE = (
    "foreprop: if the modified tensor is a parameter, this backward pass needs a value that the"
    " parameter's update replaces. Run a forward pass of its own for each backward pass after"
    " optimizer.step() (no retain_graph=True across steps). If one step has more backward passes"
    " than the first had, set parallelize(..., update='workers'), or backward_passes=N to the"
    " largest number. Give a use that takes no gradient a copy of its own:"
    " parameter.detach().clone() instead of parameter.detach()."
)


def _with_advice(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except RuntimeError as error:
            if _SYMPTOM in str(error) and _ADVICE not in getattr(error, "__notes__", ()):
                error.add_note(_ADVICE)
            raise

    return wrapper


_INTERCEPTIONS = [Interception(torch.autograd, name, _with_advice) for name in ("backward", "grad")]


def give_advice() -> list[Callable[[], None]]:
    """From now on; the returned functions end it."""
    return [interception.hold() for interception in _INTERCEPTIONS]

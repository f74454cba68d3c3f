"""How often a backward pass adds to a parameter's gradient, known before it does."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from foreprop.hooks.interception import Interception

_lock = threading.Lock()


class BackwardPass:
    """One run of autograd's."""

    def __init__(self, roots: Sequence[torch.Tensor]) -> None:
        self._roots = [root.grad_fn for root in roots]
        self._uses: Counter[int] | None = None
        self.at_end: list[Callable[[], None]] = []
        """Called when it has ended, or failed."""

    def uses(self) -> Counter[int]:
        """By the parameter's `id`: the edges that lead to where autograd accumulates it."""
        if self._uses is None:
            self._uses = _count(self._roots)
        return self._uses


def _count(roots: Sequence[Any]) -> Counter[int]:
    uses: Counter[int] = Counter()
    rest = [root for root in roots if root is not None]
    seen = set(rest)
    while rest:
        for node, _ in rest.pop().next_functions:
            variable = getattr(node, "variable", None)
            if variable is not None:
                uses[id(variable)] += 1
            elif node is not None and node not in seen:
                seen.add(node)
                rest.append(node)
    return uses


_under_way: dict[int, list[BackwardPass]] = {}
"""By thread: the innermost is the last."""


def maybe_this_pass() -> BackwardPass | None:
    """None if it is not known which pass this is."""
    with _lock:
        own = _under_way.get(threading.get_ident())
        passes = own[-1:] if own else [one for each in _under_way.values() for one in each]
    return passes[0] if len(passes) == 1 else None


def _running(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def wrapper(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        own = [output for output in outputs if isinstance(output, torch.Tensor)]
        thread, this = threading.get_ident(), BackwardPass(own)
        with _lock:
            _under_way.setdefault(thread, []).append(this)
        try:
            return run(outputs, *args, **kwargs)
        finally:
            for call in this.at_end:
                call()
            with _lock:
                _under_way[thread].pop()
                if not _under_way[thread]:
                    del _under_way[thread]

    return wrapper


BACKWARD = Interception(torch.autograd, "_engine_run_backward", _running)
"""What ``loss.backward()`` calls."""

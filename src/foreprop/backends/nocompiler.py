"""Keeps ``torch._dynamo`` out of processes that compile nothing.

``torch.optim`` imports it in each optimizer's first call, only to keep the compiler out of there
(``torch/_compile.py``, ``_use_grad_for_differentiable`` in ``torch/optim/optimizer.py``). That
takes as long as to import torch itself, and a third of its memory.
"""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"


class NoCompiler(ModuleType):
    """Answers what ``torch.optim`` asks. The first other question loads the real module."""

    def __init__(self) -> None:
        super().__init__(_NAME, self.__doc__)
        self._loading = threading.RLock()  # its own modules ask, too

    @staticmethod
    def disable(function: Any = None, *_: Any, **__: Any) -> Any:
        """The function, or a decorator that returns it: nothing would trace it."""
        return (lambda decorated: decorated) if function is None else function

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        """Outside compiled code torch's own does nothing either."""

    def __getattr__(self, name: str) -> Any:
        # who looks through all modules asks each for its file, say; submodules need the path
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        with self._loading:
            if sys.modules.get(_NAME) is self:
                del sys.modules[_NAME], torch._dynamo
            real = importlib.import_module(_NAME)
        return getattr(real, name)


def do_without_compiler() -> None:
    """Put `NoCompiler` there, unless one is loaded already. Call it before any optimizer."""
    if _NAME not in sys.modules:
        sys.modules[_NAME] = torch._dynamo = NoCompiler()

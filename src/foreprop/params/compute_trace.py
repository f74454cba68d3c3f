"""When each layer computes, for the trace: spans "forward" and "backward".

Every module that owns parameters has them. Its forward span is what its hooks enclose. Its backward
span ends when its gradient is there and begins where the one before it ended. The hooks cost a
little, so they are there only while a trace is recorded. Compiled code has no layers: of its
forward pass there are no spans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foreprop.engine.trace import TraceRecorder
from foreprop.params.modelhooks import CallingHook, before_forward


class ComputeTrace:
    def __init__(
        self, model: torch.nn.Module, trace: TraceRecorder, current_step: Callable[[], int]
    ) -> None:
        self._trace = trace
        self._current_step = current_step
        self._mark_ns = trace.now_ns()
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                self._watch(name, module)

    def _watch(self, name: str, module: torch.nn.Module) -> None:
        started_ns = 0

        def before(*_: Any) -> None:
            nonlocal started_ns
            if torch.compiler.is_compiling():
                return
            started_ns = self._trace.now_ns()

        def after(*_: Any) -> None:
            if torch.compiler.is_compiling():
                return
            self._mark_ns = self._trace.now_ns()
            if torch.is_grad_enabled():
                self._trace.span(
                    "forward", name, started_ns, stop_ns=self._mark_ns, step=self._current_step()
                )

        self._handles.append(before_forward(module, CallingHook(before)))
        self._handles.append(torch.nn.Module.register_forward_hook(module, CallingHook(after)))

    def gradient_ready(self, parameter_name: str) -> None:
        now_ns = self._trace.now_ns()
        layer = parameter_name.rpartition(".")[0]
        self._trace.span(
            "backward", layer, self._mark_ns, stop_ns=now_ns, step=self._current_step()
        )
        self._mark_ns = now_ns

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

"""Whom a waiting gradient asks where the workers update: who reads it finds the average."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from foreprop.gradients.scalable import Scalable
from foreprop.path.waiting import waits_for


class ReadGradient(Scalable, Protocol):
    """The parameter whose gradient is read."""

    @property
    def shown(self) -> torch.Tensor | None:
        """What is, or was last, ``p.grad``."""

    @property
    def may_answer(self) -> bool:
        """Whether operations may be answered that come before `step()`."""

    def ask(self, *, norm: bool) -> None:
        """An operation is about to be answered: have all averages made that it needs."""

    def averaged(self) -> None:
        """Make ``p.grad`` the average over the ranks."""

    def edited(self) -> None:
        """From now on ``p.grad`` is the user's, an ordinary tensor, alike on every rank."""


class AverageReader:
    """Asked before each operation with the gradient."""

    def __init__(self, parameter: ReadGradient) -> None:
        self.parameter = parameter

    def answer(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Without waiting for the average, where that can be."""
        if not self.parameter.may_answer:
            return NotImplemented
        from foreprop.gradients import gradientmath  # for whom gradients are read at all

        norm = gradientmath.needs_squares(func)
        if not (norm or gradientmath.is_scaling(func)):
            return NotImplemented
        self.parameter.ask(norm=norm)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return gradientmath.answer(func, args, kwargs, _find)

    def before_use(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        in_place: bool,
    ) -> bool:
        self.parameter.averaged()
        if in_place:
            self.parameter.edited()
        return not in_place

    def after_use(self, result: Any) -> None:
        """Who has another tensor of the same memory may edit it, and leave no trace."""
        if not _is_apart(result, self.parameter.shown):
            self.parameter.edited()

    def meets_compiler(self) -> None:
        """Compiled code may read it, a compiled optimizer's step for one."""
        self.parameter.averaged()
        self.parameter.edited()


def _find(value: Any) -> Scalable | None:
    reader = waits_for(value)
    return reader.parameter if isinstance(reader, AverageReader) else None


def _is_apart(result: Any, gradient: torch.Tensor | None) -> bool:
    """Whether a result of an operation on the gradient has no part in its memory."""
    if isinstance(result, (list, tuple)):
        return all(_is_apart(item, gradient) for item in result)
    if isinstance(result, torch.Tensor) and gradient is not None:
        with torch._C.DisableTorchFunctionSubclass():
            if result.layout != torch.strided or gradient.layout != torch.strided:
                return False
            memories = [tensor.untyped_storage().data_ptr() for tensor in (result, gradient)]
            return memories[0] != memories[1]
    return result is None or isinstance(result, (bool, float, str))

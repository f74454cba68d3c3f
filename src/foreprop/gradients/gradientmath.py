"""Operations on waiting gradients that need not wait for them: norms, and scaling by a number.

``clip_grad_norm_``, ``get_total_norm`` and ``GradScaler.unscale_`` are made of these, however they
are imported. Servers tell the sums of squares as soon as all ranks' gradients are added up, long
before the last average has come back; a factor is applied to each gradient when it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from foreprop.gradients.averaged import AveragedParameter
from foreprop.gradients.averaging import AverageReader
from foreprop.gradients.roundpart import Scaling
from foreprop.path.waiting import waits_for

_Tensor = torch.Tensor
_TORCH: Any = torch
_UNSCALE = _TORCH._amp_foreach_non_finite_check_and_unscale_
_FOREACH_NORM = _TORCH._foreach_norm
_NORMS_OF_ONE = frozenset({torch.linalg.vector_norm, torch.norm, _Tensor.norm})
_SCALINGS: Mapping[Callable[..., Any], Callable[[Any, Any], Any]] = {
    _Tensor.mul_: _Tensor.mul_,
    _Tensor.div_: _Tensor.div_,
    _Tensor.__imul__: _Tensor.mul_,
    _Tensor.__itruediv__: _Tensor.div_,
    _TORCH._foreach_mul_: _Tensor.mul_,
    _TORCH._foreach_div_: _Tensor.div_,
}
_OF_LISTS = frozenset({_TORCH._foreach_mul_, _TORCH._foreach_div_})
_TWO = (2, 2.0, "fro", None)


def needs_squares(func: Callable[..., Any]) -> bool:
    """Whether the operation can be answered from sums of squares."""
    return func in _NORMS_OF_ONE or func in (_FOREACH_NORM, _UNSCALE)


def is_scaling(func: Callable[..., Any]) -> bool:
    return func in _SCALINGS


def answer(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operation's result without the gradients, or ``NotImplemented``."""
    if func in _SCALINGS:
        return _scale(func, args, kwargs)
    if func is _UNSCALE:
        gradients, found_inf, inv_scale = args
        return _unscale(gradients, found_inf, inv_scale)
    if func is _FOREACH_NORM:
        return _norms(*args, **kwargs)
    if func in _NORMS_OF_ONE:
        return _norm(*args, **kwargs)
    return NotImplemented


# Scaling.
def _scale(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if kwargs or len(args) != 2 or not _is_number(args[1]):
        return NotImplemented
    targets = args[0] if func in _OF_LISTS else [args[0]]
    found = _all_found(targets)
    if found is None:
        return NotImplemented
    _scale_all(found, (_SCALINGS[func], args[1]))
    return args[0]


def _find(value: Any) -> AveragedParameter | None:
    """The parameter whose waiting gradient it is."""
    reader = waits_for(value)
    return reader.parameter if isinstance(reader, AverageReader) else None


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.dim() == 0 and not value.requires_grad
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _all_found(targets: Iterable[Any]) -> list[AveragedParameter] | None:
    found = [_find(target) for target in targets]
    return None if any(one is None for one in found) else [one for one in found if one is not None]


def _scale_all(found: Iterable[AveragedParameter], scaling: Scaling) -> None:
    method, factor = scaling
    if isinstance(factor, torch.Tensor):
        factor = factor.detach().clone()  # who made it may change it
    for one in found:
        one.scale((method, factor))


def _unscale(
    gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> Any:
    """What `torch.amp.GradScaler` does: look for what is not finite, and take the scale out."""
    found = _all_found(gradients)
    if not found:
        return NotImplemented
    found[0].note_scale(inv_scale)
    sums = [one.squares() for one in found]
    if any(one is None for one in sums):
        return NotImplemented
    if any(one is not None and one.beyond for one in sums):
        found_inf.fill_(1.0)
    _scale_all(found, (_Tensor.mul_, inv_scale))
    return None


# Norms.
def _norms(
    gradients: Sequence[torch.Tensor],
    ord: Any = 2,
    dtype: torch.dtype | None = None,
) -> Any:
    if ord not in _TWO or dtype is not None:
        return NotImplemented
    known = [(gradient, _find(gradient)) for gradient in gradients]
    norms = [_norm_of(gradient, one) for gradient, one in known]
    return NotImplemented if any(norm is None for norm in norms) else norms


def _norm(
    gradient: torch.Tensor,
    p: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    out: Any = None,
    dtype: torch.dtype | None = None,
    *,
    ord: Any = 2,
) -> Any:
    if p not in _TWO or ord not in _TWO or keepdim or (dim, out, dtype) != (None, None, None):
        return NotImplemented
    norm = _norm_of(gradient, _find(gradient))
    return NotImplemented if norm is None else norm


def _norm_of(gradient: torch.Tensor, scalable: AveragedParameter | None) -> torch.Tensor | None:
    if scalable is None:  # edited already, so its elements are here
        local: torch.Tensor = torch.linalg.vector_norm(gradient)
        return local
    squares = scalable.squares()
    if squares is None:
        return None
    norm = torch.tensor(squares.norm, dtype=gradient.dtype, device=gradient.device)
    for method, factor in scalable.scalings:
        method(norm, factor)
        norm.abs_()
    return norm

"""Operations on waiting gradients that need not wait for them: norms, and scaling by a number.

``clip_grad_norm_``, ``get_total_norm`` and ``GradScaler.unscale_`` are made of these, however they
are imported. Servers tell the sums of squares as soon as all ranks' gradients are added up, long
before the last average has come back; a factor is applied to each gradient when it has.

What cannot be answered so is ``NotImplemented``; then the operation waits for the averages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from foreprop.core.norm import SquareSum
from foreprop.engine.sums import square_sum
from foreprop.params.parameter import ParameterGradient
from foreprop.params.waiting import waits_for

if TYPE_CHECKING:  # which asks here
    from foreprop.params.averaged import AveragedGradient, Scaling

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


def answer(
    first: AveragedGradient,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """The operation's result, or ``NotImplemented``; ``first`` is the first of its gradients."""
    norm = func in _NORMS_OF_ONE or func in (_FOREACH_NORM, _UNSCALE)
    if not (norm or func in _SCALINGS) or not first.ask(norm=norm):
        return NotImplemented
    # whoever clips has it so, and this is called for each gradient twice
    quiet = torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext()
    with torch._C.DisableTorchFunctionSubclass(), quiet:
        if func in _SCALINGS:
            return _scale(func, args, kwargs)
        if func is _UNSCALE:
            return _unscale(*args)
        if func is _FOREACH_NORM:
            return _norms(*args, **kwargs)
        return _norm(*args, **kwargs)


def _scale(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if kwargs or len(args) != 2:
        return NotImplemented
    factor = args[1]
    if isinstance(factor, torch.Tensor):
        if factor.dim() or factor.requires_grad:
            return NotImplemented
    elif not isinstance(factor, (int, float)) or isinstance(factor, bool):
        return NotImplemented
    targets = args[0] if func in _OF_LISTS else [args[0]]
    found = _all_found(targets)
    if found is None:
        return NotImplemented
    _scale_all(found, (_SCALINGS[func], factor))
    return args[0]


def _find(value: Any) -> AveragedGradient | None:
    """The waiting gradient that a value is."""
    reader = waits_for(value)
    is_averaged = isinstance(reader, ParameterGradient) and reader.is_averaged
    return cast("AveragedGradient", reader) if is_averaged else None


def _all_found(targets: Iterable[Any]) -> list[AveragedGradient] | None:
    found = [_find(target) for target in targets]
    return None if any(one is None for one in found) else [one for one in found if one is not None]


def _scale_all(found: Iterable[AveragedGradient], scaling: Scaling) -> None:
    method, factor = scaling
    if isinstance(factor, torch.Tensor):
        factor = factor.detach().clone()  # who made it may change it
    for one in found:
        # an earlier average, which has no part in the round that is under way, is here
        if not (one.ask(norm=False) and one.arrival.contributed):
            one.ensure_averaged()
        arrival, gradient = one.arrival, one.seen.tensor()
        arrival.scalings.append((method, factor))
        if not arrival.under_way and gradient is not None:
            arrival.apply_scalings(gradient)
            one.seen.version = gradient._version


def _unscale(
    gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> Any:
    # what `torch.amp.GradScaler` does: look for what is not finite, and take the scale out
    found = _all_found(gradients)
    if not found:
        return NotImplemented
    found[0].averaging.unscaled_by = inv_scale.detach().clone()  # to be the same on all ranks
    sums = [_squares(one) for one in found]
    if any(one is None for one in sums):
        return NotImplemented
    if any(one is not None and one.beyond for one in sums):
        found_inf.fill_(1.0)
    _scale_all(found, (_Tensor.mul_, inv_scale))
    return None


def _norms(
    gradients: Sequence[torch.Tensor],
    ord: Any = 2,
    dtype: torch.dtype | None = None,
) -> Any:
    if ord not in _TWO or dtype is not None:
        return NotImplemented
    norms = [_norm_of(gradient, _find(gradient)) for gradient in gradients]
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


def _squares(one: AveragedGradient) -> SquareSum | None:
    """The sum of the average's squares; blocks until servers tell it, or the average is here.

    None if it cannot be told: the average has been multiplied already, say.
    """
    if not one.ask(norm=True):  # of a list the first one alone has been asked
        return None
    arrival, averaging = one.arrival, one.averaging
    if averaging.measures and one.left and arrival.contributed:
        number = averaging.measured_number(arrival.serial)
        return arrival.owner.session.square_sums(number)[arrival.owner.index]
    one.make_averaged()
    gradient = one.seen.tensor()
    if gradient is None or arrival.scalings or gradient.layout != torch.strided:
        return None
    # what a device shows is a copy of what has landed on the host
    return square_sum(gradient.detach() if gradient.is_cpu else arrival.landing.buffer)


def _norm_of(gradient: torch.Tensor, scalable: AveragedGradient | None) -> torch.Tensor | None:
    if scalable is None:  # edited already, so its elements are here
        local: torch.Tensor = torch.linalg.vector_norm(gradient)
        return local
    squares = _squares(scalable)
    if squares is None:
        return None
    norm = torch.scalar_tensor(squares.norm, dtype=gradient.dtype, device=gradient.device)
    for method, factor in scalable.arrival.scalings:
        method(norm, factor)
        norm.abs_()
    return norm

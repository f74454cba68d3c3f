"""A parameter that waits for itself.

While a parameter is pending, its Python class is a subclass of its own whose
``__torch_function__`` first waits for the reply, gives the old class back, and then runs the
operation. So the wait sits exactly at the first use, whatever uses it: a layer, ``F.linear``,
``MultiheadAttention``'s direct use of ``out_proj.weight``, ``state_dict``, ``deepcopy``, a print.
A gradient waits likewise, and may go on waiting after it has been read.

What only asks about the tensor (its shape, its device) does not wait. Some uses begin at the
object's class, and torch does not tell of them: `wait_and_use` and `wait_and_use_plain` are for
these. Whoever makes a tensor wait is its `Pending`, and is asked before each use.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, Protocol

import torch

from foreprop.errors import TrainingLoopError


class Pending(Protocol):
    """Whoever made a tensor wait, as its class asks it."""

    def answer(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """The operation's result without waiting, or ``NotImplemented``."""

    def before_use(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        in_place: bool,
    ) -> bool:
        """Wait, and give the class back; True if `after_use` is to be called."""

    def after_use(self, result: Any) -> None:
        """Learn what an operation with it has returned; None if it has failed."""

    def meets_compiler(self) -> None:
        """Raise if it must not be compiled: Dynamo looks at it, or is about to use it."""


def no_answer(*_: Any) -> Any:
    """Have every operation wait: the `Pending.answer` of most."""
    return NotImplemented


def refuse_to_be_compiled() -> None:
    """Raise: compiled code waits for its parameters at its entry, and none is pending inside."""
    raise TrainingLoopError(
        "torch.compile meets a parameter whose update is pending. Enter compiled code in the thread"
        " that called parallelize(), where this is waited for, or call session.flush() before."
    )


_pending: dict[int, Pending] = {}
_classes: dict[type, type] = {}

_Tensor = torch.Tensor
_ATTRIBUTES = (
    "shape dtype device requires_grad grad is_leaf grad_fn layout ndim is_cuda is_sparse is_meta"
    " is_quantized is_mkldnn is_nested is_cpu _version names itemsize nbytes output_nr"
    " retains_grad _backward_hooks _post_accumulate_grad_hooks"
).split()
_METHODS = (
    "size dim numel nelement stride is_contiguous element_size is_floating_point is_complex"
    " __hash__ __len__ register_hook register_post_accumulate_grad_hook requires_grad_"
    " storage_offset is_inference get_device is_shared ndimension dim_order"
).split()


def _asking_no_value() -> Iterator[Any]:
    for name in _ATTRIBUTES:
        attribute = getattr(_Tensor, name, None)
        for way in ("__get__", "__set__", "__delete__"):
            if hasattr(attribute, way) and not (name == "_version" and way != "__get__"):
                yield getattr(attribute, way)
    for name in _METHODS:
        if hasattr(_Tensor, name):
            yield getattr(_Tensor, name)


NEEDS_NO_VALUE = frozenset(_asking_no_value())
"""What only asks about the tensor, not for its elements."""

_SET_DATA = _Tensor.data.__set__  # type: ignore[attr-defined]
_IN_PLACE_DUNDERS = frozenset(
    f"__i{name}__"
    for name in "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift".split()
) | {"__setitem__"}


_NONE: frozenset[int] = frozenset()


def make_wait(parameter: torch.Tensor, pending: Pending) -> None:
    """Have a parameter or a gradient ask ``pending`` before each use."""
    cls = type(parameter)
    waiting = _classes.get(cls)
    if waiting is None:
        waiting = _classes[cls] = type(f"Waiting{cls.__name__}", (_Waiting, cls), {})
        _classes[waiting] = waiting
    _pending[id(parameter)] = pending
    parameter.__class__ = waiting


def stop_waiting(parameter: torch.Tensor) -> None:
    """Give the tensor its own class back."""
    if id(parameter) in _pending:
        cls = type(parameter)
        if issubclass(cls, _Waiting):
            parameter.__class__ = cls.__mro__[2]  # after the waiting class and its mixin
        _pending.pop(id(parameter), None)  # last: until then another thread finds it and waits too


def forget(identity: int, pending: Pending) -> None:
    """Forget the tensor of this ``id``, which may be gone while it waited."""
    if _pending.get(identity) is pending:
        del _pending[identity]


def waits_for(tensor: Any) -> Pending | None:
    """Whoever is asked before each use of it, if it waits."""
    return _pending.get(id(tensor)) if isinstance(tensor, _Waiting) else None


def is_waiting(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, _Waiting) and id(tensor) in _pending


def waiting_parameters() -> list[torch.Tensor]:
    """All parameters of this process that wait."""
    owned = [getattr(pending, "parameter", None) for pending in list(_pending.values())]
    return [tensor for tensor in owned if isinstance(tensor, _Waiting)]  # type: ignore[misc]


def is_differentiable(result: Any) -> bool:
    """Whether an operation's result takes part in a backward pass."""
    if isinstance(result, torch.Tensor):
        return result.requires_grad
    return isinstance(result, (tuple, list)) and any(is_differentiable(item) for item in result)


class _Waiting:
    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in NEEDS_NO_VALUE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        waited = waiting_in([*args, *kwargs.values()])  # empty: another thread has settled it
        if torch.compiler.is_compiling():
            for _, pending in waited.values():
                pending.meets_compiler()
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for _, pending in waited.values():
            if pending.answer is not no_answer:
                answer = pending.answer(func, args, kwargs)
                if answer is not NotImplemented:
                    return answer
            break
        return _used_by(waited, func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return wait_and_use_plain(self, lambda plain: copy.deepcopy(plain, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return wait_and_use_plain(
            self, lambda plain: object.__getattribute__(plain, "__reduce_ex__")(protocol)
        )

    def __repr__(self) -> str:
        text: str = wait_and_use_plain(self, repr)
        return text


def _used_by(
    waited: Mapping[int, tuple[torch.Tensor, Pending]],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    targets = _targets(func, args, kwargs)
    watching = []
    goes_on = False
    for identity, (tensor, pending) in waited.items():
        if pending.before_use(func, args, kwargs, in_place=identity in targets):
            watching.append(pending)
        goes_on |= isinstance(tensor, _Waiting)  # a gradient that is only read
    if not (watching or goes_on):
        return func(*args, **kwargs)
    result = None
    try:
        if goes_on:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
    finally:
        for pending in watching:
            pending.after_use(result)
    return result


def wait_and_use_plain(tensor: Any, use: Callable[[Any], Any]) -> Any:
    """Use the tensor, once it is here, with an ordinary one in its place if it goes on waiting."""

    def copied() -> Any:
        if not is_waiting(tensor):
            results.append(use(tensor))
            return None
        with torch._C.DisableTorchFunctionSubclass():  # a gradient, which goes on waiting
            plain = tensor.detach()
        results.append(use(plain))
        return results[0]

    results: list[Any] = []
    wait_and_use([tensor], copied)
    return results[0]


def wait_and_use(tensors: Iterable[torch.Tensor], use: Callable[[], Any]) -> Any:
    """Wait for the tensors among these that are waiting, and call what uses them."""
    watching = [
        pending
        for _, pending in waiting_in(list(tensors)).values()
        if pending.before_use(use, (), {}, in_place=False)
    ]
    result = None
    try:
        result = use()
    finally:
        for pending in watching:
            pending.after_use(result)
    return result


def waiting_in(value: Any) -> dict[int, tuple[torch.Tensor, Pending]]:
    """All waiting tensors among a call's arguments, however they are nested, by their ids."""
    found: dict[int, tuple[torch.Tensor, Pending]] = {}
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, torch.Tensor):
            pending = _pending.get(id(item))
            if pending is not None and isinstance(item, _Waiting):
                found[id(item)] = (item, pending)
        elif isinstance(item, (list, tuple)):
            rest.extend(reversed(item))
        elif not isinstance(item, (int, float)) and isinstance(item, Mapping):  # slow to find out
            rest.extend(reversed(list(item.values())))
    return found


def _targets(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Set[int]:
    """The ids of the tensors that the call would write to."""
    name = getattr(func, "__name__", "")
    in_place = (name[-1:] == "_" and name[-2:] != "__") or name in _IN_PLACE_DUNDERS
    in_place = in_place or func == _SET_DATA
    if not in_place and "out" not in kwargs:
        return _NONE
    written: list[Any] = []
    if in_place:
        first = args[0] if args else next(iter(kwargs.values()), None)  # nn.init names it
        written += first if isinstance(first, (list, tuple)) else [first]
    out = kwargs.get("out")
    if out is not None:
        written += out if isinstance(out, (list, tuple)) else [out]
    return {id(tensor) for tensor in written}

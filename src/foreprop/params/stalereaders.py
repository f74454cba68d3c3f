"""Finds who reads a parameter without telling: ``check_stale``, for debugging.

Whatever goes through Python's torch tells the waiting parameter (`params.waiting`), scripted code
is stopped at its entry (`params.scripted`). Two kinds of readers are left: C++ that was given the
parameter, and aliases of its memory (``p.detach()`` or ``p.numpy()`` taken earlier). Here the first
ATen operation that touches a pending parameter's memory raises, whoever calls it; and that memory
is not a number until the update is there, so that who reads it past ATen computes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from foreprop.errors import TrainingLoopError

_POISON: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float64: (torch.int64, 0x7FF8_DEAD_BEEF_DEAD),
    torch.float32: (torch.int32, 0x7FC0_DEAD),
    torch.bfloat16: (torch.int16, 0x7FDE),
    torch.float16: (torch.int16, 0x7EDE),
}
"""Integers of the same size whose bits are not a number, and not the usual one."""


class StaleReaders(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The pending parameters of one session, watched in the thread that enters it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pending: dict[int, tuple[str, torch.Tensor]] = {}
        self._kept: dict[int, torch.Tensor] = {}
        self._over = False

    def pending(self, name: str, parameter: torch.Tensor, *, poisoned: bool) -> None:
        """Let nobody read the parameter until it is `settled`.

        ``poisoned``: nobody needs its values either, so they become no numbers.
        """
        if id(parameter) in self._pending:
            return
        with torch._C.DisableTorchFunctionSubclass():
            found = _POISON.get(parameter.dtype)
            if poisoned and found is not None:
                self._kept[id(parameter)] = parameter.detach().clone()
                parameter.data.view(found[0]).fill_(found[1])
            self._pending[id(parameter)] = (name, parameter)

    def settled(self, parameter: torch.Tensor) -> None:
        """Let it be read again. Where no new values have come, the old ones are back."""
        if self._pending.pop(id(parameter), None) is None:
            return
        kept = self._kept.pop(id(parameter), None)
        if kept is not None:
            integer, poison = _POISON[parameter.dtype]
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                left = parameter.data.view(integer) == poison
                parameter.data[left] = kept[left]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._pending and not self._over and not getattr(func, "is_view", False):
            self._check(func, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():  # this call is not a use that tells
            return func(*args, **kwargs)

    def _check(self, func: Any, values: Any) -> None:
        read = [extent for tensor in _tensors_in(values) if (extent := _extent(tensor))]
        for name, parameter in list(self._pending.values()):
            own = _extent(parameter)
            if own and any(start < own[1] and own[0] < stop for start, stop in read):
                raise TrainingLoopError(
                    f"check_stale: {func} reads or writes the memory of {name} before its update"
                    " is there, through C++ that was given the parameter or an alias that was taken"
                    " earlier (p.detach(), p.data, a view). Take the alias anew after"
                    " optimizer.step(), call session.flush() before, or for C++ layers set"
                    " wait='modules'."
                )

    def watch(self) -> Callable[[], None]:
        """Watch this thread, and its backward passes; the returned function ends that."""

        def end() -> None:
            self._over = True
            for _, parameter in list(self._pending.values()):
                self.settled(parameter)
            if _get_current_dispatch_mode() is self:  # somebody's mode may be above it
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

        self.__enter__()  # type: ignore[no-untyped-call]
        return end


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors_in(part)


def _extent(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The addresses of the tensor's first element, and of what follows the last."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
            return None
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        elems = 1 + sum((size - 1) * stride for size, stride in steps)
        try:
            start = tensor.data_ptr()
        except RuntimeError:  # it has no memory: a fake
            return None
        return start, start + elems * tensor.element_size()

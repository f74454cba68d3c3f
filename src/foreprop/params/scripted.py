"""Parameters wait at the entry of TorchScript (`torch.jit`), and of `torch.func`.

TorchScript's interpreter is C++ and sees a parameter's memory, not its Python class. So whatever
enters it (a scripted or traced function or method), or saves or freezes a script module, first
waits for the parameters that the code can reach: those of its module, those among the arguments,
and those whose memory it has as a constant, as frozen modules do. The transforms of `torch.func`
wrap a tensor in C++, and what is wrapped is read past its class: it waits before.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from foreprop.params.waiting import wait_and_use, waiting_in, waiting_parameters

_Module: Any = torch._C.ScriptModule
_Method: Any = torch._C.ScriptMethod
_Function: Any = torch._C.ScriptFunction

_constants: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()
"""The addresses of the constants of scripted functions and methods."""


def run_settled(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``run`` once the parameters that its code can reach have been waited for."""
    reached = list(_reached(args, kwargs))
    if not reached:
        return run(*args, **kwargs)
    return wait_and_use(reached, lambda: run(*args, **kwargs))


def _reached(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for tensor, _ in waiting_in((args, kwargs)).values():
        yield tensor
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.jit.ScriptModule):
            value = value._c
        if isinstance(value, _Module):
            yield from _parameters(value)
            for name in value._method_names():
                yield from _in_constants(value._get_method(name))
        elif isinstance(value, _Method):
            owner = value.owner
            if isinstance(owner, _Module):
                yield from _parameters(owner)
                yield from _in_constants(value)
            else:  # an object of a scripted class may hold anything
                yield from waiting_parameters()
        elif isinstance(value, _Function):
            yield from _in_constants(value)


def _parameters(module: Any) -> Iterator[torch.Tensor]:
    for _, parameter in torch._C.ParameterDict(module).items():  # type: ignore[attr-defined]
        yield parameter
    for _, child in torch._C.ModuleDict(module).items():
        yield from _parameters(child)


def _in_constants(code: Any) -> Iterator[torch.Tensor]:
    addresses = _constants.get(code)
    if addresses is None:
        graph = code.inlined_graph
        addresses = _constants[code] = frozenset(_addresses(graph.findAllNodes("prim::Constant")))
    if addresses:
        yield from (p for p in waiting_parameters() if _address(p) in addresses)


def _addresses(nodes: Iterable[Any]) -> Iterator[int]:
    for node in nodes:
        with contextlib.suppress(RuntimeError):  # a constant that Python cannot have
            value = node.output().toIValue()
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                    yield _address(tensor)


def _address(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass(), contextlib.suppress(RuntimeError):
        return tensor.untyped_storage().data_ptr()
    return 0  # sparse, or on another layout: it has no memory of this kind

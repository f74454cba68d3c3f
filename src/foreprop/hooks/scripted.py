"""TorchScript (`torch.jit`), and `torch.func`: wait at the entry.

Its interpreter is C++ and sees a parameter's memory, not its Python class. So whatever enters it
(a scripted or traced function or method), or saves or freezes a script module, first waits for the
parameters that the code can reach: those of its module, those among the arguments, and those whose
memory it has as a constant, as frozen modules do. The transforms of `torch.func` wrap a tensor in
C++, and what is wrapped is read past its class: it waits before.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from foreprop.path.waiting import used, waiting_in, waiting_parameters

_Module: Any = torch._C.ScriptModule
_Method: Any = torch._C.ScriptMethod
_Function: Any = torch._C.ScriptFunction

_constants: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()
"""Of scripted functions and methods: where the memory of their constants begins."""


def run_settled(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an entry, once what its code can reach has been waited for."""
    reached = list(_reached(args, kwargs))
    if not reached:
        return run(*args, **kwargs)
    return used(reached, lambda: run(*args, **kwargs))


def _reached(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The waiting tensors among a call's arguments, and in scripted code among them."""
    for tensor, _ in waiting_in((args, kwargs)).values():
        yield tensor
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.jit.ScriptModule):
            value = value._c
        if isinstance(value, _Module):
            yield from _in_module(value)
        elif isinstance(value, _Method):
            yield from _in_method(value)
        elif isinstance(value, _Function):
            yield from _in_constants(value)


def _in_method(method: Any) -> Iterator[torch.Tensor]:
    owner = method.owner
    if isinstance(owner, _Module):
        yield from _parameters(owner)
        yield from _in_constants(method)
    else:  # an object of a scripted class may hold anything
        yield from waiting_parameters()


def _in_module(module: Any) -> Iterator[torch.Tensor]:
    yield from _parameters(module)
    for name in module._method_names():
        yield from _in_constants(module._get_method(name))


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

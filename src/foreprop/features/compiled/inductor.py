"""How inductor is to compile our graphs: layouts, kernels without Python's lock, their order.

Inductor computes convolutions channels-last. What has four dimensions, is read on the way to one,
and is saved for the backward graph, it copies into that layout where the graph begins
(`torch._inductor.graph.GraphLowering.run_node`). Every operation, ours among them, then gets the
copy. So the copies are put into the graph before inductor sees it, each behind the wait, where its
parameter is first used. Inductor would make the same ones, and makes none of its own for them.

torch's own operators run without the lock. Inductor's C++ kernels, fused from several of them, are
called from Python by bindings that keep it (`torch._inductor.codecache`). Meanwhile no other thread
can start a frame or take one in, so the link idles for as long as a kernel computes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from foreprop.features.compiled.operators import GRADIENT_DONE
from foreprop.params.interception import Interception

_ORDINARY = ("torch._dynamo", "torch._functorch")
"""Packages whose backends run operations as they stand in the graph."""


def saved_not_channels_last(gm: fx.GraphModule, parameters: Mapping[int, fx.Node]) -> set[int]:
    """The parameters of four dimensions that the graph saves, and that are not channels-last."""
    output, found = gm.graph.output_node(), set()
    for number, node in parameters.items():
        value = node.meta.get("val")
        if output in node.users and isinstance(value, torch.Tensor) and value.dim() == 4:
            is_dense = torch._prims_common.is_non_overlapping_and_dense_or_false(value)
            if is_dense and not value.is_contiguous(memory_format=torch.channels_last):
                found.add(number)
    return found


def maybe_copied_by(
    compiler: Callable[..., Any], gm: fx.GraphModule, parameters: Mapping[int, fx.Node]
) -> set[int] | None:
    """The parameters that the compiler would copy where the graph begins; None if nobody knows."""
    candidates = saved_not_channels_last(gm, parameters)
    package = _module_of(compiler)
    if not candidates or package.startswith(_ORDINARY):
        return set()
    if not package.startswith("torch._inductor"):
        return None
    from torch._inductor.graph import GraphLowering

    if not GraphLowering.decide_layout_opt(gm, is_inference=False):
        return set()
    this: Any = SimpleNamespace(module=gm)
    preferring = GraphLowering.find_nodes_prefer_channels_last(this)
    return {number for number in candidates if parameters[number] in preferring}


def _module_of(compiler: Any) -> str:
    """The module that defines the compiler, below what torch puts around it."""
    while True:
        if isinstance(compiler, functools.partial):
            compiler = compiler.func
        elif hasattr(compiler, "compiler_fn"):
            compiler = compiler.compiler_fn
        else:
            return str(getattr(compiler, "__module__", ""))


def insert_copy(gm: fx.GraphModule, parameter: fx.Node, after: fx.Node) -> None:
    """Have all that comes after this node, and the backward graph, use a copy of the parameter.

    Inductor chooses the copy's layout. For what else it derives from strides, the graph says that
    they are the parameter's.
    """
    value = parameter.meta["val"]
    with gm.graph.inserting_after(after):
        clone: Any = torch.ops.aten.clone.default
        copy = gm.graph.call_function(clone, (parameter,))
    with value.fake_mode:
        copy.meta["val"] = value.clone()
    parameter.replace_all_uses_with(copy, lambda user: user is not copy and user > after)


# Kernels.
# The call as torch writes it into a kernel's bindings, for `str.format`: ``{}`` reads Python's
# arguments, and so needs the lock.
_LOCKED = "kernel({}); Py_RETURN_NONE;"
_UNLOCKED = (
    "[](auto... arguments) {{"
    " struct Unlocked {{"
    " PyThreadState* const thread = PyEval_SaveThread();"
    " ~Unlocked() {{ PyEval_RestoreThread(thread); }}"
    " }} unlocked;"
    " kernel(arguments...);"
    " }}({}); Py_RETURN_NONE;"
)


@functools.cache
def _bindings(codecache: Any) -> Interception:
    def without_lock(call: Any) -> Any:
        return _UNLOCKED if call == _LOCKED else call  # another version of torch keeps its own

    return Interception(codecache.CppPythonBindingsCodeCache, "call_entry_function", without_lock)


@contextlib.contextmanager
def unlocked_kernels() -> Iterator[None]:
    """Have kernels that inductor compiles meanwhile, or loads from its cache, run without the lock.

    They compute the same. No other compiler is loaded for it, nor touched.
    """
    codecache = sys.modules.get("torch._inductor.codecache")
    if not hasattr(codecache, "CppPythonBindingsCodeCache"):
        yield
        return
    release = _bindings(codecache).hold()
    try:
        yield
    finally:
        release()


def lower_readers_first() -> None:
    """Have inductor compute what reads a parameter, or a gradient, before the gradient is done.

    By itself inductor puts off what it may fuse until somebody needs it. An operator of ours that
    writes to memory which such an operation reads would make it, but behind itself
    (`FallbackKernel`), and so have it read what has landed. Its own collectives do as we do here.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if not hasattr(lowering, "register_lowering") or GRADIENT_DONE in lowering.lowerings:
        return
    operator = lowering.fallback_handler(GRADIENT_DONE, add_to_fallback_set=False)

    def done(readers: Sequence[Any], gradient: Any, output: int) -> Any:
        for tensor in (*readers, gradient):
            tensor.realize()
            lowering.V.graph.mark_buffer_mutated(tensor.get_name())
        return operator(readers, gradient, output)

    lowering.register_lowering(GRADIENT_DONE, type_promotion_kind=None)(done)


def in_given_order() -> contextlib.AbstractContextManager[Any]:
    """Have what inductor compiles meanwhile run in its graph's order, where fusion allows it.

    Inductor's last pass would compute as late as possible what takes memory for long, as gradients
    do. The kernels are made before that pass, and are the same.
    """
    config: Any = sys.modules.get("torch._inductor.config")
    if not hasattr(config, "reorder_for_peak_memory"):
        return contextlib.nullcontext()
    kept: contextlib.AbstractContextManager[Any] = config.patch(reorder_for_peak_memory=False)
    return kept

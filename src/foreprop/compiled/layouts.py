"""Parameters that a compiler lays out anew: the copy is made behind the wait, not at the entry.

Inductor computes convolutions channels-last. What has four dimensions, is read on the way to one,
and is saved for the backward graph, it copies into that layout where the graph begins
(`torch._inductor.graph.GraphLowering.run_node`). Every operation, ours among them, then gets the
copy. So the copies are put into the graph before inductor sees it, each where its parameter is
first used. Inductor would make the same ones, and makes none of its own for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

_ORDINARY = ("torch._dynamo", "torch._functorch")
"""What is here compiles nothing: operations run as they stand in the graph."""


def saved_as_they_are(gm: fx.GraphModule, parameters: Mapping[int, fx.Node]) -> set[int]:
    """Those of four dimensions that the graph saves, and that are not channels-last."""
    output = gm.graph.output_node()
    return {
        number
        for number, node in parameters.items()
        if output in node.users and _would_change(node.meta.get("val"))
    }


def _would_change(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.dim() != 4:
        return False
    dense: bool = torch._prims_common.is_non_overlapping_and_dense_or_false(value)
    return dense and not value.is_contiguous(memory_format=torch.channels_last)


def maybe_laid_out_anew(
    compiler: Callable[..., Any], gm: fx.GraphModule, parameters: Mapping[int, fx.Node]
) -> set[int] | None:
    """Those that the compiler would copy where the graph begins; None if nobody knows."""
    candidates = saved_as_they_are(gm, parameters)
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
    """Where it is defined, below what torch puts around it."""
    while True:
        if isinstance(compiler, functools.partial):
            compiler = compiler.func
        elif hasattr(compiler, "compiler_fn"):
            compiler = compiler.compiler_fn
        else:
            return str(getattr(compiler, "__module__", ""))


def insert_copy(gm: fx.GraphModule, parameter: fx.Node, after: fx.Node) -> None:
    """All that comes after this node, and the backward graph, use a copy.

    Inductor chooses its layout. For what else it derives from strides, they stay the parameter's.
    """
    value = parameter.meta["val"]
    with gm.graph.inserting_after(after):
        clone: Any = torch.ops.aten.clone.default
        copy = gm.graph.call_function(clone, (parameter,))
    with value.fake_mode:
        copy.meta["val"] = value.clone()
    parameter.replace_all_uses_with(copy, lambda user: user is not copy and user > after)

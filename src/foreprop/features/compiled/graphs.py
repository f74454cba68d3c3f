"""Where the operators stand: passes over graphs of torch.fx.

A parameter is awaited before the first operation that reads it. Views read nothing. In a backward
graph a gradient is given away where it is computed, but not before the last operation that still
reads it or the parameter: from then on the average, or new values, may land.

Parameters have numbers: which argument of the compiled function they are.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput

from foreprop.features.compiled.inductor import insert_copy
from foreprop.features.compiled.operators import AWAIT_VALUES, GRADIENT_DONE

_aten = torch.ops.aten
_HEAVY = frozenset(
    (
        _aten.mm,
        _aten.addmm,
        _aten.bmm,
        _aten.baddbmm,
        _aten.convolution,
        _aten.convolution_backward,
        _aten.linear,
        _aten.matmul,
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_flash_attention,
        _aten._scaled_dot_product_efficient_attention,
        _aten.embedding,
    )
)
"""Operations that every compiler leaves a call of their own, so that the result is in memory."""


def insert_waits(
    gm: fx.GraphModule, parameters: Mapping[int, fx.Node], copied: Set[int] = frozenset()
) -> set[int]:
    """Have parameters awaited at their first reads; returns the numbers of those that are read.

    ``parameters``: placeholders, by number. ``copied``: those of which a copy is used
    (`compiled.inductor`); of these a view reads, too.
    """
    awaited_by: dict[fx.Node, list[fx.Node]] = {}
    found = set()
    for number, placeholder in parameters.items():
        readers = _readers(gm.graph, [placeholder], count_views=number in copied)
        reader = next(readers, None)
        if reader is not None:
            awaited_by.setdefault(reader, []).append(placeholder)
            found.add(number)
    copies = {parameters[number] for number in found & copied}
    in_memory: list[fx.Node] = []  # before the node
    for node in list(gm.graph.nodes):
        if node in awaited_by:
            after = _maybe_latest(node, in_memory)
            with gm.graph.inserting_before(node):
                wait = gm.graph.call_function(AWAIT_VALUES, (awaited_by[node], after))
            for placeholder in awaited_by[node]:
                if placeholder in copies:
                    insert_copy(gm, placeholder, wait)
        source = node.args[0] if node.target is operator.getitem else node
        is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
        if is_tensor and isinstance(source, fx.Node) and _is_call(source):
            in_memory.append(node)
    _finish(gm)
    return found


def _maybe_latest(reader: fx.Node, in_memory: Sequence[fx.Node]) -> fx.Node | None:
    """The node whose result is the last to be in memory before the reader runs."""
    if _is_call(reader):  # then its arguments are in memory
        inputs = reader.all_input_nodes
        computed = [node for node in inputs if _root(node).op == "call_function"]
        if computed and all(isinstance(n.meta.get("val"), torch.Tensor) for n in computed):
            return max(computed)
    return in_memory[-1] if in_memory else None


def _is_call(node: fx.Node) -> bool:
    """Whether compilers leave the node a call of its own, and fuse it with nothing."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.overloadpacket in _HEAVY or target.namespace not in ("aten", "prims", "prim")


def _finish(gm: fx.GraphModule) -> None:
    gm.graph.lint()
    gm.recompile()


def is_view(node: fx.Node) -> bool:
    """Whether the node's result shares memory with an argument, and nothing is read."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    schema = target._schema
    aliases = [r.alias_info for r in schema.returns if r.alias_info is not None]
    return bool(aliases) and not schema.is_mutable


def _readers(
    graph: fx.Graph, tensors: Iterable[fx.Node], *, count_views: bool = False
) -> Iterator[fx.Node]:
    same = set(tensors)
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or same.isdisjoint(node.all_input_nodes):
            continue
        if is_view(node) and not count_views:
            same.add(node)
        else:
            yield node


def saved_views(gm: fx.GraphModule, parameters: Mapping[int, fx.Node]) -> dict[str, int]:
    """The outputs of a forward graph that share memory with parameters: by name, with which."""
    owner = {node: number for number, node in parameters.items()}
    for node in gm.graph.nodes:
        if is_view(node):
            of = [owner[source] for source in node.all_input_nodes if source in owner]
            if of:
                owner[node] = of[0]
    returned = gm.graph.output_node().all_input_nodes
    return {node.name: owner[node] for node in returned if node in owner}


def insert_gradients(
    gm: fx.GraphModule, gradients: Mapping[int, int], saved: Mapping[str, int]
) -> set[int]:
    """Have gradients given away when they are computed; returns the outputs that are.

    ``gradients``: outputs, and the parameters whose gradients they are. ``saved``: names of
    placeholders that share memory with parameters, and with which. Each operator also says that it
    writes to what is read next of other parameters, so that the computations of other gradients do
    not overtake it.
    """
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    placeholders = [p for p in gm.graph.find_nodes(op="placeholder") if p.name in saved]
    reads = [(order[node], p) for p in placeholders for node in _readers(gm.graph, [p])]
    reads.sort(key=lambda read: read[0])
    own: dict[int, list[fx.Node]] = {number: [] for number in gradients.values()}
    for p in placeholders:
        own.setdefault(saved[p.name], []).append(p)
    nodes, done = list(gm.graph.nodes), set()
    for output, node in _computed(gm, gradients):
        mine = own[gradients[output]]
        others = (order[reader] for reader in _readers(gm.graph, [_root(node)]))
        place = max([order[node], *others, *(at for at, p in reads if p in mine)])
        following = [p for at, p in reads if at > place][:1]
        with gm.graph.inserting_after(nodes[place]):
            gm.graph.call_function(GRADIENT_DONE, ([*mine, *following], node, output))
        done.add(output)
    _finish(gm)
    return done


def _computed(gm: fx.GraphModule, outputs: Iterable[int]) -> Iterator[tuple[int, fx.Node]]:
    """The outputs that are computed in the graph, each in memory of its own, with their nodes."""
    returned: Any = gm.graph.output_node().args[0]
    roots = Counter(_root(node) for node in returned if isinstance(node, fx.Node))
    for output in outputs:
        node = returned[output]
        if not isinstance(node, fx.Node) or _root(node).op == "placeholder":
            continue
        if roots[_root(node)] == 1:
            yield output, node


def _root(node: fx.Node) -> fx.Node:
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def returned_gradients(gm: fx.GraphModule, parameters: Set[int]) -> dict[int, int]:
    """The outputs of a backward graph that are these parameters' gradients, and whose."""
    found = {}
    for output, kind in enumerate(gm.graph.output_node().meta.get("desc", ())):
        of = kind.grad_of if isinstance(kind, GradAOTOutput) else None
        if isinstance(of, PlainAOTInput) and of.idx in parameters:
            found[output] = of.idx
    return found


def parameter_inputs(gm: fx.GraphModule, parameters: Set[int]) -> dict[int, fx.Node]:
    """The placeholders of a graph that stand for these parameters, by number."""
    found = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        kind = node.meta.get("desc")
        if isinstance(kind, PlainAOTInput) and kind.idx in parameters:
            found[kind.idx] = node
    return found


def tensor_inputs(gm: fx.GraphModule) -> list[bool]:
    placeholders = gm.graph.find_nodes(op="placeholder")
    return [isinstance(node.meta.get("val"), torch.Tensor) for node in placeholders]

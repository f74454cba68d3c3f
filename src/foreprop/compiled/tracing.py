"""What torch.compile is told while a session is open: which functions of torch are replaced.

Dynamo traces with every parameter an ordinary tensor, whatever is pending. Its guards then accept
both classes, so that nothing is compiled again when a parameter begins or ends to wait, and code
between graphs, or that is not compiled, waits by itself. Each graph becomes a `regions.Region`.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo import convert_frame, guards, output_graph
from torch._dynamo.backends import common
from torch._dynamo.types import ConvertFrameReturn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from foreprop.compiled import graphs, layouts
from foreprop.compiled.edges import BACKWARD
from foreprop.compiled.kernels import in_given_order, lower_readers_first, unlocked_kernels
from foreprop.compiled.regions import BackwardGraph, Region, hide
from foreprop.errors import ConfigError
from foreprop.hooks.interception import Interception
from foreprop.path.waiting import is_waiting, make_wait, stop_waiting

_ours: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
"""By id: what waits inside compiled code, and the thread of its session."""
_PLAIN = (torch.nn.Parameter, torch.Tensor)
_lock = threading.Lock()
_watching: list[int] = []
"""The threads of the sessions for which torch's functions are replaced."""
_others_graphs: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameters in graphs that were made meanwhile, when no session had them."""


class _Compiling(threading.local):
    """The graph that this thread hands to a compiler."""

    region: Region | None = None
    refused: ConfigError | None = None
    cuda = False


_compiling = _Compiling()


def is_ours(tensor: Any) -> bool:
    reference, _ = _ours.get(id(tensor), (None, 0))
    return reference is not None and reference() is tensor


def watch_compiler(parameters: Iterable[torch.Tensor]) -> tuple[list[Any], Callable[[], None]]:
    """From now on these wait inside compiled code; the returned function ends it.

    Others, which are returned, must be ordinary when compiled code is entered: those whose class
    is another library's. What has been compiled before is compiled again when it is next called.
    """
    others: list[torch.Tensor] = []
    ours: list[torch.Tensor] = []
    for parameter in parameters:
        plain = _own_class(parameter) in _PLAIN
        (ours if plain else others).append(parameter)
    thread = threading.get_ident()
    _ours.update((id(parameter), (weakref.ref(parameter), thread)) for parameter in ours)
    with _lock:
        fresh = not _watching
        _watching.append(thread)
        releases = [interception.hold() for interception in _INTERCEPTIONS]
    stale = convert_frame.input_codes.seen if fresh else [p for p in ours if p in _others_graphs]
    if stale:  # which would read parameters that wait
        torch._dynamo.reset_code_caches()

    def end() -> None:
        for parameter in ours:
            _ours.pop(id(parameter), None)
        with _lock:
            _watching.remove(thread)
            for release in releases:
                release()

    return others, end


def _own_class(tensor: torch.Tensor) -> type:
    cls = type(tensor)
    return cls.__mro__[2] if is_waiting(tensor) else cls  # see `path.waiting`


def _waiting_class(cls: type) -> type:
    """What a tensor of one of the plain classes is while it waits."""
    example = torch.empty(0)
    example = torch.nn.Parameter(example) if cls is torch.nn.Parameter else example
    nobody: Any = None
    make_wait(example, nobody)
    waiting = type(example)
    stop_waiting(example)
    return waiting


# Dynamo's trace.
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep


def _tracing(convert: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(convert)
    def wrapper(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if frame.f_code.co_filename.startswith(_OWN):  # code of ours that has come to wait
            return ConvertFrameReturn()  # it is run as it is
        hidden = hide(_traceable())
        _compiling.refused = None
        try:
            return convert(self, frame, *args, **kwargs)
        except Exception:  # Dynamo's own, with what was refused as its cause
            if _compiling.refused is not None:
                raise _compiling.refused from None
            raise
        finally:
            for item in hidden:
                item.show()

    return wrapper


def _traceable() -> list[torch.Tensor]:
    """Ours, of this thread's sessions; of all, if it has none."""
    thread = threading.get_ident()
    known = [(reference(), of) for reference, of in list(_ours.values())]
    own = [tensor for tensor, of in known if tensor is not None and of == thread]
    return own or [tensor for tensor, _ in known if tensor is not None]


# Its guards.
class _Tolerant:
    """A guard manager of one of our parameters."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    def add_tensor_match_guard(
        self, value: torch.Tensor, sizes: Any, strides: Any, _: str, parts: Any, *rest: Any
    ) -> None:
        """As torch's, but for two classes."""
        self.manager.add_lambda_guard(_matcher(value, sizes, strides), parts, rest[0])


def _matcher(value: torch.Tensor, sizes: Any, strides: Any) -> Callable[[Any], bool]:
    make: Any = torch._C._dynamo.guards.TensorGuards

    def match() -> Any:
        return make(value, dynamic_dims_sizes=[sizes], dynamic_dims_strides=[strides]).check

    cls = type(value)
    own = match()
    waiting_cls = _waiting_class(cls)
    value.__class__ = waiting_cls
    try:
        waiting = match()
    finally:
        value.__class__ = cls
    by_class = {cls: own, waiting_cls: waiting}

    def matches(tensor: Any) -> bool:
        check = by_class.get(type(tensor))
        return check is not None and check(tensor)

    return matches


def _guarding(tensor_match: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(tensor_match)
    def wrapper(self: Any, guard: Any, value: Any = None) -> None:
        tensor = value() if isinstance(value, TensorWeakRef) else value
        if tensor is None:
            tensor = self.get(guard)
        if not is_ours(tensor):
            tensor_match(self, guard, value)
            return
        get = self.get_guard_manager
        self.get_guard_manager = lambda which: _Tolerant(get(which))
        try:
            tensor_match(self, guard, tensor)
        finally:
            del self.get_guard_manager
            managers = self.no_tensor_aliasing_guard_managers
            managers[:] = [m.manager if isinstance(m, _Tolerant) else m for m in managers]

    return wrapper


# A graph.
def _handing_over(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(self: Any, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        placeholders = gm.graph.find_nodes(op="placeholder")
        examples = [_example(node) for node in placeholders]
        for tensor in examples:
            if isinstance(tensor, torch.nn.Parameter) and not is_ours(tensor):
                _others_graphs[tensor] = True
        region = Region([n for n, tensor in enumerate(examples) if is_ours(tensor)])
        if not region.parameters:
            return call(self, gm, inputs)
        outer, _compiling.region = _compiling.region, region
        _compiling.cuda = _on_gpu([examples[number] for number in region.parameters])
        try:
            _refuse_graphs_of("cudagraphs" in str(_name_of(self.compiler_fn)))
            compiled = call(self, gm, inputs)
        finally:
            _compiling.region = outer
        return _as_region(region, gm, placeholders, compiled)

    return wrapper


def _on_gpu(tensors: Sequence[torch.Tensor]) -> bool:
    return any(tensor.is_cuda for tensor in tensors)


def _name_of(compiler: Any) -> Any:
    """Of a backend, below what Dynamo puts around it."""
    while (inner := getattr(compiler, "_torchdynamo_orig_backend", None)) is not None:
        compiler = inner
    return getattr(compiler, "compiler_name", None) or getattr(compiler, "__name__", "")


def _example(node: fx.Node) -> Any:
    argument = node.meta.get("grapharg")
    return None if argument is None or argument.is_tensor is False else argument.example


def _as_region(
    region: Region, gm: fx.GraphModule, placeholders: Sequence[fx.Node], compiled: Any
) -> Any:
    graph = compiled
    if region.at_entry and getattr(compiled, "__self__", None) is gm:  # it is run as it is
        region.awaited = graphs.insert_waits(gm, {n: placeholders[n] for n in region.parameters})
        region.at_entry = False
        graph = gm.forward

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        return region.run(graph, args)

    disable: Any = torch._dynamo.disable
    return disable(run, reason="foreprop waits in compiled graphs")


# What AOTAutograd makes of it.
def _dividing(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_graph)
    def wrapper(
        mod: Any, args: Any, fw_compiler: Any, bw_compiler: Any = None, *rest: Any, **options: Any
    ) -> Any:
        region = _compiling.region
        if region is None:
            return compile_graph(mod, args, fw_compiler, bw_compiler, *rest, **options)
        from torch._inductor import config

        _refuse_graphs_of(config.triton.cudagraphs)
        inference = options.get("inference_compiler") or fw_compiler
        options["inference_compiler"] = _with_waits(region, inference)
        backward = bw_compiler or fw_compiler
        compilers = (_with_waits(region, fw_compiler), _leaving(region, backward))
        return compile_graph(mod, args, *compilers, *rest, **options)

    return wrapper


def _refuse_graphs_of(cuda_graphs: bool) -> None:
    if cuda_graphs and _compiling.cuda:
        _compiling.refused = refusal = ConfigError(
            "torch.compile is to replay CUDA graphs (mode='reduce-overhead' or 'max-autotune',"
            " backend='cudagraphs'), in which no parameter can wait and no gradient can leave:"
            " compile with mode='default', mode='max-autotune-no-cudagraphs' or"
            " options={'triton.cudagraphs': False}"
        )
        raise refusal


def _with_waits(region: Region, compiler: Callable[..., Any]) -> Callable[..., Any]:
    # A function, and none of torch's serializable compilers: whose caches know graphs by what they
    # were made from, and so would give one without the operators.
    def compile_forward(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        nodes = graphs.parameter_inputs(gm, set(region.parameters))
        region.saved = graphs.saved_views(gm, nodes)
        region.is_tensor = graphs.tensor_inputs(gm)
        copied = layouts.maybe_laid_out_anew(compiler, gm, nodes)
        at_entry = layouts.saved_as_they_are(gm, nodes) if copied is None else set()
        inside = {number: node for number, node in nodes.items() if number not in at_entry}
        region.awaited = graphs.insert_waits(gm, inside, copied or set())
        region.at_entry = len(inside) < len(region.parameters)
        with unlocked_kernels():
            return compiler(gm, inputs)

    return compile_forward


def _leaving(region: Region, compiler: Callable[..., Any]) -> Callable[..., Any]:
    def compile_backward(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        gradients = graphs.returned_gradients(gm, set(region.parameters))
        done = graphs.insert_gradients(gm, gradients, region.saved)
        # autograd's node has an edge for each tensor among its inputs
        edges = {output: sum(region.is_tensor[:output]) for output in done}
        of_parameter = {gradients[output]: edge for output, edge in edges.items()}
        saved = {
            place: of_parameter[region.saved[node.name]]
            for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))
            if region.saved.get(node.name) in of_parameter
        }
        lower_readers_first()
        with unlocked_kernels(), in_given_order():
            compiled = compiler(gm, inputs)
        return BackwardGraph(_boxed(compiled), edges, saved) if edges else compiled

    return compile_backward


def _boxed(compiled: Callable[..., Any]) -> Callable[..., Any]:
    if getattr(compiled, "_boxed_call", False):
        return compiled
    return lambda args: compiled(*args)


_INTERCEPTIONS = [
    Interception(convert_frame.ConvertFrameAssert, "__call__", _tracing),
    Interception(guards.GuardBuilder, "TENSOR_MATCH", _guarding),
    Interception(output_graph.OutputGraph, "_call_user_compiler", _handing_over),
    Interception(common, "aot_module_simplified", _dividing),
    BACKWARD,
]

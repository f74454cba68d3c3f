"""The functions of torch.compile that are replaced while a session is open.

Dynamo traces with every parameter an ordinary tensor, whatever is pending. Its guards then accept
both classes, so that nothing is compiled again when a parameter begins or ends to wait, and code
between graphs, or that is not compiled, waits by itself. Each graph becomes a `regions.Region`.

A compiler's own errors would hide ours as their cause; so a refusal is kept, and raised by itself.
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
from torch._inductor import config
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from foreprop.errors import ConfigError
from foreprop.features.compiled import graphs, inductor
from foreprop.features.compiled.regions import BACKWARD, BackwardGraph, Region, hide
from foreprop.params.interception import Interception
from foreprop.params.waiting import is_waiting, make_wait, stop_waiting

_ours: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
"""The parameters that wait inside compiled code, by id, and the thread of their session."""
_PLAIN = (torch.nn.Parameter, torch.Tensor)
_lock = threading.Lock()
_watching: list[int] = []
"""The threads of the sessions for which torch's functions are replaced."""
_in_other_graphs: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameters in graphs that were compiled meanwhile, and that no session had."""


class _Compiling(threading.local):
    region: Region | None = None
    refused: ConfigError | None = None
    cuda = False


_compiling = _Compiling()


def is_ours(tensor: Any) -> bool:
    reference, _ = _ours.get(id(tensor), (None, 0))
    return reference is not None and reference() is tensor


def watch_compiler(parameters: Iterable[torch.Tensor]) -> tuple[list[Any], Callable[[], None]]:
    """Have parameters wait inside compiled code from now on; the returned function ends it.

    Those whose class is another library's cannot. They are returned, and must be ordinary when
    compiled code is entered. What was compiled before is compiled again when it is next called.
    """
    others: list[torch.Tensor] = []
    ours: list[torch.Tensor] = []
    for parameter in parameters:
        cls = type(parameter)
        own = cls.__mro__[2] if is_waiting(parameter) else cls  # see `params.waiting`
        plain = own in _PLAIN
        (ours if plain else others).append(parameter)
    thread = threading.get_ident()
    _ours.update((id(parameter), (weakref.ref(parameter), thread)) for parameter in ours)
    with _lock:
        is_first = not _watching
        _watching.append(thread)
        releases = [interception.hold() for interception in _INTERCEPTIONS]
    # graphs that were compiled before would read parameters that wait
    if convert_frame.input_codes.seen if is_first else any(p in _in_other_graphs for p in ours):
        torch._dynamo.reset_code_caches()

    def end() -> None:
        for parameter in ours:
            _ours.pop(id(parameter), None)
        with _lock:
            _watching.remove(thread)
            for release in releases:
                release()

    return others, end


def _waiting_class(cls: type) -> type:
    """The class that a tensor of one of the plain classes has while it waits."""
    example = torch.empty(0)
    example = torch.nn.Parameter(example) if cls is torch.nn.Parameter else example
    nobody: Any = None
    make_wait(example, nobody)
    waiting = type(example)
    stop_waiting(example)
    return waiting


# Dynamo's trace.
_OWN = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep


def _hide_parameters(convert: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(convert)
    def wrapper(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if frame.f_code.co_filename.startswith(_OWN):  # code of ours that has come to wait
            return ConvertFrameReturn()  # it is run as it is
        # those of this thread's sessions; of all, if it has none
        thread = threading.get_ident()
        known = [(reference(), of) for reference, of in list(_ours.values())]
        own = [tensor for tensor, of in known if tensor is not None and of == thread]
        hidden = hide(own or [tensor for tensor, _ in known if tensor is not None])
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


# Dynamo's guards.
class _BothClasses:
    """A manager of guards whose tensors may have their own class or wait."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    def add_tensor_match_guard(
        self, value: torch.Tensor, sizes: Any, strides: Any, _: str, parts: Any, *rest: Any
    ) -> None:
        make: Any = torch._C._dynamo.guards.TensorGuards

        def check_of_class() -> Any:
            return make(value, dynamic_dims_sizes=[sizes], dynamic_dims_strides=[strides]).check

        cls = type(value)
        waiting_cls = _waiting_class(cls)
        checks = {cls: check_of_class()}
        value.__class__ = waiting_cls
        try:
            checks[waiting_cls] = check_of_class()
        finally:
            value.__class__ = cls

        def matches(tensor: Any) -> bool:
            check = checks.get(type(tensor))
            return check is not None and check(tensor)

        self.manager.add_lambda_guard(matches, parts, rest[0])


def _guard_both_classes(tensor_match: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(tensor_match)
    def wrapper(self: Any, guard: Any, value: Any = None) -> None:
        tensor = value() if isinstance(value, TensorWeakRef) else value
        if tensor is None:
            tensor = self.get(guard)
        if not is_ours(tensor):
            tensor_match(self, guard, value)
            return
        get = self.get_guard_manager
        self.get_guard_manager = lambda which: _BothClasses(get(which))
        try:
            tensor_match(self, guard, tensor)
        finally:
            del self.get_guard_manager
            managers = self.no_tensor_aliasing_guard_managers
            managers[:] = [m.manager if isinstance(m, _BothClasses) else m for m in managers]

    return wrapper


# A graph.
def _compile_as_region(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(self: Any, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        placeholders = gm.graph.find_nodes(op="placeholder")
        arguments = [node.meta.get("grapharg") for node in placeholders]
        examples: list[Any] = [
            None if argument is None or argument.is_tensor is False else argument.example
            for argument in arguments
        ]
        for tensor in examples:
            if isinstance(tensor, torch.nn.Parameter) and not is_ours(tensor):
                _in_other_graphs[tensor] = True
        region = Region([n for n, tensor in enumerate(examples) if is_ours(tensor)])
        if not region.parameters:
            return call(self, gm, inputs)
        outer, _compiling.region = _compiling.region, region
        _compiling.cuda = _on_gpu([examples[number] for number in region.parameters])
        try:
            backend = self.compiler_fn  # below what Dynamo puts around it
            while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
                backend = inner
            name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", "")
            _refuse_graphs_of("cudagraphs" in str(name))
            compiled = call(self, gm, inputs)
        finally:
            _compiling.region = outer
        graph = compiled
        if region.at_entry and getattr(compiled, "__self__", None) is gm:  # it is run as it is
            parameters = {n: placeholders[n] for n in region.parameters}
            region.awaited = graphs.insert_waits(gm, parameters)
            region.at_entry = False
            graph = gm.forward

        @functools.wraps(compiled)
        def run(*args: Any) -> Any:
            return region.run(graph, args)

        disable: Any = torch._dynamo.disable
        return disable(run, reason="foreprop waits in compiled graphs")

    return wrapper


def _on_gpu(tensors: Sequence[torch.Tensor]) -> bool:
    return any(tensor.is_cuda for tensor in tensors)


# The forward and the backward graph that AOTAutograd makes of it.
def _compile_with_operators(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_graph)
    def wrapper(
        mod: Any, args: Any, fw_compiler: Any, bw_compiler: Any = None, *rest: Any, **options: Any
    ) -> Any:
        region = _compiling.region
        if region is None:
            return compile_graph(mod, args, fw_compiler, bw_compiler, *rest, **options)
        _refuse_graphs_of(config.triton.cudagraphs)
        inference = options.get("inference_compiler") or fw_compiler
        options["inference_compiler"] = _with_waits(region, inference)
        backward = bw_compiler or fw_compiler
        compilers = (_with_waits(region, fw_compiler), _with_gradients(region, backward))
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
        copied = inductor.maybe_copied_by(compiler, gm, nodes)
        at_entry = inductor.saved_not_channels_last(gm, nodes) if copied is None else set()
        inside = {number: node for number, node in nodes.items() if number not in at_entry}
        region.awaited = graphs.insert_waits(gm, inside, copied or set())
        region.at_entry = len(inside) < len(region.parameters)
        with inductor.unlocked_kernels():
            return compiler(gm, inputs)

    return compile_forward


def _with_gradients(region: Region, compiler: Callable[..., Any]) -> Callable[..., Any]:
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
        inductor.lower_readers_first()
        with inductor.unlocked_kernels(), inductor.in_given_order():
            compiled = compiler(gm, inputs)
        if not edges:
            return compiled
        is_boxed = getattr(compiled, "_boxed_call", False)
        return BackwardGraph(compiled if is_boxed else lambda args: compiled(*args), edges, saved)

    return compile_backward


_INTERCEPTIONS = [
    Interception(convert_frame.ConvertFrameAssert, "__call__", _hide_parameters),
    Interception(guards.GuardBuilder, "TENSOR_MATCH", _guard_both_classes),
    Interception(output_graph.OutputGraph, "_call_user_compiler", _compile_as_region),
    Interception(common, "aot_module_simplified", _compile_with_operators),
    BACKWARD,
]


class CompiledEntry:
    """What a session does each time its thread enters compiled code.

    ``tables`` are parameters held by rows, which do not wait inside compiled code.
    """

    def __init__(self, session: Any, tables: Sequence[Any]) -> None:
        self._session = session
        by_rows = {table.owner.index for table in tables}
        dense = [p for p in session.parameters if p.index not in by_rows]
        others, leave = watch_compiler(p.parameter for p in dense)
        session.life.add_undo(leave)
        ids = {id(tensor) for tensor in others}
        self._others = [*by_rows, *(p.index for p in dense if id(p.parameter) in ids)]

    def entered(self, *, everything: bool) -> None:
        """Prepare for compiled code; ``everything``: all parameters must be ordinary ones in it."""
        session = self._session
        if not everything and not session.first.is_over and torch.is_grad_enabled():
            session.forward_started()
        numbers = range(len(session.parameters)) if everything else self._others
        for number in numbers:
            session.parameters[number].unwatch()
            session.parameters[number].settle_if_stepped()
        if session.user.buffers and not session.user.model.training:
            session.synchronise_buffers()

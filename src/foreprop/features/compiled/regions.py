"""One compiled graph as it runs: parameters wait in it, and gradients leave from it.

The forward pass. For as long as a graph runs its parameters are ordinary tensors by class, whatever
is pending: they are hidden. The operators in the graph, or else its start, wait for them.

The backward pass. Autograd takes a compiled backward graph for one node, and accumulates its
gradients when all are computed. Here a gradient is accumulated within the graph, as soon as it is
there, with everything that belongs to that; what the graph returns in its place is None, for which
autograd does nothing. That is done only where nobody can tell the difference: autograd would
accumulate it, from this node only, and no hook changes it before. How many nodes lead to a
gradient is counted over the whole pass (`BackwardPass`), which so must be known.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from foreprop.errors import InternalError
from foreprop.features.compiled.operators import running
from foreprop.params.interception import Interception
from foreprop.params.waiting import Pending, waits_for


class Hidden:
    """A waiting parameter that has its own class again, until it is shown."""

    def __init__(self, parameter: torch.Tensor, pending: Pending) -> None:
        self.parameter = parameter
        self.pending = pending
        self._class = type(parameter)
        self._own_class = self._class.__mro__[2]  # see `params.waiting`
        parameter.__class__ = self._own_class

    def show(self) -> None:
        """Have the parameter wait again, if nobody has waited for it meanwhile."""
        self.parameter.__class__ = self._class
        if waits_for(self.parameter) is not self.pending:
            self.parameter.__class__ = self._own_class


def hide(tensors: Sequence[Any]) -> list[Hidden]:
    found = ((tensor, waits_for(tensor)) for tensor in tensors)
    return [Hidden(tensor, pending) for tensor, pending in found if pending is not None]


class _ForwardRun:
    def __init__(self, hidden: Sequence[Hidden]) -> None:
        self._hidden = {id(item.parameter): item for item in hidden}
        self._watching: list[Hidden] = []

    def is_read(self, parameter: torch.Tensor) -> None:
        item = self._hidden.pop(id(parameter), None)
        if item is None:  # or a tensor of its memory: inductor writes its own strides for size 1
            place = (_memory(parameter), parameter.storage_offset())
            for identity, other in self._hidden.items():
                if place == (_memory(other.parameter), other.parameter.storage_offset()):
                    item = self._hidden.pop(identity)
                    break
        if item is None:
            return
        item.show()
        if item.pending.before_use(_read_in_graph, (item.parameter,), {}, in_place=False):
            self._watching.append(item)

    def ends(self) -> None:
        for item in self._hidden.values():
            item.show()
        for item in self._watching:
            item.pending.after_use(item.parameter)

    def waiting(self) -> list[Hidden]:
        return list(self._hidden.values())


def _read_in_graph() -> None:
    """Stands for the operation that reads a parameter."""


class Region:
    """One graph of Dynamo's, of which these arguments are ``parameters``."""

    def __init__(self, parameters: Sequence[int]) -> None:
        self.parameters = parameters
        self.awaited: set[int] = set()  # the parameters that operators in the graph wait for
        self.at_entry = True
        """Whether the others are waited for before the graph runs, as nothing is known of it."""
        self.is_tensor: list[bool] = []
        """Which inputs of the forward graph are tensors: the others are sizes."""
        self.saved: dict[str, int] = {}
        """What the forward graph saves of parameters' memory for the backward graph, by name."""

    def run(self, graph: Callable[..., Any], args: Sequence[Any]) -> Any:
        hidden = hide([args[number] for number in self.parameters])
        if not hidden:
            return graph(*args)
        forward, outer = _ForwardRun(hidden), running.forward
        awaited = {id(args[number]) for number in self.awaited}
        if self.at_entry:
            for item in hidden:
                if id(item.parameter) not in awaited:
                    forward.is_read(item.parameter)
        running.forward = forward
        try:
            result = graph(*args)
            if any(id(item.parameter) in awaited for item in forward.waiting()):
                raise InternalError(
                    "the compiler has dropped an operator that waits for a parameter"
                )
        finally:
            running.forward = outer
            forward.ends()
        return result


# The backward pass.
_lock = threading.Lock()


class BackwardPass:
    """One run of autograd: how often it will add to each gradient, known before it does."""

    def __init__(self, roots: Sequence[torch.Tensor]) -> None:
        self._roots: list[Any] = [root.grad_fn for root in roots]
        self._uses: Counter[int] | None = None
        # what is called when the pass has ended, or failed
        self.at_end: list[Callable[[], None]] = []

    def uses(self) -> Counter[int]:
        """How many edges lead to where a gradient is accumulated, by the parameter's `id`."""
        if self._uses is None:
            self._uses = Counter()
            rest = [root for root in self._roots if root is not None]
            seen = set(rest)
            while rest:
                for node, _ in rest.pop().next_functions:
                    variable = getattr(node, "variable", None)
                    if variable is not None:
                        self._uses[id(variable)] += 1
                    elif node is not None and node not in seen:
                        seen.add(node)
                        rest.append(node)
        return self._uses


_under_way: dict[int, list[BackwardPass]] = {}  # by thread, the innermost pass last


def maybe_this_pass() -> BackwardPass | None:
    """The pass that this thread works for; None if several may be it."""
    with _lock:
        own = _under_way.get(threading.get_ident())
        passes = own[-1:] if own else [one for each in _under_way.values() for one in each]
    return passes[0] if len(passes) == 1 else None


def _note_pass(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def wrapper(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        own = [output for output in outputs if isinstance(output, torch.Tensor)]
        thread, this = threading.get_ident(), BackwardPass(own)
        with _lock:
            _under_way.setdefault(thread, []).append(this)
        try:
            return run(outputs, *args, **kwargs)
        finally:
            for call in this.at_end:
                call()
            with _lock:
                _under_way[thread].pop()
                if not _under_way[thread]:
                    del _under_way[thread]

    return wrapper


# What ``loss.backward()`` calls.
BACKWARD = Interception(torch.autograd, "_engine_run_backward", _note_pass)


class BackwardGraph:
    """The backward graph of a region, compiled; autograd's node calls it with boxed arguments.

    ``outputs`` are those whose gradients are given away, each with the edge of autograd's node that
    leads to its parameter. ``saved`` are the arguments that share memory with the parameter of an
    edge.
    """

    _boxed_call = True

    def __init__(
        self, graph: Callable[..., Any], outputs: Mapping[int, int], saved: Mapping[int, int]
    ) -> None:
        self._graph = graph
        self._outputs = outputs
        self._saved = saved
        self._checked = False

    def __call__(self, args: list[Any]) -> Any:
        targets = self._targets()
        if not self._checked:
            self._checked = True
            self._check(args)
        if not targets:
            return self._graph(args)
        backward, outer = _BackwardRun(targets), running.backward
        running.backward = backward
        try:
            results = list(self._graph(args))
        finally:
            running.backward = outer
        for output in backward.done:
            results[output] = None
        return results

    def _check(self, args: Sequence[Any]) -> None:
        """Give away no gradient whose parameter the graph reads through memory not known of."""
        edges = torch._C._current_autograd_node().next_functions
        variables = {e: getattr(edges[e][0], "variable", None) for e in self._outputs.values()}
        memory = {_memory(v): edge for edge, v in variables.items() if v is not None}
        for number, tensor in enumerate(args):
            if isinstance(tensor, torch.Tensor):
                edge = memory.get(_memory(tensor))
                if edge is not None and self._saved.get(number) != edge:
                    self._outputs = {o: e for o, e in self._outputs.items() if e != edge}

    def _targets(self) -> dict[int, _Target]:
        """The gradients that may be accumulated within the graph, by output."""
        if torch._C._autograd._get_current_graph_task_keep_graph():
            return {}  # a second pass may come, or its gradients' gradients be asked for
        this = maybe_this_pass()
        if this is None:
            return {}
        edges = torch._C._current_autograd_node().next_functions
        uses = this.uses()
        found = {}
        for output, edge in self._outputs.items():
            if edge < len(edges):
                node = edges[edge][0]
                variable = getattr(node, "variable", None)
                if variable is None or uses[id(variable)] != 1:
                    continue
                # somebody may change the gradient before it is accumulated
                is_hooked = bool(getattr(variable, "_backward_hooks", None))
                if not is_hooked and _accumulates(node):
                    found[output] = _Target(node, variable, this)
        return found


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Target:
    def __init__(self, node: Any, variable: torch.Tensor, of: BackwardPass) -> None:
        self._node = node
        self._variable = variable
        self._pass = of

    def accumulate(self, gradient: torch.Tensor) -> None:
        """Do as autograd does: a first gradient is kept if it is laid out as the parameter is."""
        variable = self._variable
        is_alike = (
            gradient.layout == variable.layout == torch.strided
            and gradient.dtype == variable.dtype
            and gradient.device == variable.device
            and gradient.shape == variable.shape
            and gradient.stride() == variable.stride()
        )
        if variable.grad is None and is_alike:
            variable.grad = gradient
            for hook in list((_after_hooks(variable) or {}).values()):
                hook(variable)
        else:
            self._node(gradient)
        hooks = _after_hooks(variable) or {}
        self._pass.at_end += [SpentHook(hooks, key).give_back for key in list(hooks)]


class SpentHook:
    """Stands for a hook that has run, which autograd runs again when it gets None for the gradient.

    That once nothing is done. Whoever removes the hook meanwhile removes this.
    """

    def __init__(self, hooks: dict[int, Callable[..., Any]], key: int) -> None:
        self._hooks = hooks
        self._key = key
        self._hook = hooks[key]
        hooks[key] = self

    def __call__(self, variable: torch.Tensor) -> None:
        self.give_back()

    def give_back(self) -> None:
        now: object = self._hooks.get(self._key)
        if now is self:
            self._hooks[self._key] = self._hook


class _BackwardRun:
    def __init__(self, targets: Mapping[int, _Target]) -> None:
        self._targets = targets
        self.done: list[int] = []

    def is_done(self, output: int, gradient: torch.Tensor) -> None:
        target = self._targets.get(output)
        if target is not None:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                target.accumulate(gradient)
            self.done.append(output)


def _after_hooks(variable: torch.Tensor) -> dict[int, Callable[..., Any]] | None:
    return getattr(variable, "_post_accumulate_grad_hooks", None)


def _accumulates(node: Any) -> bool:
    """Whether this backward pass accumulates there, and was not asked for this gradient only."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # autograd.grad
        return False

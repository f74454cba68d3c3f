"""One compiled graph as it runs: parameters wait in it, and gradients leave from it.

For as long as the graph runs its parameters are ordinary tensors by class, whatever is pending;
the operators in the graph, or else its start, wait for them.

Theory of operation of the backward pass. Autograd takes a compiled backward graph for one node,
and accumulates its gradients when all are computed. Here a gradient is accumulated within the
graph, as soon as it is there, with everything that belongs to that; what the graph returns in its
place is None, for which autograd does nothing. That is done only where nobody can tell the
difference: autograd would accumulate it, from this node only, and no hook changes it before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from foreprop.compiled.edges import BackwardPass, maybe_this_pass
from foreprop.compiled.operators import running
from foreprop.errors import InternalError
from foreprop.path.waiting import Pending, waits_for


class Hidden:
    """A waiting parameter with its own class."""

    def __init__(self, parameter: torch.Tensor, pending: Pending) -> None:
        self.parameter = parameter
        self.pending = pending
        self._class = type(parameter)
        self._own_class = self._class.__mro__[2]  # see `path.waiting`
        parameter.__class__ = self._own_class

    def show(self) -> None:
        """It waits again, if nobody has waited for it meanwhile."""
        self.parameter.__class__ = self._class
        if waits_for(self.parameter) is not self.pending:
            self.parameter.__class__ = self._own_class


def hide(tensors: Sequence[Any]) -> list[Hidden]:
    """All waiting ones among them."""
    found = ((tensor, waits_for(tensor)) for tensor in tensors)
    return [Hidden(tensor, pending) for tensor, pending in found if pending is not None]


class _Forward:
    """A graph that runs, and whose parameters are hidden."""

    def __init__(self, hidden: Sequence[Hidden]) -> None:
        self._hidden = {id(item.parameter): item for item in hidden}
        self._watching: list[Hidden] = []

    def is_read(self, parameter: torch.Tensor) -> None:
        item = self._hidden.pop(id(parameter), None)
        if item is None:  # of another shape, perhaps: inductor writes strides of its own for size 1
            item = self._hidden.pop(self._sharing(parameter), None)
        if item is None:
            return
        item.show()
        if item.pending.before_use(_read_in_graph, (item.parameter,), {}, in_place=False):
            self._watching.append(item)

    def _sharing(self, tensor: torch.Tensor) -> int:
        """Which of the hidden ones has the same memory."""
        place = (_memory(tensor), tensor.storage_offset())
        for identity, item in self._hidden.items():
            if place == (_memory(item.parameter), item.parameter.storage_offset()):
                return identity
        return 0

    def ends(self) -> None:
        for item in self._hidden.values():
            item.show()
        for item in self._watching:
            item.pending.after_use(item.parameter)

    def waiting(self) -> list[Hidden]:
        """What has not been waited for."""
        return list(self._hidden.values())


def _read_in_graph() -> None:
    """Stands for the operation that reads a parameter."""


class Region:
    """One graph of Dynamo's. ``parameters``: which arguments they are."""

    def __init__(self, parameters: Sequence[int]) -> None:
        self.parameters = parameters
        self.awaited: set[int] = set()
        """Those that operators in the graph wait for."""
        self.at_entry = True
        """Whether the others are waited for before it runs: nothing is known of the graph."""
        self.is_tensor: list[bool] = []
        """Of the forward graph's inputs: the others are sizes."""
        self.saved: dict[str, int] = {}
        """What the forward graph hands to the backward graph of parameters' memory: by name."""

    def run(self, graph: Callable[..., Any], args: Sequence[Any]) -> Any:
        hidden = hide([args[number] for number in self.parameters])
        if not hidden:
            return graph(*args)
        forward, outer = _Forward(hidden), running.forward
        if self.at_entry:
            awaited = {id(args[number]) for number in self.awaited}
            for item in hidden:
                if id(item.parameter) not in awaited:
                    forward.is_read(item.parameter)
        running.forward = forward
        try:
            result = graph(*args)
            self._check(forward, args)
        finally:
            running.forward = outer
            forward.ends()
        return result

    def _check(self, forward: _Forward, args: Sequence[Any]) -> None:
        awaited = {id(args[number]) for number in self.awaited}
        if any(id(item.parameter) in awaited for item in forward.waiting()):
            raise InternalError("the compiler has dropped an operator that waits for a parameter")


class BackwardGraph:
    """The backward graph of a region, compiled; called by autograd's node with boxed arguments."""

    _boxed_call = True

    def __init__(
        self, graph: Callable[..., Any], outputs: Mapping[int, int], saved: Mapping[int, int]
    ) -> None:
        """``outputs``: of which gradients are given away, and which input of the node each has.

        ``saved``: arguments that share memory with the parameter that is this input of the node.
        """
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
        backward, outer = _Backward(targets), running.backward
        running.backward = backward
        try:
            results = list(self._graph(args))
        finally:
            running.backward = outer
        for output in backward.done:
            results[output] = None
        return results

    def _check(self, args: Sequence[Any]) -> None:
        """No gradient may leave while the graph reads the parameter in a way that is not known."""
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
                if variable is None or uses[id(variable)] != 1 or _is_hooked(variable):
                    continue
                if _accumulates(node):
                    found[output] = _Target(node, variable, this)
        return found


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Target:
    """Where autograd accumulates a gradient."""

    def __init__(self, node: Any, variable: torch.Tensor, of: BackwardPass) -> None:
        self._node = node
        self._variable = variable
        self._pass = of

    def accumulate(self, gradient: torch.Tensor) -> None:
        """As autograd does. A first gradient is kept as it is, if it is laid out as it would be."""
        self._accumulate(gradient)
        hooks = _after_hooks(self._variable) or {}
        self._pass.at_end += [SpentHook(hooks, key).give_back for key in list(hooks)]

    def _accumulate(self, gradient: torch.Tensor) -> None:
        variable = self._variable
        if variable.grad is None and _is_alike(gradient, variable):
            variable.grad = gradient
            for hook in list((_after_hooks(variable) or {}).values()):
                hook(variable)
        else:
            self._node(gradient)


class SpentHook:
    """Stands for a hook that has run: autograd runs it again, when it gets None for the gradient.

    That once it does nothing. Whoever removes the hook meanwhile removes this.
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


class _Backward:
    def __init__(self, targets: Mapping[int, _Target]) -> None:
        self._targets = targets
        self.done: list[int] = []

    def is_done(self, output: int, gradient: torch.Tensor) -> None:
        target = self._targets.get(output)
        if target is not None:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                target.accumulate(gradient)
            self.done.append(output)


def _is_alike(gradient: torch.Tensor, variable: torch.Tensor) -> bool:
    return (
        gradient.layout == variable.layout == torch.strided
        and gradient.dtype == variable.dtype
        and gradient.device == variable.device
        and gradient.shape == variable.shape
        and gradient.stride() == variable.stride()
    )


def _after_hooks(variable: torch.Tensor) -> dict[int, Callable[..., Any]] | None:
    return getattr(variable, "_post_accumulate_grad_hooks", None)


def _is_hooked(variable: torch.Tensor) -> bool:
    """Whether somebody may change the gradient before it is accumulated."""
    return bool(getattr(variable, "_backward_hooks", None))


def _accumulates(node: Any) -> bool:
    """Whether this backward pass ends there, and does not only compute what it was asked for."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # autograd.grad
        return False

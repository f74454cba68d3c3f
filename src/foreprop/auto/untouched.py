"""Running a user's model and leaving no trace: what a pass may change is put back afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch


class Untouched:
    """Remembers values, buffers, gradients, attributes and the states of random generators.

    Gradients are taken away at once. Values are kept in host memory. Attributes that a forward
    pass sets on a module (a hidden state, a counter) get their old values; what it changes inside
    of a list or dictionary of its own is not known here.
    """

    def __init__(self, model: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> None:
        # scripted modules have no attributes of their own in Python
        modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._attributes = [(m, dict(vars(m)), dict(m._buffers)) for m in modules]
        tensors = {id(t): t for t in (*model.parameters(), *parameters, *model.buffers())}
        self._values = [(t, t._version, t.detach().to("cpu", copy=True)) for t in tensors.values()]
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._restore_chance = _chance()
        self._keep_gradients(t for t in tensors.values() if t.is_leaf)

    def keep_gradients_behind(self, loss: torch.Tensor) -> None:
        """Also those of whatever else ``loss.backward()`` would give a gradient to."""
        self._keep_gradients(_leaves(loss))

    def _keep_gradients(self, leaves: Iterable[torch.Tensor]) -> None:
        for leaf in leaves:
            if id(leaf) not in self._gradients:
                self._gradients[id(leaf)] = (leaf, leaf.grad)
                leaf.grad = None

    def clear_gradients(self) -> None:
        """As ``optimizer.zero_grad()`` does."""
        for leaf, _ in self._gradients.values():
            leaf.grad = None

    def restore(self) -> None:
        for module, attributes, buffers in self._attributes:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for tensor, version, value in self._values:
                if _has_changed(tensor, version, value):
                    tensor.copy_(value)
        for leaf, gradient in self._gradients.values():
            leaf.grad = gradient
        self._restore_chance()


def _has_changed(tensor: torch.Tensor, version: int, value: torch.Tensor) -> bool:
    if tensor._version != version:
        return True
    # what is written through .data leaves the version as it is
    return tensor.layout == torch.strided and not torch.equal(tensor.detach().cpu(), value)


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that gather gradients, found in the graph behind the loss."""
    seen: set[Any] = set()
    rest: list[Any] = [loss.grad_fn]
    while rest:
        node = rest.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable
        rest += [following for following, _ in node.next_functions]


def _chance() -> Callable[[], None]:
    """The random generators of torch, Python and NumPy; call what is returned to put them back."""
    cuda: Any = torch.cuda
    on_gpus = cuda.get_rng_state_all() if cuda.is_initialized() else []
    on_cpu, pythons, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def restore() -> None:
        torch.set_rng_state(on_cpu)
        if on_gpus:
            cuda.set_rng_state_all(on_gpus)
        random.setstate(pythons)
        np.random.set_state(numpys)

    return restore

"""The first step of a backend's connection: it shows in which order parameters are first used."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from foreprop.hooks.modelhooks import FirstForward, before_forward
from foreprop.path.waiting import is_differentiable

if TYPE_CHECKING:
    from foreprop.path.managedparameter import Watched
    from foreprop.session.training import Training


class FirstStep:
    """From a backend's connection to the first gradient that leaves. Training thread."""

    def __init__(self, training: Training) -> None:
        self.is_over = False
        self.use_order: list[int] = []
        self._training = training
        self.in_forward = False
        self._hook: RemovableHandle | None = None

    def begin(self, model: torch.nn.Module) -> None:
        """Be told of the model's first forward pass, and of first uses."""
        for parameter in self._training.parameters:
            parameter.watch()
        self._hook = before_forward(model, FirstForward(self._training))

    def unwatch(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def forward_started(self) -> None:
        """What was used before the model's first forward pass (a copy, a print) does not count."""
        if not self.in_forward:
            self.in_forward = True
            self.use_order.clear()
            for parameter in self._training.parameters:
                parameter.watch()

    def is_use(self, parameter: Watched, result: Any) -> bool:
        """Whether an operation's result makes this the parameter's first use; notes the order."""
        if not self.in_forward and not is_differentiable(result):
            return False
        if self._training.probe is not None:
            self._training.probe.used(parameter)
        self.use_order.append(parameter.index)
        return True

    def end(self) -> None:
        """Before the first gradient leaves: rank 0's order becomes everybody's priorities."""
        if not self.is_over:
            self.is_over = True
            self._learn_priorities()

    def _learn_priorities(self) -> None:
        training = self._training
        board = training.board("priorities")
        for parameter in training.parameters:
            parameter.unwatch()
        self.unwatch()
        if training.world.rank == 0:
            used = set(self.use_order)
            rest = [i for i in range(len(training.parameters)) if i not in used]
            order = self.use_order + rest
            board.publish("order", json.dumps(order))
        else:
            from foreprop.cluster.entries import decode_order

            what = "rank 0's first step (its forward pass gives the priorities)"
            order = decode_order(board.lookup("order", what), len(training.parameters), what)
        if training.has_collectives:  # one would wait for whoever makes no step at all
            board.exchange("begun", "", "first optimizer.step()")
        training.backends.learn_priorities(order)

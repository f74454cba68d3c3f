"""What settings add to the steps of an optimizer that makes them itself.

They add clipping, the gradients' norm and moving averages. This is how a world of one has them, and
a session whose workers update. The optimizer's ``step`` is replaced in the object: torch's own step
hooks would not do, for a subclass whose ``step`` calls its base class's runs them twice.

Where workers update, an update may be made later than its step is called (``made_later``). Then the
averages are behind by that step until the gradients of the next one are prepared, or somebody asks
for them.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from foreprop.config import Config
from foreprop.engine.optimizer import named_parameters
from foreprop.engine.sums import move_average, start_average
from foreprop.params.finite import check_finite


class AddedSteps:
    """Counts an optimizer's steps, and does what the settings ask for in them.

    ``scaler`` is the enabled one that calls the optimizer's step. It leaves out steps with
    gradients that are not finite; they count, as they do with several ranks. ``before`` is called
    before the gradients of a step are looked at, to make all updates of the last one.
    ``checks_finite`` has gradients checked here, as the setting says, where no server does.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        config: Config,
        scaler: torch.amp.GradScaler | None,
        *,
        checks_finite: bool,
        before: Callable[[], None] = lambda: None,
        made_later: bool = False,
    ) -> None:
        self.count = 0
        self.on_step: Callable[[int], None] = lambda step: None
        self.norm: torch.Tensor | None = None
        """The norm of the last step's gradients before clipping; None where nobody asked for it."""
        self._model = model
        self._optimizer = optimizer
        self._clip_norm, self._clip_value = config.clip_grad_norm, config.clip_grad_value
        self._wants_norm = scaler is not None or self._clip_norm is not None
        self._decay = config.ema
        self._made_later = made_later
        self._is_behind = False  # averages lack the last step's values
        self._complete = before
        self._checks_finite = checks_finite and config.check_finite and scaler is None
        self._parameters: list[torch.nn.Parameter] = []
        self._averages: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._removed = False
        self._follow_groups()
        self._give_back = [_put_in_place(optimizer, self._around(optimizer.step))]
        if scaler is not None:
            self._give_back.append(_put_in_place(scaler, self._around_scaled(scaler.step)))

    def remove(self) -> None:
        self._removed = True  # a scheduler made meanwhile has our step within its own
        while self._give_back:
            self._give_back.pop()()

    def _around(self, own_step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(getattr(own_step, "__func__", own_step))
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._removed:
                return own_step(*args, **kwargs)
            self._follow_groups()
            # the gradients that a step uses are those that its closure has made
            closure: Any = args[0] if args else kwargs.get("closure")

            def prepared() -> Any:
                loss = closure()
                self._prepare_gradients()
                return loss

            if closure is None:
                self._prepare_gradients()
            elif args:
                args = (prepared, *args[1:])
            else:
                kwargs = {**kwargs, "closure": prepared}
            result = own_step(*args, **kwargs)
            self._after()
            return result

        return step

    def _around_scaled(self, own_step: Callable[..., Any]) -> Callable[..., Any]:
        # a scaler that leaves a step out does not tell the optimizer
        @functools.wraps(getattr(own_step, "__func__", own_step))
        def step(_: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            before = self.count
            if optimizer is self._optimizer and not self._removed:
                self._complete()
            result = own_step(optimizer, *args, **kwargs)
            if optimizer is self._optimizer and self.count == before and not self._removed:
                self._follow_groups()
                self.norm = _norm_of([_holder(parameter) for parameter in self._parameters])
                self._after()
            return result

        return step

    def _prepare_gradients(self) -> None:
        self._complete()
        self.move_averages()
        if self._checks_finite:
            for name, parameter, _ in named_parameters(self._model, self._optimizer):
                gradient = _holder(parameter).grad
                if gradient is not None:
                    values = gradient._values() if gradient.is_sparse else gradient
                    check_finite(values, "rank 0", name, self.count + 1)
        if not self._wants_norm and self._clip_value is None:
            return
        holders = [_holder(parameter) for parameter in self._parameters]
        # fused optimizers unscale within the step, which is too late: have it done before
        if (scale := getattr(self._optimizer, "grad_scale", None)) is not None:
            for holder in holders:
                if holder.grad is not None:
                    holder.grad.div_(scale.to(holder.grad.device))
            self._optimizer.grad_scale = torch.ones_like(scale)  # type: ignore[attr-defined]
        if self._clip_norm is not None:
            self.norm = torch.nn.utils.clip_grad_norm_(holders, self._clip_norm)
        elif self._wants_norm:
            self.norm = _norm_of(holders)
        if self._clip_value is not None:
            torch.nn.utils.clip_grad_value_(holders, self._clip_value)

    def _after(self) -> None:
        self.count += 1
        self._is_behind = self._decay is not None
        if not self._made_later:
            self.move_averages()
        self.on_step(self.count)

    def _follow_groups(self) -> None:
        # the averages of parameters that are new in the optimizer begin with their values
        count = sum(len(group["params"]) for group in self._optimizer.param_groups)
        if count == len(self._parameters):
            return
        named = named_parameters(self._model, self._optimizer)
        self._parameters = [parameter for _, parameter, _ in named]
        if self._decay is not None:
            for parameter in self._parameters:
                if parameter not in self._averages:
                    self._averages[parameter] = start_average(parameter)

    # The moving averages.
    @property
    def keeps_averages(self) -> bool:
        return self._decay is not None

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The optimizer's, in the model's order."""
        self._follow_groups()
        return self._parameters

    def move_averages(self) -> None:
        """Move by the last step's values, once its updates have been made."""
        if not self._is_behind or self._decay is None:
            return
        self._is_behind = False
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for parameter, average in self._averages.items():
                move_average(average, parameter, self._decay)

    def averages_of(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
        self._follow_groups()
        self.move_averages()
        return self.averages_as_moved(parameters)

    def averages_as_moved(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
        """The averages so far, without those of updates that are still to come. Any thread."""
        found = []
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in parameters:
                average = self._averages.get(parameter)  # None: it is not the optimizer's
                found.append(start_average(parameter) if average is None else average)
        return found

    def put_averages(
        self, parameters: Sequence[torch.nn.Parameter], averages: Sequence[torch.Tensor]
    ) -> None:
        """Go on from these tensors, one for each parameter, and not from copies."""
        self._follow_groups()
        self._is_behind = False
        given = dict(zip(parameters, averages, strict=True))
        self._averages |= {own: given[own] for own in self._averages if own in given}


def _put_in_place(owner: Any, step: Callable[..., Any]) -> Callable[[], None]:
    """Make ``step`` the object's method; the returned function gives its own back."""
    had, ours = vars(owner).get("step"), types.MethodType(step, owner)
    owner.step = ours

    def give_back() -> None:
        if vars(owner).get("step") is ours:
            del owner.step
            if had is not None:
                owner.step = had

    return give_back


def _holder(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A tensor whose ``grad`` is dense, with the memory of the parameter's gradient."""
    gradient = parameter.grad
    if gradient is None or not gradient.is_sparse:
        return parameter
    parameter.grad = gradient.coalesce()  # a row's parts are one gradient
    values = parameter.grad._values()
    holder = values.detach()
    holder.grad = values
    return holder


def _norm_of(holders: list[torch.Tensor]) -> torch.Tensor:
    gradients = [holder.grad for holder in holders if holder.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)

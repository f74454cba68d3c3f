"""Measures a model: its arrays in order of first use, their times, and how sparse they are."""

from __future__ import annotations

import copy
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import msgspec
import torch

from foreprop.engine.memory import dtype_name
from foreprop.engine.optimizer import checked_dtype, named_parameters
from foreprop.engine.sums import count_rows
from foreprop.errors import ConfigError
from foreprop.features.tables.embeddings import EMBEDDINGS, are_listed, on_meta
from foreprop.params.interception import is_managed
from foreprop.plan.passes import (
    Attribution,
    Clock,
    DeviceClock,
    Passes,
    Untouched,
    Watch,
    attribute,
    clock_of,
)
from foreprop.plan.profile import Profile, ProfiledArray

Named = Sequence[tuple[str, torch.nn.Parameter]]

_CHANGEABLE = (MutableMapping, MutableSequence)


def profile(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batch: Any,
    loss: Callable[..., Any],
    *,
    steps: int = 10,
    warm_up: int = 3,
    backward_passes: int = 1,
    name: str | None = None,
) -> Profile:
    """Measure what a step of training costs in this process: print the result, or `save` it.

    Runs forward and backward passes on one batch; nothing is updated. Afterwards parameters,
    buffers, gradients, modules' attributes, random generators and optimizer are as before. Call it
    before `parallelize`, with model and batch on the device on which you will train. The model is
    run in the mode that it is in, train or eval. Takes host memory for a copy of the parameters.

    Every other pass is watched: first uses and ready gradients cut it into the arrays' shares of
    what the passes between, without hooks, take. All times are medians.

    Args:
        model: any module that `parallelize` takes, with all its parameters in memory.
        optimizer: says which parameters are trained; None: all that require a gradient.
        batch: what ``loss`` needs: a tensor, a tuple, a dictionary, ...
        loss: ``loss(model, batch)`` returns the loss, a tensor of one element. Or one of torch's: a
            module, as ``nn.CrossEntropyLoss()``, or function of ``torch.nn.functional``, for a
            batch (inputs, target): ``loss(model(inputs), target)``.
        steps: measured passes of each kind.
        warm_up: passes of each kind before them.
        backward_passes: forward and backward passes on the batch that make one step (gradient
            accumulation). Gradients are complete in the last one.
        name: the model's name in the profile; by default its class's.

    Raises:
        ConfigError: what cannot be measured. What ``model`` and ``loss`` raise is passed on.
    """
    _check_counts(steps=steps, warm_up=warm_up, backward_passes=backward_passes)
    named = _trained_parameters(model, optimizer)
    clock = _clock_of(model, named)
    forward = _forward_of(model, batch, loss)
    untouched = Untouched(model, (parameter for _, parameter in named))
    try:
        with torch.enable_grad():
            passes = Passes(forward, untouched, clock, backward_passes=backward_passes)
            measured = _Measurement(model, named, passes, clock, steps=steps, warm_up=warm_up)
    finally:
        untouched.restore()
    where = f"the CPU (threads: {torch.get_num_threads()})"
    if isinstance(clock, DeviceClock):
        where = clock.device.name
    return profile_from(
        measured.attribution,
        named,
        measured.shares(),
        name=name or type(model).__name__,
        note=f"measured on {where}, torch {torch.__version__}, medians of {steps}"
        + measured.left_out(),
    )


def profile_from(
    found: Attribution, named: Named, shares: Mapping[int, float], *, name: str, note: str = ""
) -> Profile:
    """The profile of the arrays; a step touches ``shares`` of their rows, where that is known."""
    arrays = [
        ProfiledArray(
            name=named[number][0],
            shape=tuple(named[number][1].shape),
            forward_s=forward_s,
            backward_s=backward_s,
            alpha=shares.get(number),
            dtype=dtype_name(named[number][1].dtype),
        )
        for number, forward_s, backward_s in zip(
            found.order, found.forward_s, found.backward_s, strict=True
        )
    ]
    return Profile(
        name=name,
        arrays=tuple(_by_operation(arrays)),
        note=note,
        before_first_use_s=found.before_first_use_s,
        after_last_gradient_s=found.after_last_gradient_s,
    )


_AT_ONCE_S, _AT_ONCE_SHARE = 20e-6, 0.02
"""The most between the first uses of two arrays of one operation: seconds, or a share of the time
from the second one's first use to the next array's."""


def _by_operation(arrays: Sequence[ProfiledArray]) -> Iterator[ProfiledArray]:
    """The arrays, with the time of each operation at its largest array.

    First uses give it to the last one, which is mostly a bias.
    """
    left = list(arrays)
    while left:
        count = 1
        while count < len(left) and _is_used_with(left[count - 1], left[count]):
            count += 1
        operation, left = left[:count], left[count:]
        largest = max(operation, key=lambda array: math.prod(array.shape))
        forward_s = sum(array.forward_s or 0.0 for array in operation)
        backward_s = sum(array.backward_s or 0.0 for array in operation)
        for array in operation:
            times = (forward_s, backward_s) if array is largest else (0.0, 0.0)
            yield msgspec.structs.replace(array, forward_s=times[0], backward_s=times[1])


def _is_used_with(array: ProfiledArray, following: ProfiledArray) -> bool:
    modules = [each.name.rpartition(".")[0] for each in (array, following)]
    own_s = array.forward_s or 0.0
    most_s = max(_AT_ONCE_S, _AT_ONCE_SHARE * (following.forward_s or 0.0))
    return modules[0] == modules[1] and own_s <= most_s


class _Measurement:
    """Runs the passes, with and without a watch in turn."""

    def __init__(
        self,
        model: torch.nn.Module,
        named: Named,
        passes: Passes,
        clock: Clock,
        *,
        steps: int,
        warm_up: int,
    ) -> None:
        self._named = named
        parameters = [parameter for _, parameter in named]
        tables = {id(module.weight) for module in model.modules() if isinstance(module, EMBEDDINGS)}
        self._tables = {n for n, parameter in enumerate(parameters) if id(parameter) in tables}
        self._shares: dict[int, list[float]] = {}
        passes.run_first()
        plain, watched = [], []
        for number in range(warm_up + steps):
            times = passes.run()
            record = passes.run_watched(Watch(model, parameters, clock))
            if number >= warm_up:
                plain.append(times)
                watched.append(record)
                self._count_rows()
        forwards_s, backwards_s = zip(*plain, strict=True)
        self.attribution: Attribution = attribute(
            watched,
            forward_s=statistics.median(forwards_s),
            backward_s=statistics.median(backwards_s),
        )
        if not self.attribution.order:
            raise ConfigError(
                "loss gave a gradient to none of the parameters that are trained; does it use the"
                " model, and does the optimizer have this model's parameters?"
            )

    def _count_rows(self) -> None:
        for number, (_, parameter) in enumerate(self._named):
            gradient = parameter.grad
            if gradient is not None and gradient.layout != torch.strided:
                self._tables.add(number)
            if number in self._tables:
                share = count_rows(gradient) / len(parameter)
                self._shares.setdefault(number, []).append(share)

    def shares(self) -> dict[int, float]:
        return {number: statistics.fmean(shares) for number, shares in self._shares.items()}

    def left_out(self) -> str:
        """The parameters that are not in the profile, in words: nothing of them is sent."""
        without = set(range(len(self._named))).difference(self.attribution.order)
        names = ", ".join(self._named[number][0] for number in sorted(without))
        return f"; without a gradient: {names}" if names else ""


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        least = 0 if name == "warm_up" else 1
        if value < least:
            raise ConfigError(f"{name} is {value}; at least {least}")


def _trained_parameters(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters that have a gradient to send; `ConfigError` for what cannot be measured."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; it must be a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError(
            "model is a ScriptModule, in which nobody sees when a parameter is used: measure the"
            " module that it was made from"
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer, or"
            " None for all parameters"
        )
    _check_in_memory(model)
    if optimizer is None:
        named = list(model.named_parameters())
    else:
        named = [(name, parameter) for name, parameter, _ in named_parameters(model, optimizer)]
    trained = [(name, p) for name, p in named if p.requires_grad and p.numel()]
    if not trained:
        raise ConfigError("model and optimizer have no parameters in common that can be trained")
    for name, parameter in trained:
        if is_managed(parameter):
            raise ConfigError(
                f"parameter {name} belongs to an open session: call profile() before"
                " parallelize(), or after session.close()"
            )
        checked_dtype(name, parameter)
    return trained


def _check_in_memory(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"parameter {name} is not initialised yet (a lazy module): run one forward pass"
                " before profile()"
            )
    if names := [what for what, _ in on_meta(model)]:
        raise ConfigError(
            f"{are_listed(names)} on the meta device, and profile() runs the model: measure a"
            " model that has all in memory, with fewer rows if there are large tables"
        )


def _clock_of(model: torch.nn.Module, named: Named) -> Clock:
    devices = {parameter.device for parameter in model.parameters()}
    devices |= {parameter.device for _, parameter in named}
    clock = clock_of(next(iter(devices)))
    if len(devices) > 1 or (
        not isinstance(clock, DeviceClock) and devices != {torch.device("cpu")}
    ):
        where = ", ".join(sorted(map(str, devices)))
        raise ConfigError(
            f"parameters are on {where}; they must be on the CPU, or on one device that torch has"
            " events for (CUDA, ROCm, XPU, NPU, MPS)"
        )
    return clock


def _forward_of(
    model: torch.nn.Module, batch: Any, loss: Callable[..., Any]
) -> Callable[[], torch.Tensor]:
    if not callable(loss):
        raise ConfigError(
            f"loss is a {type(loss).__name__}; it must be a function of (model, batch), or a loss"
            " of torch's"
        )
    function = loss.func if isinstance(loss, functools.partial) else loss
    of_torch = isinstance(function, torch.nn.Module) or (
        getattr(function, "__module__", None) == torch.nn.functional.__name__
    )
    if of_torch and not (isinstance(batch, (tuple, list)) and len(batch) > 1):
        raise ConfigError(
            f"loss is {_name(loss)}, which compares an output with a target, and batch is a"
            f" {type(batch).__name__}: give a tuple (inputs, target), or a loss of your own:"
            " lambda model, batch: ..."
        )
    call = "loss(model(*batch[:-1]), batch[-1])" if of_torch else "loss(model, batch)"

    def forward() -> torch.Tensor:
        try:
            if of_torch:
                result = loss(model(*batch[:-1]), batch[-1])
            else:
                # a copy, for it is common to pop the labels out of a dictionary
                given = copy.copy(batch) if isinstance(batch, _CHANGEABLE) else batch
                result = loss(model, given)
        except Exception as error:
            error.add_note(f"foreprop.profile() called {call}, with loss={_name(loss)}")
            raise
        return _checked(result)

    return forward


def _name(loss: Callable[..., Any]) -> str:
    return str(getattr(loss, "__qualname__", type(loss).__name__))


def _checked(result: Any) -> torch.Tensor:
    if not isinstance(result, torch.Tensor):
        raise ConfigError(f"loss returned a {type(result).__name__}; it must return a tensor")
    if result.numel() != 1:
        raise ConfigError(
            f"loss returned a tensor of shape {tuple(result.shape)}; it must have one element:"
            " take its mean or sum"
        )
    if not result.requires_grad:
        raise ConfigError(
            "loss returned a tensor without a gradient; does it use the model, and not under"
            " torch.no_grad()?"
        )
    return result

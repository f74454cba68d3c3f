"""The user's ``torch.amp.GradScaler``, for gradients that leave before anybody can unscale them.

What a scaler does with gradients is done where they are aggregated: they are divided by the scale,
and a step in which any of them is not finite is skipped, on all ranks alike. Where ranks may be in
different steps, a rank's push is skipped by itself. The scaler stays the user's object; its
``step``, ``unscale_`` and ``update`` are replaced by ones that know what has become of the
gradients. It may serve several optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from foreprop.errors import TrainingLoopError
from foreprop.params.interception import Interception

_UNSCALE_HINT = (
    "scaler.unscale_(optimizer) is called, and the scaler was given to parallelize(): servers"
    " unscale what they have added up. Leave scaler= out there, and unscale_ and clip as without"
    " foreprop. Or clip with parallelize(..., clip_grad_norm=...) or clip_grad_value=...;"
    " session.grad_norm is the norm."
)
_SCALER_HINT = (
    "a GradScaler that foreprop does not know has called optimizer.step(): servers have been sent"
    " the gradients with the loss's scale in them. Set parallelize(..., update='workers'), or give"
    " it to parallelize(..., scaler=scaler), which keeps the overlap: then gradients are unscaled,"
    " and a step is skipped on all ranks alike."
)


def refuse_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Raise if a scaler has called a step that servers make.

    It has left the scale with the optimizer, as with any that unscales by itself (a fused one).
    """
    attributes = vars(optimizer)
    if "grad_scale" in attributes:
        attributes.pop("grad_scale")
        attributes.pop("found_inf", None)
        raise TrainingLoopError(_SCALER_HINT)


class LossScale:
    def __init__(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        self._scaler = scaler
        self._optimizer = optimizer
        self._stepping = False
        self._held = True

    @property
    def factor(self) -> float:
        return float(self._scaler.get_scale())

    def check_stepping(self) -> None:
        """Raise if the optimizer's step does not come from the scaler's."""
        if not self._stepping:
            raise TrainingLoopError(
                "optimizer.step() was called directly, but a scaler was given to parallelize():"
                " call scaler.step(optimizer), after scaler.scale(loss).backward()"
            )

    def adopt(self, norm: Callable[[], float | None]) -> Callable[[], None]:
        """Replace the scaler's methods; the returned function gives them back.

        ``norm`` waits for the global norm of the last step's gradients.
        """

        def step(own: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if optimizer is not self._optimizer or not self._held:
                return own(optimizer, *args, **kwargs)
            return self._step(*args, **kwargs)

        def unscale_(own: Any, optimizer: torch.optim.Optimizer) -> None:
            if optimizer is self._optimizer and self._held:
                raise TrainingLoopError(_UNSCALE_HINT)
            own(optimizer)

        def update(own: Any, new_scale: float | torch.Tensor | None = None) -> None:
            if self._held and new_scale is None:
                self._set_verdict(norm)
            own(new_scale)

        releases = [
            Interception(self._scaler, ours.__name__, partial(partial, ours)).hold()
            for ours in (step, unscale_, update)
        ]

        def give_back() -> None:
            self._held = False  # another session's may still call ours
            for release in releases:
                release()

        return give_back

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            raise RuntimeError("a closure is not supported with a GradScaler")
        scaler: Any = self._scaler
        scaler._check_scale_growth_tracker("step")
        state = self._state
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        self._stepping = True
        try:
            result = self._optimizer.step()
        finally:
            self._stepping = False
        state["stage"] = OptState.STEPPED
        return result

    def _set_verdict(self, norm: Callable[[], float | None]) -> None:
        """Let the scaler know whether the step was skipped; blocks until that is known."""
        state = self._state
        if state["stage"] is not OptState.STEPPED:
            return
        found = norm()
        skipped = found is not None and not math.isfinite(found)
        scale: torch.Tensor = self._scaler._scale  # type: ignore[assignment]  # there was a step
        verdict = torch.full((), float(skipped), dtype=torch.float32, device=scale.device)
        state["found_inf_per_device"] = {scale.device: verdict}

    @property
    def _state(self) -> dict[str, Any]:
        scaler: Any = self._scaler
        state: dict[str, Any] = scaler._per_optimizer_states[id(self._optimizer)]
        return state

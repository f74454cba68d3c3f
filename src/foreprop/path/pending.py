"""Parameters of a newcomer, whose first values come as any step's answers do."""

from __future__ import annotations

import torch
from torch.autograd.graph import increment_version

from foreprop.path.parameter import SynchronisedParameter, ValueMark
from foreprop.path.waiting import make_wait


def make_pending(parameter: SynchronisedParameter, step: int) -> None:
    """As if its gradient of this step had been pushed: its first use waits for the answer."""
    tensor = parameter.parameter
    with torch._C.DisableTorchFunctionSubclass():
        increment_version(tensor)  # whoever saved the old value must not use it
        empty = not tensor.numel()
    parameter._value.mark = ValueMark(tensor)
    parameter._gradient.pushed_step = step
    if not empty:
        make_wait(tensor, parameter)

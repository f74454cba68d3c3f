"""A parameter that another session's optimizer turns out to have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foreprop.hooks.interception import release_parameter

if TYPE_CHECKING:
    from foreprop.session.training import Training


def hand_over(training: Training, parameter: torch.Tensor) -> bool:
    """Give it away; False if this session's optimizer has it too."""
    averaging = training.averaging
    if averaging is None:
        return False
    for averaged in averaging.parameters:
        if averaged.parameter is parameter and averaged.index >= training.user.optimized:
            averaged.give_away()  # and stays, for rounds that need word of every parameter
            release_parameter(parameter, training)
            return True
    return False

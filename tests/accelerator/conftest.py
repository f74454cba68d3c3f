"""What torch starts for a device, and keeps, is there before the first test."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _device_is_up() -> None:
    """Its context, autograd's thread for it, pinned memory and kernels of matrix products."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        x = torch.randn(64, 64, device=device, requires_grad=True)
        torch.autograd.backward((x @ x).sum())
        torch.empty(1).pin_memory().to(device, non_blocking=True)
        torch.accelerator.synchronize()

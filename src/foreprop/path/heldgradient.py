"""A gradient while it is being sent: kept alive until its last part has been taken."""

from __future__ import annotations

import threading
from typing import Any

import torch

from foreprop.errors import InternalError


class HeldGradient:
    """Given by the training thread, taken in parts by the sending threads, one per server."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._gradient: torch.Tensor | None = None
        self._bytes: Any = None
        self._unsent_bytes = 0
        self._taking = threading.Lock()

    def hold(self, gradient: torch.Tensor) -> None:
        """Keep it until all of its bytes have been taken."""
        self._unsent_bytes = gradient.numel() * gradient.element_size()
        self._gradient = gradient if self._unsent_bytes else None

    def ready(self, gradient_bytes: Any) -> None:
        """Its bytes are where they can be sent from."""
        self._bytes = gradient_bytes

    def take(self, start_bytes: int, stop_bytes: int) -> Any:
        """A part; each is taken once. Any thread."""
        whole = self._bytes
        if whole is None or self._gradient is None:
            raise InternalError(f"no gradient of {self._name} is held")
        with self._taking:
            self._unsent_bytes -= stop_bytes - start_bytes
            if self._unsent_bytes <= 0:
                self._gradient = self._bytes = None
        return whole[start_bytes:stop_bytes]

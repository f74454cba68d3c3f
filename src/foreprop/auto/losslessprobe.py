"""What the exact codec leaves of this training's own bytes: a sample of each parameter's.

In the last step that is watched. A push is the gradient. A reply is an average, of which as much is
left as of a gradient, or where servers update the difference in bits between two values. Both ways
have the same bytes raw, so their mean share is what counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from foreprop.core.codec import Place
from foreprop.errors import ConfigError

if TYPE_CHECKING:
    from foreprop.compression.lossless import Lossless
    from foreprop.path.managedparameter import Watched

_MOST_ELEMS = 50_000
_LEAST_SHARE = 1e-3
"""Of zeros some bytes are left, too."""
_ANYWHERE = Place(0, 0, 0)


class LosslessProbe:
    """``at``: the watched step, counted from 1, of which samples are taken."""

    def __init__(self, parameters: Sequence[Watched], *, at: int, by_workers: bool = False) -> None:
        self._by_workers = by_workers
        wide = [p for p in parameters if p.parameter.dtype == torch.float32]
        self._parameters = [p for p in wide if p.parameter.numel()]
        self._left = at
        self._before: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        """A watched step begins; all values are in."""
        self._left -= 1
        if not self._left:
            self._before = {p.index: _sample(p.parameter) for p in self._parameters}

    def ready(self, parameter: Watched) -> None:
        """It has its gradient, of this pass; of several the last one counts."""
        if parameter.index not in self._before:
            return
        with torch._C.DisableTorchFunctionSubclass():
            gradient = parameter.parameter.grad
        if gradient is not None and gradient.layout == torch.strided:
            self._gradients[parameter.index] = _sample(gradient)

    def shares(self) -> dict[str, float]:
        """By name, once the step's new values are in; of what had a gradient.

        Empty without the package that the codec needs: choosing it says so.
        """
        from foreprop.compression.lossless import Lossless

        try:
            codec = Lossless()
        except ConfigError:
            return {}
        return {
            p.name: _share(codec, self._gradients[p.index], self._moves(p))
            for p in self._parameters
            if p.index in self._gradients
        }

    def _moves(self, p: Watched) -> list[torch.Tensor]:
        """What crosses of its values."""
        if self._by_workers:
            return []
        before, now = self._before[p.index], _sample(p.parameter)
        bits = before.cpu().view(torch.int32) ^ now.cpu().view(torch.int32)
        return [bits.view(torch.float32)]


def _share(codec: Lossless, gradient: torch.Tensor, moves: Sequence[torch.Tensor]) -> float:
    left_bytes = raw_bytes = 0
    for values in (gradient.cpu(), *moves):
        raw_bytes += values.nbytes
        left_bytes += min(values.nbytes, len(codec.encode(values, {}, _ANYWHERE)))
    return max(_LEAST_SHARE, left_bytes / raw_bytes)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Neighbours from the middle, as a slice has them; on the tensor's device."""
    with torch._C.DisableTorchFunctionSubclass():
        flat = tensor.detach().reshape(-1)
        start = max(0, (flat.numel() - _MOST_ELEMS) // 2)
        return flat[start : start + _MOST_ELEMS].clone()

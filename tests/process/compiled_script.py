"""One rank of a training with compiled code, with accumulation and clipping.

``RESULTS``/rank-N.json gets the SHA-256 of its weights, and of those of one process that does alone
what all ranks do. ``COMPILED`` is the loop, as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import foreprop

Batch = tuple[torch.Tensor, torch.Tensor]
STEPS = 4


class _Block(nn.Module):
    """torch.compile leaves torch's own classes alone, so this is ours."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(inputs)
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(self.norm(x)))


@dataclass(frozen=True)
class Loop:
    backend: str
    regional: bool = False
    """Compiled layer by layer."""
    passes: int = 1
    """Backward passes to a step; with two, gradients are clipped."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    def build(self) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(_Block(5, 8), _Block(8, 8), _Block(8, 3))
        for part in model if self.regional else ():
            part.compile(backend=self.backend)
        call = model if self.regional else torch.compile(model, backend=self.backend)
        return call, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def batches(self, rank: int) -> list[list[Batch]]:
        """By step."""
        generator = torch.Generator().manual_seed(rank + 1)
        return [
            [
                (torch.randn(6, 5, generator=generator), torch.arange(6) % 3)
                for _ in range(self.passes)
            ]
            for _ in range(STEPS)
        ]

    def add_gradients(self, call: Any, batches: Sequence[Batch]) -> None:
        for x, y in batches:
            F.cross_entropy(call(x), y).backward()

    def clip(self, call: Any) -> None:
        if self.passes > 1:
            torch.nn.utils.clip_grad_value_(call.parameters(), 0.02)


def sha256_of(call: Any) -> str:
    return hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in call.parameters())
    ).hexdigest()


def alone(loop: Loop, ranks: int) -> str:
    """What the ranks do together, in one process without foreprop: sums in the ranks' order."""
    call, optimizer = loop.build()
    parameters = list(call.parameters())
    for step in range(STEPS):
        sums: list[torch.Tensor] = []
        for rank in range(ranks):
            optimizer.zero_grad()
            loop.add_gradients(call, loop.batches(rank)[step])
            own = [p.grad.clone() for p in parameters]
            sums = [a.add_(b) for a, b in zip(sums, own, strict=True)] if sums else own
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total.div_(ranks)
        loop.clip(call)
        optimizer.step()
    return sha256_of(call)


def main() -> None:
    torch.set_num_threads(1)
    loop = Loop(**json.loads(os.environ["COMPILED"]))
    call, optimizer = loop.build()
    with foreprop.parallelize(call, optimizer) as session:
        for batches in loop.batches(session.rank):
            optimizer.zero_grad()
            loop.add_gradients(call, batches)
            loop.clip(call)
            optimizer.step()
        result = {"sha256": sha256_of(call)}
    torch._dynamo.reset()
    result["alone"] = alone(loop, session.world_size)
    (Path(os.environ["RESULTS"]) / f"rank-{session.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

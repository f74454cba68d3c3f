"""Steps of a small transformer: eager, compiled whole, compiled per block; and where they wait.

    torchrun --nproc-per-node 2 -m foreprop_lab.experiments.compiled 100e6

The first argument is the rate of each node's link in bits per second, by which foreprop paces its
own sockets; every process is a node. The loops' blocks of steps take turns in the same processes.
"with the lock" is compiled whole as by inductor alone: kernels for CPUs keep the interpreter lock,
and the backward graph runs in the order that needs the least memory. "at the edges" is compiled
whole, but waits at the region's entry, and its gradients leave when the backward graph has ended:
what a compiled region did before `foreprop.features.compiled`. Rank 0 prints.
`foreprop_lab.experiments.compiledstep` draws a step.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from typing import Any

import torch
from torch import nn
from torch._inductor.codecache import PyCodeCache
from torch.nn import functional as F

import foreprop
from foreprop.features.compiled import regions, tracing

WIDTH, HEADS, LAYERS, TOKENS, WORDS = 128, 4, 3, 64, 256
BLOCK_STEPS, ROUNDS = 4, 6
LOOPS = ("eager", "compiled", "per block", "with the lock", "at the edges")
WHOLE = ("compiled", "with the lock", "at the edges", "alone")
OPTIONS: dict[str, Any] = {
    "with the lock": {"verbose_progress": False},
    "alone": {"trace.enabled": False},
}
"""Inductor's default options, given so that these loops share nothing with what others compile."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        result: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.words(x)
        for block in (*self.blocks, self.last):
            y = block(y)
        return y


class Loop:
    def __init__(self, name: str, rate: float | None, **more: Any) -> None:
        torch.manual_seed(0)
        self.name = name
        self.model = Transformer()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.call: Any = self.model
        if name in WHOLE:
            self.call = torch.compile(self.model, options=OPTIONS.get(name))
        for block in self.model.blocks if name == "per block" else ():
            block.compile()
        self.session: Any = None
        if rate is not None:
            settings: dict[str, Any] = {"link_rate_bits_per_s": rate, "slice_elems": 20_000, **more}
            self.session = foreprop.parallelize(self.model, self.optimizer, **settings)
        self.step_s: list[float] = []

    def step(self) -> None:
        x = torch.randint(WORDS, (8, TOKENS))
        started = time.perf_counter()
        self.optimizer.zero_grad()
        loss: Any = F.cross_entropy(self.call(x).flatten(0, 1), x.flatten())
        loss.backward()
        self.optimizer.step()
        self.step_s.append(time.perf_counter() - started)

    def block(self, steps: int = BLOCK_STEPS) -> None:
        region: Any = regions.Region
        backward: Any = regions.BackwardGraph
        run, targets = region.run, backward._targets
        if self.name == "at the edges":
            region.run, backward._targets = _run_at_edges, lambda _: {}
        compiling: Any = tracing
        before = compiling.unlocked_kernels, compiling.in_given_order
        if self.name == "with the lock":
            compiling.unlocked_kernels = compiling.in_given_order = contextlib.nullcontext
        for _ in range(steps):
            self.step()
        if self.session is not None:
            self.session.flush()
        region.run, backward._targets = run, targets
        compiling.unlocked_kernels, compiling.in_given_order = before


_run = regions.Region.run


def _run_at_edges(region: regions.Region, graph: Any, args: Any) -> Any:
    for number in region.parameters:
        args[number].data_ptr()  # waits
    return _run(region, graph, args)


def set_up_node() -> None:
    """Set up this process as a node, with one thread to compute."""
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def main(rate: float) -> None:
    set_up_node()
    alone = [Loop("eager", None), Loop("alone", None)]
    loops = [Loop(name, rate) for name in LOOPS]
    for loop in (*alone, *loops):
        PyCodeCache.cache_clear()  # or equal graphs of two loops would have the same kernels
        loop.block(5)
        loop.step_s.clear()
    for _ in range(ROUNDS):
        for loop in (*alone, *loops):
            loop.block()
            del loop.step_s[-BLOCK_STEPS]  # after the flush there is nothing to wait for
    rank = loops[0].session.rank
    for loop in loops:
        loop.session.close()
    if rank == 0:
        numel = sum(p.numel() for p in alone[0].model.parameters())
        ranks = loops[0].session.world_size
        wire_s = numel * 32 * (ranks - 1) / ranks * 2 / rate  # a server on each node
        compute_s, compiled_s = (statistics.median(loop.step_s) for loop in alone)
        print(
            f"compute {compute_s * 1e3:.1f} ms, compiled {compiled_s * 1e3:.1f} ms,"
            f" wire {wire_s * 1e3:.1f} ms each way"
        )
        limit_s = max(wire_s, compute_s)
        for loop in loops:
            step_s = statistics.median(loop.step_s)
            efficiency = limit_s / step_s
            print(f"{loop.name:13} {step_s * 1e3:8.1f} ms/step  efficiency {efficiency:.3f}")


if __name__ == "__main__":
    main(float(sys.argv[1]))

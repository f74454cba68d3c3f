"""What one of the lab's workers does under DDP, recorded as a session records its own steps."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from foreprop.engine.trace import BUCKET_REDUCED, TraceRecorder, trace_path
from foreprop.params.compute_trace import ComputeTrace

_GLOO_THREADS = 2
"""How many threads torch gives gloo for a device; each all-reduces one bucket at a time."""


class _Bucket(NamedTuple):
    """A bucket that was handed to gloo."""

    place: int
    """Its place among the buckets of the step."""
    name: str
    """The name of its largest parameter."""
    size_bytes: int
    handed_ns: int
    step: int


class DdpTrace:
    """Layers computing, buckets being all-reduced, and the wait at a backward pass's end.

    The communication hook does what DDP does without one (torch's ``allreduce_hook``): it divides
    by the number of ranks and all-reduces the bucket. A bucket's span begins when one of gloo's
    threads is free for it. Call `end_backward` after every backward pass, and `close` at the end.
    """

    def __init__(self, wrapped: DistributedDataParallel, folder: Path, rank: int) -> None:
        path = trace_path(folder, f"worker-{rank}", secrets.token_hex(8))
        self._recorder = TraceRecorder(path, f"worker {rank}", rank)
        self._step = 1
        self._computed_ns = self._recorder.now_ns()
        self._ended_ns: list[int] = []
        """When the buckets of this step were reduced."""
        self._buckets = 0
        self._last = ""
        model = wrapped.module
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._compute = ComputeTrace(model, self._recorder, lambda: self._step)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient(name))
            for name, parameter in model.named_parameters()
        ]
        # torch would compare the method's annotations, which are strings here
        wrapped.register_comm_hook(None, lambda state, bucket: self._reduce(bucket))

    def _on_gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        def ready(_: torch.Tensor) -> None:
            self._computed_ns = self._recorder.now_ns()
            self._compute.gradient_ready(name)

        return ready

    def _reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        # the bucket is a ``torch.distributed.GradBucket``, which torch's types do not have
        largest = max(bucket.parameters(), key=torch.Tensor.numel)
        values = bucket.buffer()
        handed = _Bucket(
            place=self._buckets,
            name=self._names[id(largest)],
            size_bytes=values.numel() * values.element_size(),
            handed_ns=self._recorder.now_ns(),
            step=self._step,
        )
        self._buckets += 1
        self._last = handed.name
        work = dist.all_reduce(values.div_(dist.get_world_size()), async_op=True)

        def reduced(future: Any) -> torch.Tensor:
            self._note(handed)
            result: torch.Tensor = future.value()[0]
            return result

        done: torch.futures.Future[torch.Tensor] = work.get_future().then(reduced)
        return done

    def _note(self, bucket: _Bucket) -> None:
        """Record a bucket, on gloo's thread; buckets begin in the order of their handing over."""
        earlier = sorted(self._ended_ns)
        ahead = bucket.place - _GLOO_THREADS
        free_ns = earlier[min(ahead, len(earlier) - 1)] if ahead >= 0 and earlier else 0
        self._ended_ns.append(self._recorder.now_ns())
        self._recorder.span(
            BUCKET_REDUCED,
            bucket.name,
            max(bucket.handed_ns, free_ns),
            step=bucket.step,
            slice_=bucket.place,
            size_bytes=bucket.size_bytes,
        )

    def end_backward(self) -> None:
        """Record that ``loss.backward()`` has returned: all buckets are there, a step begins."""
        self._recorder.span("wait", self._last, self._computed_ns, step=self._step)
        self._step += 1
        self._ended_ns.clear()
        self._buckets = 0

    def close(self) -> None:
        self._compute.remove()
        for handle in self._handles:
            handle.remove()
        self._recorder.write()

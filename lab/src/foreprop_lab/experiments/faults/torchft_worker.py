"""One worker of torchft's DDP, by the loop of its README; it trains until it is killed.

It runs in an environment that has torchft. ``TASK`` is as for `worker`, ``ADDRESS`` is this node's;
rank 0's process has the lighthouse. Every step that torchft has committed with this worker's
gradients is a line of ``steps``, as `worker` writes them.
"""

import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torchft  # type: ignore[import-not-found,unused-ignore]
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft.checkpointing.http_transport import (  # type: ignore[import-not-found,unused-ignore]
    HTTPTransport,
)
from torchft.coordination import LighthouseServer  # type: ignore[import-not-found,unused-ignore]

from foreprop_lab.experiments.faults.worker import Task, model_of
from foreprop_lab.lab.accelerator import EmulatedModel

_LIGHTHOUSE_PORT, _STORE_PORT = 29510, 29511
_JOIN_MS = 10_000
"""The README's value; other settings are torchft's defaults: a heartbeat is late after 5 s."""
_BUCKET_MB = 25.0
"""DDP's default, which is divided by the task's scale."""


class AddressTransport(HTTPTransport):  # type: ignore[misc,unused-ignore]
    """torchft 0.2.0's transport, with this node's address: no node can look up the machine's name.

    There is no argument for that.
    """

    def metadata(self) -> str:
        found: str = super().metadata()
        return found.replace(socket.gethostname(), os.environ["ADDRESS"], 1)


class Ddp(torchft.DistributedDataParallel):  # type: ignore[misc,unused-ignore]
    """torchft 0.2.0's DDP, with a hook that survives a failed all-reduce.

    Its own hook returns ``_fut`` of the work's future. That is None if the wait has failed, and a
    plain future has none, as `Manager.allreduce` returns for the step's other buckets. What is in
    the bucket then does not matter: the step is not committed.
    """

    # no annotations as text: DDP compares them with the types
    @staticmethod
    def _comm_hook(
        state: Any,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        state.allreduce(bucket.buffer()).wait()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future


def main() -> None:
    task = msgspec.json.decode(os.environ["TASK"], type=Task)
    rank, address = int(os.environ["RANK"]), os.environ["ADDRESS"]
    limit = timedelta(seconds=task.silent_s)
    lighthouse = None
    if rank == 0:
        bind = f"0.0.0.0:{_LIGHTHOUSE_PORT}"
        lighthouse = LighthouseServer(bind=bind, min_replicas=1, join_timeout_ms=_JOIN_MS)
    store = TCPStore(address, _STORE_PORT, is_master=True, wait_for_workers=False)
    model = model_of(task)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=limit),
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=limit,
        rank=0,  # each worker is a replica of its own
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{_LIGHTHOUSE_PORT}",
        replica_id=f"node_{rank}",
        hostname=address,
        checkpoint_transport=AddressTransport(timeout=limit, num_chunks=0),
    )
    wrapped = Ddp(manager, model, bucket_cap_mb=_BUCKET_MB / task.scale)
    train(model, wrapped, torchft.Optimizer(manager, optimizer), manager, Path(task.steps))
    del lighthouse  # it lives as long as rank 0


def train(
    model: EmulatedModel, wrapped: torch.nn.Module, optimizer: Any, manager: Any, steps: Path
) -> None:
    x = torch.ones(1, requires_grad=True)
    with steps.open("a", buffering=1) as lines:
        while True:
            optimizer.zero_grad()
            wrapped(x).sum().backward()
            model.end_backward()
            before, counts = manager.current_step(), manager.is_participating()
            asked_s = time.monotonic()
            optimizer.step()
            model.clock.waited(asked_s)
            if counts and manager.current_step() > before:
                lines.write(f"{manager.current_step()} {time.monotonic():.4f}\n")


if __name__ == "__main__":
    main()

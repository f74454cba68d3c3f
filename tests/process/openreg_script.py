"""Two ranks train on torch's own device for tests (``torch_openreg``), and on the CPU.

Its memory can only be read by its own kernels: whoever hands a device's address to the host ends
with a segmentation fault.
"""

from __future__ import annotations

import faulthandler
import sys

import torch
import torch_openreg  # type: ignore[import-not-found]  # noqa: F401  # registers it
from torch.nn import functional as F

import foreprop
from foreprop.engine.world import World
from tests.cluster import run_cluster
from tests.conformance.parity import batches_of, seeded, small_model

SETTINGS = {
    "p3": {"preset": "p3"},
    "workers": {"architecture": "p2p", "update": "workers"},
    "ring": {"architecture": "ring"},
}


def give_streams() -> None:
    """Its module has none by name, but torch's own classes know it."""
    module = torch.openreg
    module.Stream = torch.Stream
    module.Event = lambda enable_timing=False: torch.Event("openreg", enable_timing=enable_timing)
    module.current_stream = torch.accelerator.current_stream
    module.stream = lambda stream: stream  # which is its own context manager
    module.synchronize = torch.accelerator.synchronize


def train(device: str, **settings: str) -> list[dict[str, torch.Tensor]]:
    """The parameters of each rank, on the host."""
    by_rank = batches_of(2, count=6)

    def work(world: World) -> dict[str, torch.Tensor]:
        with seeded(world.rank):
            model = small_model()
        model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            if world.rank == 0:
                print(session.describe(), flush=True)
            for x, y in by_rank[world.rank]:
                optimizer.zero_grad()
                F.cross_entropy(model(x.to(device)), y.to(device)).backward()
                optimizer.step()
        return {name: value.cpu() for name, value in model.state_dict().items()}

    return run_cluster(2, work)


def main() -> int:
    faulthandler.enable()
    torch.set_num_threads(1)
    names = sys.argv[1:]
    if "streams" in names:
        names.remove("streams")
        give_streams()
    failed = 0
    for name in names or SETTINGS:
        ours, cpu = (train(device, **SETTINGS[name]) for device in ("openreg", "cpu"))
        same = all(torch.equal(a[k], b[k]) for a, b in zip(ours, cpu, strict=True) for k in b)
        print(f"{name}: {'the same bits' if same else 'OTHER BITS'}", flush=True)
        failed += not same
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

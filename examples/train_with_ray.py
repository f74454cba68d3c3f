"""A training function for Ray Train: `prepare_model` leaves out DDP, and `parallelize` follows.

python examples/train_with_ray.py
python examples/train_with_ray.py --ddp     # as it was: the same losses
"""

import argparse
from contextlib import nullcontext
from typing import Any

import ray
import torch
from ray.train import ScalingConfig, get_context, report
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import foreprop


def make_data(count: int) -> TensorDataset:
    """Points in a plane, and in which of four quarters they are."""
    points = torch.randn(count, 2, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long())


def train(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 4))
    model = prepare_model(model, parallel_strategy="ddp" if settings["ddp"] else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    session = nullcontext() if settings["ddp"] else foreprop.parallelize(model, optimizer)
    loader = prepare_data_loader(DataLoader(make_data(512), batch_size=16, shuffle=True))
    with session:  # closed before Ray ends the workers
        for epoch in range(settings["epochs"]):
            loader.sampler.set_epoch(epoch)
            for points, quarters in loader:
                loss = nn.functional.cross_entropy(model(points), quarters)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            report({"epoch": epoch, "loss": loss.item()})
    if get_context().get_world_rank() == 0:
        print(f"the last loss is {loss.item():.5f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--ddp", action="store_true", help="Ray's own prepare_model")
    arguments = parser.parse_args()

    ray.init(num_cpus=arguments.workers + 1, include_dashboard=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"ddp": arguments.ddp, "epochs": arguments.epochs},
        scaling_config=ScalingConfig(num_workers=arguments.workers),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()

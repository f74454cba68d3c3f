"""A loop written for accelerate: `ForepropAccelerator` is the one changed word.

torchrun --nproc-per-node 2 examples/train_with_accelerate.py
torchrun --nproc-per-node 2 examples/train_with_accelerate.py --ddp    # as it was: the same losses
"""

import argparse
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from foreprop.integrations.accelerate import ForepropAccelerator


def make_data(count: int, seed: int) -> TensorDataset:
    """Points in a plane, and in which of four quarters they are."""
    points = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--precision", default="no", choices=["no", "bf16", "fp16"])
    parser.add_argument("--ddp", action="store_true", help="accelerate's own Accelerator")
    arguments = parser.parse_args()

    set_seed(0)
    kind = Accelerator if arguments.ddp else ForepropAccelerator
    accelerator = kind(
        gradient_accumulation_steps=2,
        mixed_precision=arguments.precision,
        cpu=not torch.cuda.is_available(),
    )
    model = nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)
    loader = DataLoader(make_data(1024, seed=1), batch_size=16, shuffle=True)
    held_out = DataLoader(make_data(250, seed=2), batch_size=16)
    model, optimizer, schedule, loader, held_out = accelerator.prepare(
        model, optimizer, schedule, loader, held_out
    )

    (folder,) = broadcast_object_list([tempfile.mkdtemp(prefix="accelerate-")])
    for epoch in range(arguments.epochs):
        model.train()
        for points, quarters in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(points), quarters)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        right = 0
        for points, quarters in held_out:
            with torch.no_grad():
                found = model(points).argmax(-1)
            found, quarters = accelerator.gather_for_metrics((found, quarters))
            right += int((found == quarters).sum())
        accelerator.print(f"epoch {epoch}: loss {loss.item():.5f}, {right} of 250 right")
        accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    # DDP's reducer must not outlive its process group
    model, optimizer = accelerator.free_memory(model, optimizer)
    accelerator.end_training()


if __name__ == "__main__":
    main()

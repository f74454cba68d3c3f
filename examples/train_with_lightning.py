"""Lightning with foreprop: the usual program, one import and one word more.

python examples/train_with_lightning.py                                   # two processes
torchrun --nproc-per-node 2 examples/train_with_lightning.py              # started by others
python examples/train_with_lightning.py --strategy ddp                    # for comparison
"""

import argparse

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from foreprop.integrations.lightning import ForepropMonitor  # and "foreprop" is a strategy


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def make_data(samples: int) -> TensorDataset:
    """Four classes, by the largest of the first four of twenty numbers."""
    inputs = torch.randn(samples, 20, generator=torch.Generator().manual_seed(samples))
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="foreprop")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--folder", default="runs/lightning")
    options = parser.parse_args()
    pl.seed_everything(0, verbose=False)
    callbacks: list[pl.Callback] = [LearningRateMonitor()]
    if options.strategy == "foreprop":
        callbacks.append(ForepropMonitor())
    trainer = pl.Trainer(
        strategy=options.strategy,
        accelerator="cpu",
        devices=options.devices,
        max_epochs=4,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        callbacks=callbacks,
        logger=CSVLogger(options.folder),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    train = DataLoader(make_data(2000), batch_size=25, shuffle=True)  # Lightning divides it
    trainer.fit(model, train, DataLoader(make_data(500), batch_size=25))
    if trainer.is_global_zero:
        print(f"accuracy {100 * trainer.callback_metrics['accuracy']:.1f} %", flush=True)


if __name__ == "__main__":
    main()

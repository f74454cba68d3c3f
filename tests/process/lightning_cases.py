"""Trainings in Lightning for the tests: each is run with DDP and with foreprop, in one process.

``python lightning_cases.py 2 plain clip_norm`` has Lightning start two processes; under torchrun,
which has started them, the number is the same. With ``FORK_RANKS`` they are forked. Every rank
leaves ``rank-N.json`` in ``RESULTS``: by case and strategy the losses, the weights and what else
the case has to show.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", module="lightning")

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from lightning.fabric import Fabric  # noqa: E402
from lightning.pytorch import callbacks as pl_callbacks  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from lightning.pytorch.utilities import grad_norm  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from foreprop.integrations.lightning import ForepropMonitor, ForepropStrategy  # noqa: E402
from tests.process.forked import fork_ranks  # noqa: E402

fork_ranks(int(os.environ.get("FORK_RANKS", "0")), servers=len(sys.argv[2:]))
RESULTS = Path(os.environ["RESULTS"])
RANKS = int(sys.argv[1])
_TOLD = ("RANK", "SLURM_PROCID", "LOCAL_RANK")
"""By torchrun, by Slurm, by Lightning."""

RANK = next((int(os.environ[name]) for name in _TOLD if name in os.environ), 0)
Found = dict[str, Any]


class Net(pl.LightningModule):
    """Its steps do not go through ``forward``; it has buffers, too."""

    def __init__(self, *, fails_at: int = -1, norms: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)
        )
        self.losses: list[float] = []
        self.norms: list[float] | None = [] if norms else None
        self.fails_at = fails_at

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        if number == self.fails_at and self.global_rank == 1:
            raise ValueError("the data are odd")
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.norms is not None:
            self.norms.append(float(grad_norm(self, norm_type=2)["grad_2.0_norm_total"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Rivals(pl.LightningModule):
    """Two optimizers, by hand, as in a GAN; the second has every other step."""

    def __init__(self, *, toggles: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggles = toggles
        self.maker = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.judge = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, number: int) -> None:
        x, _ = batch
        made, judged = self.optimizers()  # type: ignore[attr-defined]
        self._step(made, lambda: self.judge(self.maker(x)).square().mean())
        if number % 2:
            real = lambda: (self.judge(x) - 1).square().mean()  # noqa: E731
            self._step(judged, lambda: real() + self.judge(self.maker(x).detach()).square().mean())

    def _step(self, optimizer: Any, loss_of: Callable[[], torch.Tensor]) -> None:
        if self.toggles:
            self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        loss = loss_of()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        if self.toggles:
            self.untoggle_optimizer(optimizer)
        self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        made = torch.optim.Adam(self.maker.parameters(), lr=0.01)
        return made, torch.optim.SGD(self.judge.parameters(), lr=0.05, momentum=0.9)


class Common(Rivals):
    """Two optimizers that have a parameter in common."""

    def configure_optimizers(self) -> Any:
        both = [*self.maker.parameters(), self.judge[2].bias]
        made = torch.optim.SGD(both, lr=0.05)
        return made, torch.optim.SGD(self.judge.parameters(), lr=0.05)


def data() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(60, 8), torch.randint(3, (60,)))


def loader() -> Any:
    return DataLoader(data(), batch_size=5, shuffle=True)


def trainer_for(strategy: Any, **options: Any) -> pl.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    quiet |= {"enable_checkpointing": False, "max_epochs": 2}
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=RANKS, **(quiet | options))


def shown(model: Any, losses: list[float], **more: Any) -> Found:
    weights = {name: value.tolist() for name, value in model.named_parameters()}
    if RANK == 0:  # others' buffers are their own while they train, and DDP's are rank 0's
        weights |= {name: buffer.tolist() for name, buffer in model.named_buffers()}
    return {"losses": losses, "weights": weights, **more}


def fitted(strategy: Any, make: Any = None, **options: Any) -> Found:
    pl.seed_everything(0, verbose=False)
    model = Net() if make is None else make()
    if strategy == "ddp" and not model.automatic_optimization:
        strategy = "ddp_find_unused_parameters_true"
    trainer = trainer_for(strategy, **options)
    trainer.fit(model, loader(), loader())
    states = [len(optimizer.state) for optimizer in trainer.optimizers]
    found = shown(model, model.losses, states=states)
    if "val_loss" in trainer.callback_metrics:
        found["val_loss"] = trainer.callback_metrics["val_loss"].item()
    return found


# The cases.
def fp16(strategy: Any) -> Found:
    """The scaler skips the first step, and none before a validation."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, backoff_factor=2.0**-5)
    return fitted(
        strategy, plugins=MixedPrecision("16-mixed", "cpu", scaler), gradient_clip_val=0.3
    )


def norms(strategy: Any) -> Found:
    models: list[Net] = []

    def make() -> Net:
        models.append(Net(norms=True))
        return models[0]

    folder = RESULTS / f"logs-{strategy}"
    monitors = [pl_callbacks.LearningRateMonitor()]
    more = [ForepropMonitor(every_n_steps=3)] if strategy == "foreprop" else []
    logger = CSVLogger(folder, version=0, flush_logs_every_n_steps=1)
    found = fitted(strategy, make, callbacks=monitors + more, logger=logger, log_every_n_steps=3)
    return {**found, "norms": models[0].norms, "rates": logged(logger, "lr-Adam")}


def logged(logger: CSVLogger, name: str) -> list[float]:
    path = Path(logger.log_dir) / "metrics.csv"
    if not path.exists():  # another rank's
        return []
    head, *rows = [line.split(",") for line in path.read_text().splitlines()]
    place = head.index(name)
    return [float(row[place]) for row in rows if row[place]]


def early(strategy: Any) -> Found:
    stops = pl_callbacks.EarlyStopping("val_loss", patience=0, min_delta=10.0)
    found = fitted(strategy, callbacks=[stops], max_epochs=6)
    return {**found, "stopped": stops.stopped_epoch}


def averaged(strategy: Any) -> Found:
    swa = pl_callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=1)
    return fitted(strategy, callbacks=[swa], max_epochs=4)


def scheduled(strategy: Any) -> Found:
    return fitted(
        strategy, callbacks=[pl_callbacks.GradientAccumulationScheduler({0: 1, 1: 3})], max_epochs=3
    )


def resumed(strategy: Any) -> Found:
    """One epoch, and from its checkpoint another one; then its optimizer's state is saved again."""
    folder = RESULTS / f"checkpoints-{strategy}"
    keeper = pl_callbacks.ModelCheckpoint(folder, filename="first", save_top_k=-1)
    fitted(strategy, max_epochs=1, callbacks=[keeper], enable_checkpointing=True)
    model = Net()
    trainer = trainer_for(strategy, max_epochs=2)
    pl.seed_everything(1, verbose=False)
    trainer.fit(model, loader(), ckpt_path=str(folder / "first.ckpt"))
    trainer.save_checkpoint(folder / "last.ckpt")
    last = torch.load(folder / "last.ckpt", weights_only=False)
    moments = [entry["exp_avg"].tolist() for entry in last["optimizer_states"][0]["state"].values()]
    return shown(model, model.losses, moments=moments, step=last["global_step"])


def fabric(strategy: Any) -> Found:
    """A loop of one's own: accumulation, clipping, a checkpoint in the middle, evaluation."""
    pl.seed_everything(0, verbose=False)
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy, precision="bf16-mixed")
    fabric.launch()
    plain = Net().net
    model, optimizer = fabric.setup(plain, torch.optim.Adam(plain.parameters(), lr=0.02))
    batches = fabric.setup_dataloaders(loader())
    losses: list[float] = []
    found_norms: list[float] = []
    saved: Any = RESULTS / f"fabric-{strategy}.ckpt"
    for epoch in range(3):
        for number, (x, y) in enumerate(batches):
            with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                loss = nn.functional.cross_entropy(model(x), y)
                fabric.backward(loss)
            losses.append(loss.item())
            if number % 2:
                norm = fabric.clip_gradients(model, optimizer, max_norm=0.4)
                found_norms.append(float(norm))  # type: ignore[arg-type]
                optimizer.step()
                optimizer.zero_grad()
        if epoch == 0:
            fabric.save(saved, {"model": model, "optimizer": optimizer})
        if epoch == 1:  # go back to it
            fabric.load(saved, {"model": model, "optimizer": optimizer})
    model.eval()
    with torch.no_grad():
        value = float(model(data().tensors[0]).square().mean())
    found = shown(plain, losses, norms=found_norms, value=value)
    if strategy == "foreprop":
        fabric.strategy.close()  # type: ignore[attr-defined]
    return found


def spawned(strategy: Any) -> Found:
    """Lightning's other launcher, which gives rank 0's weights back to the program."""
    own = ForepropStrategy(start_method="spawn", reply="notify")
    return fitted("ddp_spawn" if strategy == "ddp" else own)


CASES: dict[str, Callable[[Any], Found]] = {
    "plain": fitted,
    "clip_norm": lambda s: fitted(s, gradient_clip_val=0.3),
    "clip_value": lambda s: fitted(s, gradient_clip_val=0.02, gradient_clip_algorithm="value"),
    "accumulated": lambda s: fitted(s, accumulate_grad_batches=3, gradient_clip_val=0.3),
    "scheduled": scheduled,
    "bf16": lambda s: fitted(s, precision="bf16-mixed"),
    "bf16_true": lambda s: fitted(s, precision="bf16-true"),
    "fp16": fp16,
    "norms": norms,
    "early": early,
    "averaged": averaged,
    "resumed": resumed,
    "rivals": lambda s: fitted(s, lambda: Rivals(toggles=True)),
    "rivals_untoggled": lambda s: fitted(s, lambda: Rivals(toggles=False)),
    "common": lambda s: fitted(s, lambda: Common(toggles=False)),
    "fabric": fabric,
    "spawned": spawned,
    "fails": lambda s: fitted(s, lambda: Net(fails_at=2)) if s == "foreprop" else {},
}


def main() -> None:
    logging.getLogger("lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    found: dict[str, dict[str, Found]] = {}
    try:
        for name in sys.argv[2:]:
            found[name] = {strategy: CASES[name](strategy) for strategy in ("ddp", "foreprop")}
    finally:
        (RESULTS / f"rank-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

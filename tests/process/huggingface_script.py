"""Trains with accelerate and transformers, as they are (DDP) and with foreprop, and compares.

``CASES`` are names of functions here, ``RESULTS`` is a folder. Every rank leaves there
``rank-N.json``: for each case what both found, by name, and how far their parameters are apart.
With ``FORK_RANKS`` so many ranks are forked.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from foreprop.integrations.accelerate import ForepropAccelerator
from foreprop.integrations.trainer import ForepropTrainer
from tests.process.forked import fork_ranks

fork_ranks(int(os.environ.get("FORK_RANKS", "0")), servers=len(os.environ["CASES"].split()))
RANK = int(os.environ["RANK"])
WORDS, LENGTH = 20, 6

Found = dict[str, Any]
State = dict[str, torch.Tensor]


# Trainer.
def _texts(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(seed)
    rows = torch.randint(WORDS, (count, LENGTH), generator=drawn)
    return [{"input_ids": row, "labels": row} for row in rows]


def _language_model() -> GPT2LMHeadModel:
    set_seed(RANK)  # rank 0's is to become everybody's
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, **ends)
    )


def _arguments(folder: Path, **options: Any) -> TrainingArguments:
    usual = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    return TrainingArguments(
        output_dir=str(folder),
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        **usual | options,
    )


def _make_trainer(kind: type, folder: Path, **options: Any) -> Any:
    return kind(
        _language_model(),
        _arguments(folder, **options),
        train_dataset=_texts(96, 1),
        eval_dataset=_texts(32, 2),
    )


def _logged(trainer: Any) -> Found:
    found: Found = {"eval": trainer.evaluate()["eval_loss"]}
    for name in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        found[name] = [line[name] for line in trainer.state.log_history if name in line]
    if isinstance(trainer, ForepropTrainer):
        lines = [line for line in trainer.state.log_history if "loss" in line]
        found["report"] = [{k: v for k, v in x.items() if "foreprop" in k} for x in lines]
    return found


def _train(kind: type, folder: Path, **options: Any) -> tuple[Found, State]:
    trainer = _make_trainer(kind, folder, **options)
    trainer.train()
    found = _logged(trainer)
    return found, _copy(trainer.model)


def clipped(kind: type, folder: Path) -> tuple[Found, State]:
    """As most use it: clipped, accumulated, evaluated, saved, and at the end the best model."""
    options = {
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
    }
    return _train(kind, folder, max_grad_norm=0.5, **options)


def unclipped(kind: type, folder: Path) -> tuple[Found, State]:
    return _train(kind, folder, max_grad_norm=0.0)


def bf16(kind: type, folder: Path) -> tuple[Found, State]:
    return _train(kind, folder, bf16=True)


def adafactor(kind: type, folder: Path) -> tuple[Found, State]:
    return _train(kind, folder, optim="adafactor")


def checkpointed(kind: type, folder: Path) -> tuple[Found, State]:
    return _train(kind, folder, gradient_checkpointing=True)


def resumed(kind: type, folder: Path) -> tuple[Found, State]:
    """Broken off after its third step, and gone on with from a checkpoint by another trainer."""
    first = _make_trainer(kind, folder, save_strategy="steps", save_steps=3)
    first.add_callback(_StopAfter(3))
    first.train()
    second = _make_trainer(kind, folder, save_strategy="steps", save_steps=3)
    second.train(resume_from_checkpoint=True)
    return _logged(second), _copy(second.model)


def twice(kind: type, folder: Path) -> tuple[Found, State]:
    """`train()` again goes on with the optimizer's state, which servers have here."""
    options = {"foreprop": {"update": "servers"}} if issubclass(kind, ForepropTrainer) else {}
    trainer = kind(
        _language_model(),
        _arguments(folder, max_grad_norm=0.5, max_steps=3),
        train_dataset=_texts(96, 1),
        eval_dataset=_texts(32, 2),
        **options,
    )
    trainer.train()
    trainer.train()
    return _logged(trainer), _copy(trainer.model)


def scaled(kind: type, folder: Path) -> tuple[Found, State]:
    """As with fp16 on GPUs: a GradScaler, whose first scale is too large."""
    return _train(_scaled(kind), folder, max_grad_norm=0.5, optim="adamw_torch")


def scaled_fused(kind: type, folder: Path) -> tuple[Found, State]:
    """Trainer's usual optimizer skips by itself, and accelerate does not notice."""
    return _train(_scaled(kind), folder, max_grad_norm=0.5, optim="adamw_torch_fused")


def _scaled(kind: type) -> type:
    class Scaled(kind):  # type: ignore[misc]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            _use_scaler(self.accelerator)

    return Scaled


def tuned(kind: type, folder: Path) -> tuple[Found, State]:
    """TRL's trainer, over `ForepropTrainer`."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    class Tuned(ForepropTrainer, SFTTrainer):  # type: ignore[misc]
        pass

    words = {str(number): number for number in range(WORDS)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), pad_token="0", eos_token="1"
    )
    texts = [{"input_ids": text["input_ids"].tolist()} for text in _texts(96, 1)]
    plain = _arguments(folder, gradient_accumulation_steps=2).to_dict()
    known = {name: plain[name] for name in _TUNED}
    trainer = (Tuned if issubclass(kind, ForepropTrainer) else SFTTrainer)(
        _language_model(),
        SFTConfig(max_length=LENGTH, use_cpu=True, ddp_backend="gloo", report_to=[], **known),
        train_dataset=Dataset.from_list(texts),
        eval_dataset=Dataset.from_list(texts[:32]),
        processing_class=tokenizer,
    )
    trainer.train()
    return _logged(trainer), _copy(trainer.model)


_TUNED = (
    "output_dir max_steps per_device_train_batch_size learning_rate logging_steps save_strategy"
    " gradient_accumulation_steps disable_tqdm"
).split()


def _use_scaler(accelerator: Any) -> None:
    """What accelerate does for fp16 on a device that is not the CPU, but for autocast."""
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=2.0**-40)
    accelerator.unscale_gradients = lambda optimizer=None: [
        accelerator.scaler.unscale_(outer.optimizer) for outer in accelerator._optimizers
    ]


class _StopAfter:
    """A callback, once it has transformers' class behind it."""

    def __new__(cls, step: int) -> Any:
        from transformers import TrainerCallback

        class Stop(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                control.should_training_stop |= state.global_step == step

        return Stop()


# accelerate.
def _points(count: int, seed: int) -> TensorDataset:
    points = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, points.sum(1, keepdim=True).tanh())


def _network() -> nn.Module:
    torch.manual_seed(RANK)
    return nn.Sequential(
        nn.Linear(5, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)
    )


def _accelerator(trainer: type, **options: Any) -> Any:
    AcceleratorState._reset_state()
    kind = ForepropAccelerator if issubclass(trainer, ForepropTrainer) else Accelerator
    return kind(cpu=True, **options)


def _loop(
    accelerator: Any,
    optimizer_kind: Any,
    *,
    epochs: int = 2,
    clip: float = 0.5,
    first_times: float = 1.0,
) -> Any:
    """Batches of two epochs, whose number is odd, with everything that a script may call."""
    model = _network()
    optimizer = optimizer_kind(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    loader = DataLoader(_points(9 * 4 * accelerator.num_processes, 1), batch_size=4, shuffle=True)
    torch.manual_seed(5)
    optimizer, model, loader, schedule = accelerator.prepare(optimizer, model, loader, schedule)
    found: Found = {"loss": [], "norm": [], "lr": [], "skipped": 0}
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss if found["loss"] else loss * first_times)
                if accelerator.sync_gradients and clip:
                    norm = accelerator.clip_grad_norm_(model.parameters(), clip)
                    found["norm"].append(float(norm))
                optimizer.step()
                found["skipped"] += int(optimizer.step_was_skipped)
                schedule.step()
                optimizer.zero_grad()
            found["loss"].append(float(accelerator.gather_for_metrics(loss.detach()).mean()))
            found["lr"].append(optimizer.param_groups[0]["lr"])
    return found, model, optimizer, loader


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def _finished(accelerator: Any, found: Found, model: nn.Module, *more: Any) -> tuple[Found, State]:
    model.eval()
    state = _copy(accelerator.unwrap_model(model))
    accelerator.free_memory(model, *more)
    return found, state


def accumulated(trainer: type, folder: Path) -> tuple[Found, State]:
    accelerator = _accelerator(trainer, gradient_accumulation_steps=2)
    found, model, optimizer, loader = _loop(accelerator, _adamw)
    held_out = accelerator.prepare(DataLoader(_points(21, 2), batch_size=4))
    model.eval()
    with torch.no_grad():
        seen = [accelerator.gather_for_metrics(model(x)) for x, _ in held_out]
    found["held_out"] = torch.cat(seen).flatten().tolist()
    return _finished(accelerator, found, model, optimizer, loader)


def autocast(trainer: type, folder: Path) -> tuple[Found, State]:
    accelerator = _accelerator(trainer, mixed_precision="bf16")
    return _finished(accelerator, *_loop(accelerator, _adamw))


def overflowing(trainer: type, folder: Path) -> tuple[Found, State]:
    """As with fp16 on GPUs: the schedule waits in steps that the scaler skips."""
    accelerator = _accelerator(trainer)
    _use_scaler(accelerator)
    return _finished(accelerator, *_loop(accelerator, _adamw, first_times=1e30))


def whole_steps(trainer: type, folder: Path) -> tuple[Found, State]:
    """An optimizer that servers cannot apply, called as ``step(None)``."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(parameters, lr=0.01)

    accelerator = _accelerator(trainer)
    return _finished(accelerator, *_loop(accelerator, make, clip=0.0))


def state_saved(trainer: type, folder: Path) -> tuple[Found, State]:
    """Back to what was saved after an epoch, after more training."""
    accelerator = _accelerator(trainer)
    _, model, optimizer, loader = _loop(accelerator, _adamw, epochs=1)
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()

    def epoch() -> list[float]:
        losses = []
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses

    epoch()
    accelerator.load_state(str(folder))
    found = {"loss": epoch()}
    return _finished(accelerator, found, model, optimizer, loader)


def two_models(trainer: type, folder: Path) -> tuple[Found, State]:
    """Prepared in turn, each with its optimizer, the optimizer first."""
    accelerator = _accelerator(trainer)
    one, other = _network(), _network()
    optimizers = []
    for model in (one, other):
        optimizers.append(accelerator.prepare_optimizer(_adamw(model.parameters())))
    models = [accelerator.prepare_model(model) for model in (one, other)]
    losses = []
    for x, y in accelerator.prepare(DataLoader(_points(40, 3), batch_size=4)):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    state = _copy(nn.ModuleList([one, other]).eval())
    del model, optimizer
    accelerator.free_memory()
    return {"loss": losses}, state


# Both.
def _copy(model: nn.Module) -> State:
    """The parameters: DDP leaves every rank its own statistics of BatchNorm."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def compare(case: Callable[..., tuple[Found, State]], folder: Path) -> Found:
    """What the case finds with DDP and with foreprop."""
    results = []
    for kind in (Trainer, ForepropTrainer):
        own = folder / case.__name__ / kind.__name__
        own.mkdir(parents=True, exist_ok=True)
        results.append(case(kind, own))
        gc.collect()  # DDP's reducers, before their process group
    (ddp, wanted), (ours, state) = results
    return {
        "ddp": ddp,
        "foreprop": ours,
        "apart": {name: _apart(state[name], value) for name, value in wanted.items()},
    }


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    largest = float(other.double().abs().max())
    return float((one.double() - other.double()).abs().max()) / (largest or 1.0)


def main() -> None:
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
    folder = Path(os.environ["RESULTS"])
    cases = [getattr(sys.modules[__name__], name) for name in os.environ["CASES"].split()]
    found = {case.__name__: compare(case, folder) for case in cases}
    (folder / f"rank-{RANK}.json").write_text(json.dumps(found))
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A tiny GPT-2 in Hugging Face's Trainer: `ForepropTrainer` is the one changed word.

torchrun --nproc-per-node 2 examples/train_with_trainer.py
torchrun --nproc-per-node 2 examples/train_with_trainer.py --ddp    # as it was: the same losses
"""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from foreprop.integrations.trainer import ForepropTrainer

WORDS, LENGTH = 50, 16


def make_texts(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Texts whose words count up from a random one: easy to learn."""
    starts = torch.randint(WORDS, (count, 1), generator=torch.Generator().manual_seed(seed))
    rows = (starts + torch.arange(LENGTH)) % WORDS
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ddp", action="store_true", help="transformers' own Trainer")
    arguments = parser.parse_args()

    set_seed(0)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(prefix="trainer-"),
        max_steps=arguments.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=max(1, arguments.steps // 6),
        eval_strategy="steps",
        eval_steps=max(1, arguments.steps // 2),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_backend="nccl" if torch.cuda.is_available() else "gloo",
    )
    kind = Trainer if arguments.ddp else ForepropTrainer
    trainer = kind(
        model, settings, train_dataset=make_texts(512, seed=1), eval_dataset=make_texts(64, seed=2)
    )
    trainer.train()
    if trainer.is_world_process_zero():
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        print("losses:", " ".join(f"{loss:.5f}" for loss in losses), flush=True)


if __name__ == "__main__":
    main()

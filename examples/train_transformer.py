"""A small transformer with gradient accumulation, clipping and a warm-up, on text generated here.

torchrun --nproc-per-node 2 examples/train_transformer.py
FOREPROP_WORKERS_PER_NODE=2 torchrun --nproc-per-node 4 examples/train_transformer.py

The second command treats one machine as two nodes with two workers each, to try that out.
"""

import argparse
import hashlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import foreprop

LETTERS, LENGTH, WIDTH = 16, 12, 32


class Transformer(nn.Module):
    """Predicts the next letter."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        inputs = self.letters(text) + self.places(torch.arange(length))
        return self.head(self.layers(inputs, mask=mask, is_causal=True))


def texts(count: int) -> TensorDataset:
    """Texts in which each letter follows the one before by the same step."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(LETTERS, (count, 1), generator=generator)
    step = torch.randint(1, 4, (count, 1), generator=generator)
    return TensorDataset((start + step * torch.arange(LENGTH + 1)) % LETTERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes per step")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    session = foreprop.parallelize(model, optimizer)
    loader = foreprop.shard(DataLoader(texts(512), batch_size=16, shuffle=True))

    for epoch in range(options.epochs):
        losses = []
        for number, (text,) in enumerate(loader, start=1):
            scores = model(text[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(scores, text[:, 1:].flatten())
            (loss / options.accumulate).backward()  # no no_sync(): one average per step
            losses.append(loss.item())
            if number % options.accumulate == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the ranks' average
                optimizer.step()
                optimizer.zero_grad()
                warm_up.step()
        if session.rank == 0:
            print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.3f}", flush=True)

    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    digest = hashlib.sha256(weights).hexdigest()
    # one write that includes the line end: all ranks share a terminal
    print(f"rank {session.rank}: SHA-256 of the weights {digest}\n", end="", flush=True)


if __name__ == "__main__":
    main()

"""A language model on WikiText-2: two tables of 76,616 rows each, of which a step needs few.

torchrun --nproc-per-node 2 examples/train_language_model.py            # batches of 20 + 20 texts
python examples/train_language_model.py --texts 40                      # alone, the same batches
torchrun --nproc-per-node 2 examples/train_language_model.py --architecture ring    # all dense
torchrun --nproc-per-node 2 examples/train_language_model.py --remote      # tables on servers only
python examples/train_language_model.py --profile mine.json    # measure it, for `foreprop plan`
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import foreprop
from foreprop_lab.experiments.wikitext import wikitext2

LENGTH, DRAWN, HELD_OUT = 20, 1024, 4000


class LanguageModel(nn.Module):
    """An embedding, an LSTM and a softmax: over all types, or in training over the drawn ones."""

    def __init__(self, types: int, *, width: int = 64, remote: bool = False) -> None:
        super().__init__()
        device = "meta" if remote else "cpu"
        self.words = nn.Embedding(types, width, sparse=True, device=device)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.classes = nn.Embedding(types, width, sparse=True, device=device)
        for table in (self.words, self.classes):
            nn.init.uniform_(table.weight, -0.1, 0.1)  # on the meta device nothing happens

    def loss(self, text: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        """Sampled softmax, corrected for the log-uniform distribution of ``drawn``."""
        hidden, _ = self.lstm(self.words(text[:, :-1]))
        following = text[:, 1:]
        types = self.classes.num_embeddings
        right = (hidden * self.classes(following)).sum(-1) - expected(following, types)
        wrong = hidden @ self.classes(drawn).T - expected(drawn, types)
        wrong = wrong.masked_fill(following.unsqueeze(-1) == drawn, -math.inf)
        scores = torch.cat([right.unsqueeze(-1), wrong], -1).flatten(0, 1)
        return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64))

    @torch.no_grad()
    def perplexity(self, text: torch.Tensor) -> float:
        """The perplexity of a text, with the softmax over all types."""
        hidden, _ = self.lstm(self.words(text[:, :-1]))
        everything = self.classes(torch.arange(self.classes.num_embeddings))
        scores = F.linear(hidden.flatten(0, 1), everything)
        return math.exp(F.cross_entropy(scores, text[:, 1:].flatten()))


def expected(numbers: torch.Tensor, types: int) -> torch.Tensor:
    """The logarithm of how often `draw` is expected to give each type of ``numbers``."""
    share = torch.log((numbers + 2.0) / (numbers + 1.0)) / math.log(types + 1)
    return torch.log(DRAWN * share)


def draw(step: int, types: int) -> torch.Tensor:
    """Random types, frequent ones more often; all ranks draw the same and so have one softmax."""
    uniform = torch.rand(DRAWN, generator=torch.Generator().manual_seed(step))
    return (torch.exp(uniform * math.log(types + 1)).long() - 1).clamp_(0, types - 1).unique()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=20, help="texts in a rank's batch")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=64, help="elements of a row, and of the LSTM")
    parser.add_argument("--architecture", default="hybrid")
    parser.add_argument("--remote", action="store_true", help="tables on the servers only")
    parser.add_argument("--out", type=Path, help="JSON file for the perplexities by step")
    parser.add_argument("--profile", type=Path, help="JSON file for what a step costs; no training")
    options = parser.parse_args()
    for path in filter(None, (options.out, options.profile)):
        path.parent.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    numbers, types = wikitext2()
    texts = numbers[: len(numbers) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    held_out, training = texts[-HELD_OUT // LENGTH :], texts[: -HELD_OUT // LENGTH]
    model = LanguageModel(len(types), width=options.width, remote=options.remote)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3, initial_accumulator_value=1e-3)
    if options.profile is not None:
        batch = training[: options.texts], draw(0, len(types))
        measured = foreprop.profile(model, optimizer, batch, lambda model, b: model.loss(*b))
        print(measured)
        measured.save(options.profile)
        return
    session = foreprop.parallelize(
        model, optimizer, architecture=options.architecture, table_init="uniform(-0.1, 0.1)"
    )
    loader = foreprop.shard(DataLoader(TensorDataset(training), batch_size=options.texts))

    seen = []
    for step, (text,) in zip(range(options.steps + 1), loader, strict=False):
        if step % 50 == 0:
            seen.append((step, model.perplexity(held_out)))
            if session.rank == 0:
                print(f"step {step}: perplexity {seen[-1][1]:.1f}", flush=True)
        optimizer.zero_grad()
        model.loss(text, draw(step, len(types))).backward()
        optimizer.step()
    if session.rank == 0 and options.out is not None:
        options.out.write_text(json.dumps(seen))


if __name__ == "__main__":
    main()

"""Models of tokens: tied, attending, recurrent."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Tied(nn.Module):
    """The same matrix embeds and predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.output = nn.Linear(6, 11)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(torch.tanh(self.body(self.embedding(tokens))))


class UsedElsewhere(Tied):
    """Uses a parameter outside its module's forward."""

    def __init__(self) -> None:
        super().__init__()
        del self.output

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(F.linear(self.embedding(tokens), self.body.weight, self.body.bias))
        return F.linear(hidden, weight=self.embedding.weight)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.output = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        attended, _ = self.attention(x, x, x, need_weights=False)
        return self.output(self.norm(x + attended))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.body = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.output = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.body(self.embedding(tokens)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.lstm = nn.LSTM(5, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(12, 5, batch_first=True)
        self.output = nn.Linear(5, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.output(self.gru(hidden)[0])

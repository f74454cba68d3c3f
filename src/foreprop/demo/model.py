"""The demo's network: two convolutions and a heavy fully connected layer, like VGG in small."""

from __future__ import annotations

import torch
from torch import nn


class SmallVgg(nn.Module):
    """For 1x28x28 images and 10 classes; 1.6 of its 1.65 million parameters are in ``fc1``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(32 * 7 * 7, 1024)
        self.fc2 = nn.Linear(1024, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        x = torch.relu(self.fc1(x.flatten(1)))
        out: torch.Tensor = self.fc2(x)
        return out


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of images whose most likely class is right."""
    model.eval()
    with torch.no_grad():
        right: int = sum(
            int((model(part).argmax(1) == truth).sum())
            for part, truth in zip(
                torch.split(images, 1000), torch.split(labels, 1000), strict=True
            )
        )
    model.train()
    return right / len(labels)

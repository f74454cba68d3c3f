"""Fashion-MNIST with foreprop: the usual loop, and two lines more.

torchrun --nproc-per-node 4 examples/train_fashion_mnist.py    # four workers and a server
python examples/train_fashion_mnist.py                         # alone: a world of one
"""

import hashlib

import torch
from torch.nn import Conv2d, Flatten, Linear, ReLU, Sequential, functional
from torch.utils.data import DataLoader

import foreprop
from foreprop_lab.datasets import fashion_mnist


def main() -> None:
    torch.manual_seed(0)
    convolutions = [Conv2d(1, 16, 3, stride=2), ReLU(), Conv2d(16, 32, 3, stride=2), ReLU()]
    model = Sequential(*convolutions, Flatten(), Linear(1152, 512), ReLU(), Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = foreprop.parallelize(model, optimizer)
    loader = foreprop.shard(DataLoader(fashion_mnist("train"), batch_size=64, shuffle=True))

    images, labels = fashion_mnist("test").tensors
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if session.rank == 0:
            with torch.no_grad():
                right = (model(images).argmax(1) == labels).float().mean()
            print(f"epoch {epoch + 1}: test accuracy {100 * right:.1f} %", flush=True)

    if session.rank == 0:
        weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
        print(f"SHA-256 of the weights: {hashlib.sha256(weights).hexdigest()}")


if __name__ == "__main__":
    main()

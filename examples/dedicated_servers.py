"""Parameter servers on machines of their own, found by the workers' rendezvous.

foreprop server --count 2 &                     # two servers, here or elsewhere
torchrun --nproc-per-node 4 --master-port 29500 examples/dedicated_servers.py

29500 is where foreprop server looks by itself; without a port torchrun chooses one, and the waiting
workers print the command to start. On another machine: foreprop server --rendezvous HOST:29500,
where HOST is torchrun's --master-addr. The command ends when the run has ended.
"""

import hashlib

import torch
from torch.nn import Conv2d, Flatten, Linear, ReLU, Sequential, functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import foreprop
from foreprop_lab.datasets import data_folder, fashion_mnist


def training_data() -> Dataset[tuple[torch.Tensor, ...]]:
    """Fashion-MNIST if it is here (see train_fashion_mnist.py), else as many random images."""
    if (data_folder() / "fashion-mnist").is_dir():
        images, labels = fashion_mnist("train").tensors
        return TensorDataset(images[:12_800], labels[:12_800])
    return TensorDataset(torch.randn(12_800, 1, 28, 28), torch.randint(10, (12_800,)))


def main() -> None:
    torch.manual_seed(0)
    convolutions = [Conv2d(1, 16, 3, stride=2), ReLU(), Conv2d(16, 32, 3, stride=2), ReLU()]
    model = Sequential(*convolutions, Flatten(), Linear(1152, 512), ReLU(), Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = foreprop.parallelize(model, optimizer, dedicated_servers=2)
    loader = foreprop.shard(DataLoader(training_data(), batch_size=64, shuffle=True))

    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if session.rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

    weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    digest = hashlib.sha256(weights).hexdigest()
    # one write that includes the line end: all ranks share a terminal
    print(f"rank {session.rank}: SHA-256 of the weights {digest}\n", end="", flush=True)


if __name__ == "__main__":
    main()
